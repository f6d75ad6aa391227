"""What do drafters gain for a target with an encoder?

    python -m benchmarks.encoder_decoder [--quick] [--json FILE] [--runs DIR]

No package has weights of a real model with an encoder. So the benchmark first trains a T5 from
random weights on an invented translation (`benchmarks.shared.translation`), for a few minutes. The
target answers the training sources, and three drafters learn from its answers:

    blockwise      heads on the decoder's states (1811.03115); the target stays as it is
    medusa         the same with Medusa's heads (2401.10774)
    small          the target's encoder and the first layer of its decoder, distilled, so that the
                   draft has a deep encoder and a shallow decoder, as that of SpecDec (2203.16487)

`ngram` looks up in the source and in the text, and needs no training. Each drafter drafts chains of
a length that is chosen on dev sources. On test sources the table has: how often the first token of
a draft is right; tokens per step and the speed-up over plain decoding, greedy, batch 1, with 95%
bootstrap intervals over sources; the costs c and v of a draft token and of a pass. All is in
float32, where each text must equal that of plain decoding token by token, and the benchmark checks
that. Runs are kept and continue where they stopped.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.common import (
    JsonOption,
    RunsOption,
    describe_machine,
    execute_run,
    format_figure,
    format_interval,
    read_summary,
    rows_table,
    run_command,
    run_config,
    start_benchmark,
    with_interval,
    write_json,
)
from benchmarks.shared.translation import SPLITS, Shape, write_target
from decode.drafters import DRAFTERS
from decode.measure.evaluation import evaluate
from decode.measure.timed_prompts import fastest_gamma
from decode.opening.directory import open_drafter
from decode.settings import EvaluationProtocol
from train.base.console import Reporter
from train.run.run import Run

HEADS: dict[str, dict[str, Any]] = {
    "blockwise": {"type": "blockwise", "k": 5},
    "medusa": {"type": "medusa", "heads": 4, "output": "shared"},
}
SMALL = "small"
TRAINED = (*HEADS, SMALL)
LOOKUP = "ngram"


@dataclass(frozen=True)
class Settings:
    """shape, target_steps: of the target and its training. drafter_steps: optimizer steps of each
    drafter. tokens: the length limit of a text. timed: the number of test sources that are timed.
    gammas: lengths of a draft to choose from, on dev sources."""

    name: str
    runs: Path
    shape: Shape
    target_steps: int = 1200
    drafter_steps: int = 800
    tokens: int = 48
    timed: int = 48
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="less training, fewer sources")] = False,
    json_file: JsonOption = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Train the target and the drafters, measure them, print the table."""
    reporter = start_benchmark()
    settings = Settings("encoder-decoder", runs, Shape())
    if quick:
        settings = Settings(
            "encoder-decoder-quick",
            runs,
            Shape(train=600, test=48),
            target_steps=400,
            drafter_steps=150,
            timed=16,
            gammas=(2, 4),
        )
    run, target_figures, figures = measure_all(settings, reporter)
    reporter.table(drafters_table(figures, target_figures))
    if json_file:
        write_json(
            json_file,
            {
                "ratios": ratios(figures),
                "drafters": figures,
                "target": target_figures,
                "shape": asdict(settings.shape),
                "settings": run.config.model_dump(mode="json"),
                "machine": describe_machine(),
            },
        )


