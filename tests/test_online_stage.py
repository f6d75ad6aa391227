"""The `online` stage: a stream is served and learnt from, and nothing is lost when it is killed."""

import itertools
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.drafters import small_lm
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.opening.directory import describe_drafter, open_drafter
from heads.parallel_heads import MedusaDrafter, MedusaHeads
from tests.stages import (
    DRAFTER,
    drafter_weights,
    examples,
    make_stage,
    run_stage,
    stage_context,
    with_examples,
)
from tests.test_on_policy import LOOP as DISTILL_LOOP
from tests.test_run import command
from tests.tiny import save_tiny, shortened
from tests.training import (
    Killed,
    ask_to_stop,
    assert_equal,
    before_call,
    in_new_process,
    scramble,
    two_ranks,
)
from train.base.stage import StageInputs, StageResult
from train.data.corpus import Corpus
from train.loop.checkpoint import Stopped
from train.online import stream_progress
from train.online.learning import Online
from train.online.serving import Serving
from train.online.stream_progress import StreamProgress, Versions, summed
from train.report.plots.line_plots import stream_plot
from train.stages.online import OnlineStage

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
LEARNING: dict[str, Any] = {
    "every_requests": 4,
    "steps": 2,
    "tokens_per_batch": 250,
    "holdout_every": 2,
    "k": 16,
    "optimizer": {"lr": 2e-3, "warmup_steps": 2, "schedule": "constant"},
}
STAGE: dict[str, Any] = {
    "drafter": {"layers": [0]},
    "batch_size": 4,
    "gamma": 2,
    "max_new_tokens": 10,
    "sampling": {"temperature": 1.0},
    "train_embeddings": True,
    "learning": LEARNING,
    "window": 6,
    "seed": 3,
}
REQUESTS = 22


@pytest.fixture
def context(tmp_path: Path, target: Target) -> StageInputs:
    return with_stream(stage_context(tmp_path, target))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target: Target) -> StageResult:
    """What the stage ends with that nothing interrupts. Its drafter's directory is only read."""
    context = with_stream(stage_context(tmp_path_factory.mktemp("whole"), target))
    return run_stage(context, online_stage("whole"))


def with_stream(context: StageInputs) -> StageInputs:
    context.corpus.examples["stream"] = examples("stream", REQUESTS)
    return context


def online_stage(name: str, *earlier: Any, **settings: Any) -> Any:
    return make_stage("online", name, *earlier, **(STAGE | settings))


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    found = {k: v for k, v in summary.items() if "second" not in k}
    found["rounds"] = [
        {k: v for k, v in e.items() if k not in ("seconds", "waited")} for e in summary["rounds"]
    ]
    found["windows"] = [
        {k: v for k, v in w.items() if k != "tokens_per_second"} for w in summary["windows"]
    ]
    return found


@pytest.mark.usefixtures("plots")
def test_a_stream_is_served_in_order_and_learnt_from(whole, target):
    outcome = whole
    summary = outcome.summary
    assert summary["requests"] == REQUESTS
    assert [w["first"] for w in summary["windows"]] == [0, 8, 16]
    assert sum(w["requests"] for w in summary["windows"]) == REQUESTS
    assert [entry["served"] for entry in summary["rounds"]] == [4, 8, 12, 16, 20]
    kept = [entry for entry in summary["rounds"] if entry["kept"]]
    assert summary["versions_kept"] == len(kept) > 0
    assert summary["optimizer_steps"] == 2 * len(kept)
    # Held out, or not served yet.
    assert set(summary["rounds"][0]["requests"]) <= {"stream-1", "stream-3"}
    assert outcome.drafter is not None
    provenance = describe_drafter(outcome.drafter)["provenance"]
    assert provenance["rounds"] == kept
    assert provenance["version"] == len(kept)
    versions = outcome.drafter.parent / "versions"
    stored = sorted(p.name for p in versions.iterdir())
    assert f"version-{len(kept)}" in stored
    assert len(stored) <= 4
    newest = versions / f"version-{len(kept)}"
    made_by = describe_drafter(newest)["provenance"]
    assert made_by["round"]["version"] == len(kept)
    assert made_by["round"]["requests"]
    open_drafter(str(newest), target)
    assert "new weights" in stream_plot("s", summary["windows"], summary["rounds"])


