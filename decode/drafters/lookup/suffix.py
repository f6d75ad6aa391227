"""Suffix decoding: drafts what most often followed the end of the text, longer for longer matches.

A trie holds the beginnings of all suffixes of texts, with counts, and finds the end of a text.
"""

import itertools
import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.base.errors import UserError, require_whole
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.drafters.lookup.lookup_tree import (
    LookupDrafter,
    LookupTree,
    grow_likeliest,
    require_tree_nodes,
)
from decode.verification import Verification

# The longest match with its continuation. Each token of a text costs one step for each size.
DEEPEST_TREE = 256
# Stands after the last token of a complete text. No token has this id.
END = -1


class Node:
    """A sequence of `depth` tokens in the trie. count: how often it occurs. followed: how often a
    token follows it, up to the trie's depth. children: by the next token. A child that occurs once
    is not a node: it is the position of the token after it."""

    __slots__ = ("children", "count", "depth", "followed")

    def __init__(self, depth: int, count: int) -> None:
        self.depth, self.count, self.followed = depth, count, 0
        self.children: dict[int, Place] = {}


Place = Node | int


class SuffixTrie:
    """Counts of all sequences of at most `max_depth` tokens in some texts.

    A sequence that occurs once is stored only as its position in the text. So a text takes memory
    by its length, and only sequences that occur again take nodes. A token of new text costs one
    step for each suffix that occurred before, at most `max_depth`.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._root = Node(0, 0)
        self._tokens = array("q")  # of all texts, each complete one with END after it
        self._first = 0  # the position of the first of these tokens; earlier texts were dropped
        self._open: list[Node] = []  # the suffixes of the open text that are nodes, longest first
        self._lengths: deque[int] = deque()  # of the complete texts
        self.tokens = 0  # of the complete texts
        self._begin = 0  # the position of the first token of the open text

    def __len__(self) -> int:
        """The number of complete texts."""
        return len(self._lengths)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the open text."""
        for token in tokens:
            self._tokens.append(token)
            after = self._first + len(self._tokens)
            self._open.append(self._root)
            still = []
            for node in self._open:
                node.followed += 1
                child = node.children.get(token)
                if child is None:
                    node.children[token] = after
                    continue
                if isinstance(child, int):
                    child = node.children[token] = self._node(node.depth + 1, child)
                child.count += 1
                if child.depth < self.max_depth:
                    still.append(child)
            self._open = still

    def close(self) -> None:
        """The open text is complete."""
        self._tokens.append(END)
        after = self._first + len(self._tokens)
        self._lengths.append(after - 1 - self._begin)
        self.tokens += self._lengths[-1]
        self._open, self._begin = [], after

    def drop_first(self) -> None:
        """Drops the oldest complete text."""
        length = self._lengths.popleft()
        self.tokens -= length
        text = self._tokens[:length].tolist()
        for begin in range(length):
            node = self._root
            for token in itertools.islice(text, begin, begin + self.max_depth):
                node.followed -= 1
                child = node.children[token]
                if isinstance(child, Node):
                    child.count -= 1
                if isinstance(child, int) or not child.count:
                    del node.children[token]
                    break
                node = child
        del self._tokens[: length + 1]
        self._first += length + 1

    def find(self, sequence: Sequence[int]) -> Place | None:
        """The place of a sequence. None: it does not occur."""
        place: Place | None = self._root
        for token in sequence:
            if isinstance(place, Node):
                place = place.children.get(token)
            elif place is not None:
                place = place + 1 if self._token(place) == token else None
        return place

    def followers(self, place: Place) -> list[tuple[int, float, Place]]:
        """The tokens that follow a place, each with its share of them and the place after it.
        Tokens that are new there come first."""
        if isinstance(place, int):
            token = self._token(place)
            return [] if token == END else [(token, 1.0, place + 1)]
        return [
            (token, (child.count if isinstance(child, Node) else 1) / place.followed, child)
            for token, child in reversed(place.children.items())
        ]

    def _node(self, depth: int, position: int) -> Node:
        """The node of a sequence that occurred once, with this position after it."""
        node, token = Node(depth, 1), self._token(position)
        if depth < self.max_depth and token != END:
            node.children[token], node.followed = position + 1, 1
        return node

    def _token(self, position: int) -> int:
        index = position - self._first
        return self._tokens[index] if index < len(self._tokens) else END


@dataclass
class _SuffixRow:
    """begin: where the output begins. stored: how many tokens of the text its trie has."""

    trie: SuffixTrie
    begin: int
    stored: int = 0

    def read(self, text: np.ndarray) -> None:
        """The text so far, int64 [L]: store what is new."""
        self.trie.extend(text[self.stored :].tolist())
        self.stored = len(text)


