"""Whole runs on a tiny target: what they leave behind, and what an interruption costs."""

import json
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import LoggerType
from click.testing import Result
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from typer.testing import CliRunner

import train.run.run_evaluation
from decode.base.errors import UserError
from decode.drafters.several.combined import CompositeDrafter
from decode.opening.directory import describe_drafter
from draftsmith.cli.main import app
from draftsmith.watch.run_state import RunState
from tests.tiny import save_tiny, write_rows
from tests.training import Killed, before_call, begin_anew, in_new_process, two_ranks
from train.base.console import Reporter
from train.base.directory_lock import DirectoryLock
from train.base.tracking.curve_file import CURVES_FILE, CurveReader
from train.data.answer_files import read_answers
from train.loop.trainer import Trainer
from train.report.report_summary import footnotes
from train.run.config_checks import load_config
from train.run.run import Run
from train.stages.generate import GenerateStage

WORDS = ["the", "a", "dog", "fox", "sea", "shell", "target", "drafter", "token", "sells", "jumps"]
WORDS += ["verifies", "and", "of", "it", "one", "two"]

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
CONFIG = """
name: tiny
output_dir: {base}/runs
trackers: []
threads: 1
target: {{model: {base}/target, dtype: float32, device: cpu}}
data: {{train: train.jsonl, dev: dev.jsonl, test: test.jsonl}}
evaluation:
  {{prompts: 4, gamma: 2, max_new_tokens: 8, batch_size: 4, timed_prompts: 2, timed_tokens: 8,
    generate: false, baseline_gammas: [1, 2]}}
stages:
  - {{name: answers, kind: generate, max_new_tokens: 10, batch_size: 4, part_prompts: 5}}
  - name: words
    kind: distill
    text: answers
    drafter: {{layers: [0]}}
    draft_vocabulary: 120
    losses: {{cross_entropy: 1.0}}
    loop: {{epochs: 1, tokens_per_batch: 120, save_every: 2, log_every: 1}}
    optimizer: {{lr: 1e-2, warmup_steps: 2}}
  - name: distill
    kind: distill
    text: answers
    drafter: {{stage: words}}
    losses: {{forward_kl: 1.0, cross_entropy: 0.1}}
    train_embeddings: false
    loop: {{epochs: 3, tokens_per_batch: 120, save_every: 2, log_every: 1}}
    optimizer: {{lr: 1e-2, warmup_steps: 2}}
"""


def make_base(directory: Path) -> Path:
    """A target, prompts and a config."""
    save_tiny(directory / "target", "llama", layers=2)
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("dev", 4), ("test", 4)):
        rows = []
        for i in range(count):
            words = torch.randint(len(WORDS), (4 + i % 3,), generator=generator).tolist()
            rows.append({"id": f"{split}-{i}", "prompt": " ".join(WORDS[w] for w in words)})
        write_rows(directory / f"{split}.jsonl", rows)
    (directory / "config.yaml").write_text(CONFIG.format(base=directory), "utf-8")
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose run is complete. Tests only read it."""
    base = make_base(tmp_path_factory.mktemp("finished"))
    config = str(base / "config.yaml")
    trained = command("train", config, "trackers=[tensorboard]", "tracking.project=trials")
    assert trained.exit_code == 0, trained.output
    assert "report.html" in trained.stdout
    return base


def report_of(base: Path, run: str = "tiny") -> dict[str, Any]:
    return json.loads((base / "runs" / run / "report.json").read_text("utf-8"))


def start(base: Path, *overrides: str, allow_changes: bool = False) -> dict[str, Any]:
    """One process's worth of a run: a fresh accelerator, as after a restart."""
    begin_anew()
    config = load_config(base / "config.yaml", overrides)
    accelerator = Accelerator(
        cpu=True, log_with=config.trackers or None, project_dir=config.run_dir / "logs"
    )
    try:
        return Run(config, accelerator, Reporter(silent=True), allow_changes).execute()
    finally:
        accelerator.end_training()


