"""The rows that decode together: how each is decoded, how they join, which place each one keeps.

Shapes: B rows, C tokens of space.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from decode.base.errors import UserError, require_whole
from decode.draft import Contexts
from decode.draw.mixed_sampling import combined
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.text_stream import Stop


@dataclass(frozen=True)
class RowSettings:
    """How one row is decoded. Rows with different settings run in the same passes.

    sampling: how its text is drawn. draft_sampling: how its drafts are drawn. None: as the text.
    seed: a whole number of 64 bits. Its random numbers depend on it and on the row's id.
    stop: ends the text, in addition to the EOS ids and the length limit. Rows may share one.
    ignore_eos: an EOS id does not end the text.
    logprobs: for each emitted token, give its log-probability and this number of the likeliest
        tokens with theirs (`decode.draw.logprobs`). None: give nothing.
    answered: how many tokens at the end of the prompt are a part of the row's text, which a grammar
        and penalties go on from.
    label: the label of the row's kind of text, for drafters that are chosen by it
        (`decode.drafters.several.routed.RoutedDrafter`).

    Raises UserError for a seed or a number of log-probabilities outside these ranges.
    """

    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: Stop | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    draft_sampling: Sampling | None = None
    label: str | None = None
    answered: int = 0

    def __post_init__(self) -> None:
        require_whole(-(2**63), 2**63 - 1, seed=self.seed)
        if self.logprobs is not None:
            require_whole(0, logprobs=self.logprobs)

    @property
    def drafts(self) -> Sampling:
        """How its drafts are drawn."""
        return self.draft_sampling or self.sampling


class Rows:
    """Rows with their texts, limits, random numbers and settings.

    numbers: int [B], the number of each row in its decode. A number is never used again.
    contexts: the committed texts. ends: int [B], the largest length of each text. reach: int [B],
    the length up to which each text has memory now. unread: bool [B], the rows whose texts the
    drafter never read. rng: the random numbers. settings: all settings in use. kinds: int [B],
    which of them a row has.

    From the settings: sampling, draft_sampling: those of all rows, as one object. ignore_eos: bool
    [B]. stop_ids: int64 [B, n], the ids that end a text besides EOS ids, filled up with −1.
    logprobs: int [B], −1 for a row that asks for none. stops: the stops of each row; empty if no
    row has one.
    """

    def __init__(
        self,
        numbers: np.ndarray,
        contexts: Contexts,
        ends: np.ndarray,
        rng: CounterRNG,
        settings: Sequence[RowSettings],
        kinds: np.ndarray,
        reach: np.ndarray,
    ) -> None:
        self.numbers, self.contexts, self.ends, self.rng = numbers, contexts, ends, rng
        self.reach, self.unread = reach, np.ones(len(numbers), dtype=bool)
        self._settle(list(settings), kinds)

    @classmethod
    def none(cls, device: torch.device) -> "Rows":
        nothing = np.zeros(0, dtype=np.int64)
        rng = CounterRNG(0, torch.zeros(0, dtype=torch.int64, device=device))
        return cls(nothing, Contexts.of((), 0), nothing, rng, [], nothing, nothing)

    def __len__(self) -> int:
        return len(self.numbers)

    def _settle(self, settings: list[RowSettings], kinds: np.ndarray) -> None:
        """Take settings and compute what depends on them."""
        self.settings, self.kinds = settings, kinds
        self.sampling = combined([one.sampling.without_grammar for one in settings], kinds)
        self.draft_sampling = combined([one.drafts.without_grammar for one in settings], kinds)
        asked = [-1 if one.logprobs is None else one.logprobs for one in settings]
        self.logprobs = np.array(asked, dtype=np.int64)[kinds]
        self.ignore_eos = np.array([one.ignore_eos for one in settings], dtype=bool)[kinds]
        ids = [one.sampling.stop_token_ids for one in settings]
        padded = np.full((len(ids), max(map(len, ids), default=0)), -1, dtype=np.int64)
        for place, some in enumerate(ids):
            padded[place, : len(some)] = some
        self.stop_ids = padded[kinds]
        self.stops: list[Stop | None] = []
        if any(one.stop is not None for one in settings):
            self.stops = [settings[kind].stop for kind in kinds.tolist()]

    def add(self, new: "Rows") -> None:
        """Append rows that join."""
        self.numbers = np.concatenate([self.numbers, new.numbers])
        self.ends = np.concatenate([self.ends, new.ends])
        self.reach = np.concatenate([self.reach, new.reach])
        self.unread = np.concatenate([self.unread, new.unread])
        # A new object: the last verification still refers to the old one.
        both = replace(self.contexts)
        both.add_rows(new.contexts)
        self.contexts = both
        self.rng.add_rows(new.rng)
        places = {one: place for place, one in enumerate(dict.fromkeys(self.settings))}
        for one in new.settings:
            places.setdefault(one, len(places))
        kinds = [
            np.array([places[one] for one in rows.settings], dtype=np.int64)[rows.kinds]
            for rows in (self, new)
        ]
        self._settle(list(places), np.concatenate(kinds))

    def widen(self, capacity: int) -> None:
        """Make space for `capacity` tokens in each row, if there is less."""
        missing = max(capacity - self.contexts.tokens.shape[1], 0)
        tokens = np.pad(self.contexts.tokens, ((0, 0), (0, missing)))
        # A new object: the last verification still refers to the old one.
        self.contexts = replace(self.contexts, tokens=tokens)

    def keep(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'], in this order."""
        self.numbers, self.ends = self.numbers[rows], self.ends[rows]
        self.reach, self.unread = self.reach[rows], self.unread[rows]
        self.contexts.keep_rows(rows)
        self.rng.keep_rows(rows)
        used, kinds = np.unique(self.kinds[rows], return_inverse=True)
        self._settle([self.settings[kind] for kind in used], kinds)

    def own_stops(self) -> set[Stop]:
        """The stops of all rows."""
        return {stop for stop in self.stops if stop is not None}

    def leave(self, leaving: np.ndarray) -> None:
        """Tell the stops of these rows, bool [B], that they leave."""
        for index in np.flatnonzero(leaving).tolist() if self.stops else ():
            stop = self.stops[index]
            if stop is not None:
                stop.leave(int(self.numbers[index]))


