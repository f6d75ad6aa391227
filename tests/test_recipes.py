"""The shipped configs are sound: each is planned, with tiny models in the place of real ones."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from decode.model import without_weights
from decode.model.hidden_states import FINAL
from draftsmith.cli.main import app
from draftsmith.cli.plan import plan_target
from draftsmith.export.readable import require_readable
from heads.layers.target_layers import auxiliary_layers
from tests.published_configs import PUBLISHED
from tests.tiny import save_tiny, tiny_tokenizer
from train.base.console import Reporter
from train.data.read import Example
from train.data.text_files import Texts
from train.run.config_checks import load_config
from train.run.run import Run

CONFIGS = Path(__file__).parent.parent / "configs"
LAYERS = 7  # of the target's stand-in: the fewest for EAGLE-3
RECIPES = sorted(path.name for path in (CONFIGS / "recipes").glob("*.yaml"))


def test_there_are_recipes():
    assert len(RECIPES) >= 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for the target, without its weights, for a small model and for rows."""
    place = tmp_path_factory.mktemp("tiny")
    save_tiny(place / "target", layers=LAYERS)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{# enable_thinking reasoning_effort #}"
    tokenizer.save_pretrained(place / "target")
    (place / "target" / "model.safetensors").unlink()
    save_tiny(place / "small", layers=1)
    (place / "rows.jsonl").write_text('{"prompt": "the dog", "response": "a fox"}\n' * 3, "utf-8")
    return place


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's affair
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_planned(
    recipe: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = CONFIGS / "recipes" / recipe
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path / "engines"))  # there is none
    overrides = [
        f"output_dir={tmp_path}",
        f"target.model={tiny / 'target'}",
        "target.device=cpu",
        "data.duplicates=keep",
    ]
    overrides += [f"data.{split}={tiny / 'rows.jsonl'}" for split in ("train", "dev", "test")]
    recipe_values = yaml.safe_load(path.read_text("utf-8"))
    if "sharded" in recipe_values["target"]:
        overrides.append("target.sharded=false")  # one process shares it with none
    for stage in recipe_values["stages"]:
        if "draft_vocabulary" in stage:
            overrides.append(f"stages.{stage['name']}.draft_vocabulary=100")
        if stage.get("start") in ("runs/module", "embedded:eagle1-smollm2-135m"):
            # The user's directory, and heads for a real target.
            overrides.append(f"stages.{stage['name']}.start=null")
        if "captured_layers" in stage:
            layers = [*auxiliary_layers(LAYERS), FINAL]
            overrides.append(f"stages.{stage['name']}.captured_layers={layers}")
        if "exit_layer" in stage:
            overrides.append(f"stages.{stage['name']}.exit_layer=6")
        if "model" in stage.get("drafter", {}):
            overrides.append(f"stages.{stage['name']}.drafter.model={tiny / 'small'}")
    config = load_config(path, overrides)
    require_readable(config)
    header = path.read_text("utf-8").partition("\nname: ")[0]
    if "Planned, not yet run" in header:  # for a GPU
        assert "Expected: " in header
        judged = config.evaluation.stages != []
        plans = re.findall(r"--speed (\S+)", header)
        assert plans
        assert all(("evaluation=" in speeds) is judged for speeds in plans)
    run = Run(config, Accelerator(cpu=True), Reporter(silent=True))
    run.loaded = plan_target(config)
    plans = run.plan()
    assert [name for name, _, _ in plans] == [stage.name for stage in config.stages]
    for _, _, plan in plans:
        assert plan.tokens > 0 or "kept while answering" in plan.what
        assert plan.memory.total > 0
    assert not config.run_dir.exists()


# The table of plans, and that of their parts.
SCALE = (CONFIGS.parent / "docs/results/scale.md").read_text("utf-8")


