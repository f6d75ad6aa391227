"""Measures drafts under grammars: extraction, lists, function calls and choices.

    python -m benchmarks.structured [--quick] [--json FILE] [--target T] [--dtype D] [--gamma N]
                                    [--prompts N] [--drafter NAME …]

Prompts and schemas are made here (`benchmarks.shared.structured_prompts`). Each drafter takes turns
with plain masked decoding in the same loop, greedily, one prompt after the other. Answers are
validated by jsonschema, or by the list of choices. The masks of every pass are timed where they are
computed and applied.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, cast

import numpy as np
import typer
from torch import Tensor

from benchmarks.common import (
    TARGET,
    JsonOption,
    TargetOption,
    describe_machine,
    format_interval,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.shared.structured_prompts import KINDS, StructuredPrompt, is_valid, prompts_of
from decode.draw import logits as logits_of_text
from decode.grammars import Grammar, Grammars
from decode.loop.decoded import Decoded
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.settings import EvaluationProtocol
from decode.text import prompt_ids
from decode.text_stream import text_of
from train.measure.evaluation import evaluate
from train.measure.intervals import ratio_of_totals
from train.measure.structured import forced_tokens

# The heads draft three tokens, and the forced run behind them follows in the same chain.
HEADS = "horizontal:first=embedded:eagle1-smollm2-135m,later=grammar,depth=3"
DRAFTERS = ["ngram", "grammar", "grammar+ngram", f"grammar+{HEADS}"]
TOKENS = 240


@dataclass
class MaskTimes:
    """seconds: of the masks of all passes. positions: those that had one."""

    seconds: float = 0.0
    positions: int = 0


@contextmanager
def timed_masks() -> Iterator[MaskTimes]:
    """Times the masks of the target's and the drafter's logits inside this context."""
    times, module = MaskTimes(), cast(Any, logits_of_text)
    constrain = module.constrain

    def timed(guides: Any, logits: Tensor, *text: Any) -> Any:
        begin = time.perf_counter()
        found = constrain(guides, logits, *text)
        times.seconds += time.perf_counter() - begin
        times.positions += logits.shape[0] * logits.shape[1]
        return found

    module.constrain = timed
    try:
        yield times
    finally:
        module.constrain = constrain


def main(
    quick: Annotated[bool, typer.Option("--quick", help="2 prompts of each kind")] = False,
    json_file: JsonOption = None,
    target: TargetOption = TARGET,
    dtype: Annotated[str, typer.Option(help="as for `evaluate`")] = "float32",
    gamma: Annotated[int, typer.Option(min=1, help="most tokens of a draft")] = 12,
    prompts: Annotated[int, typer.Option(min=1, max=8, help="prompts of each kind")] = 8,
    drafter: Annotated[list[str] | None, typer.Option(help="repeatable")] = None,
) -> None:
    """Measure drafters under grammars, beside plain masked decoding."""
    reporter = start_benchmark()
    asked = prompts_of(2 if quick else prompts)
    loaded = load_target(target, dtype=dtype, device="cpu")
    made = Grammars.of(loaded)
    grammars = [_grammar(made, one) for one in asked]
    opened = {name: open_drafter(name, loaded) for name in drafter or DRAFTERS}
    ids = [prompt_ids([{"role": "user", "content": one.prompt}], loaded.tokenizer) for one in asked]
    rows = []
    for name, part in opened.items():
        reporter.say(f"  {name}")
        rows += measure(loaded, name, part, asked, ids, grammars, gamma)
    reporter.table(rows_table("under grammars", [_cells(row) for row in rows], left=2))
    if json_file is not None:
        ratios = {
            f"{name} {row['drafter']}, {row['kind']}": row[name]["value"]
            for row in rows
            for name in ("speedup", "tokens_per_step")
        }
        figures = {"ratios": ratios, "rows": rows, "process": describe_machine()}
        write_json(json_file, {"benchmark": "structured", **figures})


def _grammar(grammars: Grammars, asked: StructuredPrompt) -> Grammar:
    if asked.choices:
        return grammars.choice(asked.choices)
    assert asked.schema is not None
    return grammars.json_schema(asked.schema)


def measure(
    target: Target,
    name: str,
    drafter: Any,
    asked: list[StructuredPrompt],
    ids: list[list[int]],
    grammars: list[Grammar],
    gamma: int,
) -> list[dict[str, Any]]:
    """A row for each kind of prompts, and one for all."""
    protocol = EvaluationProtocol(
        gamma=gamma,
        max_new_tokens=TOKENS,
        batch_size=1,
        timed_prompts=len(ids),
        timed_tokens=TOKENS,
        generate=False,
    )
    with timed_masks() as masks:
        found = evaluate(target, drafter, ids, protocol, grammars=grammars)
    passes = (found.steps, *(run.steps for run in (*found.plain, *found.drafted)))
    steps = sum(map(len, passes))
    costs = {
        "mask_ms_per_pass": 1000 * masks.seconds / steps,
        "mask_ms_per_position": 1000 * masks.seconds / masks.positions,
    }
    rows = []
    for kind in (*KINDS, "all"):
        which = [i for i, one in enumerate(asked) if kind in (one.kind, "all")]
        plain, drafted = ([runs[i] for i in which] for runs in (found.plain, found.drafted))
        row = _figures(target, plain, drafted, [asked[i] for i in which])
        texts = [run.outputs[0] for run in drafted]
        forced = sum(forced_tokens(grammars[i], text) for i, text in zip(which, texts, strict=True))
        row["forced_share"] = forced / sum(map(len, texts))
        row["mask_share"] = costs["mask_ms_per_pass"] / row["ms_per_step"]
        rows.append({"drafter": name, "kind": kind, **row, **costs, "others_share": found.others})
    return rows


def _figures(
    target: Target, plain: list[Decoded], drafted: list[Decoded], asked: list[StructuredPrompt]
) -> dict[str, Any]:
    """Of some prompts, each decoded alone."""

    def array(values: Iterator[float]) -> np.ndarray:
        return np.array(list(values), dtype=np.float64)

    lengths = [array(len(run.outputs[0]) for run in runs) for runs in (plain, drafted)]
    seconds, stepping = (
        [array(getattr(run.timing, name) for run in runs) for runs in (plain, drafted)]
        for name in ("total", "stepping")
    )
    steps = array(run.counts.steps for run in drafted)
    pairs = zip(plain, drafted, strict=True)
    answers = [text_of(target.tokenizer, run.outputs[0]) for run in drafted]
    valid = [is_valid(one, text) for one, text in zip(asked, answers, strict=True)]
    return {
        "prompts": len(asked),
        "tokens": int(lengths[1].sum()),
        "tokens_per_step": ratio_of_totals(array(run.counts.emitted for run in drafted), steps),
        "speedup": ratio_of_totals(*seconds, per=(lengths[0], lengths[1])),
        "speedup_without_prefill": ratio_of_totals(*stepping, per=(lengths[0] - 1, lengths[1] - 1)),
        "ms_per_token": [1000 * x.sum() / y.sum() for x, y in zip(seconds, lengths, strict=True)],
        "ms_per_step": 1000 * stepping[1].sum() / steps.sum(),
        "valid": sum(valid) / len(valid),
        "same_text": float(np.mean([one.outputs == other.outputs for one, other in pairs])),
    }


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "drafter": row["drafter"],
        "prompts": row["kind"],
        "tokens/step": format_interval(row["tokens_per_step"], 2),
        "forced": f"{row['forced_share']:.0%}",
        "valid": f"{row['valid']:.0%}",
        "same text": f"{row['same_text']:.0%}",
        "ms per token": _both(row["ms_per_token"], "{:.1f}"),
        "speed-up": format_interval(row["speedup"], 2),
        "without prefill": format_interval(row["speedup_without_prefill"], 2),
        "masks, ms per pass": f"{row['mask_ms_per_pass']:.2f}",
        "per node": f"{row['mask_ms_per_position']:.2f}",
        "of a step": f"{row['mask_share']:.1%}",
    }


def _both(values: list[float], form: str) -> str:
    """Two figures: without and with drafts."""
    return " → ".join(map(form.format, values))


if __name__ == "__main__":
    run_command(main)