def weights(base: Path, stage: str = "02-distill", run: str = "tiny") -> dict[str, torch.Tensor]:
    drafter = base / "runs" / run / "stages" / stage / "drafter"
    return load_file(drafter / "model.safetensors") | load_file(
        drafter / "draft_vocabulary.safetensors"
    )


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


class WandB(ModuleType):
    """What accelerate calls of wandb, with its rules: an id is one run, and a step before the last
    one is dropped."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.starts: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.rows: dict[int, dict[str, float]] = {}
        self.first = 0  # step that is not dropped

    def init(self, **options: Any) -> "WandB":
        self.starts.append(options)
        self.first = max(self.rows, default=-1) + 1
        self.config = Settings()
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step >= self.first:
            self.first = step
            self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None: ...


class Settings(dict[str, Any]):
    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        super().update(values)


def logged_scalars(directory: Path) -> dict[str, dict[int, float]]:
    """What tensorboard's files in a directory hold, by tag and step."""
    points: dict[str, dict[int, float]] = {}
    for path in directory.glob("events.out.tfevents.*"):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                points.setdefault(value.tag, {})[event.step] = value.simple_value
    return points


def test_a_run_leaves_everything_behind(finished, tmp_path):
    base, run = finished, finished / "runs" / "tiny"
    report = report_of(base)
    scalars = logged_scalars(run / "logs" / "trials")
    first, second = scalars["words/loss"], scalars["distill/loss"]
    assert max(first) < min(second)
    history = [entry["loss"] for entry in report["stages"][2]["summary"]["training"]["history"]]
    assert list(second.values()) == pytest.approx(history)
    (rate,) = scalars["evaluation/ngram_distill/acceptance_rate"].values()
    assert rate == pytest.approx(report["rows"][-1]["evaluation"]["acceptance_rate"])
    (values,) = (run / "logs" / "trials").glob("*/hparams.yml")
    assert yaml.safe_load(values.read_text("utf-8"))["stages.words.loop.tokens_per_batch"] == 120
    assert [row["stage"] for row in report["rows"]] == [
        "before",
        "words (start)",
        "words",
        "distill",
        "ngram+distill",
    ]
    assert report["rows"][-1]["drafter"] == "ngram+small_lm"
    assert "<svg" in (run / "report.html").read_text("utf-8")
    for row in report["rows"]:
        assert row["evaluation"]["identical_to_plain"] == 1.0
        assert row["evaluation"]["lossless"]
    answers = list(read_answers(run / "stages" / "00-answers"))
    assert [answer["id"] for answer in answers] == [f"train-{i}" for i in range(12)]
    provenance = json.loads((run / "provenance.json").read_text("utf-8"))
    assert {"argv", "versions", "git_commit", "machine"} <= provenance[0].keys()

    summaries = {stage["name"]: stage["summary"] for stage in report["stages"]}
    shares = {name: summary["matrix_speed_share"] for name, summary in summaries.items()}
    assert shares.keys() == {"answers", "words", "distill"}
    assert 0 < min(shares.values()) < max(shares.values()) < 1
    # The speed is measured once.
    speeds = [x["model_tflops_per_second"] / x["matrix_speed_share"] for x in summaries.values()]
    assert speeds == pytest.approx(speeds[:1] * 3)
    (line,) = (line for line in footnotes(report) if "matrix speed" in line)
    assert line.count("%") == 3

    state = RunState(run).read()
    assert state["finished"]
    assert {stage["state"] for stage in state["stages"]} == {"done"}
    assert state["progress"]["done"] == state["progress"]["total"]
    assert any(line.endswith("stage distill (distill)") for line in state["log"])
    assert [row["stage"] for row in state["evaluations"]] == [r["stage"] for r in report["rows"]]

    # A plan takes its speeds from this run.
    assert all(row["tokens"] > 0 and row["seconds"] > 0 for row in report["rows"])
    planned = command(
        *("train", str(base / "config.yaml"), "--dry-run", "--json", str(tmp_path / "plan.json"))
    )
    assert "for the stages and evaluations" in " ".join(planned.stdout.split())
    plan = json.loads((tmp_path / "plan.json").read_text("utf-8"))["evaluation"]
    assert plan["what"].startswith(f"{len(report['rows'])} drafters on ")
    assert plan["tokens"] >= sum(row["tokens"] for row in report["rows"])

    drafter = describe_drafter(run / "stages" / "02-distill" / "drafter")
    assert drafter["kind"] == "small_lm"
    assert drafter["provenance"]["start"]["stage"] == "words"
    history = report["stages"][2]["summary"]["training"]["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    frozen = "model.embed_tokens.weight"
    assert torch.equal(weights(base)[frozen], weights(base, "01-words")[frozen])
    assert not torch.equal(
        weights(base)["weight"],
        load_file(base / "target/model.safetensors")[frozen][weights(base)["ids"]],
    )


def test_a_small_lm_and_heads_share_one_pass_of_the_target(base):
    """The quickstart in small: hidden states are cached once, and two of three drafters judged."""
    text = (base / "config.yaml").read_text("utf-8")
    states = "  - {name: states, kind: feature_cache, text: answers}\n  - name: words\n"
    text = text.replace("  - name: words\n", states)
    text = text.replace(
        "    drafter: {stage: words}\n", "    drafter: {stage: words}\n    teacher: states\n"
    )
    heads = {
        "name": "medusa",
        "kind": "heads",
        "text": "answers",
        "features": "states",
        "heads": {"type": "medusa", "heads": 2, "output": "shared"},
        "losses": {"forward_kl": 1.0},
        "tree": {"nodes": 3, "width": 2, "prompts": 2, "max_new_tokens": 8},
        "loop": {"epochs": 2, "tokens_per_batch": 120, "log_every": 1},
    }
    (base / "config.yaml").write_text(text + f"  - {json.dumps(heads)}\n", "utf-8")
    evaluated = ("evaluation.stages=[distill, medusa]", "evaluation.in_one_tree=[ngram]")
    report = start(base, *evaluated, "evaluation.generate=true")
    rows = {row["stage"]: row for row in report["rows"]}
    assert list(rows) == ["before", "distill", "medusa", "ngram+medusa", "ngram++medusa"]
    assert rows["ngram+medusa"]["drafter"] == "ngram+medusa"
    assert rows["ngram++medusa"]["drafter"] == "ngram++medusa"
    # The tree of the heads where lookup finds nothing: more than a chain, and not always a tree.
    assert "tree" in rows["ngram+medusa"]["evaluation"]["drafts"]
    assert rows["medusa"]["drafter"] == "medusa"
    assert all(row["evaluation"]["identical_to_plain"] == 1 for row in rows.values())
    # `generate()` answered for the first row only.
    first, *others = rows.values()
    plain = first["evaluation"]["plain_vs_generate"]
    for row in others:
        assert row["tokens"] < first["tokens"]
        evaluation = row["evaluation"]
        assert evaluation["plain_vs_generate"] == plain
        assert evaluation["vs_generate"]["value"] == (
            evaluation["speedup"]["value"] * plain["value"]
        )


def test_drafters_that_cannot_be_asked_in_turn_cost_their_row_only(base, monkeypatch):
    said = []
    monkeypatch.setattr(Reporter, "say", lambda self, text: said.append(text))
    original = train.run.run_evaluation.evaluate

    def picky(target: Any, drafter: Any, *args: Any) -> Any:
        if isinstance(drafter, CompositeDrafter):
            raise UserError("these do not go together")
        return original(target, drafter, *args)

    monkeypatch.setattr(train.run.run_evaluation, "evaluate", picky)
    few = [f"stages.{stage}.loop.max_steps=1" for stage in ("words", "distill")]
    assert [row["stage"] for row in start(base, *few)["rows"]][-1] == "distill"
    assert "ngram+distill is not evaluated: these do not go together" in said
    monkeypatch.setattr(train.run.run_evaluation, "evaluate", original)
    assert [row["stage"] for row in start(base, *few)["rows"]][-1] == "ngram+distill"


def test_a_second_start_says_that_it_is_done(finished, monkeypatch):
    """Unless another process works in the directory: it is refused before anything is read."""
    base, first = finished, report_of(finished)
    same = ("trackers=[tensorboard]", "tracking.project=trials")
    with DirectoryLock(base / "runs/tiny", "") as lock, monkeypatch.context() as patch:
        lock.take()
        patch.setattr(Run, "read_data", None)
        holder = rf"process {os.getpid()} on \S+ \(since .*\) works in \S+tiny; wait until it ends"
        with pytest.raises(UserError, match=holder):
            start(base, *same)
    before_call(monkeypatch, Trainer, "_optimizer_step", 1)  # any training would die
    monkeypatch.setattr("train.run.run_evaluation.evaluate", None)  # and any evaluation
    assert start(base, *same)["rows"] == first["rows"]


def test_an_interrupted_run_ends_with_the_same_weights(base, finished, monkeypatch):
    """And it does not do so by beginning again: the steps taken are counted."""
    original, taken = Trainer._optimizer_step, []

    def counted(self: Any, at: Any, *args: Any) -> Any:
        taken.append((self.task.label, at.step))
        return original(self, at, *args)

    monkeypatch.setattr(Trainer, "_optimizer_step", counted)
    wandb = WandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.WANDB])
    tracked = ("trackers=[wandb]", "tracking.tags=[trial]")
    for count in (2, 4, 3):  # in the first training, in the second, and again
        with monkeypatch.context() as patch:
            before_call(patch, Trainer, "_optimizer_step", count)
            with pytest.raises(Killed):
                start(base, *tracked)
    start(base, *tracked)
    assert_same(weights(base), weights(finished))
    whole, resumed = (
        {stage["name"]: stage["summary"].get("training") for stage in report_of(place)["stages"]}
        for place in (finished, base)
    )
    # Each kill repeats at most the step since the last checkpoint (save_every is 2) and its own.
    steps = [(name, at) for name in ("words", "distill") for at in range(whole[name]["steps"])]
    assert set(taken) == set(steps)
    assert len(taken) <= len(steps) + 3
    assert whole["distill"]["history"] == resumed["distill"]["history"]

    # One run in wandb, and in the file of curves each step once.
    assert len(wandb.starts) == 4
    assert all(options == wandb.starts[0] for options in wandb.starts)
    options = wandb.starts[0]
    assert (options["project"], options["name"], options["tags"]) == (
        "draftsmith",
        "tiny",
        ["trial"],
    )
    assert options["resume"] == "allow"
    assert wandb.config["stages.distill.drafter.stage"] == "words"
    history = {entry["step"]: entry["loss"] for entry in whole["distill"]["history"]}
    losses = {
        step: row["distill/loss"] for step, row in wandb.rows.items() if "distill/loss" in row
    }
    assert list(losses.values()) == list(history.values())
    evaluations = {name for row in wandb.rows.values() for name in row if "evaluation/" in name}
    assert {f"evaluation/{label}/speedup" for label in ("ngram", "words", "distill")} <= evaluations
    curves, whole_curves = (
        CurveReader(place / "runs/tiny/logs" / CURVES_FILE).read() for place in (base, finished)
    )
    assert curves["distill"]["loss"] == history
    for stage in ("words", "distill"):
        assert curves[stage]["loss"] == whole_curves[stage]["loss"]
        assert curves[stage]["lr"] == whole_curves[stage]["lr"]


