"""Do repeated measurements agree? Speed-ups and calibrated trees of one drafter.

    python -m benchmarks.repeat --drafter DIRECTORY [--quick] [--json FILE] [--times N]
                                [--target T] [--dtype D] [--device D] [--gamma N]
                                [--prompts FILE] [--dev FILE] [--timed-prompts N] [--tokens N]

Each measurement runs in a separate process, like separate calls of `draftsmith evaluate` and
`draftsmith calibrate-tree`. Nothing is stored with the drafter. The exit status is 1 if two
intervals of the speed-up do not overlap or two trees differ. A drafter that does not draft in
shapes has no tree.
"""

from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import heads  # noqa: F401  (registers its drafters)
from benchmarks.common import (
    PROMPTS,
    TARGET,
    DeviceOption,
    JsonOption,
    PromptsOption,
    TargetOption,
    describe_machine,
    in_fresh_process,
    run_command,
    start_benchmark,
    write_json,
)
from decode.drafters.trained import ShapedDrafter
from decode.measure.calibrate_tree import calibrate_tree
from decode.measure.evaluation import evaluate
from decode.model.loading import load_target
from decode.opening.directory import open_drafter
from decode.settings import EvaluationProtocol
from draftsmith.cli.command import tokenized_prompts
from train.base.launcher import cores
from train.data.read import read_examples
from train.report.format_figures import format_ratio, format_share


def main(
    drafter: Annotated[str, typer.Option(help="as for `evaluate`")],
    quick: Annotated[bool, typer.Option("--quick", help="fewer prompts")] = False,
    json_file: JsonOption = None,
    times: Annotated[int, typer.Option(min=2, help="number of measurements")] = 2,
    target: TargetOption = TARGET,
    dtype: Annotated[str, typer.Option(help="dtype of both models")] = "fastest",
    device: DeviceOption = "auto",
    gamma: Annotated[int, typer.Option(min=1, help="depth of drafts that follow γ")] = 4,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    dev: Annotated[Path, typer.Option(help="prompts for the tree")] = PROMPTS / "dev.jsonl",
    timed_prompts: Annotated[int, typer.Option(min=1, help="prompts that are timed")] = 12,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each text")] = 48,
) -> None:
    """Measure speed-up and tree several times, and compare."""
    reporter = start_benchmark()
    subject: dict[str, Any] = {
        "target": target,
        "drafter": drafter,
        "dtype": dtype,
        "device": device,
        "tokens": tokens,
    }
    measurements: list[dict[str, Any]] = []
    for turn in range(times):
        reporter.say(f"measurement {turn + 1} of {times}")
        speed = in_fresh_process(
            "benchmarks.repeat:measure_speed",
            **subject,
            gamma=gamma,
            prompts=str(prompts),
            timed_prompts=min(timed_prompts, 4) if quick else timed_prompts,
        )
        reporter.say(
            f"  speed-up {format_ratio(speed['speedup'])}; others took "
            f"{format_share(speed['others_share'])}"
        )
        tree = in_fresh_process(
            "benchmarks.repeat:measure_tree", **subject, prompts=str(dev), limit=8 if quick else 32
        )
        reporter.say(f"  {tree['verdict'] if tree else 'it has no shapes, so no tree'}")
        measurements.append({**speed, "tree": tree})
    verdict = compare(measurements)
    reporter.say(f"speed-ups whose intervals overlap: {verdict['intervals_overlap']}")
    reporter.say(f"the same tree every time: {verdict['same_tree']}")
    if json_file is not None:
        process = describe_machine()
        write_json(
            json_file,
            {"benchmark": "repeat", "process": process, **verdict, "measurements": measurements},
        )
    if False in verdict.values():
        raise typer.Exit(1)


def compare(measurements: list[dict[str, Any]]) -> dict[str, bool | None]:
    """Return whether all intervals of the speed-up overlap (None without intervals), and whether
    all trees are the same (None without trees)."""
    known = all("low" in one["speedup"] for one in measurements)
    pairs = list(combinations([one["speedup"] for one in measurements], 2))
    trees = [one["tree"]["paths"] for one in measurements if one["tree"]]
    return {
        "intervals_overlap": all(a["low"] <= b["high"] and b["low"] <= a["high"] for a, b in pairs)
        if known
        else None,
        "same_tree": all(tree == trees[0] for tree in trees) if trees else None,
    }


def measure_speed(
    target: str,
    drafter: str,
    dtype: str,
    device: str,
    tokens: int,
    gamma: int,
    prompts: str,
    timed_prompts: int,
) -> dict[str, Any]:
    """Return the speed-up, c, v and the share of the processor that other processes took."""
    torch.set_num_threads(cores())
    loaded = load_target(target, dtype=dtype, device=device)
    examples, _ = read_examples(prompts)
    protocol = EvaluationProtocol(
        gamma=gamma,
        max_new_tokens=tokens,
        timed_prompts=timed_prompts,
        timed_tokens=tokens,
        generate=False,
    )
    texts = tokenized_prompts(examples, loaded, timed_prompts)
    figures = evaluate(loaded, open_drafter(drafter, loaded), texts, protocol).to_dict()
    names = ("speedup", "speedup_without_prefill", "c", "v", "tokens_per_step", "others_share")
    return {name: figures[name] for name in names}


def measure_tree(
    target: str, drafter: str, dtype: str, device: str, tokens: int, prompts: str, limit: int
) -> dict[str, Any] | None:
    """Return the tree's paths, the figures it was chosen by and the verdict; None if no tree."""
    torch.set_num_threads(cores())
    loaded = load_target(target, dtype=dtype, device=device)
    opened_drafter = open_drafter(drafter, loaded)
    if not isinstance(opened_drafter, ShapedDrafter):
        return None
    texts = tokenized_prompts(read_examples(prompts)[0], loaded, limit)
    calibration = calibrate_tree(loaded, opened_drafter, texts, max_new_tokens=tokens)
    paths = [list(path) for path in calibration.structure.paths]
    return {"paths": paths, "verdict": calibration.verdict, **calibration.to_dict()}


if __name__ == "__main__":
    run_command(main)