@DRAFTERS.register("suffix")
class SuffixDrafter(LookupDrafter):
    """Drafts the continuation that most often followed the end of the text (2411.04975). Needs no
    training.

    There is one trie for each row's text (prompt and output), and one for the outputs of the last
    `max_cached_requests` texts that ended, of all rows (0: none), with at most `max_cached_tokens`
    tokens together. The oldest output goes first. For
    each length m of the text's end that occurs in a trie, the draft has at most
    ⌊max_spec_factor·m + max_spec_offset⌋ tokens, and at most γ. The probability of a token is
    estimated as the product of its and its ancestors' shares among the tokens that followed there.
    Tokens below `min_token_prob` are left out. The score of a draft is the sum of its
    probabilities. The highest score decides the length m and the trie. Of equal ones the longer
    match is taken, and the row's text before the outputs. A draft with a score below `min_score` is
    not made, so that the next drafter of `suffix+DIRECTORY` drafts.

    tree_nodes: the most nodes of a tree, the likeliest ones, γ deep. None: a path.
    max_tree_depth: the longest match and its continuation, in tokens. The names are vLLM's, where
    it has the setting. Different from the paper: shares count only the occurrences that a token
    follows, so the end of the running text does not count.

    Drafts depend on earlier requests, and lossless text does not, as with `store`. Raises
    UserError for settings out of range.
    """

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_cached_tokens: int = 500_000,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        min_score: float = 0.0,
        tree_nodes: int | None = None,
    ) -> None:
        require_whole(2, DEEPEST_TREE, max_tree_depth=max_tree_depth)
        require_whole(0, max_cached_requests=max_cached_requests)
        require_whole(max_cached_tokens=max_cached_tokens)
        if min(max_spec_factor, min_score) < 0 or not 0 <= min_token_prob <= 1:
            raise UserError(
                f"max_spec_factor={max_spec_factor}, min_score={min_score}, "
                f"min_token_prob={min_token_prob}; expected numbers ≥ 0, and a min_token_prob of "
                "at most 1"
            )
        if max_spec_factor * (max_tree_depth - 1) + max_spec_offset < 1:
            raise UserError(
                f"max_spec_factor={max_spec_factor} and max_spec_offset={max_spec_offset} allow no "
                "token even for the longest match; raise one of them"
            )
        require_tree_nodes(tree_nodes)
        self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.max_spec_factor, self.max_spec_offset = max_spec_factor, max_spec_offset
        self.min_token_prob, self.min_score = min_token_prob, min_score
        self.tree_nodes = tree_nodes
        self.outputs = SuffixTrie(max_tree_depth)
        self._rows: list[_SuffixRow] = []
        self.per_row = {"_rows": self._new_rows}

    @property
    def branches(self) -> bool:
        return self.tree_nodes is not None

    def max_nodes(self, gamma: int) -> int:
        return self.tree_nodes or gamma

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        new = contexts.rows_from(first)
        for row, tokens, length in zip(
            self._rows[first:], new.tokens, new.lengths.tolist(), strict=True
        ):
            row.read(tokens[:length])

    def look_up(self, row: int, text: np.ndarray, depth: int) -> LookupTree:
        own, end = self._rows[row], text[1 - self.max_tree_depth :].tolist()
        own.read(text)
        tree = self._best(own.trie, end, depth)
        other = self._best(self.outputs, end, depth)
        tree = other if other.score > tree.score else tree
        return tree if tree.score >= self.min_score else LookupTree()

    def _best(self, trie: SuffixTrie, end: list[int], depth: int) -> LookupTree:
        """The draft with the highest score after any match. end: the last tokens of the text."""
        places: list[Place] = []
        while len(places) < len(end) and (place := trie.find(end[-len(places) - 1 :])) is not None:
            places.append(place)
        best = LookupTree()
        for match in range(len(places), 0, -1):
            # Not below a whole number because of rounding.
            budget = math.floor(self.max_spec_factor * match + self.max_spec_offset + 1e-6)
            nodes = min(budget, self.max_nodes(depth))
            if nodes <= best.score:  # nor can a shorter match have a higher score
                break
            tree = grow_likeliest(
                places[match - 1],
                trie.followers,
                nodes=nodes,
                depth=min(depth, self.max_tree_depth - match),
                least=self.min_token_prob,
                branches=self.branches,
            )
            best = tree if tree.score > best.score else best
        return best

    def observe(self, verification: Verification) -> None:
        if verification.number:
            self._store(verification, self._rows)
        else:
            self._observe_prefill(verification)

    def _observe_prefill(self, verification: Verification) -> None:
        """The texts of the last rows were the prompts until now."""
        rows = self._rows[len(self._rows) - len(verification.rows) :]
        for row, length in zip(rows, verification.lengths.tolist(), strict=True):
            row.begin = length
        self._store(verification, rows)

    def _store(self, verification: Verification, rows: Sequence[_SuffixRow]) -> None:
        """Store the outputs of the rows whose text has ended."""
        contexts = verification.contexts
        ended = verification.ended if self.max_cached_requests else ()
        for index in np.flatnonzero(ended).tolist():
            text = contexts.tokens[index, rows[index].begin : contexts.lengths[index]]
            self.outputs.extend(text.tolist())
            self.outputs.close()
            while self._holds_too_much():
                self.outputs.drop_first()

    def _holds_too_much(self) -> bool:
        outputs = self.outputs
        return len(outputs) > self.max_cached_requests or outputs.tokens > self.max_cached_tokens

    def forget(self) -> None:
        self.outputs = SuffixTrie(self.max_tree_depth)

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        super().add_rows(contexts, verification)
        self._observe_prefill(verification)

    def _new_rows(self, contexts: Contexts) -> list[_SuffixRow]:
        return [
            _SuffixRow(SuffixTrie(self.max_tree_depth), begin)
            for begin in contexts.lengths.tolist()
        ]
