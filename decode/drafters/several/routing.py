"""What chooses the drafter of a row: its text, a label that comes with it, or what was measured.

Shapes: B rows, M drafters, L tokens of a text, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from decode.base.errors import UserError

# The index of the drafter for a text, int64 [L].
Classify = Callable[[np.ndarray], int]


class Routing(ABC):
    """Chooses one of M drafters for each row, when the row joins.

    learns: the choice depends on earlier rows, until `forget`.
    """

    learns = False

    @abstractmethod
    def route(self, text: np.ndarray, label: str | None) -> int:
        """The index of the drafter for a row. text: int64 [L], the prompt, and its first new token
        if the target emits that before the first draft. label: the label of `RowSettings`."""

    def observe(self, routes: np.ndarray, accepted: np.ndarray, depths: np.ndarray) -> None:
        """Receives what came of each draft. routes: int [B], the drafter of each row. accepted: int
        [B], how many of its tokens were accepted. depths: int [B], how many it was allowed."""
        return None

    def forget(self) -> None:
        """Drop what was learnt from earlier rows."""
        return None


class ByText(Routing):
    """By a function of the text alone."""

    def __init__(self, classify: Classify) -> None:
        self.classify = classify

    def route(self, text: np.ndarray, label: str | None) -> int:
        return self.classify(text)


class ByLabel(Routing):
    """By the label that comes with a row (`RowSettings.label`): the paper's case of languages that
    are known.

    labels: the labels of each drafter. A row without a label, or with another one, goes to the
    first drafter. Raises UserError for labels that are not different.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        if len(set(labels)) < len(labels):
            raise UserError(f"labels are {list(labels)}; expected a different one for each drafter")
        self.places = {label: place for place, label in enumerate(labels)}

    def route(self, text: np.ndarray, label: str | None) -> int:
        return 0 if label is None else self.places.get(label, 0)


class ByAcceptance(Routing):
    """By the acceptance that was measured in earlier rows: the bandit UCB1 (Auer et al. 2002).

    The drafter with the largest rᵢ + √(2·ln n / nᵢ) drafts the row. nᵢ is the number of rows that
    drafter i got so far, n their sum. rᵢ is the share of the allowed depth that was accepted, over
    all verifications of these rows. A drafter without rows comes first. All drafters count as
    equally expensive. A row counts as soon as it joins, so rows that join together are spread.

    The choice depends on the rows before. So a sampled text depends on them too, and its
    distribution does not. Not from the paper.

    count: M.
    """

    learns = True

    def __init__(self, count: int) -> None:
        self.count = count
        self.forget()

    def forget(self) -> None:
        self.rows = np.zeros(self.count)  # nᵢ
        self.accepted, self.allowed = np.zeros(self.count), np.zeros(self.count)

    def shares(self) -> np.ndarray:
        """float64 [M]: rᵢ; 0 for a drafter that was never judged."""
        shares: np.ndarray = self.accepted / np.maximum(self.allowed, 1)
        return shares

    def route(self, text: np.ndarray, label: str | None) -> int:
        with np.errstate(divide="ignore", invalid="ignore"):
            bonus = np.sqrt(2 * np.log(max(self.rows.sum(), 1)) / self.rows)
        chosen = int(np.where(self.rows > 0, self.shares() + bonus, np.inf).argmax())
        self.rows[chosen] += 1
        return chosen

    def observe(self, routes: np.ndarray, accepted: np.ndarray, depths: np.ndarray) -> None:
        np.add.at(self.accepted, routes, accepted)
        np.add.at(self.allowed, routes, depths)


class TokenProfiles:
    """Which of several domains a text most likely belongs to, by how often each token occurs there:
    naive Bayes over single tokens, all domains equally likely before. A `Classify`.

    examples: token ids of each domain. Each count is one higher than it is there, so that no token
    excludes a domain. Raises UserError for an example without tokens or with ids outside the
    vocabulary.
    """

    def __init__(self, examples: Sequence[Sequence[int]], vocab_size: int) -> None:
        for domain, tokens in enumerate(examples):
            if not len(tokens) or min(tokens) < 0 or max(tokens) >= vocab_size:
                raise UserError(
                    f"the example of domain {domain} has no tokens, or ids outside the vocabulary "
                    f"of {vocab_size} tokens; give a text of that domain"
                )
        counts = np.stack([np.bincount(tokens, minlength=vocab_size) + 1.0 for tokens in examples])
        self._log_shares: np.ndarray = np.log(counts / counts.sum(1, keepdims=True))

    def __call__(self, text: np.ndarray) -> int:
        return int(self._log_shares[:, text].sum(1).argmax())
