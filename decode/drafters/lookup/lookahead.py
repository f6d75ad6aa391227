"""Lookahead decoding: n-grams that the target itself makes, in the passes that verify them.

Shapes: B rows, W columns of the window, N tokens of an n-gram, M = (N−1)·W window tokens, V
vocabulary.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from decode.base.device import to_device
from decode.base.errors import UserError, require_whole
from decode.drafters import DRAFTERS
from decode.drafters.lookup.lookup_tree import MOST_NODES, LookupDrafter, LookupTree
from decode.verification import Verification


@dataclass
class _LookaheadRow:
    """window: int64 [N−1, W], one line per level; entry (0, 0) is the last token of the text. None:
    nothing was drafted yet. nodes: int64 [N−1, W], where they stand in the last draft, −1 for the
    last token of the text; parents: the same of their parents. pool: by its first token, the rest
    of each n-gram, the one made last at the end."""

    window: np.ndarray | None = None
    nodes: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    parents: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)


@DRAFTERS.register("lookahead")
class LookaheadDrafter(LookupDrafter):
    """Jacobi iterations over a window of guessed tokens become n-grams, and n-grams that begin with
    the text's last token are the drafts (2402.02057). Needs no training and no other model.

    The window has N−1 = `ngram` − 1 levels of `window` columns. Token (ℓ, j) stands ℓ + j places
    after the text's last token, which is (0, 0). It sees the text, level 0 up to column j, and
    column j up to level ℓ. So the window is a tree: level 0 is a path, and column j hangs on it.
    The draft is this tree, merged with at most `guesses` n-grams of the pool. The target's argmax
    after the last level, in the same pass, is the newest token of each column: with the column it
    is an n-gram for the pool. Then every level becomes the one before. The pool keeps the
    `guesses` newest n-grams of each first token.

    All tokens are fixed before a pass draws any, so they are chosen, and every rule for trees is
    exact. γ does not apply. Each pass feeds at most (N−1)·(window + guesses) tokens. Window tokens
    count as drafted tokens, so the acceptance rate is low.

    Different from the paper: the window starts with n-grams of the text, evenly spread (there: with
    random tokens of the prompt). Where the window and a guess agree, they share nodes, so window
    tokens can be accepted too. A window that was cut near the end of a text stays as it is. Raises
    UserError for sizes out of range.
    """

    def __init__(self, window: int = 7, ngram: int = 5, guesses: int = 7) -> None:
        require_whole(window=window, guesses=guesses, **{"ngram - 1": ngram - 1})
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self._rows: list[_LookaheadRow] = []
        self.per_row = {"_rows": lambda new: [_LookaheadRow() for _ in new.lengths]}
        if self.max_nodes(0) > MOST_NODES:
            raise UserError(
                f"window={window}, ngram={ngram}, guesses={guesses} give drafts of "
                f"{self.max_nodes(0)} tokens; expected at most {MOST_NODES}"
            )

    @property
    def branches(self) -> bool:
        return True

    def max_depth(self, gamma: int) -> int:
        return max(self.window + self.ngram - 3, self.ngram - 1)

    def max_nodes(self, gamma: int) -> int:
        return (self.ngram - 1) * (self.window + self.guesses) - 1

    def look_up(self, row: int, text: np.ndarray, depth: int) -> LookupTree:
        """The n-grams of the pool, newest first, and the window. Keeps where its tokens stand."""
        state, tree = self._rows[row], LookupTree()
        if state.window is None:
            starts = np.arange(self.window) * len(text) // self.window
            state.window = text[(starts + np.arange(self.ngram - 1)[:, None]) % len(text)]
        window = state.window
        window[0, 0] = text[-1]
        for guess in reversed(state.pool.get(int(window[0, 0]), {})):
            parent = -1
            for token in guess:
                parent = tree.child(token, parent)
        nodes, parents = np.full_like(window, -1), np.full_like(window, -1)
        for level, line in enumerate(window.tolist()):
            for column, token in enumerate(line):
                if level or column:
                    above = nodes[level - 1, column] if level else nodes[0, column - 1]
                    parents[level, column] = above
                    nodes[level, column] = tree.child(token, int(above))
        places = tree.places()
        state.nodes, state.parents = places[nodes], places[parents]
        return tree

    def observe(self, verification: Verification) -> None:
        draft, rows = verification.draft, self._rows
        windows = [row.window.ravel() for row in rows if row.window is not None]
        if not draft.tokens.shape[1] or len(windows) < len(rows):
            return
        window_BM = np.stack(windows)
        nodes_BM = np.stack([row.nodes.ravel() for row in rows])
        parents_BM = np.stack([row.parents.ravel() for row in rows])
        index = np.minimum(nodes_BM, draft.tokens.shape[1] - 1)
        last = to_device(index[:, -self.window :], draft.tokens.device)
        rows_B1 = torch.arange(len(rows), device=last.device)[:, None]
        newest_BW = verification.scores.raw[rows_B1, last + 1].argmax(-1).cpu().numpy()
        tokens_BM = np.take_along_axis(verification.tokens, index.clip(min=0), axis=1)
        # Nodes may be cut, or another drafter's draft may have taken the place of this one.
        parents = np.take_along_axis(draft.parents_on_host(), index.clip(min=0), axis=1)
        stands_BM = (tokens_BM == window_BM) & (parents == parents_BM)
        stands_BM &= nodes_BM < draft.sizes[:, None]
        for number in np.flatnonzero((stands_BM | (nodes_BM < 0)).all(1)):
            self._advance(rows[number], newest_BW[number])

    def _advance(self, row: _LookaheadRow, newest: np.ndarray) -> None:
        """Put the window's n-grams into the pool, and make every level the one before. newest:
        int64 [W], the tokens after the last level."""
        assert row.window is not None
        ngrams = np.vstack([row.window, newest])
        for first, *rest in ngrams.T.tolist():
            known = row.pool.setdefault(first, {})
            known.pop(tuple(rest), None)
            known[tuple(rest)] = None
            if len(known) > self.guesses:
                del known[next(iter(known))]
        row.window = ngrams[1:]
