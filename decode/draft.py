"""What a drafter hands to the verification: a token tree per row.

Shapes: B rows, N nodes (padded to the largest row), V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Draft:
    """B token trees. A chain is a tree without branches: node i hangs on node i−1.

    tokens: int64 [B, N], shallow nodes before deeper ones.
    sizes: int [B] on the host; row b has nodes 0 … sizes[b]−1, the rest is padding.
    q: float32 [B, R, V] or None. Row r is the distribution the drafter drew from in the context
        that ends at node r−1 (row 0: the committed context), so node i's token came from row
        parent(i)+1. For a chain R = N. None: the tokens were chosen, not drawn (q = 1 for each).
    parents: int64 [B, N] or None. −1 is the last committed token; None means a chain.

    >>> Draft.none(2, "cpu").tokens.shape
    torch.Size([2, 0])
    """

    tokens: Tensor
    sizes: np.ndarray
    q: Tensor | None = None
    parents: Tensor | None = None

    @classmethod
    def none(cls, rows: int, device: torch.device | str) -> "Draft":
        """Nothing drafted: the verification pass is a plain decoding step."""
        return cls(
            torch.zeros(rows, 0, dtype=torch.int64, device=device), np.zeros(rows, dtype=np.int64)
        )

    def to(self, device: torch.device) -> "Draft":
        """The same draft with its tensors on `device`."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Draft(self.tokens.to(device), self.sizes, move(self.q), move(self.parents))

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    def limit_depth(self, depths: np.ndarray) -> None:
        """Take away row b's nodes that are deeper than depths[b], int [B]."""
        by_depth = self.nodes_by_depth()
        self.sizes = (by_depth * (np.arange(by_depth.shape[1]) < depths[:, None])).sum(1)

    def valid(self) -> Tensor:
        """bool [B, N]: nodes that are not padding."""
        nodes_N = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return nodes_N < torch.as_tensor(self.sizes, device=self.tokens.device)[:, None]

    def parent_rows(self) -> Tensor:
        """int64 [B, N]: the row of p and q in which node i's token is judged, parent(i) + 1."""
        rows, nodes = self.tokens.shape
        if self.parents is None:
            return torch.arange(nodes, device=self.tokens.device).expand(rows, -1)
        return self.parents + 1

    def ancestors(self) -> Tensor:
        """bool [B, N, N]: [b, i, j] says that node j is node i or one of its ancestors."""
        rows, nodes = self.tokens.shape
        seen = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device).repeat(rows, 1, 1)
        if self.parents is None:
            return seen.cumsum(2).bool().transpose(1, 2)
        index_B = torch.arange(rows, device=self.tokens.device)
        for node in range(1, nodes):
            parent_B = self.parents[:, node]
            above = seen[index_B, parent_B.clamp(min=0)] & (parent_B >= 0)[:, None]
            seen[:, node] |= above
        return seen

    def nodes_by_depth(self) -> np.ndarray:
        """int [B, D] on the host: how many nodes row b has at depth 1, 2, … D."""
        rows, nodes = self.tokens.shape
        if self.parents is None:
            return (np.arange(nodes)[None, :] < self.sizes[:, None]).astype(np.int64)
        depth_BN = self.ancestors().sum(2).cpu().numpy()
        counts = np.zeros((rows, max(int(depth_BN.max(initial=0)), 0)), dtype=np.int64)
        for row, size in enumerate(self.sizes):
            np.add.at(counts[row], depth_BN[row, :size] - 1, 1)
        return counts