def plan_commands() -> list[list[str]]:
    """The words of each `draftsmith train … --dry-run` in a comment of a recipe."""
    commands = []
    for name in RECIPES:
        text = (CONFIGS / "recipes" / name).read_text("utf-8").replace("\\\n#", "")
        lines = re.findall(r"^# +draftsmith (train .*--dry-run.*)$", text, re.M)
        commands += [shlex.split(line) for line in lines]
    return commands


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories with the config of a published model and a tiny tokenizer, without weights."""
    place = tmp_path_factory.mktemp("configs")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{# enable_thinking reasoning_effort #}"
    directories = {name: place / name.replace("/", "--") for name in PUBLISHED}
    for name, directory in directories.items():
        tokenizer.save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(PUBLISHED[name]), "utf-8")
    return directories


PLANS = plan_commands()


def _plan(words: list[str]) -> Any:
    """The plans of one recipe are in the gate, those of the other recipes in longer tests."""
    name = Path(words[1]).stem
    marks = [] if name == "qwen3_8b_1x80gb" else [pytest.mark.thorough]
    return pytest.param(words, id=name, marks=marks)


@pytest.mark.parametrize("words", [_plan(words) for words in PLANS])
def test_a_plan_is_the_one_that_the_docs_state(
    words: list[str],
    configs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Planned from the published shapes alone: no network, weights, data set or engine."""
    read = without_weights.config_and_tokenizer
    monkeypatch.setattr(
        without_weights, "config_and_tokenizer", lambda name: read(str(configs[name]))
    )
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path / "none"))
    question = "the dog and the fox " * 20
    example = Example("0", ({"role": "user", "content": question},), question, None, None, "here")

    def rows(run: Run) -> dict[str, Any]:
        train = [example] * (run.config.data.limit or 0)
        return {"train": train, "dev": [example] * 500, "test": [example] * 500}

    monkeypatch.setattr(Run, "read_data", rows)
    # All rows are one: each needs no look.
    monkeypatch.setattr(Texts, "prompts", lambda self, key, what, rows, make: range(len(rows)))
    monkeypatch.chdir(CONFIGS.parent)
    AcceleratorState._reset_state(reset_partial_state=True)  # other tests set another precision
    json_file = tmp_path / "plan.json"
    words = [*words, "--json", str(json_file)]
    planned = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    AcceleratorState._reset_state(reset_partial_state=True)
    assert planned.exit_code == 0, planned.output
    text = " ".join(planned.stdout.split())
    summary = r"about ([\d.]+ \w+) for the tensors .*?, and (.+?) of disk, where.*"
    times = r" about ([^.]+?) for the stages(?: and evaluations)?, ([\d.]+) hours of one device"
    found = re.search(summary + times, text)
    assert found, text
    *figures, hours = found.groups()
    table = (
        line.strip("| ").split(" | ")
        for line in SCALE.splitlines()
        if f"[{Path(words[1]).name}]" in line
    )
    rows_by_figures = {tuple(row[2:5]): row for row in table}
    assert tuple(figures) in rows_by_figures, (figures, hours)
    # The parts of the largest stage's memory, in the table of parts.
    plan = json.loads(json_file.read_text("utf-8"))
    largest = max((stage["memory"] for stage in plan["stages"]), key=lambda x: sum(x.values()))
    assert plan["memory_bytes"] == sum(largest.values())
    parts = " | ".join(f"{size / 2**30:.1f}" for size in largest.values())
    assert re.search(rf"\[{Path(words[1]).name}\]\S*[^|]* \| {re.escape(parts)} \|", SCALE), parts
    row = rows_by_figures[tuple(figures)]
    # Of the GPUs that train, and of those that only serve.
    training, *serving = map(int, re.findall(r"\d+", row[1]))
    assert training == int(words[words.index("--processes") + 1] if "--processes" in words else 1)
    assert float(row[5]) == pytest.approx(float(hours) * (1 + sum(serving) / training), abs=0.1)


@pytest.mark.parametrize("name", ["one_gpu", "ddp", "fsdp2", "zero2", "zero3_offload"])
def test_an_accelerate_config_is_one_that_accelerate_reads(name: str):
    from accelerate.commands.config import load_config_from_file

    found = load_config_from_file(str(CONFIGS / "accelerate" / f"{name}.yaml"))
    assert found.mixed_precision == "bf16"
