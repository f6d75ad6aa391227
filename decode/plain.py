"""Speculative decoding on one page: draft, verify, accept, roll back (2211.17192, algorithm 1).

One text, one small drafter, two models of transformers with their own caches, no options. The loop
of this package (`decode.loop.decoding`) does the same for batches, trees and every kind of drafter.
Tests hold it against this page.

Shapes: n tokens read in a pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decode.model.cache_names import with_cache


@dataclass(frozen=True)
class Written:
    """tokens: the continuation. accepted: how many draft tokens each step accepted."""

    tokens: list[int]
    accepted: list[int]


@torch.no_grad()
def decode(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    gamma: int = 4,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Written:
    """Continue a prompt by `new_tokens` tokens, with the target's distribution.

    The models share a vocabulary. gamma: the draft tokens of a step. temperature 0: greedy.
    """
    p, q = Reader(target, temperature), Reader(drafter, temperature)
    text, accepted = list(prompt), []
    while (room := len(prompt) + new_tokens - len(text)) > 0:
        # Draft. The last token of a step is the target's own, so it needs no draft.
        draft: list[int] = []
        q_of = []
        for _ in range(min(gamma, room - 1)):
            q_of.append(q.after(text + draft)[-1])
            draft.append(draw(q_of[-1], generator))
        # Verify: one pass gives the target's distribution for each draft token, and the one after.
        p_of = p.after(text + draft)[-len(draft) - 1 :]
        # Accept from left to right, each token with probability min(1, p/q).
        taken = 0
        while taken < len(draft) and accepts(p_of[taken], q_of[taken], draft[taken], generator):
            taken += 1
        # One more token: in place of the rejected one from max(0, p − q), or after the last one.
        rest = p_of[taken] if taken == len(draft) else (p_of[taken] - q_of[taken]).clamp(min=0)
        text += [*draft[:taken], draw(rest / rest.sum(), generator)]
        accepted.append(taken)
        # Roll back: no cache keeps a rejected token, and none has read the new one.
        p.keep(len(text) - 1)
        q.keep(len(text) - 1)
    return Written(text[len(prompt) :], accepted)


def accepts(p: Tensor, q: Tensor, token: int, generator: torch.Generator | None) -> bool:
    """Whether a token that was drawn from q, [V], passes for one of p, [V]."""
    return bool(torch.rand((), generator=generator) * q[token] < p[token])


def draw(p: Tensor, generator: torch.Generator | None) -> int:
    """A token drawn from p, float32 [V]."""
    return int(torch.multinomial(p, 1, generator=generator))


class Reader:
    """A model that has read the beginning of a text, and keeps its keys and values."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        self.model, self.temperature = model, temperature
        self.cache, self.read = DynamicCache(config=model.config), 0
        # Else a layer with a window drops what it may need again after a rejected token.
        self.cache.activate_past_recording()

    def after(self, text: Sequence[int]) -> Tensor:
        """Read what is new of a text. Returns the distribution after each new token, [n, V]."""
        new = torch.tensor([text[self.read :]], device=self.model.device)
        logits = self.model(input_ids=new, **with_cache(self.model, self.cache)).logits[0].float()
        self.read = len(text)
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return (logits / self.temperature).softmax(-1)

    def keep(self, length: int) -> None:
        """Forget everything past the first `length` tokens of the text."""
        if self.read > length:
            self.cache.crop(length - self.read)
            self.read = length
