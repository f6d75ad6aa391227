"""The target's hidden states of new tokens, for drafters that read them.

Shapes: B rows, n tokens, H hidden size, T captured layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device


@dataclass
class Features:
    """values: the hidden states of each captured layer, [B, n, H]. counts: int [B] on the host. Row
    b holds its first counts[b] tokens, the rest is padding."""

    values: Mapping[int, Tensor]
    counts: np.ndarray

    def of(self, captured_layers: Sequence[int]) -> Tensor:
        """[B, n, T·H]: the hidden states of some captured layers, concatenated in this order."""
        if len(captured_layers) == 1:
            return self.values[captured_layers[0]]
        return torch.cat([self.values[layer] for layer in captured_layers], -1)

    def at(self, columns: Tensor, counts: np.ndarray) -> "Features":
        """The hidden states in these columns of each row, int64 [B, m]. The first counts[b] columns
        of row b are valid."""
        rows_B1 = torch.arange(len(counts), device=columns.device)[:, None]
        return Features({layer: x[rows_B1, columns] for layer, x in self.values.items()}, counts)

    def newest(self, captured_layers: Sequence[int]) -> Tensor:
        """[B, T·H]: the hidden states of each row's last valid token. Meaningless for a row with
        counts[b] = 0."""
        values = self.of(captured_layers)
        columns = to_device(np.maximum(self.counts - 1, 0), values.device)
        return values[torch.arange(len(columns), device=values.device), columns]

    def last(self) -> "Features":
        """The hidden states of only the last valid token of each row."""
        device = next(iter(self.values.values())).device
        columns = to_device(np.maximum(self.counts - 1, 0), device)[:, None]
        return self.at(columns, np.minimum(self.counts, 1))

    def none(self, rows: int) -> "Features":
        """As many columns for `rows` rows without a valid token."""
        values = {layer: x.new_zeros(rows, *x.shape[1:]) for layer, x in self.values.items()}
        return Features(values, np.zeros(rows, dtype=self.counts.dtype))

    def joined(self, other: "Features") -> "Features":
        """These rows, then the rows of `other`, both with the same number of columns."""
        values = {layer: torch.cat([x, other.values[layer]]) for layer, x in self.values.items()}
        return Features(values, np.concatenate([self.counts, other.counts]))

    def keep_rows(self, rows: np.ndarray) -> "Features":
        """The hidden states of only these rows, int [B'], in this order."""
        values = {
            layer: x.index_select(0, to_device(rows, x.device)) for layer, x in self.values.items()
        }
        return Features(values, self.counts[rows])
