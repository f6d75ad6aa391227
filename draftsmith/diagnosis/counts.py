"""Acceptance by place here: what each of several drafters would draft along the target's text.

The target decodes each prompt once, greedily and without drafts. Every drafter sees every pass of
it, and is asked for a draft after each token. What an engine would count with it follows from these
drafts, however many drafters there are.

Shapes: M drafters, N prompts, P places of a text, γ tokens of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.drafters.several.combined import Group
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from draftsmith.export.compare_acceptance import Counting

BATCH = 16
NOTHING = -1  # in the place of a token that was not drafted


class Panel(Group):
    """Drafters that are all asked, and none of whose drafts is verified. drafts: of each call, the
    texts' lengths [B] and the tokens, int64 [M, B, γ]."""

    def __init__(self, drafters: Sequence[Drafter], gamma: int) -> None:
        super().__init__(drafters)
        self.gamma = gamma
        self.drafts: list[tuple[np.ndarray, np.ndarray]] = []

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        rows = len(contexts.lengths)
        tokens = np.full((len(self.drafters), rows, self.gamma), NOTHING)
        for place, drafter in enumerate(self.drafters):
            draft = drafter.draft(contexts, Limits(limits.depths), sampling, rng)
            drafted = draft.tokens.cpu().numpy()[:, : self.gamma]
            inside = np.arange(drafted.shape[1])[None, :] < draft.sizes[:, None]
            tokens[place, :, : drafted.shape[1]] = np.where(inside, drafted, NOTHING)
        self.drafts.append((contexts.lengths.copy(), tokens))
        return Draft.none(rows, "cpu")


@dataclass(frozen=True)
class DraftsAlong:
    """texts: the target's own, int64 [N, P + γ + 1]. tokens: int64 [M, N, P, γ], the draft after
    the first p tokens of each text."""

    texts: np.ndarray
    tokens: np.ndarray


def drafts_along(
    target: Target,
    drafters: Sequence[Drafter],
    prompts: Sequence[Sequence[int]],
    gamma: int,
    places: int,
    *,
    first_drafted: bool,
) -> DraftsAlong:
    """Decode each prompt once and ask all drafters after each of the first `places` tokens.
    Greedy. Rows of a batch are in the order of the prompts."""
    texts, tokens = [], []
    length = places + gamma + 1
    for begin in range(0, len(prompts), BATCH):
        some = prompts[begin : begin + BATCH]
        panel = Panel(drafters, gamma)
        decoder = Decoder(
            target.model, panel, gamma=gamma, rule="speculative", first_target=not first_drafted
        )
        texts += decoder.decode(some, length).outputs
        found = np.full((len(drafters), len(some), places, gamma), NOTHING)
        starts = np.array([len(prompt) for prompt in some])
        for lengths, drafted in panel.drafts:
            # Rows begin together and none ends before the others.
            place = int((lengths - starts)[0])
            if place < places:
                found[:, :, place] = drafted
        tokens.append(found)
    return DraftsAlong(np.array(texts), np.concatenate(tokens, 1))


def accepted_by_place(
    drafts: DraftsAlong,
    member: int,
    counting: Counting,
    eos: Sequence[int],
    tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(drafted, accepted), int [N, γ] each: what an engine counts at each place of its drafts for
    a text of at most `tokens` tokens, with the drafter number `member`."""
    count, _, gamma = drafts.tokens.shape[1:]
    drafted = np.zeros((count, gamma), dtype=np.int64)
    accepted = np.zeros_like(drafted)
    for row in range(count):
        text = drafts.texts[row]
        place = int(not counting.first_drafted)
        ended = bool(np.isin(text[:place], list(eos)).any())
        while place < tokens and not ended:
            depth = gamma if counting.past_length else min(gamma, tokens - place - 1)
            draft = drafts.tokens[member, row, place, :depth]
            draft = draft[draft != NOTHING]
            right = int((draft == text[place : place + len(draft)]).cumprod().sum())
            block = text[place : place + right + 1]
            kept, counted = counting.of_draft(draft.tolist(), block.tolist(), eos)
            drafted[row, :kept] += 1
            accepted[row, :counted] += 1
            ended = bool(np.isin(block, list(eos)).any())
            place += right + 1
    return drafted, accepted
