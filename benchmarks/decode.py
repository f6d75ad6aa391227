"""Compares our decode loop with others: plain, with a small drafter, with prompt lookup.

    python -m benchmarks.decode [--quick] [--json FILE] [--target T] [--drafter DIR] [--heads D]
                                [--dtype D] [--device D] [--gamma N] [--prompts FILE] [--runs DIR]
                                [--context N] [--notes FILE]

All contestants but llama.cpp run in one process with the same two modules. All have the same
prompts through the chat template and the same number of threads, and in this process the same
attention (sdpa). They take turns prompt by prompt, in a rotating order, after a warm-up that
does not count. No contestant stops at an end of text, so all emit the same number of tokens. The
prompts are those whose greedy answers are at least that long. Sampled means temperature 1 without
filters. Every prompt lookup tries n-grams of 3, 2 and 1 tokens, but llama.cpp's only those of 3.

llama.cpp takes part where its server is installed (make engine-llama): on the target's weights as
they are, in 8 and in 4 bits, with the same drafter, and with its own lookup.

If a contestant refuses a setting, fails in it or is not installed, the output gives the reason, and
it has no ratio there. Ratios are of time, theirs over ours: above 1 we are faster. A name without
an ending means batch 1, greedy, in the requested dtype. Intervals are 95% intervals over
prompts (over batches at batch 8). The default drafter is the target's first layers, trained here in
a run that is kept.

At the end comes the cost of a step beside its functions in C++. What a pass costs beside the least
that this machine allows is in `draftsmith doctor`.

--context N puts N tokens of notes before each prompt, which the answer does not need, and compares
only greedy decoding at batch 1. Then no time has the pass over the prompt: each contestant also
answers with one token, and the time of that is subtracted.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.common import (
    PROMPTS,
    TARGET,
    DeviceOption,
    JsonOption,
    PromptsOption,
    RunsOption,
    TargetOption,
    describe_machine,
    end_benchmark,
    execute_run,
    format_figure,
    ratio_table,
    rows_table,
    run_command,
    run_config,
    start_benchmark,
    write_json,
)
from benchmarks.shared.decode_contestants import NAMES, Models
from benchmarks.shared.decode_measurements import (
    OURS,
    Contest,
    Setting,
    hold_contest,
    long_answers,
    step_costs,
)
from benchmarks.shared.notes import NotesOption, behind_notes, notes_of
from decode.model.loading import Target, load_target
from draftsmith.cli.command import table
from train.base.console import Reporter
from train.data.read import read_examples

# Ratio name: (contestant whose time is the numerator, contestant whose time is the denominator).
RATIOS = {
    "plain_vs_generate": ("generate", "plain"),
    "plain_vs_generate_packed": ("generate_packed", "plain"),
    "speculative_vs_plain": ("plain", "speculative"),
    "speculative_vs_generate": ("generate", "speculative"),
    "speculative_vs_assisted": ("assisted", "speculative"),
    "speculative_vs_assisted_defaults": ("assisted_defaults", "speculative"),
    "lookup_vs_plain": ("plain", "lookup"),
    "lookup_vs_generate": ("generate", "lookup"),
    "lookup_vs_transformers": ("transformers_lookup", "lookup"),
    "heads_vs_plain": ("plain", "heads"),
    "heads_vs_generate": ("generate", "heads"),
    "plain_vs_llama": ("llama", "plain"),
    "plain_vs_llama_q8": ("llama_q8", "plain"),
    "lookup_vs_llama_lookup": ("llama_lookup", "lookup"),
    "heads_vs_llama": ("llama", "heads"),
    "heads_vs_llama_q8": ("llama_q8", "heads"),
    "heads_vs_llama_q4": ("llama_q4", "heads"),
    "heads_vs_llama_drafter": ("llama_drafter", "heads"),
    "heads_vs_llama_lookup": ("llama_lookup", "heads"),
}
HEADS = "ngram+embedded:eagle1-smollm2-135m:weights=int8"
# The layers of the default drafter.
LAYERS = 4


QUICK = (
    Setting(8, 64),
    Setting(3, 64, sampled=True),
    Setting(1, 32, batch=8),
    Setting(1, 32, batch=8, sampled=True),
)
FULL = (
    Setting(24, 128),
    Setting(12, 128, sampled=True),
    Setting(3, 128, batch=8),
    Setting(3, 128, batch=8, sampled=True),
)
# Behind notes, by --quick.
LONG = {True: Setting(3, 64), False: Setting(12, 128)}
# In float32 rounding does not matter, so all greedy texts must be the same.
EXACT = {True: Setting(2, 24, dtype="float32"), False: Setting(8, 64, dtype="float32")}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few minutes on 2 cores")] = False,
    json_file: JsonOption = None,
    target: TargetOption = TARGET,
    drafter: Annotated[str | None, typer.Option(help="default: train one")] = None,
    dtype: Annotated[str, typer.Option(help="dtype of both models")] = "fastest",
    device: DeviceOption = "auto",
    heads: Annotated[str | None, typer.Option(help="a drafter of our loop only")] = None,
    gamma: Annotated[int, typer.Option(min=1, help="of each loop that has a γ")] = 4,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    runs: RunsOption = Path("runs"),
    context: Annotated[int, typer.Option(min=0, help="tokens of notes before a prompt")] = 0,
    notes: NotesOption = PROMPTS / "train.jsonl",
) -> None:
    """Run all settings and print their tables."""
    reporter = start_benchmark()
    loaded = load_target(target, dtype=dtype, device=device)
    if drafter is None:
        drafter = str(train_drafter(loaded, quick=quick, runs=runs, reporter=reporter))
    heads = (HEADS if target == TARGET else "") if heads is None else heads
    models = Models.load(loaded, drafter, heads)
    examples, _ = read_examples(str(prompts))
    settings = list(QUICK if quick else FULL)
    if context:
        settings = [replace(LONG[quick], context=context)]
    tokens = max(setting.tokens for setting in settings)
    read = notes_of(loaded, notes) if context else []
    texts = long_answers(
        loaded,
        [behind_notes(loaded, row, read, context, tokens) for row in examples],
        count=max(setting.jobs * setting.batch for setting in settings),
        tokens=tokens,
    )
    contests: list[Contest] = []

    def report(contest: Contest) -> None:
        # Print immediately, so an interrupted run has shown its results so far.
        contests.append(contest)
        reporter.table(contest_table(contest, gamma))
        for name, reason in contest.unable.items():
            reporter.say(f"  not available: {NAMES[name]}: {reason}")

    with models.closing:
        for setting in settings:
            report(hold_contest(models, setting, texts, gamma, reporter))
    if loaded.dtype != torch.float32 and not context:
        exact = Models.load(load_target(target, dtype="float32", device=device), drafter, heads)
        with exact.closing:
            report(hold_contest(exact, EXACT[quick], texts, gamma, reporter))
        del exact
    models_of_all = {"target": target, "drafter": drafter, "dtype": dtype, "device": device}
    costs = step_costs(models, texts[0], gamma)

    time_ratios = ratios(contests)
    reporter.table(ratio_table("ratios of time, theirs over ours", time_ratios))
    reporter.table(cost_table(costs))
    machine = describe_machine()
    reporter.say(f"machine: {machine['machine']}; {machine['versions']}")
    if json_file is not None:
        figures = {
            "benchmark": "decode",
            "quick": quick,
            "settings": {**models_of_all, "heads": heads, "gamma": gamma, "prompts": str(prompts)}
            | {"context": context, "notes": str(notes)},
            "process": machine,
            "ratios": {name: ratio["value"] for name, ratio in time_ratios.items()},
            "intervals": time_ratios,
            "contests": [
                {
                    **asdict(contest.setting),
                    "contestants": {name: contest.figures(name) for name in contest.seconds},
                    "unable": contest.unable,
                }
                for contest in contests
            ],
            "step_costs": costs,
        }
        write_json(json_file, figures)
    end_benchmark({NAMES[name]: how for one in contests for name, how in one.broken.items()})


def ratios(contests: Sequence[Contest]) -> dict[str, dict[str, float]]:
    """Return all RATIOS with value, low and high, and for each of our loops its total time over the
    time of its forwards (1 + overhead / forwards)."""
    values: dict[str, dict[str, float]] = {}
    for contest in contests:
        for name, (theirs, ours) in RATIOS.items():
            ratio = contest.ratio(theirs, ours)
            if ratio is not None:
                values[name + contest.setting.ending] = ratio
        for name in filter(contest.passes.__contains__, OURS):
            passes = contest.passes[name]
            forwards = sum(passes.draft_s) + sum(passes.verify_s)
            value = 1 + sum(passes.overhead_s) / forwards
            values[f"{name}_total_vs_forwards{contest.setting.ending}"] = {"value": value}
    return values


def contest_table(contest: Contest, gamma: int) -> Table:
    """Return a table of the contestants' figures. Times are medians over passes."""
    setting = contest.setting
    rows = []
    for name in contest.seconds:
        figures = contest.figures(name)
        cells = {
            "contestant": NAMES[name],
            "tokens/s": f"{figures['tokens_per_second']:.1f}",
            "tokens/step": format_figure(figures["tokens_per_step"], ".2f"),
            "accepted": format_figure(figures["acceptance_rate"], ".2f"),
            "draft ms": format_figure(figures["draft_ms"], ".2f"),
            "verify ms": format_figure(figures["verify_ms"], ".2f"),
            "overhead ms": format_figure(figures["overhead_ms"], ".2f"),
            "same text": format_figure(figures["equal_to_generate"], ".0%"),
            "up to rounding": format_figure(figures["equal_within_rounding"], ".0%"),
        }
        rows.append(cells)
    return rows_table(
        f"{contest.title}, γ = {gamma}: {setting.jobs * setting.batch} prompts, "
        f"{setting.tokens} tokens each",
        rows,
    )