def measure_all(
    settings: Settings, reporter: Reporter
) -> tuple[Run, dict[str, float], dict[str, dict[str, Any]]]:
    """Train all that is not there yet. Return the run, figures of the target, and those of each
    drafter."""
    directory = settings.runs / f"{settings.name}-target"
    target_figures = write_target(directory, settings.shape, settings.target_steps, reporter)
    run, _ = execute_run(drafters_config(settings, directory), reporter)
    target, data = run.target, run.read_data()
    dev, prompts = run.prompts(data["dev"]), run.prompts(data["test"])
    protocol = EvaluationProtocol(
        max_new_tokens=settings.tokens,
        timed_tokens=settings.tokens,
        timed_prompts=settings.timed,
        # In transformers 5.23, that of a T5 whose encoder has fewer layers than its decoder fails.
        generate=False,
    )
    plain = protocol.decoder(target, DRAFTERS["none"]())[0].decode(
        prompts, settings.tokens, batch_size=protocol.batch_size
    )
    references = [
        target.tokenizer(example.messages[-1]["content"])["input_ids"]
        for example in data["test"]
        if example.messages
    ]
    target_figures["right_texts"] = _share_equal(plain.outputs, references)
    figures = {}
    for name in (LOOKUP, *TRAINED):
        spec = name if name == LOOKUP else str(run.stage_directory(name) / "drafter")
        drafter = open_drafter(spec, target)
        gamma = fastest_gamma(target, drafter, dev, settings.gammas, protocol)
        reporter.say(f"measuring {name} with γ = {gamma}")
        measured = evaluate(target, drafter, prompts, replace(protocol, gamma=gamma))
        summary = {} if name == LOOKUP else read_summary(run, name)
        figures[name] = {
            **measured.to_dict(),
            "same_text": _share_equal(measured.outputs, plain.outputs),
            "trained_parameters": summary.get("trained_parameters"),
            "training_seconds": summary["training"]["training_seconds"] if summary else None,
        }
    return run, target_figures, figures


def drafters_config(settings: Settings, directory: Path) -> dict[str, Any]:
    """Return the config of the run: the target's answers, and a stage for each drafter."""
    training = {
        "text": "answers",
        "loop": {"epochs": 1000, "max_steps": settings.drafter_steps, "log_every": 40},
        "optimizer": {"lr": 2e-3},
    }
    stages: list[dict[str, Any]] = [
        {"name": "answers", "kind": "generate", "max_new_tokens": settings.tokens}
        | {"batch_size": 64, "part_prompts": 512},
        *(
            training | {"name": name, "kind": "heads", "heads": heads, "remember_features": True}
            for name, heads in HEADS.items()
        ),
        training
        | {"name": SMALL, "kind": "distill", "drafter": {"layers": [0]}, "remember_teacher": True},
    ]
    data = {split: str((directory / f"{split}.jsonl").absolute()) for split in SPLITS}
    config = run_config(settings.name, settings.runs, stages, target=str(directory), data=data)
    config["target"]["dtype"] = "float32"
    return config


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return by drafter: the speed-up over plain decoding, and tokens per step."""
    values = {}
    for name, row in figures.items():
        values[f"speedup_{name}"] = row["speedup"]["value"]
        values[f"tokens_per_step_{name}"] = row["tokens_per_step"]
    return values


def drafters_table(figures: dict[str, dict[str, Any]], target_figures: dict[str, float]) -> Table:
    """Return the table of all drafters."""

    rows = [
        {
            "drafter": name,
            "trained": format_figure(row["trained_parameters"], ",d"),
            "seconds": format_figure(row["training_seconds"], ".0f"),
            "γ": str(row["gamma"]),
            "first guess right": format_figure(
                next(iter(row["acceptance_by_position"]), None), ".0%"
            ),
            "tokens/step": with_interval(row, "tokens_per_step", 2),
            "c": with_interval(row, "c", 2),
            "v": format_figure(row["v"], ".2f"),
            "speed-up": format_interval(row["speedup"], 2),
            "same text": format_figure(row["same_text"], ".0%"),
        }
        for name, row in figures.items()
    ]
    title = (
        f"a T5 with {target_figures['parameters'] / 1e6:.1f}M weights that translates "
        f"{target_figures['right_texts']:.0%} of the sources without a mistake; greedy, batch 1"
    )
    return rows_table(title, rows, left=1)


def _share_equal(texts: list[list[int]], others: list[list[int]]) -> float:
    pairs = list(zip(texts, others, strict=True))
    return sum(text == other for text, other in pairs) / len(pairs)


if __name__ == "__main__":
    run_command(main)
