"""The figures of an evaluation, computed from its counts and times.

The meaning of each figure:
- tokens per step: emitted / verification passes, pooled; without prefill and its token.
- acceptance rate: accepted / positions reached. draft efficiency: accepted / drafted.
- speed-up: time per emitted token of plain decoding, divided by that of speculative decoding in the
  same loop and process. Both decode the same prompts in the same batches (of one prompt by
  default), in turns of a few tokens; prefill is included. It is a ratio of totals with a 95%
  interval over batches (`train.measure.intervals`). If both texts have the same length, as in
  greedy lossless decoding, it is the ratio of wall times (`speedup_basis`).
- speed-up without prefill: without the target's and the drafter's passes over the prompts, and
  without the token from the target's pass.
- c, v: the time of a full draft divided by its depth, without the drafter's pass over the prompt,
  and the time of the pass that verifies it, in plain steps. A draft is full if it is γ deep. Steps
  with a shorter draft count only if a policy varies the lengths, and steps without one never. So c
  is the time of a pass of a small language model. A drafter that computes all depths in one pass
  pays about the same for any depth, so its c falls as γ grows. `measured_costs` has the two parts
  of a draft's cost, the fixed one and the one per depth, where a policy or shape needed them
  (`decode.costs`).
- break-even acceptance: the α at which (1 − α^(γ+1)) / ((1 − α)(γc + v)) is 1. It exists only for a
  fixed γ that some drafts reach. A pass over several tokens is never cheaper than a pass over one:
  a v below 1 is noise, and then there is no break-even.
- others' share: the share of the processor that other processes used during timing
  (`decode.costs`).
- γ, la/k and milliseconds by part of a step: see `decode.stats.summary`. They are given separately
  for the acceptance run (batches of `batch_size`) and the timed run (`timed_batch_size`).
- parts: the counts and figures of the acceptance run for a reasoning model, `thinking` and `answer`
  apart. A step belongs to the part in which its draft begins (`train.measure.thinking`).
- structured: for answers with a grammar, see `train.measure.structured`.
- repetition: the share of a text's tokens inside an 8-gram that the text repeats.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decode.costs import Costs, busy
from decode.loop.decoded import Decoded
from decode.settings import EvaluationProtocol
from decode.stats import Counts, Tally, Timing, finite, summary
from decode.verification import Verification
from train.measure.intervals import ratio_of_totals

REPEATED = 8  # tokens


@dataclass
class Evaluation:
    """The figures of one drafter under one protocol. Reports are made from `to_dict`.

    plain, drafted: one run for each timed batch. generated: seconds and tokens of `generate()` by
    the place of a batch among these; None: it was not timed. drafts: a short description, such as
    `chain`. others: see `decode.costs`. ranks: the processes that shared the acceptance run. parts:
    counts inside and outside of the thinking part, if both occur. kernels: what computed the target
    (`train.measure.machine.describe_kernels`). structured: of answers with a grammar; None: no
    answer has one."""

    protocol: EvaluationProtocol
    dtype: str
    lossless: bool
    counts: Counts
    outputs: list[list[int]]
    repetition: list[float]
    plain: list[Decoded]
    drafted: list[Decoded]
    generated: dict[int, tuple[float, int]] | None
    identical: float | None
    identical_within_rounding: float | None
    steps: list[Verification] = field(default_factory=list)
    measured_costs: Costs | None = None
    drafts: str = "chain"
    others: float | None = None
    ranks: int = 1
    parts: dict[str, Counts] | None = None
    kernels: dict[str, Any] = field(default_factory=dict)
    structured: dict[str, Any] | None = None

    @property
    def decoded_tokens(self) -> int:
        """The tokens of all texts, those of the timed runs and of `generate()` included."""
        timed = (run.outputs for run in (*self.plain, *self.drafted))
        texts = itertools.chain(self.outputs, *timed)
        return sum(map(len, texts)) + sum(tokens for _, tokens in (self.generated or {}).values())

    def steps_to_dict(self) -> dict[str, Any]:
        """Converts every step to JSON values: `acceptance` for the run over all prompts, `timed`
        for each timed batch. Prompts are given by their index in the set."""
        return {
            "acceptance": [step.to_dict() for step in self.steps],
            "timed": [[step.to_dict() for step in run.steps] for run in self.drafted],
        }

    def to_dict(self) -> dict[str, Any]:
        """Converts all figures to JSON values. A figure that does not exist is None."""
        plain, drafted = _sum(self.plain), _sum(self.drafted)
        plain_s = _array(run.timing.total for run in self.plain)
        drafted_s = _array(run.timing.total for run in self.drafted)
        plain_n = _array(sum(map(len, run.outputs)) for run in self.plain)
        drafted_n = _array(sum(map(len, run.outputs)) for run in self.drafted)
        costs = self._costs(plain, drafted)
        fluent = np.array([all(map(_fluent, run.outputs)) for run in self.plain], dtype=bool)
        result: dict[str, Any] = {
            **self.counts.to_dict(),
            **self.protocol.to_dict(),
            "tokens_per_step_interval": self._tokens_per_step(),
            "parts": self.parts and {name: part.to_dict() for name, part in self.parts.items()},
            "structured": self.structured,
            "drafts": self.drafts,
            "lossless": self.lossless,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "prompts": len(self.outputs),
            "timed_prompts": sum(len(run.outputs) for run in self.plain),
            "ranks": self.ranks,
            "timed_batch_size": self.protocol.timed_batch_size,
            **costs,
            **self._break_even(costs),
            "measured_costs": self.measured_costs and self.measured_costs.to_dict(),
            "draft_lengths": summary(self.steps),
            "draft_lengths_timed": summary(step for run in self.drafted for step in run.steps),
            "speedup": ratio_of_totals(plain_s, drafted_s, per=(plain_n, drafted_n)),
            "speedup_basis": self._basis(plain_n, drafted_n),
            "speedup_without_prefill": ratio_of_totals(
                _array(run.timing.stepping for run in self.plain),
                _array(run.timing.stepping for run in self.drafted),
                # The first token of each row comes from prefill.
                per=(
                    plain_n - [len(run.outputs) for run in self.plain],
                    drafted_n - [len(run.outputs) for run in self.drafted],
                ),
            ),
            "speedup_not_repeating": ratio_of_totals(
                plain_s[fluent], drafted_s[fluent], per=(plain_n[fluent], drafted_n[fluent])
            ),
            "tokens_per_step_not_repeating": finite(self._fluent_counts().tokens_per_step),
            "repetition": float(np.mean(self.repetition)),
            "share_repeating": float(np.mean([share > 0 for share in self.repetition])),
            "identical_to_plain": self.identical,
            "identical_within_rounding": self.identical_within_rounding,
            "seconds": {"plain": vars(plain), "drafted": vars(drafted)},
            "others_share": self.others,
            "alone": None if self.others is None else not busy(self.others),
        }
        if self.generated is not None:
            places = [*self.generated]
            seconds, tokens = np.array([*self.generated.values()]).reshape(-1, 2).T
            for name, ours_s, ours_n in (
                ("vs_generate", drafted_s, drafted_n),
                ("plain_vs_generate", plain_s, plain_n),
            ):
                per = tokens, ours_n[places]
                result[name] = ratio_of_totals(seconds, ours_s[places], per=per)
        return result

    def _basis(self, plain: np.ndarray, drafted: np.ndarray) -> str:
        """What the speed-ups compare. plain, drafted: the number of tokens in each batch."""
        same = self.lossless and self.protocol.sampling.greedy and np.array_equal(plain, drafted)
        return "wall time" if same else "time per token"

    def _costs(self, plain: Timing, drafted: Timing) -> dict[str, Any]:
        """c and v with their intervals, and what a pass is on average. None: not known."""
        policy = self.protocol.make_policy()
        least = policy.max_depth if policy.constant else 1
        full = [[step for step in run.steps if step.draft_steps >= least] for run in self.drafted]
        passes = _array(map(len, full))
        depths = _array(sum(step.draft_steps for step in steps) for steps in full)
        drafting = _array(sum(step.draft_s for step in steps) for steps in full)
        judging = _array(sum(step.verify_s + step.overhead_s for step in steps) for steps in full)
        steps, seconds = (
            _array(getattr(run.timing, name) for run in self.plain)
            for name in ("steps", "stepping")
        )
        c = ratio_of_totals(drafting, seconds, per=(depths, steps))
        v = ratio_of_totals(judging, seconds, per=(passes, steps))
        return {
            "c": c and c["value"],
            "c_interval": c,
            "v": v and v["value"],
            "v_interval": v,
            "verify_width": drafted.tokens_fed / drafted.steps if drafted.steps else None,
            "overhead_ms": 1000 * drafted.overhead / drafted.steps if drafted.steps else None,
        }

    def _break_even(self, costs: dict[str, Any]) -> dict[str, Any]:
        """The break-even acceptance. If it is missing, a note with the reason, except when no
        acceptance rate pays off."""
        policy = self.protocol.make_policy()
        alpha: float | None = None
        note = None
        if not policy.constant:
            note = "draft lengths vary, so there is no single γ"
        elif not self.drafted:
            note = "nothing was timed"
        elif costs["v"] is None:
            note = f"no draft was γ = {policy.max_depth} deep, so the costs of one are not known"
        elif costs["v"] < 1:
            note = (
                f"a verification pass took {costs['v']:.2f} plain steps; less than 1 is noise, "
                "so time more prompts, or use an idle machine"
            )
        else:
            alpha = break_even(policy.max_depth, costs["c"], costs["v"])
        return {"break_even_acceptance": alpha, "break_even_note": note}

    def _tokens_per_step(self) -> dict[str, float] | None:
        """Tokens per step of the acceptance run, with its interval over prompts."""
        tally = Tally(len(self.outputs))
        for step in self.steps:
            tally.add(step)
        return ratio_of_totals(tally.emitted, tally.steps)

    def _fluent_counts(self) -> Counts:
        rows = [
            run.tally.row(row)
            for run in self.drafted
            for row, output in enumerate(run.outputs)
            if _fluent(output)
        ]
        return sum(rows, Counts.zero())


def _sum(runs: Sequence[Decoded]) -> Timing:
    return sum((run.timing for run in runs), Timing())


def _array(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), dtype=np.float64)


def _fluent(output: Sequence[int]) -> bool:
    return repetition(output) == 0


def repetition(tokens: Sequence[int]) -> float:
    """The share of the tokens that are inside an 8-gram that occurs more than once.

    >>> repetition([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    1.0
    """
    starts: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(tokens) - REPEATED + 1):
        starts.setdefault(tuple(tokens[i : i + REPEATED]), []).append(i)
    inside = np.zeros(len(tokens), dtype=bool)
    for copies in starts.values():
        if len(copies) > 1:
            for i in copies:
                inside[i : i + REPEATED] = True
    return float(inside.mean()) if len(tokens) else 0.0


def break_even(gamma: int, c: float | None, v: float | None) -> float | None:
    """The i.i.d. acceptance rate above which drafting γ tokens pays off (2211.17192, theorem 3.8,
    with the cost v of the verification pass). None if even α = 1 does not pay off, or without
    costs."""
    if c is None or v is None or gamma * c + v > gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        gained = sum(middle**i for i in range(gamma + 1))
        low, high = (low, middle) if gained >= gamma * c + v else (middle, high)
    return high
