"""The target's hidden states in the loop: those of each token, once, in order, as a plain forward
has them, whatever the batch, the draft and the verdict."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter, NoDrafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.loop.decoding import Decoder
from decode.model.hidden_states import FINAL, Recorder
from decode.verification import Verification
from tests.tiny import tiny_model

model = functools.cache(tiny_model)
PROMPTS = [[5, 17, 250, 9, 42], [7], [11, 12, 13], [40, 41, 42, 43, 44, 45, 46, 47]]
NEW = 16
CAPTURED_LAYERS = (FINAL, 0, 1)


class Reader(Drafter):
    """Drafts the target's own next token and others, in a chain or a tree, and collects what it
    is given to read."""

    captured_layers = CAPTURED_LAYERS

    def __init__(self, family: str, tree: bool) -> None:
        self.target, self.tree = model(family), tree
        self.given: list[list[torch.Tensor]] = []  # [F] of each row's tokens so far
        self.done: list[tuple[list[int], list[torch.Tensor]]] = []
        self.depths: set[int] = set()

    @property
    def branches(self) -> bool:
        return self.tree

    def max_nodes(self, gamma: int) -> int:
        return 3 if self.tree else gamma

    def start(self, contexts: Contexts) -> None:
        self.given = [[] for _ in contexts.lengths]
        self.texts = contexts

    def observe(self, done: Verification) -> None:
        if done.features is not None:
            values = done.features.of(self.captured_layers)
            for row, count in enumerate(done.features.counts):
                self.given[row] += list(values[row, :count])
                self.depths.add(int(count))
        for row, length in enumerate(done.contexts.lengths if done.number else []):
            text = done.contexts.tokens[row, :length].tolist()
            self.done.append((text, list(self.given[row])))

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
        if not self.tree:
            tokens = torch.cat([right, torch.full_like(right, 9)], 1)[:, : limits.max_depth]
            return Draft(tokens, np.minimum(limits.depths, tokens.shape[1]))
        # The right one second, so that the accepted path is not where the first nodes are.
        tokens = torch.cat([torch.full_like(right, 9), right, torch.full_like(right, 8)], 1)
        parents = torch.tensor([[-1, -1, 1]]).expand(len(tokens), -1)
        return Draft(tokens, np.full(len(tokens), 3), parents=parents)


@pytest.mark.parametrize(
    ("family", "tree", "first_target"),
    [
        *(("llama", tree, first) for tree in (False, True) for first in (False, True)),
        *((family, True, True) for family in ("gpt2", "gemma", "qwen3")),
    ],
)
def test_each_token_is_read_once_as_a_plain_forward_has_it(
    family: str, tree: bool, first_target: bool
) -> None:
    plain = Decoder(model(family), NoDrafter()).decode(PROMPTS, NEW).outputs
    # Two texts end early, at places of their own.
    ends = [plain[0][5], plain[2][10]]
    reader = Reader(family, tree)
    decoder = Decoder(model(family), reader, gamma=2, eos_token_ids=ends, first_target=first_target)
    run = decoder.decode(PROMPTS, NEW)
    assert len({len(output) for output in run.outputs}) > 1  # rows left one after the other
    assert run.counts.accepted.sum() > 0
    # Blocks of several tokens, and of one.
    assert {1, 2} <= reader.depths
    hidden: dict[tuple[int, ...], torch.Tensor] = {}
    for text, features in reader.done:
        if run_ended(text, features):
            continue
        assert len(features) == len(text) - 1
        key = tuple(text)
        if key not in hidden:
            last = model(family).base_model(torch.tensor([text])).last_hidden_state
            layers = layer_outputs(family, text)
            hidden[key] = torch.cat([last, *layers], -1)[0]
        # Other shapes, so other rounding; states of about 1.
        torch.testing.assert_close(
            torch.stack(features), hidden[key][: len(features)], rtol=1e-3, atol=1e-4
        )


def run_ended(text: list[int], features: list[torch.Tensor]) -> bool:
    """A text that was cut at its end has features past it."""
    return len(features) > len(text) - 1


@torch.no_grad()
def layer_outputs(family: str, text: list[int]) -> list[torch.Tensor]:
    """What both layers put out, by hooks of our own."""
    found: list[torch.Tensor] = []
    lm: Any = model(family)
    layers = lm.transformer.h if family == "gpt2" else lm.model.layers
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: found.append(out if torch.is_tensor(out) else out[0])
        )
        for layer in layers
    ]
    lm(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    return found


def test_nothing_is_taken_where_nobody_reads() -> None:
    decoder = Decoder(model("llama"), NgramDrafter())
    decoder.decode(PROMPTS, 4)
    assert decoder.lm.features == {}
    decoder = Decoder(model("llama"), Reader("llama", False), gamma=2)
    decoder.decode(PROMPTS, 4)
    assert not any(module._forward_hooks for module in model("llama").modules())


@pytest.mark.parametrize("kind", [CompositeDrafter, SeveralDrafters])
def test_drafters_of_drafters_pass_on_what_is_read(kind: Any) -> None:
    reader, other = Reader("llama", False), Reader("llama", False)
    other.captured_layers = (1,)
    both = kind([NgramDrafter(), other, reader])
    assert both.captured_layers == (FINAL, 0, 1)
    Decoder(model("llama"), both, gamma=2).decode(PROMPTS, 8)
    whole, part = reader.done[-1][1], other.done[-1][1]
    assert len(whole) == len(part)
    assert torch.equal(torch.stack(whole)[:, 64:], torch.stack(part))


@pytest.mark.parametrize("layer", [2, -2])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    with pytest.raises(UserError, match=f"layer {layer} were requested, but .* has 2 layers"):
        Recorder(model("llama"), [layer])