def test_figures_of_changed_settings_are_measured_again_and_others_kept(base, monkeypatch):
    """A finished run goes on with changes: the report has each drafter of its config once."""
    sound, measured = train.run.run_evaluation.evaluate, []

    def counted(target: Any, drafter: Any, prompts: Any, protocol: Any, *args: Any) -> Any:
        measured.append(protocol.max_new_tokens)
        return sound(target, drafter, prompts, protocol, *args)

    monkeypatch.setattr(train.run.run_evaluation, "evaluate", counted)
    config = base / "config.yaml"
    text = config.read_text("utf-8")
    # One trained drafter is enough here.
    text = text[: text.index("  - name: distill")].replace("epochs: 1", "max_steps: 1")
    text = text.replace("prompts: 4", "prompts: 1").replace("timed_prompts: 2", "timed_prompts: 0")
    text = text.replace("[1, 2]", "[1]")
    config.write_text(text, "utf-8")
    kept = start(base, "evaluation.in_turn=[]")["rows"]
    assert measured == [8, 8, 8]
    # A row more, and a stage before the others, which keep their directories and results.
    config.write_text(
        text.replace("stages:\n", "stages:\n  - {name: few, kind: generate, prompts: 1}\n"), "utf-8"
    )
    more = start(base, allow_changes=True)
    assert measured == [8, 8, 8, 8]
    assert more["rows"][:3] == kept
    assert [row["stage"] for row in more["rows"][3:]] == ["ngram+words"]
    assert [stage["name"] for stage in more["stages"]] == ["few", "answers", "words"]
    assert len([*(base / "runs/tiny/stages").iterdir()]) == 3
    # A stage whose directory was deleted is done again: its drafter is another one, its start not.
    shutil.rmtree(base / "runs/tiny/stages/01-words")
    start(base, "stages.words.loop.seed=1", allow_changes=True)
    assert measured == [8, 8, 8, 8, 8, 8]
    measured.clear()
    # Other settings, and a row less.
    changed = ("evaluation.max_new_tokens=6", "evaluation.baselines=[]")
    rows = start(base, *changed, allow_changes=True)["rows"]
    assert measured == [6, 6, 6]
    assert [row["stage"] for row in rows] == ["words (start)", "words", "ngram+words"]


