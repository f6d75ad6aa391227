"""One drafter per domain, chosen per row (Online Speculative Decoding, 2310.07177, section 4.3)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from decode.draft import Contexts
from decode.drafters import Drafter
from decode.drafters.several.combined import CompositeDrafter
from decode.errors import UserError
from decode.verification import Verification

# The index of the drafter for a text, int64 [L].
Classify = Callable[[np.ndarray], int]


class TokenProfiles:
    """Which of several domains a text most likely belongs to, by how often each token occurs there:
    naive Bayes over single tokens, all domains equally likely before.

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


class RoutedDrafter(CompositeDrafter):
    """Each row is drafted by one of the drafters, chosen from its text when it joins, before
    anything is drafted. So decoding stays lossless, and a row's text does not depend on others.

    classify: gives the index of the drafter for a text: the prompt, and its first new token if the
    target emits that before the first draft. A label that comes with a request is not among what a
    drafter sees. routes: int [B], the drafter of each row that runs. Raises UserError as
    `CompositeDrafter` does, and where `classify` names a drafter that is not there.
    """

    def __init__(self, drafters: Sequence[Drafter], classify: Classify) -> None:
        super().__init__(drafters)
        self.classify = classify
        self.routes = np.zeros(0, dtype=np.int64)

    def with_drafters(self, drafters: Sequence[Drafter]) -> "RoutedDrafter":
        return RoutedDrafter(drafters, self.classify)

    def asked(self, depths: np.ndarray) -> np.ndarray:
        asked: np.ndarray = self.routes[:, None] == np.arange(len(self.drafters))
        return asked

    def start(self, contexts: Contexts) -> None:
        super().start(contexts)
        self.routes = self._routes(contexts)

    def keep_rows(self, rows: torch.Tensor) -> None:
        super().keep_rows(rows)
        self.routes = self.routes[rows.cpu().numpy()]

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        super().add_rows(contexts, verification)
        new = self._routes(contexts.since(len(self.routes)))
        self.routes = np.concatenate([self.routes, new])

    def _routes(self, contexts: Contexts) -> np.ndarray:
        texts = zip(contexts.tokens, contexts.lengths.tolist(), strict=True)
        routes = [self.classify(tokens[:length]) for tokens, length in texts]
        for route in routes:
            if not 0 <= route < len(self.drafters):
                raise UserError(
                    f"the classifier names drafter {route}; expected 0 to {len(self.drafters) - 1}"
                )
        return np.array(routes, dtype=np.int64)
