"""Evaluates a drafter: acceptance on many prompts, time on a few, always with the same loop.

`decode.measure.figures` explains each figure.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.errors import UserError
from decode.loop import Decoded, Decoder, Decoding
from decode.measure.costs import OtherProcesses
from decode.measure.figures import Evaluation, repetition
from decode.measure.machine import describe_kernels
from decode.measure.ranks import ALONE, Ranks
from decode.measure.thinking import counts_by_part, thinking_tokens
from decode.settings import EvaluationProtocol
from decode.stats import Counts
from decode.target.cache.prefix_cache import prefix_cache
from decode.target.generation_config import (
    decoder_settings,
    nothing_filled_in,
    padded_prompts,
    stated_config,
)
from decode.target.loading import Target
from decode.target.pretrained import decoder_start
from decode.verification import Verification

OnProgress = Callable[[str, int, int], None]  # name of the measurement, number done, total
# Tokens per row that a decoder emits in one turn. With short turns, a slow second of the machine
# affects all decoders equally.
TURN = 8
WARM_UP = 8  # tokens decoded before anything is timed
# The number of times that `fastest_gamma` decodes each prompt with each γ.
GAMMA_TURNS = 2


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    progress: OnProgress | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Measures `drafter` on prompts (token ids).

    Acceptance is measured on all prompts, in batches. Times are measured on the timed prompts, in
    batches of `timed_batch_size`: plain and speculative decoding take turns of a few tokens, and
    `generate()` runs after both. A drafter that learns from requests starts both measurements with
    nothing learnt, and learns while they run. Raises UserError as `Decoder` does, and if the
    prompts do not fill one timed batch.

    ranks: the processes that share the prompts of the acceptance run. This is the first of them,
    which measures all times alone; the others call `help_evaluate`. Parts that learn from earlier
    prompts, decide for a batch or read costs would give other figures, so with them, and with
    fewer prompts than processes, this process decodes all prompts.
    """
    if not prompts:
        raise UserError("there are no prompts to evaluate on")
    report = progress or (lambda what, done, of: None)
    batches = _timed(prompts, protocol)
    timed = sum(map(len, batches))
    speculative, costs = protocol.decoder(target, drafter, min(prompts, key=len))
    ranks = ranks if _can_share(speculative, protocol, prompts, ranks) else ALONE
    rule, max_depth = protocol.for_drafter(drafter).rule, speculative.policy.max_depth
    protocol = replace(protocol, rule=rule, gamma=max_depth)
    plain, _ = replace(protocol, policy=None, shape=None).decoder(target, DRAFTERS["none"]())
    speculative.drafter.forget()  # what the costs were measured on
    outputs, counts, steps = _decode_all(speculative, prompts, protocol, report, ranks)
    short = replace(protocol, timed_tokens=min(WARM_UP, protocol.timed_tokens))
    for batch in batches[:1]:  # warm-up, not part of any figure
        texts = [prompts[i] for i in batch]
        for which in (plain, speculative):
            which.decode(texts, short.timed_tokens)
        if protocol.generate:
            time_generate(target, texts, short)
    speculative.drafter.forget()  # the timed prompts are among those of the acceptance run
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
    marks = None if target.has_encoder else thinking_tokens(target.tokenizer)
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
        ranks.world,
        counts_by_part(steps, prompts, outputs, marks) if marks else None,
        describe_kernels(speculative.lm),
    )


def help_evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    ranks: Ranks,
) -> None:
    """The part of all processes but the first in an `evaluate` over several. Raises as it does."""
    _timed(prompts, protocol)
    decoder, _ = protocol.decoder(target, drafter)
    if _can_share(decoder, protocol, prompts, ranks):
        decoder.drafter.forget()
        _decode_all(decoder, prompts, protocol, lambda what, done, of: None, ranks)


def _can_share(
    decoder: Decoder, protocol: EvaluationProtocol, prompts: Sequence[object], ranks: Ranks
) -> bool:
    """Whether each process has a prompt, and the counts do not depend on which prompts are decoded
    before or beside a prompt."""
    learns = decoder.drafter.learns or decoder.policy.by_batch
    return len(prompts) >= ranks.world and not (learns or protocol.needs_costs)


