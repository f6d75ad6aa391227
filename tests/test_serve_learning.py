"""A service whose drafter learns: only from what it may, texts stay exact, and a bad round leaves
no trace."""

import copy
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.opening.directory import describe_drafter, open_drafter, save_drafter
from decode.settings import DecodeSettings
from distill.losses import WeightedLoss
from distill.replay.replay_buffer import Record
from draftsmith.cli.main import app
from draftsmith.serve.learner import (
    LearnOptions,
    open_learning_drafter,
)
from heads.online_heads import HeadStudent
from tests.service import (
    CHAT,
    Running,
    alone,
    asked,
    chat,
    save_small,
    serving,
    set_to,
    text_of,
    until,
    words,
)
from tests.test_online_heads import heads_of
from tests.tiny import tiny_target

CONFIG = LearnOptions.of(
    "every_requests=4,steps=12,tokens_per_batch=512,accepted=0.5,k=64,holdout_every=2,"
    "optimizer={'lr':1e-2,'warmup_steps':1,'schedule':'constant'}"
).config
GREEDY = DecodeSettings(gamma=2)


@contextmanager
def learning(
    target: Any, path: Path, settings: DecodeSettings = GREEDY, idle: float = 0.0, **options: Any
) -> Iterator[Running]:
    learn = LearnOptions(CONFIG.model_copy(update={"idle_seconds": idle}), **options)
    student, drafter = open_learning_drafter(str(path), target, learn)
    more = {"student": student, "learning": learn}
    with serving(target, drafter, settings, drafter_name=str(path), options=more) as running:
        yield running


def learner_of(running: Running) -> Any:
    return running.service.settings.learner


def prompts(count: int) -> list[str]:
    return [f"Question {number}: what is {number} and {number + 3}?" for number in range(count)]


def ask(running: Running, texts: Sequence[str], **fields: Any) -> list[Any]:
    """The answers to some requests that come at once."""
    with running.client() as client, ThreadPoolExecutor(4) as pool:
        bodies = [chat(text, **({"max_tokens": 24} | fields)) for text in texts]
        answers = pool.map(lambda body: client.post(CHAT, json=body), bodies)
        return list(answers)


def acceptance(answers: Sequence[Any]) -> float:
    counts = [answer.json()["draftsmith"] for answer in answers]
    return sum(c["accepted"] for c in counts) / sum(c["drafted"] for c in counts)


def save_medusa(directory: Path, on: Any) -> Path:
    """A drafter directory with Medusa heads for a target."""
    student = HeadStudent(heads_of("medusa", on), WeightedLoss({"forward_kl": 1.0}), on)
    save_drafter(directory, student.kind, student.write, target=on, provenance={})
    return directory


@pytest.mark.parametrize("kind", [pytest.param("small_lm", marks=pytest.mark.thorough), "medusa"])
def test_with_stored_requests_acceptance_rises_and_texts_stay(
    endless: Any, tmp_path: Path, kind: str
) -> None:
    is_heads = kind == "medusa"
    path = save_medusa(tmp_path / "m", endless) if is_heads else save_small(tmp_path / "s")
    expected = [words(alone(endless, asked(text), 24)) for text in prompts(4)]
    texts, rates = prompts(4), []  # the same questions day after day
    with learning(endless, path) as running:
        for _ in range(8):
            answers = ask(running, texts, store=True)
            assert list(map(text_of, answers)) == expected
            rates.append(acceptance(answers))
            until(lambda: not learner_of(running).online.due())
        until(lambda: running.metrics()["draftsmith:drafter_version"] > 0)
        assert running.metrics()['draftsmith:learning_rounds_total{result="kept"}'] > 0
        (last,) = ask(running, ["And now?"])
        assert last.json()["draftsmith"]["drafter_versions"][0] > 0
        # Nothing of the texts is left but bounded buffers.
        collector = learner_of(running).online.collector
        assert collector._open_requests == {}
        assert collector._rows == set()
        until(lambda: collector._closed == [])
        buffer = learner_of(running).online.buffer
        assert 0 < buffer.nbytes <= buffer.max_bytes
    assert rates[-1] > rates[0] + 0.1


def test_nothing_is_learnt_from_requests_that_do_not_say_so(endless: Any, tmp_path: Path) -> None:
    path = save_small(tmp_path / "small")
    with learning(endless, path) as running, running.client() as client:
        ask(running, prompts(6))
        online = learner_of(running).online
        assert online.collector.requests == 0
        assert online.collector.take() == ([], [])
        assert set_to(client, learning=False).json()["learning"] is False
        ask(running, prompts(6), store=True)
        assert online.collector.requests == 0
        # Another drafter learns nothing, and the one that learns comes back with its version.
        assert set_to(client, drafter="ngram", learning=True).status_code == 400
        assert set_to(client, drafter="ngram").json()["drafter"] == "ngram"
        assert set_to(client, drafter=str(path), learning=True).json()["learning"]
        assert running.batcher.decoder.drafter is learner_of(running).drafter
        ask(running, prompts(1), store=True)
        assert online.collector.requests == 1
    with learning(endless, path, source="all") as running:
        ask(running, prompts(1))
        assert learner_of(running).online.collector.requests == 1
    with serving(endless) as running:
        (answer,) = ask(running, prompts(1), store=True)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "store"


