"""`draftsmith init` writes configs that run, and a plan needs no weights."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator
from click.testing import Result
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.model.loading import load_target
from draftsmith import starter_config
from draftsmith.cli.init import ENGINE_NAMES, GOAL_NAMES, MACHINE_NAMES, init
from draftsmith.cli.main import app
from draftsmith.cli.plan import plan_target
from draftsmith.starter_config import GOALS, MACHINES, Starter
from heads.heads_directory import new_heads, save_heads
from heads.options import HeadOptions
from tests.test_run import CONFIG, WORDS
from tests.tiny import save_tiny, shortened, write_rows
from train.base.console import Reporter
from train.base.stage import StagePlan
from train.loop.estimates import read_speeds, seconds_of
from train.run.config import RunConfig
from train.run.config_checks import load_config
from train.run.run import Run

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "target", "llama", layers=3)
    rows = [{"instruction": f"the {a} {b}", "output": b} for a in WORDS[:5] for b in WORDS]
    (tmp_path / "rows.json").write_text(json.dumps(rows), "utf-8")
    return tmp_path


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def write(place: Path, goal: str, *more: str) -> Result:
    target, data = str(place / "target"), str(place / "rows.json")
    out = str(place / f"{goal}.yaml")
    return command("init", "--target", target, "--data", data, "--goal", goal, "--out", out, *more)


def plan(path: Path, *overrides: str, weights: bool = False) -> list[tuple[str, str, StagePlan]]:
    config = load_config(path, overrides)
    run = Run(config, Accelerator(cpu=True), Reporter(silent=True))
    if not weights:
        run.loaded = plan_target(config)
    return run.plan()


@pytest.mark.parametrize(
    ("goal", "machine"),
    [*((goal, "cpu") for goal in GOALS), *(("heads", x) for x in MACHINES if x != "cpu")],
)
def test_a_config_for_every_goal_and_machine_is_planned(place: Path, goal: str, machine: str):
    result = write(place, goal, "--machine", machine)
    assert result.exit_code == 0, result.stderr
    path = place / f"{goal}.yaml"
    config = load_config(path)
    assert (config.data.test, config.data.train) == (None, str(place / "rows.json"))
    assert (config.target.device == "cpu") == (machine == "cpu")
    plans = plan(path, "target.device=cpu")
    assert [kind for _, kind, _ in plans][-1] == {"small-lm": "distill"}.get(goal, goal)
    for _, _, planned in plans:
        kept = "kept while answering" in planned.what
        assert (planned.tokens > 0) == (planned.disk_bytes > 0) == (not kept)
        assert planned.memory.total > 0
    # What engines read: vLLM's EAGLE-1 has no draft vocabulary.
    assert goal != "heads" or config.stages[-1].draft_vocabulary is None
    assert "all in the warm-up" not in " ".join(p.what for _, _, p in plans)
    # Comments name the sources of what is chosen.
    assert "2310.08461" in path.read_text("utf-8")
    again = write(place, goal)
    assert again.exit_code == 2
    assert "exists; expected a new file" in again.stderr


@pytest.mark.parametrize(
    ("engine", "machine", "expected"),
    [
        ("vllm", "80gb", {"heads": "eagle3", "draft_vocabulary": 100}),
        ("llama.cpp", "cpu", {"heads": "eagle3", "draft_vocabulary": 100}),
        ("hf", "cpu", {"drafter": [0, 1], "draft_vocabulary": None}),
    ],
)
def test_a_config_for_an_engine_is_one_that_it_reads(
    place: Path, monkeypatch: pytest.MonkeyPatch, engine: str, machine: str, expected: Any
):
    save_tiny(place / "target", "llama", layers=7)  # the fewest for EAGLE-3
    monkeypatch.setattr(Starter, "usual_vocabulary", 100)
    out = place / "my.yaml"
    words = ("--target", str(place / "target"), "--data", str(place / "rows.json"))
    goal = () if engine == "hf" else ("--goal", "heads")
    made = command(
        *("init", *words, *goal, "--engine", engine, "--machine", machine, "--out", str(out))
    )
    assert made.exit_code == 0, made.stderr
    stage: Any = load_config(out).stages[-1]
    found = {"draft_vocabulary": stage.draft_vocabulary}
    found |= {"heads": stage.heads.type} if stage.kind == "heads" else {}
    found |= {"drafter": stage.drafter.layers} if stage.kind == "distill" else {}
    assert found == expected
    # Engines draft chains, and vLLM writes the answers where it has a GPU.
    assert getattr(stage, "tree", None) is None
    answers: Any = load_config(out).stages[0]
    assert (answers.server is not None) == (engine == "vllm")
    assert plan(out, "target.device=cpu", "precision=null")


def test_what_the_engine_could_not_read_is_refused_before_training(place: Path):
    """By the plan and by the training alike, without a look at the target."""
    for goal, changes, reason in (
        ("heads", ["engine=hf"], "stage heads, for engine hf: format hf cannot hold"),
        ("heads", ["engine=llama.cpp"], "llama.cpp has no EAGLE-1"),
        ("heads", ["engine=vllm", "stages.heads.heads={type: hydra}"], "no engine supports Hydra"),
        ("heads", ["engine=vllm", "stages.heads.draft_vocabulary=9"], "Leave draft_vocabulary out"),
        ("heads", ["engine=vllm", "stages.heads.heads={type: eagle1, window: 99}"], "a window of"),
        ("heads", ["engine=sglang", EAGLE31], "fc_norm, which sglang does not read"),
        ("small-lm", ["engine=llama.cpp", "stages.distill.parallel={}"], "cannot hold a pard"),
        ("small-lm", ["engine=vllm", "stages.distill.draft_vocabulary=9"], "rows that were not"),
    ):
        path = place / f"{goal}.yaml"
        if not path.exists():
            assert write(place, goal, "--machine", "cpu").exit_code == 0
        for more in (["--dry-run"], []):
            refused = command("train", str(path), *changes, *more)
            assert (refused.exit_code, reason in refused.stderr) == (2, True), refused.stderr
    fine = command("train", str(place / "heads.yaml"), "engine=vllm", "--dry-run")
    assert fine.exit_code == 0, fine.stderr


TREE = ("stages.heads.tree.prompts=2", "stages.heads.tree.max_new_tokens=8")
EAGLE31 = "stages.heads.heads={type: eagle3, fc_norm: true}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goal", "engine"),
    shortened(
        [*((goal, None) for goal in GOALS), ("heads", "vllm")], [("heads", None), ("online", None)]
    ),
)
def test_a_config_runs_as_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, goal: str, engine: str | None
):
    monkeypatch.chdir(place)
    if engine:
        save_tiny(place / "target", "llama", layers=7)  # the fewest for EAGLE-3
    named = ("--engine", engine) if engine else ()
    assert write(place, goal, "--machine", "cpu", *named).exit_code == 0
    small = [
        *("evaluation.timed_prompts=2", "evaluation.timed_tokens=8", "evaluation.prompts=2"),
        *("evaluation.max_new_tokens=8", "evaluation.baseline_gammas=[2]"),
        *("data.limit=40", "trackers=[]", "threads=1", "stages.answers.max_new_tokens=8"),
        *{
            "small-lm": ["stages.dev-answers.max_new_tokens=8"],
            "heads": [
                "stages.dev-answers.max_new_tokens=8",
                *([] if engine else TREE),
            ],
            "online": ["stages.online.max_new_tokens=8"],
        }[goal],
    ]
    trained = command("train", f"{goal}.yaml", *small)
    assert trained.exit_code == 0, trained.stderr
    assert "split off from train" in trained.stdout
    assert (place / "runs" / goal / "report.html").exists()


def test_what_is_missing_or_wrong_is_named(place: Path, monkeypatch: pytest.MonkeyPatch):
    target, out = str(place / "target"), str(place / "new.yaml")
    few = place / "few.jsonl"
    few.write_text('{"prompt": "hi"}\n', "utf-8")
    cases = (
        (["--target", target, "--out", out], "--data is missing, and there is no terminal to ask"),
        (["--target", target, "--data", str(few), "--out", out], "1 rows with a prompt; expected"),
        (["--data", str(few), "--goal", "head", "--out", out], 'Did you mean "heads"'),
        (["--data", str(few), "--machine", "tpu", "--out", out], "expected cpu, 24gb"),
    )
    for arguments, message in cases:
        result = command("init", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not Path(out).exists()
    # As 8B: its weights fit into 24 GB, and a training needs 27.
    for memory, message in ((2**16, "at most 80% of that"), (2**20, "a training for")):
        small = starter_config.replace(MACHINES["24gb"], memory=memory)
        monkeypatch.setitem(MACHINES, "24gb", small)
        assert message in write(place, "heads", "--machine", "24gb").stderr
        assert not (place / "heads.yaml").exists()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_redirect_gets_the_config_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Questions and what was done go to standard error; the data is named wherever the file is."""
    moved = place / "me@host"
    moved.mkdir()
    rows = (place / "rows.json").rename(moved / "rows.json")
    monkeypatch.setattr("sys.stdin", _Terminal(f"{place / 'target'}\n{rows}\nheads\n"))
    init(machine="cpu")
    out, err = capsys.readouterr()
    (place / "my.yaml").write_text(out, "utf-8")
    config = load_config(place / "my.yaml")
    assert (config.name, config.data.train) == ("heads", str(rows))
    assert "Target (hub id" in err
    assert "the config: heads on the target's hidden states" in err
    assert [kind for _, kind, _ in plan(place / "my.yaml")][-1] == "heads"


