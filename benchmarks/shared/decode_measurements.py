"""What `benchmarks.decode` measures: contests, one for each setting, and steps of our loop."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.common import Unable
from benchmarks.shared.decode_contestants import (
    NAMES,
    Contestant,
    Models,
    Passes,
    makers,
)
from benchmarks.shared.step_costs import WARM_UP, step_cost
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder, Decoding
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.stats import finite
from train.base.console import Reporter
from train.data.read import spread
from train.measure.intervals import ratio_of_totals
from train.measure.same_text import identical
from train.measure.time_passes import finish

T = TypeVar("T")
OURS = ("plain", "speculative", "lookup")
COUNTED_STEPS = 5  # of each kind of step, to count its calls


@dataclass(frozen=True)
class Setting:
    """jobs: the number of batches of `batch` prompts, each answered with `tokens` tokens. dtype:
    overrides the requested dtype; "" keeps it. context: the tokens of notes before each prompt; if
    there are any, times are without the pass over the prompt."""

    jobs: int
    tokens: int
    batch: int = 1
    sampled: bool = False
    dtype: str = ""
    context: int = 0

    @property
    def ending(self) -> str:
        """The ending of the names of this setting's ratios."""
        batch = f"_batch{self.batch}" if self.batch > 1 else ""
        context = f"_ctx{self.context}" if self.context else ""
        return "_sampled" * self.sampled + batch + (self.dtype and f"_{self.dtype}") + context


@dataclass
class Contest:
    """The results of one setting. By contestant: seconds and outputs by job, and passes. `unable`
    has the reason why a contestant does not take part, and `broken` those of them that are
    installed and failed."""

    setting: Setting
    dtype: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, list[list[list[int]]]] = field(default_factory=dict)
    passes: dict[str, Passes] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    equal: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        how = "temperature 1" if self.setting.sampled else "greedy"
        behind = f", behind {self.setting.context} tokens" if self.setting.context else ""
        return f"{how}, batch {self.setting.batch}, {self.dtype}{behind}"

    @contextmanager
    def excusing(self, name: str) -> Iterator[None]:
        """Exclude a contestant that raises inside this block. Errors of our own loops and of plain
        `generate()` are raised: they must take part."""
        try:
            yield
        except Exception as error:
            if name in (*OURS, "generate"):
                raise
            lines = str(error).strip().splitlines() or [""]
            self.unable[name] = f"{type(error).__name__}: {lines[0]}"
            if not isinstance(error, Unable):
                self.broken[name] = self.unable[name]
            for results in (self.seconds, self.outputs, self.passes):
                results.pop(name, None)

    def ratio(self, theirs: str, ours: str) -> dict[str, float] | None:
        """Return the time of `theirs` over the time of `ours`, with an interval if there is more
        than one job. None if one of them has no times."""
        if theirs not in self.seconds or ours not in self.seconds:
            return None
        ratio = ratio_of_totals(*(np.array(self.seconds[name]) for name in (theirs, ours)))
        return {"value": ratio["value"]} if ratio and self.setting.jobs == 1 else ratio

    def figures(self, name: str) -> dict[str, Any]:
        """Return a contestant's figures for JSON and the table. Unknown ones are None."""
        passes, seconds = self.passes[name], sum(self.seconds[name])
        timed = -1 if self.setting.context else 0  # the prompt's pass gives the first token
        tokens = sum(len(row) + timed for job in self.outputs[name] for row in job)
        milliseconds = {
            f"{what}_ms": 1000 * median(times) if times else None
            for what, times in (
                ("draft", passes.draft_s),
                ("verify", passes.verify_s),
                ("overhead", passes.overhead_s),
            )
        }
        equal, close = self.equal.get(name, (None, None))
        return {
            "tokens_per_second": tokens / seconds,
            "seconds": self.seconds[name],
            "tokens_per_step": _share(passes.emitted, passes.steps),
            "acceptance_rate": _share(passes.accepted, passes.reached),
            "draft_efficiency": _share(passes.accepted, passes.drafted),
            **milliseconds,
            "equal_to_generate": equal,
            "equal_within_rounding": close,
        }


def _share(part: int, total: int) -> float | None:
    return finite(part / total) if total else None


