"""The target's token embeddings, for heads that read drafted tokens too: borrowed, not stored."""

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from decode.errors import UserError


def require_embeddings(model: PreTrainedModel, hidden_size: int) -> None:
    """UserError where the target's embeddings [V, E] are no hidden states' size, E ≠ H."""
    own = model.get_input_embeddings().weight.shape[1]
    if own != hidden_size:
        raise UserError(
            f"{type(model).__name__} embeds tokens in {own} numbers and its hidden states have "
            f"{hidden_size}; heads that read tokens need the same of both, so train medusa or "
            "blockwise heads"
        )


class BorrowedEmbeddings:
    """The table as it is stored, also where the target scales what it looks up. No module, so that
    neither `parameters` nor an engine sees it."""

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def borrow(self, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        """In `dtype`, or the target's own."""
        table = model.get_input_embeddings().weight.detach()
        self._table = table.to(dtype or table.dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """[..., H] of token ids, int64 [...]."""
        assert self._table is not None, "the target's embeddings are borrowed first"
        return embedding(ids, self._table)
