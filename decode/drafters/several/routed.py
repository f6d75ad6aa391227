"""One of several drafters for each row (Online Speculative Decoding, 2310.07177, section 4.3)."""

from collections.abc import Sequence

import numpy as np

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import Drafter
from decode.drafters.several.combined import CompositeDrafter


class RoutedDrafter(CompositeDrafter):
    """Each row is drafted by one of the drafters, which its label (`RowSettings.label`) names when
    the row joins, before anything is drafted. So decoding stays lossless. This is the paper's case
    of languages that are known.

    labels: the label of each drafter. A row without a label, or with another one, goes to the first
    drafter. routes: int [B], the drafter of each row that runs. Raises UserError as
    `CompositeDrafter` does, and unless there is a different label for each drafter.
    """

    def __init__(self, drafters: Sequence[Drafter], labels: Sequence[str]) -> None:
        super().__init__(drafters)
        if len(labels) != len(self.drafters):
            raise UserError(
                f"there are {len(labels)} labels for {len(self.drafters)} drafters; expected one "
                "for each"
            )
        if len(set(labels)) < len(labels):
            raise UserError(f"labels are {list(labels)}; expected a different one for each drafter")
        self.labels = list(labels)
        self.routes = np.zeros(0, dtype=np.int64)
        self.per_row = {**self.per_row, "routes": self.routes_of}

    def with_drafters(self, drafters: Sequence[Drafter]) -> "RoutedDrafter":
        return type(self)(drafters, self.labels)

    def asked(self, depths: np.ndarray) -> np.ndarray:
        asked: np.ndarray = self.routes[:, None] == np.arange(len(self.drafters))
        return asked

    def routes_of(self, contexts: Contexts) -> np.ndarray:
        """int64 [B]: the drafter of each of these rows."""
        places = {label: place for place, label in enumerate(self.labels)}
        labels = contexts.labels or [None] * len(contexts.lengths)
        routes = [0 if label is None else places.get(label, 0) for label in labels]
        return np.array(routes, dtype=np.int64)
