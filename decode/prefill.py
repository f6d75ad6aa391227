"""The target reads the prompts of new rows, apart from the rows that already decode."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from decode.draft import Draft
from decode.rows import Rows
from decode.sampling import CounterRNG
from decode.target.hidden_states import Features
from decode.verification import Scores, Verification

if TYPE_CHECKING:
    from decode.loop import Decoder


def prefill(decoder: "Decoder", new: Rows, first: int) -> tuple[Verification, Features | None]:
    """Read the prompts of new rows, in the slots of the rows from `first` on.

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
        ids = torch.as_tensor(contexts.tokens[:, : int(fed.max())], device=device)
        with decoder.lm.only(first, first + count):
            logits = decoder.lm.read(ids, zeros, fed)
        if decoder.drafter.captured_layers:
            features = Features(decoder.lm.features, fed)
    if not decoder.first_target:  # the first step verifies the first token like all others
        scores = Scores(logits, decoder.sampling)
        empty, broken = np.zeros((count, 0), dtype=np.int64), np.zeros(count, dtype=bool)
        return Verification(nothing, scores, nothing.tokens, zeros, zeros, empty, broken), features
    scores = Scores(logits, decoder.sampling, nothing, contexts, decoder.processors)
    none = torch.zeros(count, dtype=torch.int64, device=device)
    token = scores.pick(new.rng.uniforms(CounterRNG.NEXT, 0, 1))[:, 0]
    verification = Verification.of(
        nothing, scores, path=nothing.tokens, accepted=none, reached=none, next_token=token
    )
    return verification, features
