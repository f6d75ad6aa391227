"""How much does a module of multi-token prediction lose by a fine-tuning, and regain by training?

    python -m benchmarks.mtp [--quick] [--json FILE] [--runs DIR]

A small target in the shape of Qwen3.5 learns the English of docs/, and a module is trained for it.
Then the target alone is fine-tuned on the Python code of decode/, as a user would tune a model that
ships such a module. `configs/recipes/mtp_restore.yaml`, with smaller sizes, trains the old module
for the tuned target. A second training starts with a new module and takes as many steps. Rows:

    before    the module, with the target it was trained for, on English
    broken    the same module with the tuned target, on code
    restored  the module that the recipe trained from the broken one
    anew      the module that was trained from nothing

The table has the tokens per step on prompts that no module was trained on, greedy and at
temperature 1, with 95% intervals over prompts. What is there already is kept.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from benchmarks.common import (
    JsonOption,
    RunsOption,
    describe_machine,
    execute_run,
    format_interval,
    rows_table,
    run_command,
    run_config,
    start_benchmark,
    write_json,
)
from benchmarks.shared.small_vocabulary import make_tokenizer
from decode.base.artifact import write_directory
from decode.draw.sampling import Sampling
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.settings import DecodeSettings
from draftsmith.export import ImportOptions
from draftsmith.export.export_directory import export_drafter
from draftsmith.export.import_directory import import_drafter
from train.base.console import Reporter
from train.measure.intervals import ratio_of_totals

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "configs" / "recipes" / "mtp_restore.yaml"
TEXTS = {"english": "docs/*.md", "code": "decode/**/*.py"}
EOS = "<eos>"
TOKENS = 1500
LENGTH = 96  # tokens of a text that the target learns from
DEPTH = 3
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="a smaller target, fewer steps of modules")
    ] = False,
    json_file: JsonOption = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Make the targets, train the modules, measure each, print the table."""
    reporter = start_benchmark()
    base = (runs / ("mtp-quick" if quick else "mtp")).absolute()
    texts = {name: _read(pattern) for name, pattern in TEXTS.items()}
    for name, files in texts.items():
        _write_rows(base / name, files)
    original = _target(base, "original", texts["english"], quick, reporter)
    first = _trained(base, original, "english", {"new": None}, quick, reporter)["new"]
    with_module = base / "original-mtp"
    if not with_module.exists():
        export_drafter(first, "mtp", with_module)
    tuned = _target(base, "tuned", texts["code"], quick, reporter, start=with_module)
    broken = base / "broken"
    if not broken.exists():
        import_drafter(
            str(with_module), load_target(str(tuned)), broken, ImportOptions(depth=DEPTH)
        )
    starts = {"restored": str(broken), "anew": None}
    trained = _trained(base, tuned, "code", starts, quick, reporter)
    figures = {"before": measure(load_target(str(with_module)), "mtp:depth=3", base / "english")}
    target = load_target(str(tuned))
    for arm, drafter in {"broken": broken, **trained}.items():
        figures[arm] = measure(target, str(drafter), base / "code")
    reporter.table(arms_table(figures))
    if json_file:
        ratios = {
            f"drafted_{metric}_{arm}_vs_{other}": _drafted(figures[arm], metric)
            / _drafted(figures[other], metric)
            for metric in TEMPERATURES
            for arm, other in (("broken", "before"), ("broken", "anew"), ("restored", "anew"))
        }
        machine = describe_machine()
        write_json(json_file, {"ratios": ratios, "arms": figures, "machine": machine})


def _read(pattern: str) -> list[str]:
    """The texts of the repository's files with names of this pattern."""
    return [file.read_text("utf-8") for file in sorted(ROOT.glob(pattern))]


def _write_rows(directory: Path, files: Sequence[str]) -> None:
    """Prompts of three lines: a tenth for dev, a tenth for test. Those of an earlier run stay."""
    if directory.exists():
        return
    directory.mkdir(parents=True)
    rows: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for number, piece in enumerate(_pieces(files)):
        split = {0: "dev", 5: "test"}.get(number % 10, "train")
        rows[split].append(json.dumps({"prompt": piece}))
    for split, lines in rows.items():
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def _pieces(files: Sequence[str]) -> list[str]:
    lines = [line for text in files for line in text.splitlines(keepends=True) if line.strip()]
    return ["".join(lines[at : at + 3]) for at in range(0, len(lines) - 3, 12)]