def test_a_save_does_not_grow_with_the_stream():
    progress, sizes = StreamProgress(1), []
    for requests in (8, 8_000):
        while progress.served < requests:
            progress.add([[2, 9, 8, 7]] * 8, 0.5)
            window = progress.close_window(8, ending=False)
        sizes.append(len(json.dumps(asdict(progress))))
    assert window == {
        "first": 7_992,
        "requests": 8,
        "counts": [[2, 9, 8, 7]] * 8,
        "acceptance_rate": 7 / 8,
        "tokens_per_step": 4.5,
        "tokens_per_second": 144.0,
    }
    assert sizes[1] < sizes[0] + 30
    # What earlier versions stored goes on as a part of one window.
    stored = {"ranks": 1, "served": 2, "counts": [[1, 2, 3, 1]] * 2, "batches": [[2, 0.5]]}
    earlier = StreamProgress.read(stored | {"rounds": []})
    assert (earlier.served, earlier.totals, earlier.window.seconds) == (2, [2, 4, 6, 2], 0.5)
    later = {
        "ranks": 1,
        "served": 2,
        "window": {"first": 0, "counts": [2, 4, 6, 2], "seconds": 0.5},
    }
    assert summed(StreamProgress.read(later).window.counts) == [2, 4, 6, 2]


def test_it_goes_on_with_a_distilled_drafter_and_its_vocabulary(context):
    distilled = make_stage(
        "distill", "distil", **(DRAFTER | {"draft_vocabulary": 80, "loop": DISTILL_LOOP})
    )
    run_stage(context, distilled)
    stage = online_stage("online", distilled, drafter={"stage": "distil"}, train_embeddings=False)
    outcome = run_stage(context, stage)
    assert outcome.summary["rounds"]
    weights, before = (
        drafter_weights(outcome),
        drafter_weights(replace(outcome, drafter=context.earlier["distil"] / "drafter")),
    )
    same = {name for name in weights if torch.equal(weights[name], before[name])}
    assert {name for name in weights if "embed" in name or "vocabulary" in name} <= same
    assert outcome.summary["versions_kept"] == 0 or len(same) < len(weights)
    more = make_stage("distill", "more", stage, **(DRAFTER | {"drafter": {"stage": "online"}}))
    assert more.drafter.stage == "online"


HEADS: dict[str, Any] = {
    "heads": {"type": "medusa", "heads": 2},
    "loop": {"epochs": 1, "tokens_per_batch": 150},
}


def heads_stage(**settings: Any) -> Any:
    return make_stage("heads", "medusa", **(HEADS | settings))


def on_heads(name: str, *earlier: Any, **settings: Any) -> Any:
    settings = {"drafter": {"stage": "medusa"}, "train_embeddings": False} | settings
    return online_stage(name, *(earlier or [heads_stage()]), **settings)


@pytest.fixture
def with_heads(context):
    run_stage(context, heads_stage())
    return context


def test_heads_go_on_learning_and_stay_drafter_directories(with_heads, target):
    context = with_heads
    outcome = run_stage(context, on_heads("online"))
    summary = outcome.summary
    assert summary["versions_kept"] > 0
    assert [entry["served"] for entry in summary["rounds"]] == [4, 8, 12, 16, 20]
    # 16 of 300 tokens; the hidden size is 32.
    assert summary["bytes_per_position"] == 16 * 4 + 4 + 5 + 1
    assert summary["bytes_per_draft"] == 32 * 4 + 4
    newest = context.earlier["online"] / "versions" / f"version-{summary['versions_kept']}"
    for path in (newest, outcome.drafter):
        assert describe_drafter(path)["kind"] == "medusa"
        assert isinstance(open_drafter(str(path), target), MedusaDrafter)
    before = drafter_weights(replace(outcome, drafter=context.earlier["medusa"] / "drafter"))
    after = drafter_weights(outcome)
    assert before.keys() == after.keys()
    assert any(not torch.equal(x, before[name]) for name, x in after.items())
    # And a further stage takes it from there.
    more = on_heads("more", heads_stage(), on_heads("online"), drafter={"stage": "online"})
    assert run_stage(context, more).summary["versions_kept"] >= 0


