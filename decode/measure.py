"""Judges a drafter: acceptance on many prompts, time on a few, always by the one loop.

The meaning of each figure:
- tokens per step: emitted / verification passes, pooled; prefill and its token left out.
- acceptance rate: accepted / positions reached. draft efficiency: accepted / drafted.
- speed-up: wall time of plain decoding over that of speculative decoding in the same loop and
  process; same prompts, interleaved, prefill included; ratio of totals with a 95% interval from a
  bootstrap over prompts.
- c, v: the time of one draft step, and of one verification pass of the mean width, in plain steps.
- break-even acceptance: the α at which (1 − α^(γ+1)) / ((1 − α)(γc + v)) is 1; it exists for a
  fixed γ only.
- γ, la/k and milliseconds by part of a step: `decode.stats.summary`, of the acceptance run (in
  batches) and of the timed one (at batch 1) apart.
- repetition: share of a text's tokens inside an 8-gram that the text repeats.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from decode.costs import Costs
from decode.drafters import DRAFTERS, Drafter
from decode.errors import UserError
from decode.generation import nothing_filled_in, stated_config
from decode.loop import Decoded, Decoder
from decode.settings import DecodeSettings
from decode.stats import Counts, Step, Timing, finite, summary
from decode.target import Target

Progress = Callable[[str, int, int], None]  # what is being measured, done, of how many
REPEATED = 8


@dataclass(frozen=True, kw_only=True)
class Protocol(DecodeSettings):
    """What is measured, and on how much.

    max_new_tokens and batch_size: of the acceptance run over all prompts. timed_prompts of them,
    spread evenly, are decoded again one by one for timed_tokens tokens to measure time. generate:
    whether `transformers` is timed beside us.
    """

    max_new_tokens: int = 64
    batch_size: int = 16
    timed_prompts: int = 8
    timed_tokens: int = 64
    generate: bool = True
    seed: int = 0


@dataclass
class Evaluation:
    """The figures of one drafter under one protocol; `to_dict` is what reports are made of.

    drafts: in words, such as `chain`."""

    protocol: Protocol
    dtype: str
    lossless: bool
    counts: Counts
    outputs: list[list[int]]
    repetition: list[float]
    plain: list[Decoded]
    drafted: list[Decoded]
    generate_seconds: list[float] | None
    identical: float | None
    identical_within_rounding: float | None
    steps: list[Step] = field(default_factory=list)
    measured_costs: Costs | None = None
    drafts: str = "chain"

    def steps_to_dict(self) -> dict[str, Any]:
        """Every step as JSON values: `acceptance` of the run over all prompts, `timed` of each
        timed prompt, with prompts by their place in the set."""
        return {
            "acceptance": [step.to_dict() for step in self.steps],
            "timed": [[step.to_dict() for step in run.steps] for run in self.drafted],
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; a figure that does not exist is None."""
        plain_s = np.array([run.timing.total for run in self.plain])
        drafted_s = np.array([run.timing.total for run in self.drafted])
        plain, drafted = _sum(self.plain), _sum(self.drafted)
        costs = self._costs(plain, drafted)
        fluent = np.array([repetition(run.outputs[0]) == 0 for run in self.plain], dtype=bool)
        result: dict[str, Any] = {
            **self.counts.to_dict(),
            **self.protocol.to_dict(),
            "drafts": self.drafts,
            "lossless": self.lossless,
            "dtype": self.dtype,
            "prompts": len(self.outputs),
            "timed_prompts": len(self.plain),
            **costs,
            "break_even_acceptance": self._break_even(costs),
            "measured_costs": self.measured_costs and self.measured_costs.to_dict(),
            "draft_lengths": summary(self.steps),
            "draft_lengths_timed": summary(step for run in self.drafted for step in run.steps),
            "speedup": ratio_of_totals(plain_s, drafted_s),
            "speedup_without_prefill": ratio_of_totals(
                plain_s - [run.timing.prefill for run in self.plain],
                drafted_s - [run.timing.prefill for run in self.drafted],
            ),
            "speedup_not_repeating": ratio_of_totals(plain_s[fluent], drafted_s[fluent]),
            "tokens_per_step_not_repeating": finite(self._fluent_counts().tokens_per_step),
            "repetition": float(np.mean(self.repetition)),
            "share_repeating": float(np.mean([share > 0 for share in self.repetition])),
            "identical_to_plain": self.identical,
            "identical_within_rounding": self.identical_within_rounding,
            "seconds": {"plain": vars(plain), "drafted": vars(drafted)},
        }
        if self.generate_seconds is not None:
            generate_s = np.array(self.generate_seconds)
            result["vs_generate"] = ratio_of_totals(generate_s, drafted_s)
            result["plain_vs_generate"] = ratio_of_totals(generate_s, plain_s)
        return result

    def _costs(self, plain: Timing, drafted: Timing) -> dict[str, float | None]:
        step = (plain.verify + plain.overhead + plain.draft) / plain.steps if plain.steps else 0.0
        if not step or not drafted.steps:
            return {"c": None, "v": None, "verify_width": None, "overhead_ms": None}
        return {
            "c": drafted.draft / drafted.draft_depth / step if drafted.draft_depth else 0.0,
            "v": (drafted.verify + drafted.overhead) / drafted.steps / step,
            "verify_width": drafted.width / drafted.steps,
            "overhead_ms": 1000 * drafted.overhead / drafted.steps,
        }

    def _break_even(self, costs: dict[str, float | None]) -> float | None:
        policy = self.protocol.make_policy()
        return break_even(policy.most, costs["c"], costs["v"]) if policy.constant else None

    def _fluent_counts(self) -> Counts:
        rows = [run.tally.row(0) for run in self.drafted if repetition(run.outputs[0]) == 0]
        return sum(rows, Counts.zero())


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    protocol: Protocol,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure `drafter` on prompts (token ids). Raises UserError as `Decoder` does.

    The acceptance of the drafter comes from all prompts, in batches; times come from the timed
    prompts, at batch 1, plain and speculative decoding (and `generate()`) taking turns.
    """
    if not prompts:
        raise UserError("there are no prompts to evaluate on")
    report = progress or (lambda what, done, of: None)
    timed = np.linspace(0, len(prompts) - 1, min(protocol.timed_prompts, len(prompts))).astype(int)
    speculative, costs = protocol.decoder(target, drafter, min(prompts, key=len))
    rule, most = protocol.for_drafter(drafter).rule, speculative.policy.most
    protocol = replace(protocol, rule=rule, gamma=most)
    plain, _ = replace(protocol, policy=None, shape=None).decoder(target, DRAFTERS["none"]())
    outputs, counts, steps = _decode_all(speculative, prompts, protocol, report)
    if len(timed):
        for which in (plain, speculative):  # warm-up, left out of every figure
            which.decode([prompts[timed[0]]], min(8, protocol.timed_tokens))
    runs: dict[str, list[Decoded]] = {"plain": [], "drafted": []}
    generate_seconds = []
    for done, index in enumerate(timed):
        report("timing", done, len(timed))
        pair = [("plain", plain), ("drafted", speculative)]
        # Taking turns at going first keeps a drift of the machine out of the ratio.
        for name, which in pair if done % 2 == 0 else reversed(pair):
            run = which.decode(
                [prompts[index]],
                protocol.timed_tokens,
                seed=protocol.seed,
                row_ids=[int(index)],
            )
            run.steps = [replace(step, rows=np.array([index])) for step in run.steps]
            runs[name].append(run)
        if protocol.generate:
            generate_seconds.append(time_generate(target, prompts[index], protocol))
    report("timing", len(timed), len(timed))
    same, close = None, None
    if protocol.sampling.greedy and len(timed):
        texts = ([run.outputs[0] for run in runs[name]] for name in ("plain", "drafted"))
        same, close = identical(target, [prompts[i] for i in timed], *texts)
    return Evaluation(
        protocol,
        str(target.dtype).removeprefix("torch."),
        speculative.rule.lossless,
        counts,
        outputs,
        [repetition(output) for output in outputs],
        runs["plain"],
        runs["drafted"],
        generate_seconds if protocol.generate else None,
        same,
        close,
        steps,
        costs,
        speculative.drafter.describe_drafts(most),
    )


def _decode_all(
    decoder: Decoder, prompts: Sequence[Sequence[int]], protocol: Protocol, report: Progress
) -> tuple[list[list[int]], Counts, list[Step]]:
    # Prompts of like length together: less padding in the prefill.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[list[int]] = [[] for _ in prompts]
    counts, steps = Counts.zero(), []
    for begin in range(0, len(order), protocol.batch_size):
        report("acceptance", begin, len(order))
        batch = order[begin : begin + protocol.batch_size]
        run = decoder.decode(
            [prompts[i] for i in batch],
            protocol.max_new_tokens,
            seed=protocol.seed,
            row_ids=batch,
        )
        counts = counts + run.counts
        steps += [replace(step, rows=np.array(batch)[step.rows]) for step in run.steps]
        for index, output in zip(batch, run.outputs, strict=True):
            outputs[index] = output
    report("acceptance", len(order), len(order))
    return outputs, counts, steps


def time_generate(target: Target, prompt: Sequence[int], protocol: Protocol) -> float:
    """Seconds that `transformers` `generate()` takes for the same prompt, sampling and length.

    The protocol's settings are all it is given: the checkpoint's `generation_config`, which it
    would follow otherwise, is put aside, as in our loop.
    """
    settings = stated_config(
        protocol.sampling,
        max_new_tokens=protocol.timed_tokens,
        eos_token_ids=target.eos_token_ids,
    )
    ids = torch.tensor([list(prompt)], device=target.device)
    mask = torch.ones_like(ids)
    with nothing_filled_in(target.model):
        begin = time.perf_counter()
        target.model.generate(ids, attention_mask=mask, generation_config=settings)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return time.perf_counter() - begin


def identical(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> tuple[float, float]:
    """The share of prompts whose two greedy texts are equal, and the share where they are so up to
    a choice between two logits closer than the dtype can tell apart."""
    same, close = 0, 0
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        if text == other:
            same += 1
            continue
        pairs = zip(text, other, strict=False)
        at = next((i for i, pair in enumerate(pairs) if len(set(pair)) > 1), None)
        if at is None:
            continue  # one goes on where the other ended
        ids = torch.tensor([[*prompt, *text[:at]]], device=target.device)
        with torch.inference_mode():
            logits = target.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        gap = (logits[text[at]] - logits[other[at]]).abs()
        # Both logits are rounded, after sums that were rounded in another order.
        close += bool(gap <= 4 * torch.finfo(target.dtype).eps * logits.abs().max())
    return same / len(prompts), (same + close) / len(prompts)


def _sum(runs: Sequence[Decoded]) -> Timing:
    return sum((run.timing for run in runs), Timing())


def repetition(tokens: Sequence[int]) -> float:
    """Share of the tokens that lie inside an 8-gram occurring more than once.

    >>> repetition([1, 2, 3, 4, 5, 6, 7, 8] * 2)
    1.0
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(tokens) - REPEATED + 1):
        places.setdefault(tuple(tokens[i : i + REPEATED]), []).append(i)
    inside = np.zeros(len(tokens), dtype=bool)
    for found in places.values():
        if len(found) > 1:
            for i in found:
                inside[i : i + REPEATED] = True
    return float(inside.mean()) if len(tokens) else 0.0