def compacted(stays: np.ndarray) -> np.ndarray:
    """int [B']: the rows that stay (`stays`, bool [B]), in their new order. The last rows move into
    the holes, so each row that leaves moves at most one other.

    >>> compacted(np.array([True, False, True, True])).tolist()
    [0, 3, 2]
    """
    kept = np.flatnonzero(stays)
    order = np.arange(len(kept))
    order[~stays[: len(kept)]] = kept[kept >= len(kept)]
    return order


def token_ids(prompts: Any) -> list[list[int]]:
    """The token ids of prompts as lists: of lists, arrays or tensors, or what a tokenizer returns
    (`input_ids`, without what `attention_mask` leaves out). Raises UserError for anything else."""
    mask = None
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise UserError(f"the prompts have {', '.join(prompts)}; expected input_ids")
        prompts, mask = prompts["input_ids"], prompts.get("attention_mask")
    each = [_whole_numbers(index, prompt) for index, prompt in enumerate(prompts)]
    if mask is not None:
        kept = [np.asarray(row).astype(bool) for row in mask]
        each = [ids[row] for ids, row in zip(each, kept, strict=True)]
    return [ids.tolist() for ids in each]


def _whole_numbers(index: int, prompt: Any) -> np.ndarray:
    ids = np.asarray(prompt) if np.ndim(prompt) else np.zeros(())
    if ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu"):
        return ids.astype(np.int64) if not ids.size else ids
    raise UserError(
        f"prompt {index} is of the type {type(prompt).__name__}; expected a list of prompts, each "
        "a list of token ids"
    )


def require_prompts(prompts: Iterable[Sequence[int]], max_positions: int, vocab_size: int) -> None:
    """Raise UserError for prompts (token ids) that cannot be decoded: no prompts, an empty prompt,
    a prompt that fills the context, or ids outside the vocabulary. The message gives the index of
    the prompt."""
    row = -1
    for row, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt, max_positions, vocab_size):
            raise UserError(f"prompt {row} {problem}")
    if row < 0:
        raise UserError("there are no prompts to decode")


def prompt_problem(prompt: Sequence[int], max_positions: int, vocab_size: int) -> str | None:
    """Why a prompt (token ids) cannot be decoded, in words that follow its name. None: it can."""
    if not len(prompt):
        return "is empty; a model needs at least one token"
    if len(prompt) >= max_positions:
        return (
            f"has {len(prompt)} tokens and the target's context holds {max_positions}, so there is "
            "no room for an answer; shorten the prompt"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return (
            f"has token ids from {min(prompt)} to {max(prompt)}; expected ids from 0 to "
            f"{vocab_size - 1}. Use the target's tokenizer"
        )
    return None