def test_heads_killed_anywhere_end_with_the_same_weights(with_heads, monkeypatch):
    """One after the other: each kill is of the second call since the start before it."""
    whole = run_stage(with_heads, on_heads("whole"))
    assert_same_after_kills(with_heads, monkeypatch, ["version", "learn"], on_heads, whole)


def test_a_tree_of_heads_is_kept_and_judged_by_a_rule_for_trees(context):
    tree = {"nodes": 4, "width": 3, "prompts": 2, "max_new_tokens": 6}
    stage = heads_stage(tree=tree)
    with pytest.raises(UserError, match=r"draft in a tree, but the rule speculative.*multi_round"):
        on_heads("online", stage)
    run_stage(context, stage)
    settings = {"rule": "multi_round", "prompts": 8}
    outcome = run_stage(context, on_heads("online", stage, **settings))
    stored = context.earlier["medusa"] / "drafter" / "tree.json"
    assert stored.exists() == (outcome.drafter / "tree.json").exists()


def test_what_is_not_for_heads_is_refused(monkeypatch):
    with pytest.raises(UserError, match="heads are always trained completely, so train_embeddings"):
        on_heads("online", train_embeddings=True)
    with pytest.raises(UserError, match="the drafter of online is heads on the target"):
        make_stage(
            "distill",
            "more",
            heads_stage(),
            on_heads("online"),
            **(DRAFTER | {"drafter": {"stage": "online"}}),
        )
    monkeypatch.setattr(MedusaHeads, "replayed_from", "")
    with pytest.raises(UserError, match=r"heads of type medusa do not learn .* do: blockwise"):
        on_heads("online")


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    shortened(
        ["serve", "learn", "swap", "half a swap", "version", "progress", "buffer"],
        ["learn", "half a swap", "progress", "buffer"],
    ),
)
def test_killed_anywhere_it_ends_with_the_same_weights(context, whole, monkeypatch, place):
    assert_same_after_kills(context, monkeypatch, [place], online_stage, whole)


def assert_same_after_kills(context, monkeypatch, places, stage_of, whole):
    """Each time in the second call of a place, and once more where it then goes on."""
    where = {
        "serve": (Serving, "_serve"),
        "learn": (Online, "_learn"),
        "swap": (Online, "swap"),
        "half a swap": (small_lm, "take_weights"),
        "version": (Versions, "save_version"),
        "progress": (Versions, "save_progress"),
        "buffer": (Online, "gather"),
    }
    for place, after in itertools.product(places, (False, True)):
        kind, name = where[place]
        calls = []
        original = getattr(kind, name)

        def dying(self, *args, place=place, calls=calls, original=original, after=after, **given):
            calls.append(1)
            if len(calls) == 2 and not after:
                if place == "half a swap":
                    name, value = next(iter(args[0].items()))
                    dict(self.named_parameters())[name].data.copy_(value)
                raise Killed
            found = original(self, *args, **given)
            if len(calls) == 2:
                raise Killed
            return found

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, dying)
            with pytest.raises(Killed):
                run_stage(context, stage_of("killed"))
        scramble()
    killed = run_stage(context, stage_of("killed"))
    assert_equal(drafter_weights(killed), drafter_weights(whole))
    assert without_times(killed.summary) == without_times(whole.summary)


