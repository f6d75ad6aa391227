"""Evaluates a drafter: acceptance on many prompts, time on a few, always with the same loop.

`train.measure.figures` explains each figure.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.drafters import DRAFTERS, Drafter
from decode.grammars import Grammar
from decode.loop.decoding import Decoder
from decode.loop.rows import RowSettings
from decode.model.cache.prefix_cache import prefix_cache
from decode.model.loading import Target
from decode.settings import EvaluationProtocol
from decode.stats import Counts
from decode.verification import Verification
from train.measure.figures import Evaluation, repetition
from train.measure.machine import describe_kernels
from train.measure.ranks import ALONE, Ranks
from train.measure.same_text import identical
from train.measure.structured import structured_figures
from train.measure.thinking import counts_by_part, thinking_tokens
from train.measure.timed_prompts import OnProgress, time_by_turns, timed_batches


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    progress: OnProgress | None = None,
    ranks: Ranks = ALONE,
    grammars: Sequence[Grammar | None] | None = None,
) -> Evaluation:
    """Measures `drafter` on prompts (token ids).

    Acceptance is measured on all prompts, in batches. Times are measured on the timed prompts, in
    batches of `timed_batch_size`: plain and speculative decoding take turns of a few tokens, and
    `generate()` runs after both on some of them. A drafter that learns from requests starts both
    measurements with nothing learnt, and learns while they run. Raises UserError as `Decoder` does,
    and if the prompts do not fill one timed batch.

    ranks: the processes that share the prompts of the acceptance run. This is the first of them,
    which measures all times alone; the others call `help_evaluate`. Parts that learn from earlier
    prompts, decide for a batch or read costs would give other figures, so with them, and with
    fewer prompts than processes, this process decodes all prompts.

    grammars: of the answer to each prompt, for one process. Plain decoding is masked too, and
    `generate()`, which knows no grammar, is not timed. None: no answer has a grammar.
    """
    if not prompts:
        raise UserError("there are no prompts to evaluate on")
    report = progress or (lambda what, done, of: None)
    if grammars is not None:
        protocol, ranks = replace(protocol, generate=False), ALONE
    batches = timed_batches(prompts, protocol)
    speculative, costs = protocol.decoder(target, drafter, min(prompts, key=len))
    ranks = ranks if _can_share(speculative, protocol, prompts, ranks) else ALONE
    rule, max_depth = protocol.for_drafter(drafter).rule, speculative.policy.max_depth
    used = speculative.parts.rule
    protocol = replace(protocol, rule=rule, gamma=max_depth)
    plain, _ = replace(protocol, policy=None, shape=None).decoder(target, DRAFTERS["none"]())
    speculative.drafter.forget()  # what the costs were measured on
    speculative.numbers_repeat = False  # it forgets again before the prompts are timed
    settings = None if grammars is None else _settings(protocol, grammars)
    outputs, counts, steps = _decode_all(speculative, prompts, protocol, report, ranks, settings)
    runs = time_by_turns(target, plain, speculative, prompts, batches, protocol, report, settings)
    marks = None if target.has_encoder else thinking_tokens(target.tokenizer)
    same, close = None, None
    if protocol.sampling.greedy and batches:
        same, close = identical(
            target,
            [prompts[i] for batch in batches for i in batch],
            *([text for run in of for text in run.outputs] for of in (runs.plain, runs.drafted)),
        )
    return Evaluation(
        protocol,
        dtype_name(target.dtype),
        used.lossless or used.is_exact_for(protocol.sampling),
        counts,
        outputs,
        [repetition(output) for output in outputs],
        runs.plain,
        runs.drafted,
        runs.generated if protocol.generate else None,
        same,
        close,
        steps,
        costs,
        speculative.drafter.describe_drafts(max_depth),
        runs.others,
        ranks.world,
        counts_by_part(steps, prompts, outputs, marks) if marks else None,
        describe_kernels(speculative.lm),
        None if grammars is None else structured_figures(grammars, outputs),
    )


def _settings(
    protocol: EvaluationProtocol, grammars: Sequence[Grammar | None]
) -> list[RowSettings]:
    """Those of each row, with its grammar."""
    return [
        RowSettings(
            replace(protocol.sampling, grammar=grammar),
            protocol.seed,
            draft_sampling=protocol.draft_sampling,
        )
        for grammar in grammars
    ]


def help_evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    ranks: Ranks,
) -> None:
    """The part of all processes but the first in an `evaluate` over several. Raises as it does."""
    timed_batches(prompts, protocol)
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


def _decode_all(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    protocol: EvaluationProtocol,
    report: OnProgress,
    ranks: Ranks,
    settings: Sequence[RowSettings] | None = None,
) -> tuple[list[list[int]], Counts, list[Verification]]:
    # Prompts of similar length come together: less padding.
    order = ranks.own(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))
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
        settings=None if settings is None else [settings[i] for i in order],
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