def cost_table(costs: dict[str, dict[str, float]]) -> Table:
    rows = [
        (name, f"{cost['calls']:.0f}", f"{cost['ms']:.2f}", f"{cost['outside_ms']:.2f}")
        for name, cost in costs.items()
    ]
    columns = ["step", "calls", "ms", "ms outside of C++"]
    return table("a step of our loop, greedy", columns, rows)


def train_drafter(target: Target, *, quick: bool, runs: Path, reporter: Reporter) -> Path:
    """Return the directory of a small LM with the target's first layers and full vocabulary.

    It is trained on the target's answers to the shipped prompts in a separate run. The run is kept,
    so a second call reuses it. Other decoding loops do not support a reduced draft vocabulary.
    """
    layers = first_layers(target.model)
    config = drafter_config(target.name, layers, target.device.type, quick, runs)
    run, _ = execute_run(config, reporter)
    return run.stage_directory("distill") / "drafter"


def first_layers(model: PreTrainedModel) -> list[int]:
    """Return the numbers of the first LAYERS layers, but at most half of the model's layers."""
    return list(range(max(1, min(LAYERS, model.config.get_text_config().num_hidden_layers // 2))))


def drafter_config(
    target: str, layers: list[int], device: str, quick: bool, runs: Path
) -> dict[str, Any]:
    """Return the config of one run: the target's answers, and distillation on them."""
    answers: dict[str, Any] = {"kind": "generate", "batch_size": 32, "part_prompts": 64}
    if quick:
        texts = [answers | {"name": "answers", "prompts": 160, "max_new_tokens": 64}]
    else:
        texts = [
            answers | {"name": "answers", "max_new_tokens": 96},
            answers
            | {"name": "sampled", "max_new_tokens": 96}
            | {"sampling": {"temperature": 1.0}, "samples": 2},
        ]
    distill = {
        "name": "distill",
        "kind": "distill",
        "text": [text["name"] for text in texts],
        "drafter": {"layers": layers},
        "losses": {"forward_kl": 1.0},
        "train_embeddings": False,
        "loop": {"epochs": 100, "max_steps": 50 if quick else 300, "tokens_per_batch": 1024},
        "optimizer": {"lr": 2e-3},
    }
    name = re.sub(r"[^A-Za-z0-9]+", "-", target).strip("-")
    name = f"decode-{name}{'-quick' if quick else ''}"
    return run_config(name, runs, [*texts, distill], target=target, device=device)


if __name__ == "__main__":
    run_command(main)
