"""Measures, on one device, what a GPU should be measured for, in a few minutes.

    python -m benchmarks.device [--quick] [--json FILE] [--device auto|cpu|cuda]

Needs no download: the models are llamas with random weights in bfloat16. On CUDA the target has the
shape of a 1B llama and the drafter 0.1B parameters. With --quick, and on a CPU, both are much
smaller. The output states all shapes.

Random models agree on nothing, so both are given a script (`benchmarks.shared.device_parts`): they
compute as usual and then say the text that the script names. The drafter's script is right in a
fixed share of the positions. So every loop emits the same tokens, accepts the same drafts, and
differs only in time. In the other parts only the time of passes matters, not what they predict.

A part that fails (out of memory, TRL not installed) is reported in one line, and the others go on.
Ratios of times are theirs over ours; of throughput and memory, ours over theirs.
"""

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.common import (
    MIB,
    DeviceOption,
    JsonOption,
    describe_machine,
    ratio_table,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.decode import contest_table
from benchmarks.shared.decode_measurements import timed
from benchmarks.shared.device_parts import (
    ANSWERS,
    BATCH,
    FULL,
    SMALL,
    Bench,
    draft_costs,
    hold_decode_contest,
    mixed_lengths,
    pass_times,
    text_speeds,
    train_here,
)
from decode.base.errors import UserError
from decode.costs import OtherProcesses, busy
from decode.model.loading import resolve_device
from draftsmith.cli.examination import ItemFigures
from train.loop.meters.peak_memory import peak_memory, restart_peak
from train.measure.machine import describe_gpus

Measure = Callable[[Bench], dict[str, Any]]
PARTS: dict[str, Measure] = {
    "decode": hold_decode_contest,
    "decode_batch": partial(hold_decode_contest, batch=BATCH),
    "texts": text_speeds,
    "passes": pass_times,
    "mixed_lengths": mixed_lengths,
    "draft_costs": draft_costs,
}
TRAININGS: dict[str, Measure] = {
    f"train_{name}": partial(train_here, contestant=name) for name in ("ours", "trl", "eagle1")
}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="small models, fewer repeats")] = False,
    json_file: JsonOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Run all parts and print their tables."""
    reporter = start_benchmark()
    place = resolve_device(device)
    if place.index:
        raise UserError(
            f"device is {device}, but trainings run in processes of their own, on the first GPU; "
            "choose another with CUDA_VISIBLE_DEVICES"
        )
    sizes = FULL if place.type == "cuda" and not quick else SMALL
    bench = Bench(place, sizes, reporter)
    machine = describe_machine(["trl"]) | {"gpus": describe_gpus()}
    where = machine["gpus"] if place.type == "cuda" else machine["machine"]["processor"]
    reporter.say(f"device: {place}, {where}; {machine['versions']}")
    reporter.say(
        f"{torch.get_num_threads()} threads, {machine['machine']['memory_gib']} GiB of memory"
    )
    for name, shape in (("target", sizes.target), ("drafter", sizes.drafter)):
        reporter.say(f"{name}: llama, bfloat16, random weights, {shape}")
    findings, others = ItemFigures(), OtherProcesses()
    _measure(PARTS, bench, findings)
    share = others.share()  # the trainings are other processes too
    _measure(TRAININGS, bench, findings)
    values = ratios(findings.figures)
    for table in tables(bench, findings.figures, values):
        reporter.table(table)
    for name, reason in findings.errors.items():
        reporter.say(f"{name} failed: {reason}")
    if busy(share):
        reporter.say(f"other programs used {share:.0%} of the processor, so times are too long")
    if json_file is not None:
        figures = {
            "benchmark": "device",
            "quick": quick,
            "device": str(place),
            "process": machine,
            "sizes": sizes.to_dict(),
            "ratios": values,
            "results": {name: _plain(part) for name, part in findings.figures.items()},
            "errors": findings.errors,
            "others_share": share,
        }
        write_json(json_file, figures)


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return all ratios of the parts that succeeded, flat by name."""
    values: dict[str, float] = {}
    for name in PARTS:
        values |= figures.get(name, {}).get("ratios", {})
    ours, trl = (figures.get(f"train_{name}") for name in ("ours", "trl"))
    if ours and trl:
        for name, key in (
            ("throughput_vs_trl", "predicted_tokens_per_second"),
            ("peak_memory_vs_trl", "peak_bytes"),
            ("training_memory_vs_trl", "training_bytes"),
        ):
            values[name] = ours[key] / trl[key]
    return values