@pytest.mark.usefixtures("unjudged")
def test_a_setting_that_did_not_exist_when_the_run_began_is_no_change_and_other_data_are(
    base, monkeypatch
):
    with monkeypatch.context() as patch:
        before_call(patch, Trainer, "_optimizer_step", 2)
        with pytest.raises(Killed):
            start(base)
    stored = base / "runs/tiny/config.json"
    values = json.loads(stored.read_text("utf-8"))
    del values["evaluation"]["policy"]
    stored.write_text(json.dumps(values), "utf-8")
    with monkeypatch.context() as patch:
        before_call(patch, Trainer, "_optimizer_step", 1)
        with pytest.raises(Killed):
            start(base)
    path = base / "train.jsonl"
    path.write_text(path.read_text("utf-8").replace("train-0", "train-zero"), "utf-8")
    with pytest.raises(UserError, match=r"the data of train changed .*stage words has begun"):
        start(base)


@pytest.mark.usefixtures("unjudged")
def test_a_mended_file_keeps_the_answers_of_a_run_that_only_generates(base, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("train.stages.distill.DistillStage.run", cannot)
        with pytest.raises(UserError):
            start(base)
    shutil.rmtree(base / "runs/tiny/stages/01-words")
    path = base / "train.jsonl"
    path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[1:]), "utf-8")
    with pytest.raises(UserError, match=r"the data of train changed .*with --allow-changes, which"):
        start(base)
    made = before_call(monkeypatch, GenerateStage, "_answer")
    start(base, "stages.words.loop.max_steps=1", allow_changes=True)
    done = json.loads((base / "runs/tiny/stages/00-answers/done.json").read_text("utf-8"))
    assert done["summary"]["answers"] == 11
    assert not any(prompts for _, prompts, *_ in made)


