"""The target's hidden states in the loop: who gets them. What drafters make of them is under the
contract of heads, and `test_window_drafters` compares it in ragged batches."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.loop.decoding import Decoder
from decode.model.hidden_states import FINAL, Recorder
from decode.verification import Verification
from tests.tiny import tiny_model

model = functools.cache(tiny_model)
PROMPTS = [[5, 17, 250, 9, 42], [7], [11, 12, 13], [40, 41, 42, 43, 44, 45, 46, 47]]
CAPTURED_LAYERS = (FINAL, 0, 1)


class Reader(Drafter):
    """Drafts the target's own next token and another, and collects what it is given to read."""

    captured_layers = CAPTURED_LAYERS

    def __init__(self) -> None:
        self.target = model("llama")
        self.given: list[list[torch.Tensor]] = []  # [F] of each row's tokens so far
        self.done: list[list[torch.Tensor]] = []

    def start(self, contexts: Contexts) -> None:
        self.given = [[] for _ in contexts.lengths]

    def observe(self, done: Verification) -> None:
        if done.features is not None:
            values = done.features.of(self.captured_layers)
            for row, count in enumerate(done.features.counts):
                self.given[row] += list(values[row, :count])
        self.done += [list(given) for given in self.given if done.number]

    def keep_rows(self, rows: np.ndarray) -> None:
        self.given = [self.given[row] for row in rows.tolist()]

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        likeliest = []
        for row, length in enumerate(contexts.lengths):
            text = torch.as_tensor(contexts.tokens[row, :length])[None]
            # Now right at once, now wrong at once, now right for one token.
            best = int(self.target(text).logits[0, -1].argmax())
            likeliest.append((best + int(length % 3 == 0)) % 300)
        right = torch.tensor(likeliest)[:, None]
        tokens = torch.cat([right, torch.full_like(right, 9)], 1)[:, : limits.max_depth]
        return Draft(tokens, np.minimum(limits.depths, tokens.shape[1]))


def test_nothing_is_taken_where_nobody_reads() -> None:
    decoder = Decoder(model("llama"), NgramDrafter())
    decoder.decode(PROMPTS, 4)
    assert decoder.lm.features == {}
    decoder = Decoder(model("llama"), Reader(), gamma=2)
    decoder.decode(PROMPTS, 4)
    assert not any(module._forward_hooks for module in model("llama").modules())


@pytest.mark.parametrize("kind", [CompositeDrafter, SeveralDrafters])
def test_drafters_of_drafters_pass_on_what_is_read(kind: Any) -> None:
    reader, other = Reader(), Reader()
    other.captured_layers = (1,)
    both = kind([NgramDrafter(), other, reader])
    assert both.captured_layers == (FINAL, 0, 1)
    Decoder(model("llama"), both, gamma=2).decode(PROMPTS, 8)
    whole, part = reader.done[-1], other.done[-1]
    assert len(whole) == len(part)
    assert torch.equal(torch.stack(whole)[:, 64:], torch.stack(part))


@pytest.mark.parametrize("layer", [2, -2])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    with pytest.raises(UserError, match=f"layer {layer} were requested, but .* has 2 layers"):
        Recorder(model("llama"), [layer])
