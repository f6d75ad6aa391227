"""Evaluates a drafter: acceptance on many prompts, time on a few, always with the same loop.

The meaning of each figure:
- tokens per step: emitted / verification passes, pooled; without prefill and its token.
- acceptance rate: accepted / positions reached. draft efficiency: accepted / drafted.
- speed-up: time per emitted token of plain decoding, divided by that of speculative decoding in the
  same loop and process. Both decode the same prompts in the same batches (of one prompt by
  default), in turns of a few tokens; prefill is included. It is a ratio of totals with a 95%
  interval from a bootstrap over batches. If both texts have the same length, as in greedy lossless
  decoding, it is the ratio of wall times (`speedup_basis`).
- speed-up without prefill: without the target's and the drafter's passes over the prompts, and
  without the token from the target's pass.
- c, v: the time of one draft step without the drafter's pass over the prompt, and of one
  verification pass of the mean width, in plain steps.
- break-even acceptance: the α at which (1 − α^(γ+1)) / ((1 − α)(γc + v)) is 1. It exists only for a
  fixed γ. A pass over several tokens is never cheaper than a pass over one: a v below 1 is noise,
  and then there is no break-even.
- others' share: the share of the processor that other processes used during timing
  (`decode.measure.costs`).
- γ, la/k and milliseconds by part of a step: see `decode.stats.summary`. They are given separately
  for the acceptance run (batches of `batch_size`) and the timed run (`timed_batch_size`).
- repetition: the share of a text's tokens inside an 8-gram that the text repeats.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.errors import UserError
from decode.loop import Decoded, Decoder, Decoding
from decode.measure.costs import Costs, OtherProcesses, busy
from decode.settings import DecodeSettings
from decode.stats import Counts, Timing, finite, summary
from decode.target.generation_config import nothing_filled_in, stated_config
from decode.target.loading import Target
from decode.verification import Verification

OnProgress = Callable[[str, int, int], None]  # name of the measurement, number done, total
REPEATED = 8
# Tokens per row that a decoder emits in one turn. With short turns, a slow second of the machine
# affects all decoders equally.
TURN = 8
WARM_UP = 8  # tokens decoded before anything is timed
# The number of times that `fastest_gamma` decodes each prompt with each γ.
GAMMA_TURNS = 2


@dataclass(frozen=True, kw_only=True)
class EvaluationProtocol(DecodeSettings):
    """The settings of an evaluation and its sizes.

    max_new_tokens, batch_size: for the acceptance run over all prompts. To measure time,
    `timed_prompts` of the prompts, evenly spread, are decoded again for `timed_tokens` tokens, in
    batches of `timed_batch_size` prompts with similar lengths. generate: whether `generate()` of
    `transformers` is timed too. Raises UserError unless timed_prompts is a multiple of
    timed_batch_size.
    """

    max_new_tokens: int = 64
    batch_size: int = 16
    timed_prompts: int = 8
    timed_tokens: int = 64
    timed_batch_size: int = 1
    generate: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.timed_batch_size
        if size < 1 or self.timed_prompts % size:
            raise UserError(
                f"timed_batch_size is {size} and timed_prompts {self.timed_prompts}; expected a "
                "batch of at least 1, and a number of prompts that fills whole batches"
            )


@dataclass
class Evaluation:
    """The figures of one drafter under one protocol. Reports are made from `to_dict`.

    plain, drafted: one run for each timed batch. generate_seconds, generate_tokens: the same for
    `generate()`. drafts: a short description, such as `chain`. others: see
    `decode.measure.costs`."""

    protocol: EvaluationProtocol
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
    steps: list[Verification] = field(default_factory=list)
    measured_costs: Costs | None = None
    drafts: str = "chain"
    generate_tokens: list[int] | None = None
    others: float | None = None

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
            "drafts": self.drafts,
            "lossless": self.lossless,
            "dtype": self.dtype,
            "prompts": len(self.outputs),
            "timed_prompts": sum(len(run.outputs) for run in self.plain),
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
        if self.generate_seconds is not None and self.generate_tokens is not None:
            seconds, tokens = np.array(self.generate_seconds), np.array(self.generate_tokens)
            for name, ours_s, ours_n in (
                ("vs_generate", drafted_s, drafted_n),
                ("plain_vs_generate", plain_s, plain_n),
            ):
                result[name] = ratio_of_totals(seconds, ours_s, per=(tokens, ours_n))
        return result

    def _basis(self, plain: np.ndarray, drafted: np.ndarray) -> str:
        """What the speed-ups compare. plain, drafted: the number of tokens in each batch."""
        same = self.lossless and self.protocol.sampling.greedy and np.array_equal(plain, drafted)
        return "wall time" if same else "time per token"

    def _costs(self, plain: Timing, drafted: Timing) -> dict[str, Any]:
        step = plain.stepping / plain.steps if plain.steps else 0.0
        if not step or not drafted.steps:
            names = ("c", "v", "v_interval", "verify_width", "overhead_ms")
            return dict.fromkeys(names)
        return {
            "c": drafted.draft / drafted.draft_steps / step if drafted.draft_steps else 0.0,
            "v": (drafted.verify + drafted.overhead) / drafted.steps / step,
            "v_interval": ratio_of_totals(
                _array(run.timing.verify + run.timing.overhead for run in self.drafted),
                _array(run.timing.stepping for run in self.plain),
                per=(
                    _array(run.timing.steps for run in self.drafted),
                    _array(run.timing.steps for run in self.plain),
                ),
            ),
            "verify_width": drafted.tokens_fed / drafted.steps,
            "overhead_ms": 1000 * drafted.overhead / drafted.steps,
        }

    def _break_even(self, costs: dict[str, Any]) -> dict[str, Any]:
        """The break-even acceptance. If it is missing, a note with the reason, except when no
        acceptance rate pays off."""
        policy = self.protocol.make_policy()
        found: float | None = None
        note = None
        if not policy.constant:
            note = "draft lengths vary, so that there is no one γ"
        elif costs["v"] is None:
            note = "nothing was timed"
        elif costs["v"] < 1:
            note = (
                f"a verification pass took {costs['v']:.2f} plain steps; less than 1 is noise, "
                "so time more prompts, or on a machine that has nothing else to do"
            )
        else:
            found = break_even(policy.max_depth, costs["c"], costs["v"])
        return {"break_even_acceptance": found, "break_even_note": note}

    def _fluent_counts(self) -> Counts:
        rows = [
            run.tally.row(row)
            for run in self.drafted
            for row, output in enumerate(run.outputs)
            if _fluent(output)
        ]
        return sum(rows, Counts.zero())


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    progress: OnProgress | None = None,
) -> Evaluation:
    """Measures `drafter` on prompts (token ids).

    Acceptance is measured on all prompts, in batches. Times are measured on the timed prompts, in
    batches of `timed_batch_size`: plain and speculative decoding take turns of a few tokens, and
    `generate()` runs after both. Raises UserError as `Decoder` does, and if the prompts do not fill
    one timed batch.
    """
    if not prompts:
        raise UserError("there are no prompts to evaluate on")
    report = progress or (lambda what, done, of: None)
    batches = _timed(prompts, protocol)
    timed = sum(map(len, batches))
    speculative, costs = protocol.decoder(target, drafter, min(prompts, key=len))
    rule, max_depth = protocol.for_drafter(drafter).rule, speculative.policy.max_depth
    protocol = replace(protocol, rule=rule, gamma=max_depth)
    plain, _ = replace(protocol, policy=None, shape=None).decoder(target, DRAFTERS["none"]())
    outputs, counts, steps = _decode_all(speculative, prompts, protocol, report)
    short = replace(protocol, timed_tokens=min(WARM_UP, protocol.timed_tokens))
    for batch in batches[:1]:  # warm-up, not part of any figure
        texts = [prompts[i] for i in batch]
        for which in (plain, speculative):
            which.decode(texts, short.timed_tokens)
        if protocol.generate:
            time_generate(target, texts, short)
    runs: dict[str, list[Decoded]] = {"plain": [], "drafted": []}
    generated: list[tuple[float, int]] = []
    watch = OtherProcesses()
    for done, batch in enumerate(batches):
        report("timing", done * protocol.timed_batch_size, timed)
        texts = [prompts[i] for i in batch]
        pair = [("plain", plain), ("drafted", speculative)]
        # Each goes first in turn, so that a drift of the machine does not affect the ratio.
        order = pair if done % 2 == 0 else pair[::-1]
        decodings = [
            Decoding(which, texts, protocol.timed_tokens, seed=protocol.seed, row_ids=batch)
            for _, which in order
        ]
        for (name, _), run in zip(order, in_turns(decodings, TURN * len(batch)), strict=True):
            for step in run.steps:
                step.rows = np.array(batch)[step.rows]
            runs[name].append(run)
        if protocol.generate:
            generated.append(time_generate(target, texts, protocol))
    others = watch.share() if batches else None
    report("timing", timed, timed)
    same, close = None, None
    if protocol.sampling.greedy and batches:
        same, close = identical(
            target,
            [prompts[i] for batch in batches for i in batch],
            *([text for run in runs[name] for text in run.outputs] for name in runs),
        )
    return Evaluation(
        protocol,
        str(target.dtype).removeprefix("torch."),
        speculative.rule.lossless,
        counts,
        outputs,
        [repetition(output) for output in outputs],
        runs["plain"],
        runs["drafted"],
        [seconds for seconds, _ in generated] if protocol.generate else None,
        same,
        close,
        steps,
        costs,
        speculative.drafter.describe_drafts(max_depth),
        [tokens for _, tokens in generated] if protocol.generate else None,
        others,
    )


def _timed(prompts: Sequence[Sequence[int]], protocol: EvaluationProtocol) -> list[list[int]]:
    """The indices of the timed prompts, in full batches."""
    size = protocol.timed_batch_size
    count = min(protocol.timed_prompts, len(prompts) // size * size)
    if not count and protocol.timed_prompts:
        raise UserError(
            f"there are {len(prompts)} prompts, which do not fill one timed batch of {size}; give "
            "more prompts, or a smaller timed_batch_size"
        )
    chosen = np.linspace(0, len(prompts) - 1, count).astype(int).tolist()
    if size > 1:
        chosen.sort(key=lambda i: len(prompts[i]))  # less padding
    return [chosen[begin : begin + size] for begin in range(0, count, size)]


def in_turns(decodings: Sequence[Decoding], tokens: int) -> list[Decoded]:
    """Runs several decodings to their ends, in turns. In one turn, each emits about `tokens` more
    tokens before the next one continues."""
    turn = 0
    while not all(decoding.finished for decoding in decodings):
        turn += tokens
        for decoding in decodings:
            while not decoding.finished and decoding.emitted < turn:
                decoding.step()
    return [decoding.result() for decoding in decodings]


def _decode_all(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    report: OnProgress,
) -> tuple[list[list[int]], Counts, list[Verification]]:
    # Prompts of similar length go together: less padding in the prefill.
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
        for step in run.steps:
            step.rows = np.array(batch)[step.rows]
        steps += run.steps
        for index, output in zip(batch, run.outputs, strict=True):
            outputs[index] = output
    report("acceptance", len(order), len(order))
    return outputs, counts, steps


def time_generate(
    target: Target, prompts: Sequence[Sequence[int]], protocol: EvaluationProtocol
) -> tuple[float, int]:
    """The seconds that `generate()` of `transformers` takes for these prompts in one batch, with
    the same sampling and length, and the number of tokens it emits.

    It gets only the protocol's settings. The checkpoint's `generation_config`, which it would use
    otherwise, is ignored, as in our loop.
    """
    settings = stated_config(
        protocol.sampling,
        max_new_tokens=protocol.timed_tokens,
        eos_token_ids=target.eos_token_ids,
    )
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), settings.pad_token_id, device=target.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=target.device)
        mask[row, longest - len(prompt) :] = 1
    with nothing_filled_in(target.model):
        begin = time.perf_counter()
        ids = target.model.generate(ids, attention_mask=mask, generation_config=settings)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds = time.perf_counter() - begin
    texts = ids[:, longest:].tolist()
    return seconds, sum(_length(text, target.eos_token_ids) for text in texts)


def _length(text: Sequence[int], eos: Sequence[int]) -> int:
    """The number of tokens of a text up to and including its first EOS."""
    return next((i + 1 for i, token in enumerate(text) if token in eos), len(text))


def identical(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> tuple[float, float]:
    """The share of prompts whose two greedy texts are equal, and the share of those equal up to a
    choice between two logits that are too close for the dtype to separate."""
    same, close = 0, 0
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        if text == other:
            same += 1
            continue
        pairs = zip(text, other, strict=False)
        at = next((i for i, pair in enumerate(pairs) if len(set(pair)) > 1), None)
        if at is None:
            continue  # one text is a prefix of the other
        ids = torch.tensor([[*prompt, *text[:at]]], device=target.device)
        with torch.inference_mode():
            logits = target.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        gap = (logits[text[at]] - logits[other[at]]).abs()
        # Both logits are rounded, and their sums were rounded in different orders.
        close += bool(gap <= 4 * torch.finfo(target.dtype).eps * logits.abs().max())
    return same / len(prompts), (same + close) / len(prompts)


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


def ratio_of_totals(
    numerator: np.ndarray,
    denominator: np.ndarray,
    *,
    per: tuple[np.ndarray, np.ndarray] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, float] | None:
    """Σ numerator / Σ denominator over prompts (or batches), with its 95% bootstrap interval. None
    for empty arrays, or if a divisor is 0 in total.

    per: units for both, such as tokens. The value is then (Σ numerator / Σ per[0]) / (Σ denominator
    / Σ per[1]).
    """
    count = len(numerator)
    over, under = per or (np.ones(count), np.ones(count))
    if not count or not (denominator.sum() and over.sum() and under.sum()):
        return None
    everything = np.arange(count)[None]
    drawn = np.random.default_rng(seed).integers(0, count, (draws, count))

    def ratios(index: np.ndarray) -> np.ndarray:
        n, d, o, u = (x[index].sum(1) for x in (numerator, denominator, over, under))
        usable = (d * o * u) != 0
        values: np.ndarray = n[usable] * u[usable] / (d[usable] * o[usable])
        return values

    low, high = np.quantile(ratios(drawn), [0.025, 0.975])
    return {"value": float(ratios(everything)[0]), "low": float(low), "high": float(high)}


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


def fastest_gamma(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    gammas: Sequence[int],
    protocol: EvaluationProtocol,
) -> int:
    """The γ with the most tokens per second on these prompts, in batches of `timed_batch_size`.
    Use dev prompts.

    After a warm-up, all γ take turns at every batch, in a changing order. Each γ decodes a batch
    `GAMMA_TURNS` times, and the fastest time counts.
    """
    size = protocol.timed_batch_size
    batches = [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
    decoders = [replace(protocol, gamma=g).decoder(target, drafter)[0] for g in gammas]
    for decoder in decoders:
        decoder.decode(batches[0], min(WARM_UP, protocol.timed_tokens))
    emitted = np.zeros(len(gammas))
    seconds = np.full((len(gammas), len(batches)), np.inf)
    for turn in range(GAMMA_TURNS):
        for place, batch in enumerate(batches):
            for by in range(len(gammas)):
                which = (by + place + turn) % len(gammas)
                run = decoders[which].decode(batch, protocol.timed_tokens, seed=protocol.seed)
                emitted[which] += sum(map(len, run.outputs)) / GAMMA_TURNS
                seconds[which, place] = min(seconds[which, place], run.timing.total)
    return gammas[int(np.argmax(emitted / seconds.sum(1)))]
