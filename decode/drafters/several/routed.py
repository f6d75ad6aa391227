"""One of several drafters for each row (Online Speculative Decoding, 2310.07177, section 4.3)."""

from collections.abc import Sequence

import numpy as np

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.several.routing import ByText, Classify, Routing
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.verification import Verification


class RoutedDrafter(CompositeDrafter):
    """Each row is drafted by one of the drafters, which is chosen when the row joins, before
    anything is drafted. So decoding stays lossless.

    routing: chooses (`decode.drafters.several.routing`). A function of the text is a `ByText`.
    routes: int [B], the drafter of each row that runs. Raises UserError as `CompositeDrafter` does,
    and where the routing names a drafter that is not there.
    """

    def __init__(self, drafters: Sequence[Drafter], routing: Routing | Classify) -> None:
        super().__init__(drafters)
        self.routing = routing if isinstance(routing, Routing) else ByText(routing)
        self.routes = np.zeros(0, dtype=np.int64)
        self.per_row = {"routes": self._routes}
        self._depths: np.ndarray | None = None  # [B], what it was asked for in this pass

    def with_drafters(self, drafters: Sequence[Drafter]) -> "RoutedDrafter":
        return RoutedDrafter(drafters, self.routing)

    def asked(self, depths: np.ndarray) -> np.ndarray:
        asked: np.ndarray = self.routes[:, None] == np.arange(len(self.drafters))
        return asked

    def start(self, contexts: Contexts) -> None:
        super().start(contexts)
        self._depths = None

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        # A drafter without new rows has nothing to read.
        for member in np.unique(self.routes[first:]):
            self.drafters[member].prefill(contexts, first)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        self._depths = limits.depths.copy()
        return super().draft(contexts, limits, sampling, rng)

    def observe(self, verification: Verification) -> None:
        super().observe(verification)
        # As a part of another drafter it also receives passes that it did not draft for.
        depths, self._depths = self._depths, None
        if depths is not None:
            accepted = np.minimum(verification.accepted, depths)
            self.routing.observe(self.routes, accepted, depths)

    def forget(self) -> None:
        super().forget()
        self.routing.forget()

    @property
    def learns(self) -> bool:
        return super().learns or self.routing.learns

    def _routes(self, contexts: Contexts) -> np.ndarray:
        lengths = contexts.lengths.tolist()
        labels = contexts.labels or [None] * len(lengths)
        rows = zip(contexts.tokens, lengths, labels, strict=True)
        routes = [self.routing.route(tokens[:length], label) for tokens, length, label in rows]
        for route in routes:
            if not 0 <= route < len(self.drafters):
                raise UserError(
                    f"the routing names drafter {route}; expected 0 to {len(self.drafters) - 1}"
                )
        return np.array(routes, dtype=np.int64)