def _timed(prompts: Sequence[Sequence[int]], protocol: EvaluationProtocol) -> list[list[int]]:
    """The indices of the timed prompts, in full batches."""
    size = protocol.timed_batch_size
    count = min(protocol.timed_prompts, len(prompts) // size * size)
    if not count and protocol.timed_prompts:
        raise UserError(
            f"there are {len(prompts)} prompts, too few for one timed batch of {size}; give more "
            "prompts, or set a smaller timed_batch_size"
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
    ranks: Ranks,
) -> tuple[list[list[int]], Counts, list[Verification]]:
    # Prompts of similar length come together: less padding.
    order = ranks.share(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))
    ended = itertools.count(1)
    report("acceptance", 0, len(order))
    # The turns of one chat come one after the other, so a turn reuses the turns before it.
    decoder.prefixes = prefix_cache(decoder.lm.model)
    run = decoder.decode(
        [prompts[i] for i in order],
        protocol.max_new_tokens,
        seed=protocol.seed,
        row_ids=order,
        on_end=lambda *_: report("acceptance", next(ended), len(order)),
        batch_size=protocol.batch_size,
    )
    decoder.prefixes = None  # times are those of complete prompts
    for step in run.steps:
        step.rows = np.array(order)[step.rows]
    outputs: list[list[int]] = [[] for _ in prompts]
    counts, steps = Counts.zero(), list[Verification]()
    for indices, texts, theirs, passes in ranks.gather((order, run.outputs, run.counts, run.steps)):
        for index, output in zip(indices, texts, strict=True):
            outputs[index] = output
        counts += theirs
        steps += passes
    return outputs, counts, steps


def time_generate(
    target: Target, prompts: Sequence[Sequence[int]], protocol: EvaluationProtocol
) -> tuple[float, int]:
    """The seconds that `generate()` of `transformers` takes for these prompts in one batch, with
    the same sampling and length, and the number of tokens it emits.

    It gets only the protocol's settings. The checkpoint's `generation_config`, which it would use
    otherwise, is ignored, as in our loop. Only tokens that the checkpoint of a target with an
    encoder forces or forbids stay so, as in our loop too (but the token at the length limit).
    """
    settings = stated_config(
        protocol.sampling,
        max_new_tokens=protocol.timed_tokens,
        eos_token_ids=target.eos_token_ids,
        **decoder_settings(target.model, limited=False),
    )
    ids, mask = padded_prompts(
        prompts, settings.pad_token_id, target.device, right=target.has_encoder
    )
    with nothing_filled_in(target.model):
        begin = time.perf_counter()
        texts = target.model.generate(ids, attention_mask=mask, generation_config=settings)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds = time.perf_counter() - begin
    answers = texts[:, 1 if target.has_encoder else ids.shape[1] :].tolist()
    return seconds, sum(_length(answer, target.eos_token_ids) for answer in answers)


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
        logits = _next_logits(target, prompt, text[:at])
        gap = (logits[text[at]] - logits[other[at]]).abs()
        # Both logits are rounded, and their sums were rounded in different orders.
        close += bool(gap <= 4 * torch.finfo(target.dtype).eps * logits.abs().max())
    return same / len(prompts), (same + close) / len(prompts)


@torch.inference_mode()
def _next_logits(target: Target, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """float32 [V]: the logits of transformers' forward after a text that answers a prompt."""
    if target.has_encoder:
        inputs = {"input_ids": prompt, "decoder_input_ids": [decoder_start(target.model), *text]}
        tensors = {key: torch.tensor([ids], device=target.device) for key, ids in inputs.items()}
        logits: torch.Tensor = target.model(**tensors).logits
    else:
        ids = torch.tensor([[*prompt, *text]], device=target.device)
        logits = target.model(input_ids=ids, logits_to_keep=1).logits
    return logits[0, -1].float()


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
                decoders[which].drafter.forget()  # all of them decode the same prompts
                run = decoders[which].decode(batch, protocol.timed_tokens, seed=protocol.seed)
                emitted[which] += sum(map(len, run.outputs)) / GAMMA_TURNS
                seconds[which, place] = min(seconds[which, place], run.timing.total)
    return gammas[int(np.argmax(emitted / seconds.sum(1)))]
