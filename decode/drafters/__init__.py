"""Drafters by kind. An untrained drafter is a class; a trained one also has a directory.

A drafter proposes tokens and is told which of them were accepted. It knows nothing about
verification rules, and only the vocabulary of the target.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import nn

from decode import row_state
from decode.base.errors import UserError
from decode.base.registry import Registry, import_all
from decode.base.threads import OneAtATime, Together
from decode.draft import Contexts, Draft, Limits, Siblings
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.loading import Target
from decode.shapes import Shape
from decode.verification import Verification


class Drafter(ABC):
    """Base class of drafters.

    Order of the calls in one decode: attach → start → observe → prefill →
    (draft → observe)*, with keep_rows and add_rows in between. If passes without drafts come first,
    `observe` is called more than once before `prefill`. If all rows have left and others come,
    `start` follows again.

    captured_layers: the layers whose hidden states are captured for the drafter
    (`decode.model.hidden_states`). They come from the target's normal passes.
    reads_cache: its drafts read the target's keys and values of the text.
    trained: the drafter can only be loaded from a directory.
    decoder_only: it cannot draft for a target with an encoder: it does not read the sources.
    vocab_size: the size of the vocabulary, equal to the target's. None: it can draft any token.
    learning: its weights are trained between the decodes.
    module: what computes its drafts. None: nothing of its own.
    per_row: the state that it keeps of each row (`decode.row_state`).
    estimates: a draft-length policy is also told how likely the target accepts the next token.
    """

    captured_layers: tuple[int, ...] = ()
    reads_cache: bool = False
    vocab_size: int | None = None
    trained: bool = False
    decoder_only: bool = False
    learning: bool = False
    module: nn.Module | None = None
    per_row: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "Drafter":
        """Loads a directory written by `decode.opening.directory.save_drafter`, onto the target's
        device. Raises UserError if the drafter does not fit the target."""
        raise UserError(f"{cls.__name__} is not trained, so it cannot be loaded from a directory")

    @property
    def turn(self) -> OneAtATime | Together:
        """What each decode enters: a drafter has the state of one decode at a time, and several
        decoders may share it."""
        turn: OneAtATime = self.__dict__.setdefault("_own_turn", OneAtATime("this drafter"))
        return turn

    @property
    def token_bytes(self) -> int:
        """The bytes that it keeps on the target's device for each token of a row."""
        return 0

    @property
    def estimates(self) -> bool:
        return True  # most drafters ask no policy

    @property
    def branches(self) -> bool:
        """Whether its drafts can be trees, not only chains."""
        return False

    @property
    def rewinds(self) -> bool:
        """Whether it takes back tokens that it was shown (`rewind`). A drafter that keeps no state
        of a row has nothing to take back."""
        kind = type(self)
        stateless = kind.keep_rows is Drafter.keep_rows and not self.per_row
        return stateless or kind.rewind is not Drafter.rewind

    def siblings(self, sampling: Sampling) -> Siblings:
        """How this drafter picks the children of one node under `sampling`."""
        return "chosen"

    def max_depth(self, gamma: int) -> int:
        """The max depth of its drafts for this γ. A tree of fixed structure ignores γ: it keeps its
        fixed depth, which can be larger or smaller."""
        return gamma

    def max_nodes(self, gamma: int) -> int:
        """The max number of nodes in one row's draft. For trees it can be more than `gamma`."""
        return gamma

    def describe_drafts(self, max_depth: int | None = None) -> str:
        """A short description of its drafts, such as `chain`. max_depth: None: not limited."""
        return "tree" if self.branches else "chain"

    def with_shape(self, shape: Shape) -> "Drafter":
        """The same drafter with another shape. Raises UserError if it has no choice of shape."""
        raise UserError(f"{type(self).__name__} does not take a shape; leave the shape out")

    def with_window(self, window: SlidingWindow) -> "Drafter":
        """The same drafter, whose layers see only a window of the text. Raises UserError if none of
        its layers attend to the text, or, for heads, if the window is shorter than a draft."""
        raise UserError(
            f"{type(self).__name__} has no layers that see a window of the text; leave window out"
        )

    def attach(self, lm: CachedLM) -> None:
        """Receives the target before a decode, and when a decoder is made. For drafters that run
        layers of the target. Raises UserError if the drafter does not fit it."""
        return None

    def start(self, contexts: Contexts) -> None:
        """A new batch begins. The contexts are the prompts. Drop all state of the last batch."""
        row_state.begin(self, len(contexts.lengths), contexts)

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        """Reads the texts so far of the rows from `first` on, except the last token of each, before
        their first draft. For drafters with their own cache: this time is not counted as draft
        time. Not called if nothing is ever drafted."""
        return None

    @abstractmethod
    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        """Drafts each row, at most `limits` deep. A shorter or empty draft is always allowed.

        `q` must be the distribution that the tokens were really drawn from.
        """

    def observe(self, verification: Verification) -> None:
        """Receives every pass once: after `start` the prefill (the verification of an empty draft),
        then each verification. `contexts` already ends with the emitted tokens.

        A drafter with captured layers gets the target's hidden states in `verification.features`:
        first those of the prompt's tokens, later those of the last token of the text so far and of
        the accepted tokens. So each token comes once and in order. The hidden states of a text's
        last token come with the next call. They are None if the prefill fed nothing."""
        return None

    def rewind(self, lengths: np.ndarray) -> None:
        """Only the first lengths[b] tokens, int [B], of the text of row b still stand: a larger
        drafter showed it tokens that are drafted, and some were rejected. The right tokens follow.
        Only a drafter that `rewinds` is shown such tokens."""
        return None

    def forget(self) -> None:
        """Drop what was learnt from earlier requests. An evaluation calls this between decodes, so
        that no prompt is decoded by a drafter that has seen its answer."""
        return None

    @property
    def learns(self) -> bool:
        """Whether drafts depend on earlier requests: until `forget`, or because its weights are
        trained meanwhile."""
        return self.learning or type(self).forget is not Drafter.forget

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keeps only these rows, int [B'] on the host, in this order."""
        if self.per_row:
            row_state.keep(self, rows)

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        """Rows join the running ones, after them. contexts: all rows, perhaps with more space for
        tokens than before. verification: the prefill of the new rows alone. What `start` and
        `observe` do for the first rows, this does for the new ones.

        Raises UserError for a drafter that keeps state of each row outside of `per_row` and does
        not define this."""
        if self.per_row:
            first = row_state.count(self)
            row_state.add(self, len(contexts.lengths) - first, contexts.rows_from(first))
        kind = type(self)
        if kind.keep_rows is not Drafter.keep_rows and kind.add_rows is Drafter.add_rows:
            raise UserError(
                f"{type(self).__name__} keeps state of each row and takes no rows into a running "
                "decode; decode each batch to its end, or define `add_rows`"
            )


DRAFTERS: Registry[type[Drafter]] = Registry("drafter")


@DRAFTERS.register("none")
class NoDrafter(Drafter):
    """Drafts nothing, so that each verification pass emits one token."""

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        return Draft.none(len(contexts.lengths), "cpu")


for _package in ("decode.drafters", "decode.drafters.lookup", "decode.drafters.tokenizers"):
    import_all(_package)
