"""Whether drafts ever cost: `worth` beside plain decoding and fixed drafts.

The cells are kinds of text × tokens before the question × temperatures × batches.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.common import PROMPTS, format_interval, rows_table
from benchmarks.shared.notes import behind_notes, notes_of
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.settings import DecodeSettings
from decode.verification import Verification
from train.base.console import Reporter
from train.data.read import Example, read_examples, spread
from train.measure.intervals import ratio_of_totals

# By --quick.
BATCHES = {True: (1, 8), False: (1, 2, 4, 8, 16)}
BEHIND = {True: (0, 1000), False: (0, 500, 2000, 7000)}
ROUNDS, TOKENS = {True: 4, False: 3}, {True: 32, False: 48}
FIXED = (1, 4)  # the depths of fixed drafts
KINDS = ("chat", "code", "noise")
NOISE = 24  # random tokens of a question that is none
# Bytes of texts for each drafter, whose hidden states differ: it reads the notes once.
PREFIXES = 2 << 30
RATIOS = {
    "vs_plain": ("worth", "plain"),
    "vs_best": ("worth", "best"),
    "again_vs_plain": ("plain again", "plain"),
}
TITLES = {"vs_plain": "÷ plain", "vs_best": "÷ best", "again_vs_plain": "plain again ÷ plain"}


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


@dataclass
class Steady:
    """Steps in which all rows of a batch ran. seconds: of all of them, by the clock."""

    seconds: float
    steps: list[Verification]


def steady(decoder: Decoder, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> Steady:
    """Decode until the first text ends. Drafts end some texts early, and a batch of fewer rows is
    slower a token. A service fills it up, so such steps would tell nothing of one."""
    slots = decoder.slots(max(map(len, prompts)), tokens)
    decoding = Decoding(decoder, prompts, tokens, seed=seed, rows=len(prompts), slots=slots)
    started = perf_counter()
    while len(decoding.rows) == len(prompts):
        decoding.step()
    taken = perf_counter() - started
    decoder.lm.reset(1, 1)  # each of a grid's ten decoders would keep the slots of its last batch
    return Steady(taken, decoding.steps)


def endless_decoder(target: Target, drafter: str, settings: DecodeSettings) -> Decoder:
    """A decoder whose texts have the length that is asked for: no token ends them."""
    prompt = list(range(3, 40)) if settings.needs_costs else None
    made, _ = settings.decoder(target, open_drafter(drafter, target), prompt)
    made.eos = made.eos[:0]
    return made


class Grid:
    """The contestants of all cells: plain decoding twice, and a drafter with drafts by their worth
    and with fixed ones. A policy keeps its costs from cell to cell, as in a service."""

    def __init__(self, target: Target, drafter: str, gamma: int) -> None:
        self.target = target
        self.prefixes = defaultdict[str, PrefixCache](lambda: PrefixCache(PREFIXES))
        self.settings: dict[str, tuple[str, str | None, int]] = {"plain": ("none", None, gamma)}
        self.settings["plain again"] = self.settings["plain"]
        self.settings["worth"] = drafter, "worth", gamma
        fixed = {f"{n} deep": (drafter, f"fixed:max_depth={n}", n) for n in FIXED}
        self.settings |= fixed
        self._decoders: dict[tuple[str, float], Decoder] = {}

    def decoder(self, name: str, temperature: float) -> Decoder:
        if (name, temperature) not in self._decoders:
            drafter, policy, gamma = self.settings[name]
            settings = DecodeSettings(gamma=gamma, policy=policy, sampling=Sampling(temperature))
            made = endless_decoder(self.target, drafter, settings)
            made.prefixes = self.prefixes[drafter]
            self._decoders[name, temperature] = made
        return self._decoders[name, temperature]

    def measure(self, cell: Cell, tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
        """The figures of each contestant. All have the same prompts, in turns: other ones in each
        round, and those of the first round before, which do not count."""
        rows = prompts_of(self.target, cell, rounds * cell.batch, tokens)
        taken: dict[str, list[Steady]] = {name: [] for name in self.settings}
        order = list(self.settings)
        for name in order:
            steady(self.decoder(name, cell.temperature), rows[: cell.batch], tokens // 4, 0)
        for at in range(rounds):
            job = rows[at * cell.batch :][: cell.batch]
            turn = at % len(order)
            for name in order[turn:] + order[:turn]:
                decoder = self.decoder(name, cell.temperature)
                taken[name].append(steady(decoder, job, tokens, at))
        return {name: figures(runs) for name, runs in taken.items()}


def figures(runs: Sequence[Steady]) -> dict[str, Any]:
    """Tokens a second, seconds a token of each round, tokens a step and row, the tokens that were
    fed over those that the rows needed, and what became of the time: the share of a drafter that
    reads texts, and of steps without a draft and with one their share, the mean of their seconds
    (which have no reading) and of the tokens that they feed."""
    steps = [step for run in runs for step in run.steps]
    each = [astuple(step.seconds)[:3] for step in steps]  # without the reading of texts
    kinds: dict[str, list[tuple[float, int]]] = {"without_draft": [], "with_draft": []}
    for step, seconds in zip(steps, each, strict=True):
        kinds["with_draft" if step.drafted.any() else "without_draft"].append(
            (sum(seconds), step.fed)
        )
    emitted = [sum(int(step.emitted.sum()) for step in run.steps) for run in runs]
    rows, taken = sum(len(step.rows) for step in steps), sum(run.seconds for run in runs)
    found: dict[str, Any] = {
        "tokens_per_second": sum(emitted) / taken,
        "seconds_per_token": [
            run.seconds / tokens for run, tokens in zip(runs, emitted, strict=True)
        ],
        "tokens_per_step": sum(emitted) / rows,
        "fed_over_needed": sum(step.fed for step in steps)
        / (rows + sum(int(step.drafted.sum()) for step in steps)),
        "reading": sum(step.seconds.draft_prefill for step in steps) / taken,
    }
    for name, some in kinds.items():
        if some:
            seconds, fed = np.mean(some, axis=0).tolist()
            found[name] = {"share": len(some) / len(steps), "seconds": seconds, "fed": fed}
    return found


def _times(cell: dict[str, Any], name: str) -> np.ndarray:
    """Seconds a token by round. name: of a contestant, or "best": the fastest but `worth`."""
    times = {one: np.array(x["seconds_per_token"]) for one, x in cell["contestants"].items()}
    if name == "best":
        name = min((one for one in times if one != "worth"), key=lambda one: times[one].mean())
    return times[name]


def mean_ratio(cells: Sequence[dict[str, Any]], ours: str, theirs: str) -> dict[str, float]:
    """The speed of `ours` over that of `theirs`: the mean of the cells, each with the same weight,
    and the ends of its 95% interval over the paired rounds. Differences between cells are in it."""
    sides = [(_times(cell, theirs), _times(cell, ours)) for cell in cells]
    scaled = [(their / our.mean(), our / our.mean()) for their, our in sides]
    ratio = ratio_of_totals(*(np.concatenate(side) for side in zip(*scaled, strict=True)))
    assert ratio is not None  # each round took time
    return ratio


def summaries(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """RATIOS and the worst cell ÷ plain, by batch size, and by batch size and temperature."""
    parts = []
    for size in sorted({cell["batch"] for cell in cells}):
        for temperature in (None, *sorted({cell["temperature"] for cell in cells})):
            some = [
                x for x in cells if x["batch"] == size and temperature in (None, x["temperature"])
            ]
            worst = min(some, key=lambda cell: cell["vs_plain"])
            part = {"batch": size, "temperature": temperature}
            part |= {name: mean_ratio(some, *sides) for name, sides in RATIOS.items()}
            part["worst"] = {
                name: worst[name] for name in ("kind", "behind", "temperature", "vs_plain")
            }
            parts.append(part)
    return parts


def hold_grid(
    target: Target, drafter: str, gamma: int, quick: bool, reporter: Reporter
) -> dict[str, Any]:
    """Measure and print all cells, and RATIOS by batch size and temperature (None: both). The best
    setting is of each cell, plain among them, chosen by the same times, so chance helps it. Plain
    decoding beside itself says how far chance goes."""
    grid, measured = Grid(target, drafter, gamma), []
    # The batches of one length one after the other: the notes before them are known then.
    for behind, kind, temperature, batch in product(
        BEHIND[quick], KINDS, (0.0, 1.0), BATCHES[quick]
    ):
        cell = Cell(kind, behind, temperature, batch)
        one = {**asdict(cell), "contestants": grid.measure(cell, TOKENS[quick], ROUNDS[quick])}
        one |= {name: mean_ratio([one], *sides)["value"] for name, sides in RATIOS.items()}
        measured.append(one)
        reporter.say(f"{cell}: {one['vs_plain']:.2f} of plain, {one['vs_best']:.2f} of best")
    rows = [
        {name: str(one[name]) for name in ("kind", "behind", "temperature", "batch")}
        | {name: f"{x['tokens_per_second']:.0f}" for name, x in one["contestants"].items()}
        | {"÷ plain": f"{one['vs_plain']:.2f}", "÷ best": f"{one['vs_best']:.2f}"}
        | {"fed ÷ needed": f"{one['contestants']['worth']['fed_over_needed']:.2f}"}
        for one in measured
    ]
    reporter.table(rows_table(f"{drafter}: tokens a second", rows))
    ratios = summaries(measured)
    rows = [
        {
            "batch": str(x["batch"]),
            "T": "both" if x["temperature"] is None else f"{x['temperature']:g}",
        }
        | {title: format_interval(x[name], 2) for name, title in TITLES.items()}
        | {
            "worst ÷ plain": "{vs_plain:.2f}: {kind}, {behind}, T = {temperature:g}".format(
                **x["worst"]
            )
        }
        for x in ratios
    ]
    reporter.table(
        rows_table(f"{drafter}, `worth`: mean of the cells [95% over paired rounds]", rows)
    )
    return {"ratios": ratios, "cells": measured}
