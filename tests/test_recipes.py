"""The shipped configs are sound: each is planned, with tiny models in the place of real ones."""

from pathlib import Path

import pytest
import yaml
from accelerate import Accelerator

from tests.tiny import save_tiny, tiny_tokenizer
from train.config import load_config
from train.console import Reporter
from train.run import Run

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = sorted(path.name for path in (CONFIGS / "recipes").glob("*.yaml"))


def test_there_are_recipes():
    assert len(RECIPES) >= 2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's affair
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_planned(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = CONFIGS / "recipes" / recipe
    save_tiny(tmp_path / "target", layers=7)  # the fewest for EAGLE-3
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{# enable_thinking #}"
    tokenizer.save_pretrained(tmp_path / "target")
    # Recipes start vLLM, which is not installed everywhere.
    monkeypatch.setenv("DRAFTSMITH_ENGINES", str(tmp_path / "engines"))
    (tmp_path / "engines/vllm/bin").mkdir(parents=True)
    (tmp_path / "engines/vllm/bin/python").touch()
    save_tiny(tmp_path / "small", layers=1)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the dog", "response": "a fox"}\n' * 3)
    overrides = [
        f"output_dir={tmp_path}",
        f"target.model={tmp_path / 'target'}",
        "target.device=cpu",
        "data.duplicates=keep",
    ]
    overrides += [f"data.{split}={tmp_path / 'rows.jsonl'}" for split in ("train", "dev", "test")]
    for stage in yaml.safe_load(path.read_text())["stages"]:
        if "draft_vocabulary" in stage:
            overrides.append(f"stages.{stage['name']}.draft_vocabulary=100")
        if "model" in stage.get("drafter", {}):
            overrides.append(f"stages.{stage['name']}.drafter.model={tmp_path / 'small'}")
    config = load_config(path, overrides)
    plans = Run(config, Accelerator(cpu=True), Reporter(silent=True)).plan()
    assert [name for name, _, _ in plans] == [stage.name for stage in config.stages]
    assert all(plan.tokens > 0 and plan.memory_bytes > 0 for _, _, plan in plans)
    assert not config.run_dir.exists()


@pytest.mark.parametrize("name", ["one_gpu", "ddp", "fsdp2", "zero2", "zero3_offload"])
def test_an_accelerate_config_is_one_that_accelerate_reads(name: str):
    from accelerate.commands.config import load_config_from_file

    found = load_config_from_file(str(CONFIGS / "accelerate" / f"{name}.yaml"))
    assert found.mixed_precision == "bf16"
