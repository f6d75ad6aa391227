"""Compares our decode loop with others: plain, with a small drafter, with prompt lookup.

    python -m benchmarks.decode [--quick] [--json FILE] [--plots DIR] [--target T] [--drafter DIR]
                                [--dtype D] [--device D] [--gamma N] [--prompts FILE] [--runs DIR]
                                [--profile]

All contestants run in one process with the same two modules, the same prompts through the chat
template, the same number of threads and the same attention (sdpa). They take turns prompt by
prompt, in a rotating order, after a warm-up that does not count. No contestant stops at an end of
text, so all emit the same number of tokens. The prompts are those whose greedy answers are at least
that long. Sampled means temperature 1 without filters. Every prompt lookup tries n-grams of 3, 2
and 1 tokens.

If a contestant refuses a setting, fails in it or is not installed, the output gives the reason, and
it has no ratio there. Ratios are of time, theirs over ours: above 1 we are faster. A name without
an ending means batch 1, greedy, in the requested dtype. Intervals are 95% bootstrap intervals over
prompts (over batches at batch 8). The default drafter is the target's first layers, trained here in
a run that is kept (see `benchmarks.decode_drafter`).
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.common import describe_machine, in_fresh_process, write_json
from benchmarks.decode_contest import (
    OURS,
    PACKAGES,
    Contest,
    Setting,
    finish,
    hold,
    long_answers,
)
from benchmarks.decode_contestants import NAMES, Models, makers
from benchmarks.decode_drafter import PROMPTS, train_drafter
from benchmarks.decode_profile import profile_loop, profile_table
from benchmarks.decode_tables import cold_table, contest_table, plot, ratio_table
from decode.target.loading import load_target
from train.cli.command import cores, quieten, shows_errors
from train.console import Reporter
from train.data.chat import prompt_tokens
from train.data.read import read_examples

# Ratio name: (contestant whose time is the numerator, contestant whose time is the denominator).
RATIOS = {
    "plain_vs_generate": ("generate", "plain"),
    "plain_vs_generate_packed": ("generate_packed", "plain"),
    "speculative_vs_plain": ("plain", "speculative"),
    "speculative_vs_generate": ("generate", "speculative"),
    "speculative_vs_assisted": ("assisted", "speculative"),
    "speculative_vs_assisted_defaults": ("assisted_defaults", "speculative"),
    "speculative_vs_flashspec": ("flashspec", "speculative"),
    "speculative_vs_economize": ("economize", "speculative"),
    "lookup_vs_plain": ("plain", "lookup"),
    "lookup_vs_generate": ("generate", "lookup"),
    "lookup_vs_transformers": ("transformers_lookup", "lookup"),
    "lookup_vs_flashspec": ("flashspec_lookup", "lookup"),
    "lookup_vs_economize": ("economize_lookup", "lookup"),
}
COLD = ("plain", "generate", "speculative", "assisted", "economize", "flashspec")

QUICK = (
    Setting(5, 64),
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
# In float32 rounding does not matter, so all greedy texts must be the same.
EXACT = {True: Setting(2, 24, dtype="float32"), False: Setting(8, 64, dtype="float32")}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few minutes on 2 cores")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
    plots: Annotated[Path | None, typer.Option(help="write decode.png here")] = None,
    target: Annotated[str, typer.Option(help="as elsewhere")] = "embedded:smollm2-135m",
    drafter: Annotated[str | None, typer.Option(help="a directory; default: one is made")] = None,
    dtype: Annotated[str, typer.Option(help="of both models")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N")] = "auto",
    gamma: Annotated[int, typer.Option(min=1, help="of every loop that takes one")] = 4,
    prompts: Annotated[Path, typer.Option(help="held-out prompts")] = PROMPTS / "test.jsonl",
    runs: Annotated[Path, typer.Option(help="where the trained drafter is kept")] = Path("runs"),
    profile: Annotated[bool, typer.Option("--profile", help="where our steps' time goes")] = False,
) -> None:
    """Run all settings and print their tables."""
    quieten()
    torch.set_num_threads(cores())
    reporter = Reporter()
    loaded = load_target(target, dtype=dtype, device=device)
    if drafter is None:
        drafter = str(train_drafter(loaded, quick=quick, runs=runs, reporter=reporter))
    models = Models.load(loaded, drafter)
    examples, _ = read_examples(str(prompts))
    settings = list(QUICK if quick else FULL)
    texts = long_answers(
        loaded,
        [prompt_tokens(example, loaded.tokenizer) for example in examples],
        count=max(setting.jobs * setting.batch for setting in settings),
        tokens=max(setting.tokens for setting in settings),
    )
    contests: list[Contest] = []

    def show(contest: Contest) -> None:
        # Print immediately, so an interrupted run has shown its results so far.
        contests.append(contest)
        reporter.table(contest_table(contest, gamma))
        for name, reason in contest.unable.items():
            reporter.say(f"  not there: {NAMES[name]}: {reason}")

    for setting in settings:
        show(hold(models, setting, texts, gamma, reporter))
    if loaded.dtype != torch.float32:
        exact = Models.load(load_target(target, dtype="float32", device=device), drafter)
        show(hold(exact, EXACT[quick], texts, gamma, reporter))
        del exact
    where = {"target": target, "drafter": drafter, "dtype": dtype, "device": device}
    cold = cold_starts(COLD[:3] if quick else COLD, where, texts[0], gamma, reporter)
    profiled = profile_loop(models, texts[0], 64, gamma) if profile else None

    found = ratios(contests)
    reporter.table(ratio_table(found))
    reporter.table(cold_table(cold))
    if profiled:
        reporter.table(profile_table(profiled))
    machine = describe_machine()
    for package in PACKAGES:
        machine["versions"][package] = _version(package)
    reporter.say(f"machine: {machine['machine']}; {machine['versions']}")
    if plots is not None:
        plot(contests, plots / "decode.png")
    if json_file is not None:
        figures = {
            "benchmark": "decode",
            "quick": quick,
            "settings": {**where, "gamma": gamma, "prompts": str(prompts)},
            "process": machine,
            "ratios": {name: value["value"] for name, value in found.items()},
            "intervals": found,
            "contests": [
                {
                    **asdict(contest.setting),
                    "contestants": {name: contest.figures(name) for name in contest.seconds},
                    "unable": contest.unable,
                }
                for contest in contests
            ],
            "cold_start_seconds": cold,
            "profile": profiled,
        }
        write_json(json_file, figures)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def ratios(contests: Sequence[Contest]) -> dict[str, dict[str, float]]:
    """Return all RATIOS with value, low and high, and for each of our loops its total time over the
    time of its forwards (1 + overhead / forwards)."""
    found = {}
    for contest in contests:
        for name, (theirs, ours) in RATIOS.items():
            ratio = contest.ratio(theirs, ours)
            if ratio is not None:
                found[name + contest.setting.ending] = ratio
        for name in OURS:
            passes = contest.passes[name]
            forwards = sum(passes.draft_s) + sum(passes.verify_s)
            value = 1 + sum(passes.overhead_s) / forwards
            found[f"{name}_total_vs_forwards{contest.setting.ending}"] = {"value": value}
    return found


def cold_starts(
    names: Sequence[str],
    where: dict[str, str],
    prompt: Sequence[int],
    gamma: int,
    reporter: Reporter,
) -> dict[str, dict[str, float]]:
    """Return the seconds to the first token, each contestant in a new process (`first_token`)."""
    found = {}
    for name in names:
        reporter.say(f"cold start: {NAMES[name]}")
        try:
            found[name] = in_fresh_process(
                "benchmarks.decode:first_token",
                name=name,
                prompt=list(prompt),
                gamma=gamma,
                **where,
            )
        except RuntimeError as error:
            reporter.say(f"  not there: {str(error).splitlines()[-1]}")
    return found


def first_token(
    name: str, prompt: list[int], gamma: int, target: str, drafter: str, dtype: str, device: str
) -> dict[str, float]:
    """Return three times in seconds: from loaded models to a ready loop (ours: with packed
    weights), the first call for one token, and a second such call."""
    torch.set_num_threads(cores())
    models = Models.load(load_target(target, dtype=dtype, device=device), drafter)
    begin = time.perf_counter()
    run = makers(models, gamma=gamma, sampled=False)[name]()
    finish(models.target)
    marks = [begin, time.perf_counter()]
    for _ in range(2):
        run([prompt], 1, 0)
        finish(models.target)
        marks.append(time.perf_counter())
    ready, first, second = (b - a for a, b in pairwise(marks))
    return {"ready": ready, "first": first, "second": second}


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_show_locals=False)
    app.command()(shows_errors(main))
    app()