@pytest.mark.parametrize(
    "combined", [zip, pytest.param(itertools.product, marks=pytest.mark.thorough)]
)
def test_a_small_buffer_survives_kills_and_a_damaged_save(context, monkeypatch, combined):
    """It drops records between two saves. All that the save names with which it goes on are there:
    the newest one, or the one before if the newest is damaged."""
    settings = {"learning": LEARNING | {"buffer_mib": 1500 / 2**20}, "prompts": 16}
    wanted = drafter_weights(run_stage(context, online_stage("all", **settings)))
    newest = max((context.directory / "all/progress").glob("progress-*"))
    state = json.loads((newest / "progress.json").read_text("utf-8"))
    assert state["buffers"][0][0] > 0  # records were dropped
    restored, restore = [], Online.restore

    def counted(self, target, numbers):
        found = restore(self, target, numbers)
        first, end, first_held, end_held = numbers
        assert (len(self.buffer), len(self.held_out)) == (end - first, end_held - first_held)
        restored.append(len(self.buffer))
        return found

    monkeypatch.setattr(Online, "restore", counted)
    places = (Versions, "save_progress"), (Online, "commit"), (Online, "forget")
    kills = (2, True, True), (3, False, False), (4, False, True)
    for (kind, place), (number, after, damaged) in combined(places, kills):
        calls, original = [], getattr(kind, place)

        def dying(self, *args, calls=calls, number=number, after=after, original=original):
            calls.append(1)
            if len(calls) == number and not after:
                raise Killed
            found = original(self, *args)
            if len(calls) == number:
                raise Killed
            return found

        name = f"{place}-{number}"
        with monkeypatch.context() as patch:
            patch.setattr(kind, place, dying)
            with pytest.raises(Killed):
                run_stage(context, online_stage(name, **settings))
        saves = sorted((context.directory / name / "progress").glob("progress-*"))
        if damaged and len(saves) > 1:
            (saves[-1] / "progress.json").write_text("{", "utf-8")
        scramble()
        assert_equal(drafter_weights(run_stage(context, online_stage(name, **settings))), wanted)
    assert min(restored) > 0


def test_moments_go_with_their_weights_whatever_the_groups(context, monkeypatch):
    """A stage that goes on with other groups of weights, so that the optimizer has other numbers
    for them. The new settings hold."""

    def stage(*patterns):
        optimizer = LEARNING["optimizer"] | {"groups": {x: {"weight_decay": 0.1} for x in patterns}}
        return online_stage("groups", learning=LEARNING | {"optimizer": optimizer})

    kept, resumed, resume = {}, {}, Online.resume

    def keeping(self, *args):
        kept.update({name: x.clone() for name, x in self.online.moments().items()})
        return save(self, *args)

    def resuming(self, *args):
        resume(self, *args)
        names = {id(p): name for name, p in self.student.trained().items()}
        for parameter, state in self.optimizer.state.items():
            name = names[id(parameter)]
            resumed.update({f"{name} {key}": x.clone() for key, x in state.items()})
        decay = {id(p): g["weight_decay"] for g in self.optimizer.param_groups for p in g["params"]}
        assert {names[x] for x, found in decay.items() if found} == {
            name for name in names.values() if "norm" in name or "up_proj" in name
        }

    save = Serving.save_version
    with monkeypatch.context() as patch:
        patch.setattr(Serving, "save_version", keeping)
        before_call(patch, Serving, "_serve", 5)
        with pytest.raises(Killed):
            run_stage(context, stage("*q_proj*"))
    monkeypatch.setattr(Online, "resume", resuming)
    run_stage(context, stage("*norm*", "*up_proj*"))
    assert kept
    assert_equal(resumed, kept)


