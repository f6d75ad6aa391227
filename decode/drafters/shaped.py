"""The common base of drafters that take shapes."""

from decode.draft import Siblings
from decode.drafters import Drafter
from decode.sampling import Sampling
from decode.trees import Shape
from decode.trees.chains import Chain


class ShapedDrafter(Drafter):
    """A drafter that gives logits after any node, and therefore works with any shape.

    shape: default a chain. farthest: the max depth of its drafts; None: no limit.
    """

    def __init__(
        self, vocab_size: int, shape: Shape | None = None, farthest: int | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self.shape = shape or Chain()
        self.farthest = farthest

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def branches(self) -> bool:
        return self.shape.branches

    def siblings(self, sampling: Sampling) -> Siblings:
        return self.shape.siblings(sampling)

    def deepest(self, gamma: int) -> int:
        return self.shape.depth or min(gamma, self.farthest or gamma)

    def most_nodes(self, gamma: int) -> int:
        return self.shape.most_nodes(min(gamma, self.farthest or gamma))

    def describe_drafts(self, most: int | None = None) -> str:
        return self.shape.describe(most)