def _target(
    base: Path,
    name: str,
    files: Sequence[str],
    quick: bool,
    reporter: Reporter,
    start: Path | None = None,
) -> Path:
    """The directory of a target that has learnt these texts. start: the target that is tuned."""
    directory = base / name
    if directory.exists():
        return directory
    if start is None:
        # The tokenizer knows both kinds of text.
        texts = [text for pattern in TEXTS.values() for text in _read(pattern)]
        tokenizer = make_tokenizer(texts, [EOS], EOS, TOKENS)
        model: PreTrainedModel = _new_model(len(tokenizer), tokenizer.eos_token_id, quick)
        steps = 200
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
        steps = 100
    ids = torch.tensor(tokenizer("".join(files))["input_ids"])
    loss = _learn(model, ids, steps, reporter, name)
    reporter.say(f"{name}: {steps} steps, {len(ids):,} tokens of text, {loss:.3f} nats at the end")

    def fill(place: Path) -> None:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)

    write_directory(directory, fill)
    return directory


def _new_model(vocabulary: int, eos: int, quick: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    hidden, layers = (96, 2) if quick else (192, 2)
    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"] * (layers // 2),
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        mtp_num_hidden_layers=1,
        eos_token_id=eos,
    )
    return Qwen3_5ForCausalLM(config)


def _learn(
    model: PreTrainedModel, ids: torch.Tensor, steps: int, reporter: Reporter, name: str
) -> float:
    """Train on the next token. Returns the mean loss of the last ten steps, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator, losses = torch.Generator().manual_seed(1), []
    with reporter.bar(f"the target {name}", steps) as bar:
        for step in range(steps):
            starts = torch.randint(0, len(ids) - LENGTH, (8,), generator=generator)
            rows = ids[starts[:, None] + torch.arange(LENGTH)]
            loss = model(rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            bar.update(step + 1)
    return float(np.mean(losses[-10:]))


def _trained(
    base: Path,
    target: Path,
    text: str,
    starts: dict[str, str | None],
    quick: bool,
    reporter: Reporter,
) -> dict[str, Path]:
    """The drafters of the recipe's last stage, one for each start."""
    config = run_config(f"{target.name}-modules", base, restore_stages(starts, quick))
    config["target"] = {"model": str(target), "dtype": "float32", "device": "cpu"}
    splits = ("train", "dev", "test")
    config["data"] = {split: str(base / text / f"{split}.jsonl") for split in splits}
    config["data"]["limit"] = 240
    run, _ = execute_run(config, reporter)
    return {name: run.stage_directory(name) / "drafter" for name in starts}


def restore_stages(starts: dict[str, str | None], quick: bool) -> list[dict[str, Any]]:
    """The stages of the recipe with sizes for a small target, and its last stage for each start."""
    answers, dev, module = yaml.safe_load(RECIPE.read_text("utf-8"))["stages"]
    assert (dev["name"], module["name"]) == ("dev-answers", "module")
    del answers["server"]
    answers |= {"max_new_tokens": 64, "batch_size": 32, "part_prompts": 96}
    module |= {
        "dev": None,
        "max_length": 256,
        "loop": {"epochs": 1000, "max_steps": 150 if quick else 200, "tokens_per_batch": 1024},
        "optimizer": {"lr": 2e-3, "warmup_steps": 20, "clip": 0.5},
    }
    return [answers, *(module | {"name": name, "start": start} for name, start in starts.items())]


def measure(target: Target, drafter: str, text: Path) -> dict[str, Any]:
    """Tokens per step on the text's test prompts with an interval, and steps, emitted and drafted
    tokens of each prompt: greedy, and at temperature 1."""
    rows = [
        json.loads(line)["prompt"] for line in (text / "test.jsonl").read_text("utf-8").splitlines()
    ]
    prompts = [target.tokenizer(row)["input_ids"] for row in rows[:48]]
    figures = {}
    for name, temperature in TEMPERATURES.items():
        settings = DecodeSettings(gamma=DEPTH, sampling=Sampling(temperature))
        decoder, _ = settings.decoder(target, open_drafter(drafter, target))
        tally = decoder.decode(prompts, 64, seed=1).tally
        figures[name] = {
            "tokens_per_step": ratio_of_totals(tally.emitted, tally.steps),
            "steps": tally.steps.tolist(),
            "emitted": tally.emitted.tolist(),
            "drafted": tally.drafted.sum(1).tolist(),
        }
    return figures


def _drafted(figures: dict[str, Any], metric: str) -> float:
    """Accepted draft tokens per step."""
    value: float = figures[metric]["tokens_per_step"]["value"]
    return value - 1


def arms_table(figures: dict[str, dict[str, Any]]) -> Any:
    """The table of all modules."""
    rows = [
        {"module": arm}
        | {name: format_interval(part["tokens_per_step"], 3) for name, part in row.items()}
        for arm, row in figures.items()
    ]
    return rows_table(f"tokens per step, drafts of up to {DEPTH} tokens", rows, left=1)


if __name__ == "__main__":
    run_command(main)
