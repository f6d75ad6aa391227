"""REST: drafts what followed the end of the text in a datastore of documents."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from decode.base.errors import UserError, require_whole
from decode.drafters import DRAFTERS
from decode.drafters.lookup.documents import SORTED_TOKENS, Datastore, write_datastore
from decode.drafters.lookup.lookup_tree import (
    LookupDrafter,
    LookupTree,
    grow_likeliest,
    require_tree_nodes,
)
from decode.drafters.lookup.ngram import require_sizes
from decode.model.loading import Target
from decode.shapes import Chain, Shape

OPTIONS_FILE = "config.json"

# Continuations of a datastore: the rows [first, last) of a sorted table, and the next column.
Block = tuple[int, int, int]


@dataclass(frozen=True)
class RestOptions:
    """min_n, max_n: how many of the text's last tokens are looked up, the longest match first.
    max_hits: how many of its places are read. More of them are thinned out evenly. tree_nodes: the
    size of the tree. None: a path.

    Raises UserError for options out of range.
    """

    min_n: int = 2
    max_n: int = 16
    max_hits: int = 5000
    tree_nodes: int | None = 64

    def __post_init__(self) -> None:
        require_sizes(self.min_n, self.max_n, SORTED_TOKENS // 2)
        require_whole(max_hits=self.max_hits)
        require_tree_nodes(self.tree_nodes)


@DRAFTERS.register("rest")
class RestDrafter(LookupDrafter):
    """Looks up the text's end in a datastore and drafts a tree of its continuations (2311.08252).

    The longest end of min_n … max_n tokens that occurs is taken. Its continuations form a trie. A
    node's weight is the number of places that go on so. The draft is the `tree_nodes` nodes of the
    highest weight, at most γ deep (the paper: 10). Of equal ones shallow nodes come first, so a
    node never comes without its ancestors; siblings come by weight.

    Tokens are chosen, not drawn, so `multi_round` and `exact` judge them without bias. The paper's
    code draws for each path again, also after a rejection, which changes the distribution of
    sampled text. Documents are separated in the datastore, and no draft runs from one into the
    next. Raises UserError as `Datastore` does.
    """

    trained = True

    def __init__(self, store: Datastore, options: RestOptions | None = None) -> None:
        self.store, self.options = store, options or RestOptions()

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "RestDrafter":
        try:
            options = RestOptions(**json.loads((path / OPTIONS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}: {OPTIONS_FILE} does not hold the options of a datastore ({error}); "
                "make the datastore again with this version"
            ) from error
        return cls(Datastore(path), options)

    @property
    def branches(self) -> bool:
        return self.options.tree_nodes is not None

    def max_depth(self, gamma: int) -> int:
        # Further down, places are not sorted by what follows.
        return min(gamma, SORTED_TOKENS - self.options.max_n)

    def max_nodes(self, gamma: int) -> int:
        return self.options.tree_nodes or gamma

    def with_shape(self, shape: Shape) -> "RestDrafter":
        if not isinstance(shape, Chain):
            raise UserError(
                f"a datastore has no distributions for the shape {type(shape).__name__.lower()}; "
                "leave the shape out (the best nodes by counts), or use the shape chain"
            )
        return RestDrafter(self.store, replace(self.options, tree_nodes=None))

    def look_up(self, row: int, text: np.ndarray, depth: int) -> LookupTree:
        options, depth = self.options, self.max_depth(depth)
        end = text[-options.max_n :].tolist()
        count, first, last = self.store.longest(end, options.min_n) if depth else (0, 0, 0)
        if not count:
            return LookupTree()
        hits = min(last - first, options.max_hits)
        places = first + np.arange(hits) * (last - first) // hits
        following = self.store.continuations(places, count, depth)

        def followers(block: Block) -> Sequence[tuple[int, float, Block]]:
            begin, end, column = block
            tokens = following[begin:end, column]
            edges = (begin + 1 + np.flatnonzero(tokens[1:] != tokens[:-1])).tolist()
            return [
                (int(following[at, column]), (to - at) / (end - begin), (at, to, column + 1))
                for at, to in zip([begin, *edges], [*edges, end], strict=True)
                if following[at, column] >= 0
            ]

        nodes = self.max_nodes(depth)
        return grow_likeliest(
            (0, hits, 0), followers, nodes=nodes, depth=depth, branches=self.branches
        )


def write_rest(
    directory: Path, documents: Iterable[Sequence[int] | np.ndarray], options: RestOptions
) -> None:
    """Write the files that `RestDrafter.load` reads. documents, and errors: those of
    `write_datastore`."""
    write_datastore(directory, documents)
    (directory / OPTIONS_FILE).write_text(json.dumps(asdict(options)), encoding="utf-8")