def test_the_shell_completes_commands_goals_and_machines(monkeypatch: pytest.MonkeyPatch):
    assert ([*GOALS], [*MACHINES]) == (GOAL_NAMES, MACHINE_NAMES)
    engine = RunConfig.model_fields["engine"].annotation
    assert str(ENGINE_NAMES)[1:-1] in str(engine)
    for words, expected in (
        ("draftsmith ca", ["calibrate", "calibrate-layers", "calibrate-tree"]),
        ("draftsmith init --goal s", ["small-lm"]),
        ("draftsmith init --engine v", ["vllm"]),
        ("draftsmith init --machine 8", ["80gb", "8x80gb"]),
        ("draftsmith chat --dtype b", ["bfloat16"]),
    ):
        count = str(len(words.split()) - 1)
        asked = {"_DRAFTSMITH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
        result = CliRunner().invoke(app, [], env=asked, prog_name="draftsmith")
        assert sorted(result.stdout.split()) == expected, result.output


def test_a_terminal_is_asked_for_what_is_not_given(place: Path, monkeypatch: pytest.MonkeyPatch):
    answers = iter([str(place / "target"), str(place / "rows.json"), "online"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda question, default: next(answers))
    init(out=place / "asked.yaml", machine="cpu")
    assert (
        yaml.safe_load((place / "asked.yaml").read_text("utf-8"))["stages"][-1]["kind"] == "online"
    )


# --- plans without weights -----------------------------------------------------------------------

ANSWERS = {"text": "answers"}
STAGES: list[dict[str, Any]] = [
    {"name": "answers", "kind": "generate", "max_new_tokens": 10},
    {"name": "states", "kind": "feature_cache", **ANSWERS},
    {"name": "top", "kind": "teacher_cache", "k": 4, **ANSWERS},
    {"name": "first", "kind": "distill", "drafter": {"layers": [0, 2]}, **ANSWERS},
    {"name": "new", "kind": "distill", "drafter": {"config": {"intermediate_size": 16}}},
    {"name": "other", "kind": "distill", "drafter": {"model": "SMALL"}, **ANSWERS},
    {"name": "adapted", "kind": "distill", "drafter": {"layers": [0]}, "lora": {}, **ANSWERS},
    {"name": "heads", "kind": "heads", "heads": {"type": "eagle1"}, "tree": {}, **ANSWERS},
    {"name": "both", "kind": "heads", "heads": {"type": "medusa"}, "backbone": {}, **ANSWERS},
    {"name": "further", "kind": "heads", "heads": {"type": "eagle1"}, "start": "HEADS", **ANSWERS},
    {"name": "live", "kind": "online", "split": "train", "drafter": {"layers": [0]}},
]


def test_the_quickstarts_plan_is_written_as_json(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(place)
    written = place / "plan.json"
    model = save_tiny(place / "long", max_positions=2048)
    planned = command(
        *("quickstart", f"target.model={model}", "target.dtype=float32"),
        *(f"stages.{stage}.draft_vocabulary=100" for stage in ("words", "heads")),
        *("--dry-run", "--json", str(written)),
    )
    assert planned.exit_code == 0, planned.stderr
    names = [stage["name"] for stage in json.loads(written.read_text("utf-8"))["stages"]]
    assert {"answers", "distill", "heads"} <= set(names)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's affair
def test_a_plan_needs_no_weights(place: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny(place / "small", layers=1)
    rows = [{"prompt": f"the {word}", "response": word} for word in WORDS]
    write_rows(place / "train.jsonl", rows)
    target = load_target(str(place / "target"), dtype="float32", device="cpu")
    heads = new_heads(HeadOptions.of({"type": "eagle1"}), target, None)
    save_heads(place / "start", heads, target=target, provenance={})
    paths = json.dumps(STAGES).replace("SMALL", str(place / "small"))
    stages = json.loads(paths.replace("HEADS", str(place / "start")))
    config = yaml.safe_load(CONFIG.format(base=place)) | {"stages": stages}
    config["data"] = {"train": "train.jsonl"}
    (place / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
    complete = plan(place / "config.yaml", weights=True)
    for directory in ("target", "small"):
        (place / directory / "model.safetensors").unlink()
    assert plan(place / "config.yaml") == complete
    # Of a training: weights, gradients, two moments, and more for the text.
    _, _, first = next(p for p in complete if p[0] == "first")
    assert first.memory.total > 16 * first.trained_parameters
    # A stage that serves and learns needs memory of every kind; one that stores a text does not.
    parts = {name: vars(stage_plan.memory) for name, _, stage_plan in complete}
    assert all(parts["live"].values())
    assert [part for part, size in parts["states"].items() if size] == ["target", "activations"]
    short = plan(place / "config.yaml", "stages.first.optimizer.warmup_steps=500")[3][2].what
    assert re.search(r"about \d+ steps, all in the warm-up: lower .*, which is 500", short)
    # max_steps ends a training before its epochs do.
    shorter = plan(place / "config.yaml", "stages.first.loop={max_steps: 1, tokens_per_batch: 100}")
    assert shorter[3][2].tokens == 100 < first.tokens
    planned = command("train", str(place / "config.yaml"), "--dry-run", "--speed", "generate=10")
    assert planned.exit_code == 0, planned.stderr
    assert "≈ 15 s" in planned.stdout  # 15 answers of 10 tokens
    assert "products on cpu: trainings in float32; the target's passes in float32" in planned.stdout
    assert " of disk, where " in planned.stdout
    assert "disk may be too small" not in planned.stdout
    monkeypatch.setattr("draftsmith.cli.plan.free_space", lambda _: 0)
    planned = command("train", str(place / "config.yaml"), "--dry-run")
    assert planned.exit_code == 0, planned.stderr
    assert "where 0 bytes are free" in planned.stdout
    assert "the disk may be too small: choose another output_dir" in planned.stdout
    refused = command("train", str(place / "config.yaml"), "--speed", "generate=10")
    assert (refused.exit_code, "--speed is for --dry-run" in refused.stderr) == (2, True)


def test_speeds_are_stated_or_measured_by_a_run(tmp_path: Path):
    stages = [
        {"name": "a", "kind": "generate", "summary": {"tokens_per_second": 50.0}},
        {"name": "d", "kind": "distill", "summary": {"training": {"tokens_per_second": 20.0}}},
        {"name": "o", "kind": "online", "summary": {}},
    ]
    # The second row is of an earlier version.
    rows = [{"seconds": 2.0, "tokens": 60}, {}, {"seconds": 1.0, "tokens": 30}]
    (tmp_path / "report.json").write_text(json.dumps({"stages": stages, "rows": rows}), "utf-8")
    speeds = read_speeds(str(tmp_path))
    measured = {"generate": 50.0, "a": 50.0, "distill": 20.0, "d": 20.0, "evaluation": 30.0}
    assert speeds == measured
    assert seconds_of("b", "generate", StagePlan("", tokens=100), speeds) == 2
    assert seconds_of("o", "online", StagePlan("", tokens=100), speeds) is None
    assert read_speeds("a=1,heads=2.5") == {"a": 1.0, "heads": 2.5}
    for wrong in ("fast", "a=b", "a=0", str(tmp_path / "none")):
        with pytest.raises(UserError, match="expected KIND=TOKENS_PER_SECOND"):
            read_speeds(wrong)