def long_answers(
    target: Target, prompts: Sequence[list[int]], *, count: int, tokens: int
) -> list[list[int]]:
    """Return at most `count` prompts, spread over all, whose greedy answers have at least `tokens`
    tokens. Raises UserError if there is none."""
    decoder = Decoder(target.model, DRAFTERS["none"](), eos_token_ids=target.eos_token_ids)
    long: list[list[int]] = []
    # About half of the answers are too short. If more are, try the other prompts too.
    first = spread(range(len(prompts)), 2 * count)
    order = first + sorted(set(range(len(prompts))) - set(first))
    for begin in range(0, len(order), 16):
        if len(long) >= count:
            break
        batch = [prompts[index] for index in order[begin : begin + 16]]
        outputs = decoder.decode(batch, tokens).outputs
        ends = set(target.eos_token_ids)
        long += [
            prompt
            for prompt, output in zip(batch, outputs, strict=True)
            if len(output) == tokens and output[-1] not in ends
        ]
    if not long:
        raise UserError(
            f"no greedy answer to these {len(prompts)} prompts has {tokens} tokens; give prompts "
            "that ask for longer ones"
        )
    return spread(long, count)


def hold_contest(
    models: Models,
    setting: Setting,
    texts: Sequence[list[int]],
    gamma: int,
    reporter: Reporter,
    names: Sequence[str] = tuple(NAMES),
) -> Contest:
    """Let the contestants with these names answer the setting's prompts, in turns.

    Errors of other packages are recorded as reasons. Our own loop and plain `generate()` must
    support every setting, so their errors are raised.
    """
    prompts = spread(texts, setting.jobs * setting.batch)
    count = max(setting.batch, len(prompts) - len(prompts) % setting.batch)  # complete batches
    jobs = [prompts[i : i + setting.batch] for i in range(0, count, setting.batch)]
    dtype, device = dtype_name(models.target.dtype), models.target.device
    contest = Contest(replace(setting, jobs=len(jobs)), dtype)
    ready: dict[str, Contestant] = {}
    make = makers(models, gamma=gamma, sampled=setting.sampled, batch=setting.batch)
    for name in names:
        with contest.excusing(name):
            contestant = make[name]()
            contestant(jobs[0], min(8, setting.tokens), 0)  # the warm-up
            ready[name] = contestant
            contest.seconds[name], contest.outputs[name] = [], []
            contest.passes[name] = Passes()
    order = list(ready)
    for number, job in enumerate(jobs):
        reporter.say(f"{contest.title}: {number + 1} of {len(jobs)}")
        turn = len(order) * number // len(jobs)
        for name in order[turn:] + order[:turn]:
            if name in contest.unable:
                continue
            with contest.excusing(name):
                answer, prompt = ready[name], 0.0
                if setting.context:
                    prompt, _ = timed(device, partial(answer, job, 1, number))
                seconds, result = timed(device, partial(answer, job, setting.tokens, number))
                contest.seconds[name].append(seconds - prompt)
                contest.outputs[name].append(result.outputs)
                contest.passes[name] += result.passes()
    if not setting.sampled:
        prompts = [prompt for job in jobs for prompt in job]
        rows = {
            name: [row for job in outputs for row in job]
            for name, outputs in contest.outputs.items()
        }
        contest.equal = {
            name: identical(models.target, prompts, rows["generate"], rows[name]) for name in rows
        }
    return contest


def timed(device: torch.device, work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of some work on a device, and what it returns."""
    finish(device)
    begin = time.perf_counter()
    result = work()
    finish(device)
    return time.perf_counter() - begin, result


def step_costs(models: Models, prompt: Sequence[int], gamma: int) -> dict[str, dict[str, float]]:
    """Return by name what a greedy step of our loop costs beside its functions in C++: plain, of 1
    and of 8 rows, and with the heads if there are any. calls: of the interpreter. ms, outside_ms:
    of the step, and outside of C++."""
    kinds = {"plain": ("none", 1), "plain, 8 rows": ("none", 8)}
    if models.heads:
        kinds["heads"] = models.heads, 1
    costs = {}
    for name, (drafter, rows) in kinds.items():
        opened = open_drafter(drafter, models.target)
        decoder = Decoder(models.target.model, opened, gamma=gamma, eos_token_ids=[])
        # No step of a draft has more tokens.
        tokens = (WARM_UP + 2 * COUNTED_STEPS) * (opened.max_depth(gamma) + 1) + 1
        cost = step_cost(Decoding(decoder, [prompt] * rows, tokens), COUNTED_STEPS)
        costs[name] = {
            "calls": cost.calls,
            "ms": 1000 * cost.seconds,
            "outside_ms": 1000 * cost.outside,
        }
    return costs
