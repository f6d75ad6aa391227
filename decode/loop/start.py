"""Rows begin, and get another drafter."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from decode.base.device import to_device
from decode.base.errors import UserError, require_whole
from decode.draft import Contexts
from decode.draw.constraint import Guide, require_ends
from decode.draw.penalties import AnswerSpans
from decode.draw.random_numbers import CounterRNG
from decode.loop.parts import Parts
from decode.loop.rows import Rows, RowSettings, require_prompts
from decode.loop.waiting_rows import PromptReading
from decode.model.cache.cached_model import CachedLM
from decode.model.features import Features
from decode.rules.exact import ExactMatch
from decode.verification import Verification

# Counts the times that rows began, over all decodes of this process.
_begun = itertools.count(1)
# More identities than a decode has rows.
IDENTITIES = 1 << 32


def new_rows(
    lm: CachedLM,
    parts: Parts,
    eos: np.ndarray,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    numbers: np.ndarray,
    ids: Sequence[int] | None,
    settings: RowSettings | Sequence[RowSettings],
    *,
    ahead: int | None,
    numbers_repeat: bool,
) -> Rows:
    """The rows of new prompts (token ids), with space for their texts and drafts.

    eos: int [n], the ids that end a text. numbers: int [B]. ids: the ids of each row, for its
    random numbers. None: the numbers. max_new_tokens, settings: one for all, or one for each
    prompt. ahead: as for `Decoding`. numbers_repeat: as for `Decoder`.
    Raises UserError as `require_prompts` does, for another number of limits or settings than
    prompts, for a limit below 1, for more log-probabilities than tokens, and if the rule cannot
    judge the drafts of a row.
    """
    count, device = len(prompts), lm.device
    several = isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str)
    limits = list(max_new_tokens) if several else [max_new_tokens]  # type: ignore[arg-type]
    each = [settings] if isinstance(settings, RowSettings) else list(settings)
    for limit in limits:
        require_whole(max_new_tokens=limit)
    require_prompts(prompts, lm.max_prompt, lm.vocab_size)
    for name, values, one in (
        ("max_new_tokens", limits, not several),
        ("settings", each, isinstance(settings, RowSettings)),
    ):
        if len(values) != count and not one:
            raise UserError(
                f"there are {len(values)} {name} for {count} prompts; expected one for each, "
                "or one for all"
            )
    asked = max((one.logprobs or 0 for one in each), default=0)
    if asked > lm.vocab_size:
        raise UserError(
            f"logprobs is {asked}; expected at most {lm.vocab_size}, the tokens of the target"
        )
    parts.require_sampling((one.sampling, one.drafts) for one in each)
    for row in each:
        row.sampling.require_vocabulary(lm.vocab_size)
        if row.sampling.grammar is not None:
            least = row.sampling.min_tokens
            require_ends(row.sampling.grammar, eos.tolist(), row.ignore_eos, least)
    texts, sources = lm.texts_and_sources(prompts)
    lengths = np.array([len(text) for text in texts])
    ends = np.minimum(lengths + np.array(limits), lm.max_positions)
    reach = ends
    if ahead is not None:
        allocated = lm.slots.allocated[1] - parts.draft_room
        reach = np.minimum(ends, np.maximum(lengths + 1 + ahead, allocated))
    contexts = Contexts.of(texts, int(reach.max()) + parts.draft_room, sources)
    if any(one.label is not None for one in each):
        contexts.labels = [one.label for one in each] * (count if len(each) == 1 else 1)
    kinds = np.zeros(count, dtype=np.int64) if len(each) == 1 else np.arange(count)
    begins = lengths - np.array([one.answered for one in each])[kinds]
    contexts.answers = AnswerSpans(begins, eos)
    if any(one.sampling.grammar is not None for one in each):
        contexts.guides = [
            _guide(each[kind], begin) for kind, begin in zip(kinds, begins.tolist(), strict=True)
        ]
    identities = np.asarray(numbers if ids is None else ids, dtype=np.int64)
    new = np.array([_needs_new_numbers(parts, one, numbers_repeat) for one in each], dtype=bool)
    if new.any():
        identities = identities + next(_begun) * IDENTITIES * new[kinds]
    seeds = np.array([one.seed for one in each], dtype=np.int64)[kinds]
    rng = CounterRNG(to_device(seeds, device), to_device(identities, device))
    return Rows(numbers, contexts, ends, rng, each, kinds, reach)


def _guide(settings: RowSettings, begin: int) -> Guide | None:
    """For a row whose prompt has this length."""
    grammar = settings.sampling.grammar
    return None if grammar is None else Guide(grammar, begin)


def _needs_new_numbers(parts: Parts, settings: RowSettings, numbers_repeat: bool) -> bool:
    """Whether a text depends on what the drafter or the policy remembers, which was drawn with the
    numbers of earlier texts. It does not if exact match judges the drafts."""
    remembers = parts.drafter.learns and numbers_repeat
    if not (remembers or parts.policy.by_batch):
        return False
    rule = parts.rule
    chosen = parts.drafter.siblings(settings.drafts) == "chosen"
    exact = isinstance(rule, ExactMatch) or rule.is_exact_for(settings.sampling)
    return not (exact or (rule.lossless and chosen))


def start_drafter(
    lm: CachedLM, rows: Rows, parts: Parts, fresh: bool, waiting: Sequence[PromptReading] = ()
) -> Features | None:
    """Make room for the texts up to their `reach`, and for the drafts of these parts, which may be
    others than those that the decoder uses now. fresh: the drafter is new, so it starts with the
    running texts, if there are some, and the prompts of `waiting` rows are read from their first
    tokens on.

    Returns the hidden states that it got: those of the texts, except their last tokens. Raises
    UserError if memory is missing. The parts in use can then go on.
    """
    before = rows.contexts.tokens.shape[1]
    every = [rows, *(reading.new for reading in waiting)]
    reach = max(int(some.reach.max(initial=0)) for some in every)
    capacity = max(reach + parts.draft_room, *(some.contexts.tokens.shape[1] for some in every))
    lm.add_rows(0, capacity)
    for some in every:
        some.widen(capacity)
    for reading in waiting if fresh else ():
        reading.begin_anew()
    if not len(rows):
        return None
    if fresh:
        held = len(rows) + sum(reading.count for reading in waiting)
        features = read_again(lm, rows.contexts, parts.drafter.captured_layers, held)
        parts.drafter.start(rows.contexts)
        parts.drafter.observe(
            Verification.of_nothing(rows.numbers, rows.contexts, lm.device, features=features)
        )
        return features
    if capacity > before:  # no rows join, but all rows get more space
        nothing = Verification.of_nothing(rows.numbers[:0], Contexts.of((), 0), lm.device)
        parts.drafter.add_rows(rows.contexts, nothing)
    return None


def read_again(
    lm: CachedLM, contexts: Contexts, layers: Sequence[int], held: int
) -> Features | None:
    """The hidden states of these layers for the running texts, except their last tokens: for a
    drafter that was not there when they were read. None without layers, and if no text has two
    tokens.

    held: how many rows the target has. One text after the other is read in the slots of one more
    row. So the keys and values of the running rows stay as they are, bit by bit. Raises UserError
    as `CachedLM.add_rows` and `capture` do.
    """
    rows, counts = len(contexts.lengths), contexts.lengths - 1
    width = int(counts.max(initial=0))
    if not width or not layers:
        return None
    captured = lm.captured_layers
    lm.capture(layers)
    values: dict[int, torch.Tensor] = {}
    start = np.zeros(1, dtype=np.int64)
    try:
        lm.add_rows(1, contexts.tokens.shape[1])
        for row in np.flatnonzero(counts).tolist():
            count = int(counts[row])
            if contexts.sources is not None:
                lm.encode(contexts.sources[row : row + 1], held)
            ids = to_device(contexts.tokens[row : row + 1, :count], lm.device)
            lm.read(ids, start, counts[row : row + 1], held)
            for layer, states in lm.features.items():
                if layer not in values:
                    values[layer] = states.new_zeros(rows, width, states.shape[2])
                values[layer][row, :count] = states[0]
    finally:
        lm.keep_rows(np.arange(held))
        lm.captured_layers = captured
    return Features(values, counts)