def test_asked_to_stop_it_saves_and_goes_on(context, whole, monkeypatch):
    """A prompt is read when it is served."""
    made, prompts = [], Corpus.prompts

    def counted(self, examples):
        made.extend(example.id for example in examples)
        return prompts(self, examples)

    monkeypatch.setattr(Corpus, "prompts", counted)
    with monkeypatch.context() as patch:
        before_call(patch, Serving, "_serve", 3, ask_to_stop)
        with pytest.raises(Stopped, match="after 12 of 22 requests"):
            run_stage(context, online_stage("stopped"))
    assert made == [f"stream-{i}" for i in range(12)]
    made.clear()
    stopped = run_stage(context, online_stage("stopped"))
    assert made == [f"stream-{i}" for i in range(12, REQUESTS)]
    assert "continuing after 12 of 22 requests" in str(context.reporter)
    assert_equal(drafter_weights(stopped), drafter_weights(whole))


def test_what_is_damaged_is_passed_over(context, monkeypatch):
    with monkeypatch.context() as patch:
        before_call(patch, Serving, "_serve", 5)
        with pytest.raises(Killed):
            run_stage(context, online_stage("damaged"))
    directory = context.directory / "damaged"
    newest = max((directory / "progress").iterdir(), key=lambda p: int(p.name.split("-")[1]))
    (newest / "progress.json").write_text("{}", "utf-8")
    damaged = run_stage(context, online_stage("damaged"))
    assert "skipping a damaged save" in str(context.reporter)
    assert damaged.summary["requests"] == REQUESTS
    shutil.rmtree(directory / "drafter")
    for path in (directory / "progress").iterdir():
        (path / "progress.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match=r"no save in .* is complete"):
        run_stage(context, online_stage("damaged"))


def test_a_full_disk_is_one_error_and_nothing_learnt_is_lost(context, whole, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        before_call(patch, stream_progress, "save_file", 3, full)
        with pytest.raises(UserError, match=r"cannot write .*version-2: the disk is full"):
            run_stage(context, online_stage("full"))
    found = run_stage(context, online_stage("full"))
    assert_equal(drafter_weights(found), drafter_weights(whole))


# --- bad input ------------------------------------------------------------------------------------


def test_a_stream_without_prompts_is_refused(context):
    bare = [replace(e, messages=None, text=e.prompt) for e in context.corpus.examples["stream"]]
    bare_context = with_examples(context, stream=bare)
    with pytest.raises(UserError, match="the stream split has no prompts to answer"):
        run_stage(bare_context, online_stage("online"))
    del context.corpus.examples["stream"]
    with pytest.raises(UserError, match=r"data has no such split; set data\.stream"):
        run_stage(context, online_stage("online"))


def test_a_stream_that_cannot_be_served_is_refused_before_its_first_request(context, monkeypatch):
    monkeypatch.setattr(Decoder, "decode", None)
    long = replace(
        context.corpus.examples["stream"][-1], messages=({"role": "user", "content": "sea " * 300},)
    )
    stream = [*context.corpus.examples["stream"], long]
    with pytest.raises(UserError, match=r"has \d+ tokens and the target's context holds"):
        run_stage(with_examples(context, stream=stream), online_stage("online"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"drafter": {"stage": "none"}}, "no earlier stage 'none' of kind heads or distill"),
        ({"losses": {"forwardkl": 1.0}}, "forwardkl"),
        ({"rule": "greedy"}, "greedy"),
        ({"learning": {"holdout_every": 1}}, "greater than or equal to 2"),
        ({"split": "test"}, "'stream', 'train' or 'dev'"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(settings, said):
    with pytest.raises((UserError, ValueError), match=said):
        online_stage("online", **settings)


def test_another_number_of_ranks_is_refused(context, whole):
    for path in (whole.drafter.parent / "progress").iterdir():
        state = json.loads((path / "progress.json").read_text("utf-8"))
        assert state["ranks"] == 1
    stage = online_stage("online")
    with pytest.raises(UserError, match="began with 2 ranks, but now there are 1"):
        OnlineStage(stage, context)._require_same_ranks(StreamProgress(2))
    allowed = replace(context, allow_changes=True)
    OnlineStage(stage, allowed)._require_same_ranks(StreamProgress(2))


# --- whole runs -----------------------------------------------------------------------------------

CONFIG = """
name: {name}
output_dir: {base}/runs
trackers: []
threads: 1
target: {{model: {base}/target, dtype: float32, device: cpu}}
data: {{train: a.jsonl, test: a.jsonl, duplicates: keep, stream: [a.jsonl, b.jsonl]}}
evaluation:
  {{prompts: 1, gamma: 2, max_new_tokens: 2, timed_prompts: 0, generate: false, baselines: [],
    in_turn: []}}
stages:
  - name: online
    kind: online
    drafter: {{layers: [0]}}
    batch_size: 5
    gamma: 2
    max_new_tokens: 8
    learning:
      every_requests: 5
      steps: 2
      tokens_per_batch: 200
      holdout_every: 2
      optimizer: {{lr: 1e-3, schedule: constant}}
"""


def write_run(base: Path, name: str) -> Path:
    save_tiny(base / "target")
    for file in ("a", "b"):
        rows = [{"id": f"{file}-{i}", "prompt": e.prompt} for i, e in enumerate(examples(file, 8))]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (base / f"{file}.jsonl").write_text(text, "utf-8")
    config = base / f"{name}.yaml"
    config.write_text(CONFIG.format(base=base, name=name), "utf-8")
    return config


@pytest.mark.usefixtures("plots")
def test_a_run_serves_its_stream_and_reports_it(tmp_path):
    config = write_run(tmp_path, "one")
    done = command("train", str(config))
    assert done.exit_code == 0, done.output
    (stage,) = json.loads((tmp_path / "runs" / "one" / "report.json").read_text("utf-8"))["stages"]
    assert stage["summary"]["requests"] == 16
    assert stage["summary"]["rounds"][-1]["requests"]
    page = (tmp_path / "runs" / "one" / "report.html").read_text("utf-8")
    assert "Acceptance over the stream" in page
    planned = command("train", str(config), "--dry-run", "name=dry")
    assert {"serves", "16", "128"} <= set(planned.output.split())  # 128 tokens at most
    stream = tmp_path / "b.jsonl"
    stream.write_text(stream.read_text("utf-8").replace("b-3", "b-33"), "utf-8")
    again = command("train", str(config))
    assert "the data of stream changed" in " ".join(again.output.split())


def test_a_stream_with_broken_lines_is_refused_by_file_and_line(tmp_path):
    config = write_run(tmp_path, "broken")
    with (tmp_path / "b.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": \n')
    done = command("train", str(config))
    assert done.exit_code == 2
    assert "b.jsonl:9" in done.output
    (tmp_path / "b.jsonl").write_text("", "utf-8")
    (tmp_path / "a.jsonl").write_text("", "utf-8")
    assert "no usable row" in command("train", str(config)).output


def check_two_ranks(config: Path) -> None:
    def train(rank: int) -> None:
        done = command("train", str(config))
        assert done.exit_code == 0, done.output

    assert two_ranks(train) == [0, 0]


@pytest.mark.slow
def test_two_ranks_serve_a_share_each(tmp_path):
    config = write_run(tmp_path, "two")
    in_new_process(__name__, f"check_two_ranks(Path({str(config)!r}))")
    (stage,) = json.loads((tmp_path / "runs" / "two" / "report.json").read_text("utf-8"))["stages"]
    summary = stage["summary"]
    assert summary["requests"] == 16
    assert [entry["served"] for entry in summary["rounds"]] == [5, 10, 15]
    # Learnt from by either rank: the odd ones, as the even ones are held out.
    learnt = {name for entry in summary["rounds"] for name in entry["requests"]}
    assert learnt <= {f"{file}-{i}" for file in "ab" for i in (1, 3, 5, 7)}
    assert len(learnt) >= 5
    directory = tmp_path / "runs" / "two" / "stages" / "00-online"
    for rank in (0, 1):
        assert list((directory / f"rank-{rank}" / "buffer").glob("shard-*"))
