"""Whether drafts ever cost: `worth` beside plain decoding and fixed drafts.

The cells are kinds of text × tokens before the question × temperatures × batches.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.common import PROMPTS, rows_table
from benchmarks.shared.notes import behind_notes, notes_of
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoded, Decoder
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.settings import DecodeSettings
from train.base.console import Reporter
from train.data.read import Example, read_examples, spread

# By --quick.
BATCHES = {True: (1, 8), False: (1, 2, 4, 8, 16)}
BEHIND = {True: (0, 1000), False: (0, 500, 2000, 7000)}
ROUNDS, TOKENS = {True: 2, False: 4}, {True: 32, False: 96}
FIXED = (1, 4)  # the depths of fixed drafts
KINDS = ("chat", "code", "noise")
NOISE = 24  # random tokens of a question that is none
PREFIXES = 2 << 30  # bytes; the notes before the questions are read once


@dataclass(frozen=True)
class Cell:
    """Some texts that are decoded together, behind so many tokens of notes. kind: chat: all shipped
    prompts that no drafter learns from. code: those that ask for code. noise: random tokens."""

    kind: str
    behind: int
    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.behind} before, T = {self.temperature:g}, batch {self.batch}"


def prompts_of(target: Target, cell: Cell, count: int, tokens: int) -> list[list[int]]:
    """So many prompts of a cell, which leave room for `tokens` tokens."""
    notes = notes_of(target, PROMPTS / "train.jsonl") if cell.behind else []
    if cell.kind == "noise":
        numbers = np.random.default_rng(0).integers(3, target.vocab_size, (count, NOISE))
        texts = [target.tokenizer.decode(row) for row in numbers]
        each = [({"role": "user", "content": text},) for text in texts]
        chosen = [Example("", messages, None, None, "noise", "random") for messages in each]
    else:
        files = [PROMPTS / f"{name}.jsonl" for name in ("test", "dev")]
        some = [row for file in files for row in read_examples(str(file))[0]]
        if cell.kind == "code":
            some = [row for row in some if row.kind == "code"]
        chosen = [spread(some, count)[at % len(some)] for at in range(count)]
    return [behind_notes(target, row, notes, cell.behind, tokens) for row in chosen]


class Grid:
    """The contestants of all cells: plain decoding, and a drafter with drafts by their worth and
    with fixed ones. A policy keeps its costs from cell to cell, as in a service."""

    def __init__(self, target: Target, drafter: str, gamma: int) -> None:
        self.target, self.prefixes = target, PrefixCache(PREFIXES)
        self.settings: dict[str, tuple[str, str | None, int]] = {"plain": ("none", None, gamma)}
        self.settings["worth"] = drafter, "worth", gamma
        fixed = {f"{n} deep": (drafter, f"fixed:max_depth={n}", n) for n in FIXED}
        self.settings |= fixed
        self._decoders: dict[tuple[str, float], Decoder] = {}

    def decoder(self, name: str, temperature: float) -> Decoder:
        if (name, temperature) not in self._decoders:
            drafter, policy, gamma = self.settings[name]
            settings = DecodeSettings(gamma=gamma, policy=policy, sampling=Sampling(temperature))
            opened = open_drafter(drafter, self.target)
            prompt = list(range(3, 40)) if settings.needs_costs else None
            made, _ = settings.decoder(self.target, opened, prompt)
            made.prefixes, made.eos = self.prefixes, made.eos[:0]
            self._decoders[name, temperature] = made
        return self._decoders[name, temperature]

    def measure(self, cell: Cell, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
        """The figures of each contestant. All have the same prompts, in turns: other ones in each
        round, and those of the first round before, which do not count."""
        rows = prompts_of(self.target, cell, rounds * cell.batch, tokens)
        taken: dict[str, list[Decoded]] = {name: [] for name in self.settings}
        order = list(self.settings)
        for name in order:
            self.decoder(name, cell.temperature).decode(rows[: cell.batch], tokens // 4)
        for at in range(rounds):
            job = rows[at * cell.batch :][: cell.batch]
            turn = at % len(order)
            for name in order[turn:] + order[:turn]:
                found = self.decoder(name, cell.temperature).decode(job, tokens, seed=at)
                taken[name].append(found)
        return {name: figures(runs) for name, runs in taken.items()}


def figures(runs: Sequence[Decoded]) -> dict[str, float]:
    """Tokens a second without the target's pass over the prompts, tokens a step and row, and the
    tokens that were fed over those that the rows needed."""
    steps = [step for run in runs for step in run.steps]
    emitted = sum(int(step.emitted.sum()) for step in steps)
    needed = sum(len(step.rows) + int(step.drafted.sum()) for step in steps)
    return {
        "tokens_per_second": emitted / sum(run.timing.total - run.timing.prefill for run in runs),
        "tokens_per_step": emitted / sum(len(step.rows) for step in steps),
        "fed_over_needed": sum(step.fed for step in steps) / needed,
    }


def hold_grid(
    target: Target, drafter: str, gamma: int, quick: bool, reporter: Reporter
) -> dict[str, Any]:
    """Measure and print all cells. Returns them, with the speed of `worth` over plain decoding in
    the worst one and on average, and over the best setting, plain among them, on average."""
    grid, measured = Grid(target, drafter, gamma), []
    # The batches of one length one after the other: the notes before them are known then.
    for behind, kind, temperature, batch in product(
        BEHIND[quick], KINDS, (0.0, 1.0), BATCHES[quick]
    ):
        cell = Cell(kind, behind, temperature, batch)
        found = grid.measure(cell, TOKENS[quick], ROUNDS[quick])
        speed = {name: one["tokens_per_second"] for name, one in found.items()}
        others = max(value for name, value in speed.items() if name != "worth")
        ratios = {"vs_plain": speed["worth"] / speed["plain"], "vs_best": speed["worth"] / others}
        measured.append({**asdict(cell), **ratios, "contestants": found})
        reporter.say(f"{cell}: {ratios['vs_plain']:.2f} of plain, {ratios['vs_best']:.2f} of best")
    plain, best = (np.array([one[name] for one in measured]) for name in ("vs_plain", "vs_best"))
    ratios = {
        "worst_vs_plain": float(plain.min()),
        "mean_vs_plain": float(plain.mean()),
        "mean_vs_best": float(best.mean()),
    }
    rows = [
        {name: str(one[name]) for name in ("kind", "behind", "temperature", "batch")}
        | {name: f"{x['tokens_per_second']:.0f}" for name, x in one["contestants"].items()}
        | {"÷ plain": f"{one['vs_plain']:.2f}", "÷ best": f"{one['vs_best']:.2f}"}
        | {"fed ÷ needed": f"{one['contestants']['worth']['fed_over_needed']:.2f}"}
        for one in measured
    ]
    reporter.table(rows_table(f"{drafter}: tokens a second", rows))
    reporter.say("; ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    return {"ratios": ratios, "cells": measured}
