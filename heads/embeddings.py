"""Heads that also read draft tokens. They borrow the target's embeddings and do not store them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from decode.errors import UserError
from heads.base import Heads


class TokenHeads(Heads):
    """Heads with token embeddings. Raises UserError if the target's embedding size is not H."""

    def __init__(
        self, options: Any, depth: int, model: PreTrainedModel, vocabulary: Tensor | None
    ) -> None:
        super().__init__(options, depth, model, vocabulary)
        _require_embeddings(model, self.hidden_size)
        self.embeddings = _BorrowedEmbeddings()

    def borrow(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().borrow(model, dtype, device)
        self.embeddings.borrow(model, dtype, device)


def _require_embeddings(model: PreTrainedModel, hidden_size: int) -> None:
    """Raises UserError if the target's embeddings [V, E] have E ≠ H."""
    own = model.get_input_embeddings().weight.shape[1]
    if own != hidden_size:
        raise UserError(
            f"{type(model).__name__} embeds tokens in {own} numbers and its hidden states have "
            f"{hidden_size}; heads that read tokens need the same of both, so train medusa or "
            "blockwise heads"
        )


class _BorrowedEmbeddings:
    """The stored embedding table, without the scale that some targets apply after the lookup.

    It is not a module, so neither `parameters` nor an engine sees it.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def borrow(
        self, model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | None
    ) -> None:
        """Take the target's table in `dtype` and on `device`. None keeps those of the target."""
        table = model.get_input_embeddings().weight.detach()
        self._table = table.to(device or table.device, dtype or table.dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """[..., H]: the embeddings of token ids, int64 [...]."""
        assert self._table is not None, "the target's embeddings are borrowed first"
        return embedding(ids, self._table)