def tables(
    bench: Bench, figures: dict[str, dict[str, Any]], values: dict[str, float]
) -> list[Table]:
    """Return the tables of the parts that succeeded."""
    contests = [part["contest"] for part in figures.values() if "contest" in part]
    result = [contest_table(contest, bench.sizes.gamma) for contest in contests]
    if texts := figures.get("texts"):
        speeds = texts["tokens_per_second"].items()
        rows = [{"texts": what, "tokens/s": f"{speed:,.0f}"} for what, speed in speeds]
        result.append(rows_table(f"texts for a training, {ANSWERS} at a time", rows))
    if passes := figures.get("passes"):
        rows = [
            {"tokens before": str(context)}
            | {f"{fed} fed, ms": f"{1e3 * seconds[fed]:.2f}" for fed in seconds}
            for context, seconds in passes["seconds"].items()
        ]
        result.append(rows_table("a pass of the target", rows))
    if costs := figures.get("draft_costs"):
        rows = [
            {
                "drafter": name,
                "plain step, ms": f"{1e3 * measured.step_s:.2f}",
                "fixed": f"{measured.fixed:.3f}",
                "per depth": f"{measured.per_depth:.3f}",
            }
            for name, measured in costs["costs"].items()
        ]
        result.append(rows_table("cost of a draft, in plain steps", rows))
    rows = [
        {
            "training": name.removeprefix("train_"),
            "predicted tokens/s": f"{part['predicted_tokens_per_second']:,.0f}",
            "text tokens/s": f"{part['text_tokens_per_second']:,.0f}",
            "padding": f"{part['padding_share']:.0%}",
            "peak MiB": f"{part['peak_bytes'] / MIB:,.0f}",
            "MiB above loaded": f"{part['training_bytes'] / MIB:,.0f}",
        }
        for name, part in figures.items()
        if name.startswith("train_")
    ]
    if rows:
        result.append(rows_table("training (ours, trl: the drafter; eagle1: a layer)", rows))
    peaks = [
        {
            "part": name,
            "seconds": f"{part['part_seconds']:.0f}",
            "peak MiB": f"{part['peak_bytes'] / MIB:,.0f}",
        }
        for name, part in figures.items()
    ]
    result.append(rows_table("time and peak memory of each part", peaks))
    result.append(ratio_table("ratios", values))
    return result


def _measure(parts: Mapping[str, Measure], bench: Bench, findings: ItemFigures) -> None:
    """Add the figures of these parts to `findings`, or why they failed."""
    for name, part in parts.items():
        bench.reporter.say(f"{name} …")
        findings.add(name, partial(_with_peak, part, bench))
        # An error can keep tensors alive, and a cached block is of no use to another process.
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _with_peak(part: Measure, bench: Bench) -> dict[str, Any]:
    """The figures of a part, with its time, and its peak memory unless it measured that in a fresh
    process."""
    kind = bench.device.type
    restart_peak(kind)
    seconds, figures = timed(bench.device, partial(part, bench))
    return {"peak_bytes": peak_memory(kind), "part_seconds": seconds} | figures


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    """The figures of a part as JSON values."""
    figures = dict(part)
    if contest := figures.pop("contest", None):
        figures["contestants"] = {name: contest.figures(name) for name in contest.seconds}
        figures["unable"] = contest.unable
    if costs := figures.pop("costs", None):
        figures["costs"] = {name: measured.to_dict() for name, measured in costs.items()}
    return figures


if __name__ == "__main__":
    run_command(main)