def test_splits_that_are_left_out_come_from_train(base):
    rows = [{"prompt": f"the {word} sells {word}"} for word in WORDS for _ in range(2)]
    rows.append({"prompt": "the FOX sells: fox!"})
    write_rows(base / "train.jsonl", rows)
    answers = "{name: answers, kind: generate, max_new_tokens: 4, batch_size: 16}"
    report = start(
        base, "data={train: train.jsonl}", f"stages=[{answers}]", "evaluation.timed_prompts=0"
    )
    split = "split off from train by a hash of the first user message (seed 0): 2 rows for test"
    assert report["data_notes"][0].startswith(split)
    assert f"data: {report['data_notes'][0]}" in footnotes(report)
    answered = list(read_answers(base / "runs" / "tiny" / "stages" / "00-answers"))
    assert len(answered) in (len(rows) - 4, len(rows) - 5)
    write_rows(base / "test.jsonl", [{"prompt": "the fox sells fox"}])
    rows.append({"prompt": "why?", "response": "<think>hm</think>so"})
    write_rows(base / "train.jsonl", rows)
    config = load_config(base / "config.yaml", ["data.reasoning=drop"])
    run = Run(config, Accelerator(cpu=True), Reporter(silent=True))
    train = run.read_data()["train"]
    assert len(train) == len(rows) - 3
    assert train[-1].messages[-1]["content"] == "so"
    assert run.data_notes[0].startswith("left out of train, as they repeat prompts of dev or test")


