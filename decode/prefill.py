"""The target reads the prompts of new rows, apart from the rows that already decode."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from decode.device import to_device
from decode.draft import Contexts, Draft
from decode.rows import Rows
from decode.sampling import CounterRNG
from decode.target.hidden_states import Features
from decode.target.prefix_cache import SHORTEST
from decode.verification import Decision, Scores, Verification

if TYPE_CHECKING:
    from decode.loop import Decoder


def prefill(decoder: "Decoder", new: Rows, first: int) -> tuple[Verification, Features | None]:
    """Read the prompts of new rows, in the slots of the rows from `first` on. What the decoder's
    prefix cache knows of a prompt is copied, and only the rest is read.

    Returns the verification of an empty draft, which gives the first token of each row, and the
    hidden states of the prompts' tokens. They are None if the drafter captures none, or if nothing
    is read: a prompt of one token, whose first token is drafted (`first_target`).
    """
    contexts, count, device = new.contexts, len(new), decoder.lm.device
    fed = contexts.lengths - (not decoder.first_target)
    zeros = np.zeros(count, dtype=np.int64)
    nothing = Draft.none(count, device)
    logits, features = torch.zeros(count, 1, 1), None
    if fed.any():
        start = reuse(decoder, contexts, fed, first)
        # Past the end of a row's prompt is padding. It needs slots too.
        columns = start[:, None] + np.arange(int((fed - start).max()))
        columns = np.minimum(columns, contexts.tokens.shape[1] - 1)
        ids = to_device(np.take_along_axis(contexts.tokens, columns, axis=1), device)
        with decoder.lm.only(first, first + count):
            logits = decoder.lm.read(ids, start, fed - start)
        if decoder.drafter.captured_layers:
            features = Features(decoder.lm.features, fed)
    if not decoder.first_target:  # the first step verifies the first token like all others
        scores = Scores(logits, decoder.sampling)
        empty, broken = np.zeros((count, 0), dtype=np.int64), np.zeros(count, dtype=bool)
        return Verification(nothing, scores, nothing.tokens, zeros, zeros, empty, broken), features
    scores = Scores(logits, decoder.sampling, nothing, contexts, decoder.processors)
    none = torch.zeros(count, dtype=torch.int64, device=device)
    token = scores.pick(new.rng.uniforms(CounterRNG.NEXT, 0, 1))[:, 0]
    decision = Decision(nothing.tokens, accepted=none, reached=none, next_token=token)
    return Verification.of(nothing, scores, decision), features


def reuse(decoder: "Decoder", contexts: Contexts, fed: np.ndarray, first: int) -> np.ndarray:
    """Copy known keys and values into the slots of the rows from `first` on. Returns how many
    tokens of each row need not be fed, int [B]: at most fed[b] − 1, because the last one gives
    logits.

    Nothing is reused if the drafter reads hidden states: those of known tokens are not kept.
    """
    start, known = np.zeros(len(fed), dtype=np.int64), decoder.prefixes
    if known is None or decoder.drafter.captured_layers:
        return start
    for row, tokens in enumerate(contexts.tokens):
        states = known.find(tokens[: max(fed[row] - 1, 0)])
        if states is not None:
            decoder.lm.slots.put(first + row, states)
            start[row] = states.count
    start = np.minimum(start, contexts.tokens.shape[1] - int((fed - start).max()))
    known.reused += int(start.sum())
    known.read += int((fed - start).sum())
    return start


def remember(decoder: "Decoder", contexts: Contexts, rows: np.ndarray) -> None:
    """Keep the keys and values of rows, int [n], before they leave."""
    known, slots = decoder.prefixes, decoder.lm.slots
    if known is None or decoder.drafter.captured_layers:
        return
    room = known.room(slots.token_bytes)
    for row in rows.tolist():
        # The target has not read the last token.
        count = min(int(contexts.lengths[row]) - 1, room)
        if count >= SHORTEST:
            known.add(contexts.tokens[row, :count], slots.take(row, count))