def test_a_bad_round_is_rolled_back_and_a_broken_one_ends_learning(
    endless: Any, tmp_path: Path
) -> None:
    with learning(endless, save_small(tmp_path / "small")) as running:
        online = learner_of(running).online
        loss = online.student.loss
        before = copy.deepcopy(running.batcher.decoder.drafter.lm.model.state_dict())

        def worse(records: Sequence[Record]) -> Any:
            total, parts = loss(records)
            return -total, parts

        online.student.loss = worse
        ask(running, prompts(8), store=True)
        until(
            lambda: (
                running.metrics().get('draftsmith:learning_rounds_total{result="undone"}', 0) > 0
            )
        )
        after = running.batcher.decoder.drafter.lm.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert running.metrics()["draftsmith:drafter_version"] == 0
        online.student.loss = lambda records: 1 / 0
        ask(running, prompts(8), store=True)
        until(lambda: not learner_of(running).learning)
        (answer,) = ask(running, prompts(1), store=True)
        assert answer.status_code == 200


def test_versions_arrive_in_the_midst_of_exact_texts(endless: Any, tmp_path: Path) -> None:
    texts = prompts(4)
    expected = [words(alone(endless, asked(text), 200)) for text in texts]
    with learning(endless, save_small(tmp_path / "small")) as running:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            answers = ask(running, texts, max_tokens=200, store=True)
            assert list(map(text_of, answers)) == expected
            versions = [answer.json()["draftsmith"]["drafter_versions"] for answer in answers]
            if any(first < last for first, last in versions):
                return
    raise AssertionError("no version arrived during a text")


def test_it_learns_only_when_idle(endless: Any, tmp_path: Path) -> None:
    with learning(endless, save_small(tmp_path / "small"), idle=1e6) as running:
        ask(running, prompts(12), store=True)
        online = learner_of(running).online
        until(lambda: len(online.buffer) > 0)  # what has ended is moved to the bounded buffer
        time.sleep(0.5)
        assert online.due()
        assert online.round == 0


def test_a_service_goes_on_with_the_versions_of_an_earlier_one(
    endless: Any, tmp_path: Path
) -> None:
    path, directory = save_small(tmp_path / "small"), tmp_path / "learnt"
    with learning(endless, path, directory=directory) as running:
        online = learner_of(running).online
        while online.version == 0:
            ask(running, prompts(8), store=True)
        ask(running, prompts(2), store=True)
    version, state, count = online.version, online.state(), len(online.buffer)
    newest = directory / "versions" / f"version-{version}"
    assert describe_drafter(newest)["provenance"]["round"]["version"] <= version
    open_drafter(str(newest), endless)
    with learning(endless, path, directory=directory, idle=1e6) as running:
        again = learner_of(running).online
        assert (again.state(), len(again.buffer)) == (state, count)
        assert running.metrics()["draftsmith:drafter_version"] == version
        (answer,) = ask(running, prompts(1))
        assert answer.json()["draftsmith"]["drafter_versions"] == [version, version]
    options = LearnOptions(CONFIG, directory=directory)
    with pytest.raises(UserError, match="has versions of the drafter"):
        open_learning_drafter(str(save_small(tmp_path / "other")), endless, options)


def test_texts_of_a_bent_distribution_are_left_out(tmp_path: Path) -> None:
    with learning(tiny_target(), save_small(tmp_path / "small"), idle=1e6) as running:
        for setting, bent in {
            "grammar": {"guided_regex": "[ab]{9}"}, "presence_penalty": {"presence_penalty": 1.0},
            "logit_bias": {"logit_bias": {"7": 5}}, "ignore_eos": {"ignore_eos": True},
            "repetition_penalty": {"repetition_penalty": 1.3},
            "min_tokens": {"min_tokens": 30, "max_tokens": 40},
        }.items():  # fmt: skip
            (answer,) = ask(running, prompts(1), store=True, **bent)
            assert answer.status_code == 200, answer.text
            running.until_idle()
            name = f'draftsmith:learning_left_out_total{{setting="{setting}"}}'
            assert running.metrics()[name] == 1
        collector = learner_of(running).online.collector
        assert collector.requests == 0
        ask(running, prompts(1), store=True, temperature=0.7, top_p=0.9, stop="zz")
        running.until_idle()
        until(lambda: collector.requests == 1)


def test_only_one_process_learns_in_a_directory(
    endless: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says so before it loads the target. Shells leave the ~ of `--learn-dir=~/x`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    options = LearnOptions(CONFIG, directory=tmp_path / "learnt")
    words = ["serve", "--target", str(tmp_path / "none"), "--drafter", "x", "--port", "0"]
    words += ["--learn", "--learn-dir=~/learnt"]
    with options.locked():
        for _ in range(2):
            found = CliRunner().invoke(app, words)
            assert found.exit_code == 2
            assert "choose another directory for learning" in " ".join(found.stderr.split())
            (tmp_path / "learnt/.lock").unlink(missing_ok=True)  # by someone who tidies up
    with options.locked():  # it is free again
        pass
    with LearnOptions(CONFIG).locked(), LearnOptions(CONFIG).locked():
        pass  # in memory only


def test_what_cannot_learn_is_refused(endless: Any) -> None:
    with pytest.raises(UserError, match="'ngram' cannot learn"):
        open_learning_drafter("ngram", endless, LearnOptions())
    for options, problem in (
        ("stepss=3", 'no option of learning. Did you mean "steps"'),
        ("steps=0", "steps of learning: Input should be greater"),
        ("threads=0", "threads of learning: Input should be greater"),
        ("idle_seconds=-1", "idle_seconds of learning: Input should be greater"),
        ("every_requests=none", "set every_requests or every_rejected"),
    ):
        with pytest.raises(UserError, match=problem):
            LearnOptions.of(options)