def test_a_run_that_could_not_begin_leaves_nothing(base):
    path = base / "test.jsonl"
    good = path.read_text("utf-8")
    path.write_text(good + "{broken\n", "utf-8")
    with pytest.raises(UserError, match=r"test\.jsonl:5"):
        start(base)
    assert not (base / "runs").exists()


def cannot(*args: Any) -> Any:
    raise UserError("no trees here")


@pytest.mark.parametrize("what", ["a later stage", "a prompt", "a tree", "the disk"])
def test_what_would_end_a_later_stage_ends_the_run_at_once(
    base: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Even with no baseline that would be decoded first."""
    monkeypatch.setattr(Trainer, "_optimizer_step", cannot)
    monkeypatch.setattr(GenerateStage, "run", cannot)
    overrides = ["evaluation.baselines=[]"]
    if what == "a later stage":
        with (base / "config.yaml").open("a", encoding="utf-8") as file:
            file.write("  - {name: live, kind: online, drafter: {stage: distill}}\n")
        message = "stage live needs the prompts of split stream, but data has no such split"
    elif what == "a prompt":
        rows = [{"id": "long", "prompt": "sea " * 300}]
        write_rows(base / "test.jsonl", rows)
        message = r"test.jsonl:1: the prompt has \d+ tokens and the target's context holds 256"
    elif what == "the disk":
        monkeypatch.setattr("decode.base.artifact.free_space", lambda directory: 1000)
        message = "all stages, with answers at full length, in .* need .* free some space"
    else:
        monkeypatch.setattr("train.run.run.require_trees", cannot)
        overrides.append("evaluation.shape=dynamic")
        message = "no trees here"
    with pytest.raises(UserError, match=message):
        start(base, *overrides)
    assert not (base / "runs").exists()


def test_a_foreign_directory_is_not_written_into(base):
    (base / "runs" / "tiny").mkdir(parents=True)
    (base / "runs" / "tiny" / "thesis.txt").write_text("years of work", "utf-8")
    with pytest.raises(UserError, match="is not a run of draftsmith"):
        start(base)
    assert [p.name for p in (base / "runs" / "tiny").iterdir()] == ["thesis.txt"]


def command(*arguments: str) -> Result:
    """The command line in this process: a new one would spend its time importing torch."""
    begin_anew()
    return CliRunner().invoke(app, arguments)


def check_two_ranks(base: Path) -> None:
    def train(rank: int) -> None:
        done = command("train", str(base / "config.yaml"), "name=two")
        assert done.exit_code == 0, done.output

    assert two_ranks(train) == [0, 0]


@pytest.mark.slow
def test_two_ranks_train_as_one_does(base, finished):
    """DDP over two processes: the same batches, so the same losses up to the order of sums."""
    in_new_process(__name__, f"check_two_ranks(Path({str(base)!r}))")
    one, two = report_of(finished)["stages"], report_of(base, "two")["stages"]
    for stage in (1, 2):
        a, b = (run[stage]["summary"]["training"]["history"] for run in (one, two))
        assert [x["loss"] for x in b] == pytest.approx([x["loss"] for x in a], rel=1e-4)


@pytest.mark.slow
def test_the_commands_on_what_a_run_made(base, finished):
    rows = [json.dumps({"prompt": "the dog", "response": text}) for text in ("a fox", "the fox")]
    (base / "responses.jsonl").write_text("\n".join(rows), "utf-8")
    covered = command(
        *("coverage", "--target", str(base / "target"), str(base / "responses.jsonl")),
        *("--sizes", "9,200", "--json", str(base / "coverage.json")),
    )
    assert covered.exit_code == 0, covered.stderr
    found = json.loads((base / "coverage.json").read_text("utf-8"))
    assert [row["size"] for row in found] == [9, 200]

    drafter = str(finished / "runs/tiny/stages/02-distill/drafter")
    target = ["--target", str(base / "target")]
    assert "complete" in command("inspect", drafter).stdout
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is measured before all can be decoded with.
        patch.setattr("train.measure.evaluation.evaluate", None)
        refused = command(
            *("evaluate", *target, "--drafter", "ngram", "--drafter", "skip:attention=0-99"),
            *("--prompts", str(base / "test.jsonl")),
        )
    assert (refused.exit_code, "attention" in refused.stderr) == (2, True)
    steps = base / "steps.json"
    varied = command(
        *("evaluate", *target, "--drafter", drafter, "--prompts", str(base / "test.jsonl")),
        *("--max-new-tokens", "8", "--timed-prompts", "1", "--temperature", "0.9"),
        *("--sampling", "min_p=0.01,repetition_penalty=1.1", "--draft-temperature", "0.7"),
        *("--rule", "lenience:lenience=0.7", "--policy", "heuristic:max_depth=6,first=2"),
        *("--shape", "chain", "--steps", str(steps)),
    )
    assert varied.exit_code == 0, varied.stderr
    told = " ".join(varied.stdout.split())
    for part in (
        "≤ 6 by heuristic:max_depth=6,first=2",
        "lenience:lenience=0.7 (LOSSY",
        "min-p 0.01, repetition penalty 1.1, drafter's temperature 0.7",
        "drafts: chain",
    ):
        assert part in told
    written = json.loads(steps.read_text("utf-8"))
    assert {"gamma", "accepted", "la_k", "verify_ms"} <= written["acceptance"][0].keys()
    chosen = base / "calibration.json"
    calibrated = command(
        *("calibrate", *target, "--drafter", drafter, "--prompts", str(base / "dev.jsonl")),
        *("--max-new-tokens", "8", "--thresholds", "0.05,0.5", "--acceptance", "0.2,0.9"),
        *("--temperature", "1.0", "--json", str(chosen)),
    )
    assert calibrated.exit_code == 0, calibrated.stderr
    threshold = json.loads(chosen.read_text("utf-8"))["threshold"]
    assert f"θ = {threshold:g}" in calibrated.stdout
    assert "LOSSY" in calibrated.stdout
    options = ("a dog", "--max-new-tokens", "9", "--sampling", "repetition_penalty=1.1")
    plain = command("generate", *target, "--drafter", "none", *options, "--stop", "zz")
    fast = command("generate", *target, "--drafter", f"ngram+{drafter}", *options, "--stop", "zz")
    assert plain.stdout == fast.stdout != ""
    traced = command("generate", *target, "--drafter", drafter, "a dog", "--trace")
    assert "target adds" in traced.stdout


@pytest.mark.slow
def test_the_command_line_refuses_with_one_line_and_status_2(base):
    config = str(base / "config.yaml")
    for arguments, message in (
        (["train", "nowhere.yaml"], "cannot read the config"),
        (["train", config, "sed=1"], "config key 'sed' is unknown"),
        (["train", config, f"data.train={base}/none.jsonl"], "none.jsonl"),
        (["generate", "--target", str(base / "none"), "hello"], "does not exist"),
        (["inspect", str(base)], "manifest.json"),
        (
            [
                *("evaluate", "--target", str(base / "none"), "--drafter", "none"),
                *("--drafter", "ngram", "--prompts", str(base / "test.jsonl")),
                *("--steps", str(base / "steps.json")),
            ],
            "the steps of one drafter, and 2 are named",
        ),
        # Parts are checked before the target, which does not exist, is looked for.
        (
            ["generate", "--target", str(base / "none"), "hi", "--rule", "exactt"],
            'Did you mean "exact"',
        ),
        (
            ["generate", "--target", str(base / "none"), "hi", "--policy", "heuristic:first=99"],
            "first is 99",
        ),
    ):
        done = command(*arguments)
        assert done.exit_code == 2, (arguments, done.stderr)
        assert message in done.stderr.replace("\n", " ")
        assert "Traceback" not in done.stderr
