"""Positions of tokens, for models that would count them by themselves.

The decoders of T5, BART, Marian and models like them take positions from the length of the cache,
and the local layers of GPT-Neo take distances from the number of keys. That is wrong where rows
have texts of different lengths, and for siblings in a tree. So a copy of the model reads the
positions of the loop: its table of positions (BART, Marian), or the bias (T5) or mask (GPT-Neo) of
its attention, which depends on the distance between query and key.

Shapes: B rows, n tokens fed per row, m ≥ n nodes of a tree, S slots, N heads, H hidden size.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.cache_names import counts_from_cache
from decode.model.pretrained import decoder_config, has_encoder


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a pass are.

    fed: int64 [B, n], the position of each fed token. first: int64 [B, 1], the first slot of the
    chain or tree; in every slot before it is the token of that position. nodes: int64 [B, m], the
    positions of all nodes of a tree, of which the last n are fed. None: a chain, with every token
    in the slot of its position.
    """

    fed: Tensor
    first: Tensor
    nodes: Tensor | None

    def of_keys(self, slots: int) -> Tensor:
        """int64 [B or 1, S]: the position of the token in each slot. It means nothing for slots
        that no token may see."""
        keys = torch.arange(slots, device=self.fed.device)[None]
        if self.nodes is None:
            return keys
        columns = self.first + torch.arange(self.nodes.shape[1], device=keys.device)
        return keys.repeat(len(self.nodes), 1).scatter(1, columns, self.nodes)


class NodePositions:
    """Knows the positions of the nodes of the tree that was fed last."""

    def __init__(self) -> None:
        self._nodes: Tensor | None = None  # int64 [B, m]

    def of_pass(self, fed_BN: Tensor, first_B1: Tensor, ancestors_BNM: Tensor | None) -> Positions:
        """Where the fed tokens are, and the nodes of their tree that were fed before.

        fed_BN: int64 [B or 1, n], the positions of the fed tokens. first_B1: as in `Positions`.
        ancestors_BNM: as for `CachedLM.forward`."""
        if ancestors_BNM is None:
            self._nodes = None
            return Positions(fed_BN, first_B1, None)
        before = ancestors_BNM.shape[2] - fed_BN.shape[1]
        fed = fed_BN.expand(len(first_B1), -1)
        # What was fed as a chain is in the slots of its positions.
        known = first_B1 + torch.arange(before, device=fed.device)
        if before and self._nodes is not None:
            known = self._nodes[:, :before]
        self._nodes = torch.cat([known, fed], 1)
        return Positions(fed, first_B1, self._nodes)


_positions: ContextVar[Positions] = ContextVar("positions")


@contextmanager
def at_positions(positions: Positions) -> Iterator[None]:
    """Inside this context, models of `read_positions` have these positions."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def counts_positions(model: nn.Module) -> bool:
    """Whether a model without an encoder takes positions from the cache, as far as is known."""
    given = "position_ids" in inspect.signature(type(model).forward).parameters
    return any(_is_local(x) or (_is_table(x) and not given) for x in model.modules())


def read_positions(model: PreTrainedModel) -> None:
    """Make the decoder of this model read the positions of the loop, in place.

    Raises UserError for a decoder under an encoder with positions of another kind. Whether the
    result is right, a trial must tell.
    """
    decoder = model.get_decoder() if has_encoder(model) else model
    modules = list(decoder.modules())
    tables = [(x, n, c) for x in modules for n, c in x.named_children() if _is_table(c)]
    biased = [x for x in modules if hasattr(x, "relative_attention_bias")]
    for holder, name, table in tables:
        setattr(holder, name, _Table(table))
    for attention in filter(_is_local, modules):
        del attention.bias
        attention.bias = _LocalMask(decoder_config(model).window_size)
    if tables or not has_encoder(model):
        return
    if biased and all(map(_has_buckets, biased)):
        for attention in biased:
            attention.compute_bias = partial(_bias, attention)
    else:
        raise UserError(
            f"{type(model).__name__} makes the positions of its decoder's tokens in a way that "
            "cannot be replaced, so rows of different lengths and token trees would be wrong; "
            "known are embedded positions (BART, Marian, Pegasus) and a relative bias (T5)"
        )


def reads_positions(model: PreTrainedModel) -> bool:
    """Whether `read_positions` changed this model."""
    parts: Any = model.modules()
    return any(
        isinstance(x, _Table)
        or "compute_bias" in vars(x)
        or isinstance(vars(x).get("bias"), _LocalMask)
        for x in parts
    )


def _is_table(module: Any) -> bool:
    """Whether it is a table of positions that counts on from the length of the cache."""
    return isinstance(module, nn.Embedding) and counts_from_cache(module)


def _is_local(module: Any) -> bool:
    """Whether it is attention with a window whose mask it takes from the number of keys."""
    return getattr(module, "attention_type", "") == "local" and "bias" in module._buffers


class _LocalMask:
    """In the place of GPT-Neo's buffer with the mask of a local layer."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __getitem__(self, index: Any) -> Tensor:
        """bool [B, 1, n, S]: the keys near each query. Other masks hide those that come later."""
        positions = _positions.get()
        distance = positions.fed[:, :, None] - positions.of_keys(index[-1].stop)[:, None, :]
        return (distance < self.window)[:, None]


class _Table(nn.Module):
    """In the place of a table of positions, which some models read with an offset."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.offset = table, int(getattr(table, "offset", 0))

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """[B, n, H], whatever the arguments are."""
        weight = self.table.weight
        return embedding(_positions.get().fed.to(weight.device) + self.offset, weight)


def _has_buckets(attention: nn.Module) -> bool:
    names = ("compute_bias", "relative_attention_num_buckets", "relative_attention_max_distance")
    return all(hasattr(attention, name) for name in (*names, "_relative_position_bucket"))


def _bias(attention: Any, query_length: int, key_length: int, *_: Any, **__: Any) -> Tensor:
    """In the place of T5's `compute_bias`: [B, N, n, S]."""
    positions, table = _positions.get(), attention.relative_attention_bias
    distance = positions.of_keys(key_length)[:, None, :] - positions.fed[:, :, None]
    buckets = attention._relative_position_bucket(
        distance.to(table.weight.device),
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias: Tensor = table(buckets).permute(0, 3, 1, 2)
    return bias
