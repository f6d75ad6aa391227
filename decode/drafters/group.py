"""The common base of drafters that combine other drafters."""

from collections.abc import Sequence

import torch

from decode.drafters import Contexts, Drafter, Verified
from decode.errors import UserError
from decode.target.hidden_states import Features


class Group(Drafter):
    """Several drafters that receive all calls. Subclasses define how their drafts become one.

    Raises UserError for an empty list, and for different vocabularies.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise UserError("several drafters, but none is named; give at least one")
        self.drafters = list(drafters)
        sizes = {size for drafter in drafters if (size := drafter.vocab_size) is not None}
        if len(sizes) > 1:
            raise UserError(
                f"drafters that are to draft together have vocabularies of {sorted(sizes)} tokens; "
                "expected one and the same, the target's"
            )
        self._vocab_size = next(iter(sizes), None)
        self.observes = any(drafter.observes for drafter in drafters)
        self.captured_layers = tuple(
            sorted({layer for drafter in drafters for layer in drafter.captured_layers})
        )

    @property
    def vocab_size(self) -> int | None:
        return self._vocab_size

    def deepest(self, gamma: int) -> int:
        return max(drafter.deepest(gamma) for drafter in self.drafters)

    def start(self, contexts: Contexts) -> None:
        for drafter in self.drafters:
            drafter.start(contexts)

    def prefill(self, contexts: Contexts) -> None:
        for drafter in self.drafters:
            drafter.prefill(contexts)

    def read(self, features: Features) -> None:
        for drafter in self.drafters:
            if drafter.captured_layers:
                drafter.read(features)

    def verified(self, seen: Verified) -> None:
        for drafter in self.drafters:
            if drafter.observes:
                drafter.verified(seen)

    def commit(self, contexts: Contexts) -> None:
        for drafter in self.drafters:
            drafter.commit(contexts)

    def keep_rows(self, rows: torch.Tensor) -> None:
        for drafter in self.drafters:
            drafter.keep_rows(rows)
