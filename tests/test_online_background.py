"""Learning beside the thread that decodes: it overlaps, texts stay the target's, nothing is saved
by half, and what goes wrong there is told."""

import copy
import json
import threading
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.drafters import NoDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.opening.directory import open_drafter
from decode.verification import Verification
from tests.stages import plan_stage, run_stage
from tests.test_online import online_of, pair, prompts_of
from tests.test_online_stage import LEARNING, REQUESTS, context, online_stage
from tests.training import Killed, before_call
from train.online.learning import Online
from train.online.serving import Background, Serving
from train.online.stream_progress import StreamProgress, Versions
from train.stages.online import OnlineStage

__all__ = ["context"]  # a fixture
pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_texts_stay_the_targets_own_while_versions_arrive_in_their_midst() -> None:
    lm, small = pair()
    drafter = SmallLMDrafter(copy.deepcopy(small).requires_grad_(False))
    online = online_of(drafter, vocab=40)
    swapped = []

    def watch(_: Verification) -> None:
        swapped.append(online.version)

    with Background(online) as background:
        decoder = Decoder(lm, drafter, gamma=2, observers=[online.observe, background.swap, watch])
        plain = Decoder(lm, NoDrafter())
        kept = 0
        for begin in range(0, 400, 8):
            batch = prompts_of(400)[begin : begin + 8]
            assert decoder.decode(batch, 16).outputs == plain.decode(batch, 16).outputs
            found = background.ended()
            kept += found is not None and found.kept
            background.begin()
            if kept >= 3:
                break
        background.ended(wait=True)
        assert not background.busy
    assert kept >= 3
    assert len(set(swapped)) >= 3
    for name, tensor in online.student.trained().items():
        own = dict(drafter.lm.model.named_parameters())[name.removeprefix("student.")]
        assert own.shape == tensor.shape


def test_what_goes_wrong_in_a_round_is_raised_where_it_is_asked_for() -> None:
    _, small = pair()
    online = online_of(SmallLMDrafter(copy.deepcopy(small)), vocab=40)
    with Background(online) as background:
        background.begin()
        assert background.ended(wait=True) is None  # there is nothing to learn from
        online._learn = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        background.begin()
        with pytest.raises(ZeroDivisionError):
            background.ended(wait=True)
        assert not background.busy
        assert background.ended() is None


class Slow:
    """Holds each round back until two more batches were served, or no more are to come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = threading.Semaphore(0)
        self.overlapping = 0
        learn, serve = Online._learn, Serving._serve
        self.learning = threading.Event()

        def slow(online: Online) -> Any:
            self.batches = threading.Semaphore(0)
            self.learning.set()
            for _ in range(2):
                self.batches.acquire(timeout=1)
            try:
                return learn(online)
            finally:
                self.learning.clear()

        def counted(stage: Any, *args: Any) -> Any:
            self.overlapping += self.learning.is_set()
            found = serve(stage, *args)
            self.batches.release()
            return found

        monkeypatch.setattr(Online, "_learn", slow)
        monkeypatch.setattr(Serving, "_serve", counted)


def background_stage(name: str, **settings: Any) -> Any:
    return online_stage(name, batch_size=2, background=True, device="cpu", **settings)


def test_a_stage_learns_in_the_background_and_saves_only_whole_rounds(
    context, target, monkeypatch
) -> None:
    slow = Slow(monkeypatch)
    saves = []
    original = Versions.save_progress

    def save(versions: Versions, progress: StreamProgress) -> list[list[int]]:
        saves.append((progress.version, progress.online[0]))
        assert not slow.learning.is_set()
        return original(versions, progress)

    monkeypatch.setattr(Versions, "save_progress", save)
    outcome = run_stage(context, background_stage("online"))
    summary = outcome.summary
    assert slow.overlapping > 2  # requests were served while a round was under way
    assert summary["requests"] == REQUESTS
    assert summary["rounds"]
    assert all(version == state["version"] for version, state in saves)
    assert sum(w["requests"] for w in summary["windows"]) == REQUESTS
    assert outcome.drafter is not None
    open_drafter(str(outcome.drafter), target)


def test_killed_in_the_background_it_goes_on_where_it_was_saved(context, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        Slow(patch)
        before_call(patch, Serving, "_serve", 8)
        with pytest.raises(Killed):
            run_stage(context, background_stage("killed"))
    newest = max((context.directory / "killed" / "progress").iterdir(), key=lambda p: p.name)
    state = json.loads((newest / "progress.json").read_text("utf-8"))
    assert 0 < state["served"] < REQUESTS
    outcome = run_stage(context, background_stage("killed"))
    assert f"continuing after {state['served']} of" in str(context.reporter)
    assert outcome.summary["requests"] == REQUESTS
    numbers = [entry["number"] for entry in outcome.summary["rounds"]]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "cuda:99"}, "cannot learn on device 'cuda:99'"),
        ({"device": "nowhere"}, "cannot learn on device 'nowhere'"),
    ],
)
def test_a_device_that_is_not_there_is_named_before_anything_is_done(
    context, settings, said
) -> None:
    with pytest.raises(UserError, match=said):
        plan_stage(context, online_stage("online", **settings))


def test_several_ranks_learn_together_and_not_in_the_background(context, monkeypatch) -> None:
    monkeypatch.setattr(type(context.accelerator), "num_processes", 2)
    with pytest.raises(UserError, match="2 ranks always learn between requests"):
        plan_stage(context, background_stage("online"))
    with pytest.raises(ValueError, match="learning is null"):
        online_stage("online", learning=None, background=True)


def test_on_a_device_of_its_own_the_copy_learns_in_float32(context) -> None:
    stage = online_stage("online", learning=LEARNING, device="cpu")
    student, drafter = OnlineStage(stage, context)._learner(None)
    assert student.device == torch.device("cpu")
    assert all(p.dtype == torch.float32 for p in student.trained().values())
    assert not any(p.requires_grad for p in drafter.lm.model.parameters())