def ratio_of_totals(
    numerator: np.ndarray, denominator: np.ndarray, *, draws: int = 2000, seed: int = 0
) -> dict[str, float] | None:
    """Σ numerator / Σ denominator over prompts, with its 95% bootstrap interval; None for none."""
    if not len(numerator):
        return None
    index = np.random.default_rng(seed).integers(0, len(numerator), (draws, len(numerator)))
    ratios = numerator[index].sum(1) / denominator[index].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    value = numerator.sum() / denominator.sum()
    return {"value": float(value), "low": float(low), "high": float(high)}


def break_even(gamma: int, c: float | None, v: float | None) -> float | None:
    """The i.i.d. acceptance rate from which drafting γ tokens pays (2211.17192, theorem 3.8, with
    the cost v of the verification pass); None when even α = 1 does not pay, or without costs."""
    if c is None or v is None or gamma * c + v > gamma + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        gained = sum(middle**i for i in range(gamma + 1))
        low, high = (low, middle) if gained >= gamma * c + v else (middle, high)
    return high


def fastest_gamma(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    gammas: Sequence[int],
    protocol: Protocol,
) -> int:
    """The γ with the most tokens per second on these prompts, at batch 1. Give it dev prompts."""
    speeds = []
    for gamma in gammas:
        decoder, _ = replace(protocol, gamma=gamma).decoder(target, drafter)
        runs = [decoder.decode([prompt], protocol.timed_tokens) for prompt in prompts]
        emitted = sum(len(run.outputs[0]) for run in runs)
        speeds.append(emitted / _sum(runs).total)
    return gammas[int(np.argmax(speeds))]
