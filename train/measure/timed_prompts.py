"""Times decoders on a few prompts, in turns: plain and speculative decoding, and `generate()`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from decode.base.errors import UserError
from decode.costs import OtherProcesses
from decode.drafters import Drafter
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.model.generation_config import (
    decoder_settings,
    nothing_filled_in,
    padded_prompts,
    stated_config,
)
from decode.model.loading import Target
from decode.settings import EvaluationProtocol
from train.measure.intervals import FEWEST_PROMPTS
from train.measure.time_passes import finish

OnProgress = Callable[[str, int, int], None]  # name of the measurement, number done, total
# Tokens per row that a decoder emits in one turn. With short turns, a slow second of the machine
# affects all decoders equally.
TURN = 8
WARM_UP = 8  # tokens decoded before anything is timed
# The number of times that `fastest_gamma` decodes each prompt with each γ.
GAMMA_TURNS = 2


@dataclass
class TimedRuns:
    """plain, drafted: one run for each timed batch. generated: the seconds and tokens of
    `generate()` by the place of a batch among them (`generated_batches`); empty if it was not
    timed. others: see `decode.costs`; None if nothing was timed."""

    plain: list[Decoded] = field(default_factory=list)
    drafted: list[Decoded] = field(default_factory=list)
    generated: dict[int, tuple[float, int]] = field(default_factory=dict)
    others: float | None = None


def time_by_turns(
    target: Target,
    plain: Decoder,
    speculative: Decoder,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    report: OnProgress,
    settings: Sequence[RowSettings] | None = None,
) -> TimedRuns:
    """Times both decoders on batches of prompts (token ids) after a warm-up, and after some of them
    `generate()`, if the protocol asks for it. batches: the indices of their prompts
    (`timed_batches`). settings: of the row of each prompt."""
    runs, timed = TimedRuns(), sum(map(len, batches))
    short = replace(protocol, timed_tokens=min(WARM_UP, protocol.timed_tokens))
    for batch in batches[:1]:  # warm-up, not part of any figure
        texts = [prompts[i] for i in batch]
        for which in (plain, speculative):
            which.decode(texts, short.timed_tokens, settings=_of(settings, batch))
        if protocol.generate:
            time_generate(target, texts, short)
    speculative.drafter.forget()  # the timed prompts are among those of the acceptance run
    with_generate = generated_batches(len(batches)) if protocol.generate else []
    watch = OtherProcesses()
    for done, batch in enumerate(batches):
        report("timing", done * protocol.timed_batch_size, timed)
        texts = [prompts[i] for i in batch]
        pair = [(runs.plain, plain), (runs.drafted, speculative)]
        # Each goes first in turn, so that a drift of the machine does not affect the ratio.
        order = pair if done % 2 == 0 else pair[::-1]
        decodings = [
            Decoding(
                which,
                texts,
                protocol.timed_tokens,
                seed=protocol.seed,
                row_ids=batch,
                settings=_of(settings, batch),
            )
            for _, which in order
        ]
        for (its, _), run in zip(order, in_turns(decodings, TURN * len(batch)), strict=True):
            for step in run.steps:
                step.rows = np.array(batch)[step.rows]
            its.append(run)
        if done in with_generate:
            runs.generated[done] = time_generate(target, texts, protocol)
    runs.others = watch.share() if batches else None
    report("timing", timed, timed)
    return runs


def _of(settings: Sequence[RowSettings] | None, batch: Sequence[int]) -> list[RowSettings] | None:
    return None if settings is None else [settings[i] for i in batch]


def timed_batches(
    prompts: Sequence[Sequence[int]], protocol: EvaluationProtocol
) -> list[list[int]]:
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


def generated_batches(count: int) -> list[int]:
    """Those of `count` timed batches that `generate()` is timed on, evenly spread: as many as an
    interval needs. It takes several times as long as both decoders together."""
    return np.linspace(0, count - 1, min(count, FEWEST_PROMPTS)).astype(int).tolist()


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
        finish(target.device)
        seconds = time.perf_counter() - begin
    answers = texts[:, 1 if target.has_encoder else ids.shape[1] :].tolist()
    return seconds, sum(_length(answer, target.eos_token_ids) for answer in answers)


def _length(text: Sequence[int], eos: Sequence[int]) -> int:
    """The number of tokens of a text up to and including its first EOS."""
    return next((i + 1 for i, token in enumerate(text) if token in eos), len(text))


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
