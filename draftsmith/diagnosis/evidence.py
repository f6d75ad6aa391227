"""What the causes in a training are measured on: its text, the prompts that are served, and what
the drafter drafts along both.

Shapes: N texts, P places of a text, γ tokens of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.counts import drafts_along
from train.data.chat_tokens import Sample

PLACES = 32  # of each answer
CUTS = 8  # of each train text


@dataclass(frozen=True)
class Rights:
    """right: bool [N, P, γ], whether the draft after the first p tokens of a text has its next
    tokens, and none wrong before them. counts: bool [N, P], the places before the text's end.
    lengths: int [N, P], the tokens before each place, with the prompt."""

    right: np.ndarray
    counts: np.ndarray
    lengths: np.ndarray

    def first_by_text(self, among: np.ndarray | None = None) -> np.ndarray:
        """The share of first draft tokens that are right, of each text with such places, [N']."""
        counts = self.counts if among is None else self.counts & among
        some = counts.any(1)
        return (self.right[..., 0] & counts)[some].sum(1) / counts[some].sum(1)


@dataclass(frozen=True)
class Evidence:
    """samples: of the text that a stage trained on, as it was stored. prompts: token ids of those
    that are served, as the served target's chat template writes them. max_length: of the stage.
    temperature: at which a target wrote the text; None: the data has it."""

    target: Target
    drafter: Drafter
    samples: Sequence[Sample]
    prompts: Sequence[Sequence[int]]
    gamma: int
    max_length: int
    temperature: float | None

    @cached_property
    def answers(self) -> tuple[np.ndarray, Rights]:
        """The target's greedy answers to the prompts, int64 [N, P + γ + 1], and the drafts along
        them."""
        drafts = drafts_along(
            self.target, [self.drafter], self.prompts, self.gamma, PLACES, first_drafted=False
        )
        texts, tokens = drafts.texts, drafts.tokens[0]
        following = np.stack([texts[:, d : d + PLACES] for d in range(self.gamma)], -1)
        right = (tokens == following).cumprod(-1).astype(bool)
        ended = np.isin(texts[:, :PLACES], self.target.eos_token_ids).cumsum(1) > 0
        counts = ~np.pad(ended, ((0, 0), (1, 0)))[:, :PLACES]
        counts[:, 0] = False  # the prompt yields the first token
        starts = np.array([len(prompt) for prompt in self.prompts])[:, None]
        return texts, Rights(right, counts, starts + np.arange(PLACES))

    @cached_property
    def forced(self) -> Rights:
        """Drafts at some places of the train texts: the tokens before each are the text's own.
        P is CUTS here."""
        rng = np.random.default_rng(0)
        places = np.full((len(self.samples), CUTS), -1)
        for row, sample in enumerate(self.samples):
            # A drafter needs two tokens to read.
            trained = np.flatnonzero(sample.mask)
            trained = trained[(trained >= 2) & (trained + self.gamma < len(sample.tokens))]
            some = rng.permutation(trained)[:CUTS]
            places[row, : len(some)] = some
        rows, columns = np.nonzero(places >= 0)
        right = np.zeros((*places.shape, self.gamma), dtype=bool)
        if len(rows):
            cuts = places[rows, columns]
            texts = [self.samples[int(row)].tokens for row in rows]
            drafts = drafts_along(
                self.target,
                [self.drafter],
                [text[:cut] for text, cut in zip(texts, cuts, strict=True)],
                self.gamma,
                1,
                first_drafted=True,
            )
            own = [text[cut : cut + self.gamma] for text, cut in zip(texts, cuts, strict=True)]
            right[rows, columns] = (drafts.tokens[0, :, 0] == np.array(own)).cumprod(-1)
        return Rights(right, places >= 0, places)

    @cached_property
    def marks(self) -> tuple[list[int], list[int]]:
        """The tokens that all prompts begin with, and those that all end with."""
        return _common(self.prompts), _common([prompt[::-1] for prompt in self.prompts])[::-1]


def _common(texts: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that all texts begin with."""
    shortest = min(texts, key=len)
    alike = [len({text[place] for text in texts}) == 1 for place in range(len(shortest))]
    return list(shortest[: alike.index(False) if False in alike else len(alike)])


def find(part: Sequence[int], text: Sequence[int]) -> int | None:
    """Where a part begins first in a text; None: nowhere."""
    for place in range(len(text) - len(part) + 1):
        if list(text[place : place + len(part)]) == list(part):
            return place
    return None
