"""Profiles the time of our loop's steps."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.decode_contestants import Models
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop import Decoder

OPS = 8


def profile_loop(
    models: Models, prompt: Sequence[int], tokens: int, gamma: int
) -> dict[str, dict[str, Any]]:
    """Return milliseconds per step, plain and with the drafter, for the forwards, the rule and the
    bookkeeping. A second run under torch's profiler gives the slowest operations.

    operations: (name, milliseconds per step, calls per step), ordered by self time. python_ms: the
    time of a step in the profiled run outside all operations, including the profiler itself.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, drafter in (
        ("plain", DRAFTERS["none"]()),
        ("speculative", SmallLMDrafter(models.assistant)),
    ):
        decoder = Decoder(models.target.model, drafter, gamma=gamma)
        decoder.decode([prompt], 8)
        spent = [0.0]
        verify = decoder.rule.verify

        def timed(*args: Any, verify: Any = verify, spent: list[float] = spent) -> Any:
            begin = time.perf_counter()
            verdict = verify(*args)
            if models.target.device.type == "cuda":
                torch.cuda.synchronize(models.target.device)
            spent[0] += time.perf_counter() - begin
            return verdict

        vars(decoder.rule)["verify"] = timed
        timing = decoder.decode([prompt], tokens).timing
        del vars(decoder.rule)["verify"]
        a_step = 1000 / timing.steps
        found[name] = {
            "draft_ms": timing.draft * a_step,
            "verify_ms": timing.verify * a_step,
            "rule_ms": spent[0] * a_step,
            "bookkeeping_ms": (timing.overhead - spent[0]) * a_step,
            **_operations(decoder, prompt, tokens),
        }
    return found


def _operations(decoder: Decoder, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = decoder.lm.device.type == "cuda"
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        timing = decoder.decode([prompt], tokens).timing

    def own(event: Any) -> float:  # microseconds
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total)

    events = sorted(profiler.key_averages(), key=own, reverse=True)
    a_step = 1e-3 / timing.steps
    return {
        "python_ms": 1000 * timing.total / timing.steps - sum(map(own, events)) * a_step,
        "operations": [
            (event.key, own(event) * a_step, event.count / timing.steps) for event in events[:OPS]
        ],
    }


def profile_table(found: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title="a step of our loop, greedy, batch 1 (operations: under the profiler)")
    shown.add_column("what")
    for name in found:
        shown.add_column(f"{name}: ms", justify="right")
        shown.add_column("calls", justify="right")
    for part in ("draft", "verify", "rule", "bookkeeping", "python"):
        cells = [(f"{row[f'{part}_ms']:.2f}", "") for row in found.values()]
        shown.add_row(part, *(cell for pair in cells for cell in pair))
    listed = {op: None for row in found.values() for op, _, _ in row["operations"]}
    for op in listed:
        cells = []
        for row in found.values():
            known = {name: (ms, calls) for name, ms, calls in row["operations"]}
            ms, calls = known.get(op, (None, None))
            cells.append(("–", "–") if ms is None else (f"{ms:.2f}", f"{calls:.0f}"))
        shown.add_row(f"  {op}", *(cell for pair in cells for cell in pair))
    return shown
