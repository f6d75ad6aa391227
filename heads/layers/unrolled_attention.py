"""Attention of the training-time test (EAGLE-3, 2503.01840, section 3.2), without T × T scores.

The drafter runs once per step with all T tokens of a text. The first step reads the target's
features and is plain causal attention. At step k, token t stands for the k-th draft token after the
first t + 1 tokens. It sees tokens 0 … t of the first step and its own steps 2 … k, as in the decode
loop.

So a later step is causal attention over the keys of the first step, plus k − 1 keys of its own for
each token. Flash attention (2307.08691) computes the first part in O(T) memory, and gives the
log-sum-exp of its scores. The scores of the other keys join this log-sum-exp.

With a sliding window, `BLOCK` queries at a time get the keys that one of them may see. So the cost
grows with the length of the text, not with its square.

Shapes: B rows, T tokens of a text, N heads, G key heads, D head size, K steps so far, S = K − 1.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from decode.model.cache.sliding_window import SlidingWindow
from decode.model.forward.attention_mask import Attend
from distill.chunked_loss import at_least_float32
from distill.short_attention import SHORT, short_attention

aten = torch.ops.aten
# The queries whose scores are in memory at a time, where no kernel of PyTorch fits.
BLOCK = 256


class UnrolledAttention:
    """The attention of all steps over one batch of texts. It keeps the keys and values of each.

    window: how far back a token sees, from its own position. A later step is at a later position,
    so it sees less of the text. It holds at least as many tokens as there are steps."""

    def __init__(self, window: SlidingWindow | None = None) -> None:
        self._window = window
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def at(self, step: int) -> Attend:
        """The attention of a step, counted from 1. Steps run in order. A step may run again, as
        gradient checkpointing does; later steps keep what its first run gave."""
        return partial(self._attend, step)

    def _attend(self, step: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if step > len(self._keys):
            self._keys.append(keys)
            self._values.append(values)
        if step == 1:
            return causal_attention(queries, keys, values, self._window)
        before = slice(step - 1)
        return merged_attention(
            queries, [*self._keys[before], keys], [*self._values[before], values], self._window
        )


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, window: SlidingWindow | None = None
) -> Tensor:
    """Each token attends to itself and the tokens before it, in the window. queries: [B, N, T, D].
    keys, values: [B, G, T, D]. The memory is O(T), but for `short_attention`."""
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)
    if window is not None and queries.shape[2] > window.size:
        return merged_attention(queries, [keys], [values], window)
    if queries.device.type == "cpu" and values.dtype.itemsize == 2 and queries.shape[2] <= SHORT:
        return short_attention(queries, keys, values)
    if queries.shape[1] == keys.shape[1] or _has_kernel(queries, keys, values):
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    # Without flash attention, PyTorch stores all scores if key heads serve several query heads.
    return merged_attention(queries, [keys], [values])


def merged_attention(
    queries: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    window: SlidingWindow | None = None,
) -> Tensor:
    """The attention of step K: [B, N, T, D] for queries [B, N, T, D].

    keys, values: [B, G, T, D], of the steps 1 … K. window: see `UnrolledAttention`. The memory is
    O(T), also in the backward pass.
    """
    dtype = values[0].dtype
    pairs = (x.to(dtype) for pair in zip(keys, values, strict=True) for x in pair)
    of_text = None if window is None else window.later(len(keys) - 1)
    outputs: Tensor = _MergedAttention.apply(of_text, queries.to(dtype), *pairs)
    return outputs


class _MergedAttention(torch.autograd.Function):
    """With L the log-sum-exp of all scores s_j of a query, its weights are p_j = exp(s_j − L), and
    the gradient of s_j is p_j·(dO·v_j − dO·O) (2205.14135, appendix B). Both hold for each key
    apart, given the merged L and output O. So the backward pass of flash attention, called with
    these two, is exact for the first step's keys, and the others take the formula itself. PyTorch's
    context parallelism does the same with keys that several GPUs hold.

    window: the window of the first step's keys, counted from the place of the query in the text."""

    @staticmethod
    def forward(ctx: Any, window: SlidingWindow | None, queries: Tensor, *pairs: Tensor) -> Tensor:
        ctx.window = window
        with torch.autocast(queries.device.type, enabled=False):
            outputs, text_total, *ctx.rest = _text_forward(window, queries, *pairs[:2])
            grouped = _grouped(queries, pairs[0], text_total.dtype)
            scale = queries.shape[-1] ** -0.5
            steps = ((grouped * key.unsqueeze(2)).sum(-1) * scale for key in pairs[2::2])
            scores = torch.stack([text_total, *(x.flatten(1, 2) for x in steps)])  # [K, B, N, T]
            total = scores.logsumexp(0).contiguous()
            text_weight, *weights = (scores - total).exp().unsqueeze(-1).unbind()
            merged = outputs * text_weight
            parts = merged.unflatten(1, grouped.shape[1:3])
            for weight, value in zip(weights, pairs[3::2], strict=True):
                weight = weight.unflatten(1, grouped.shape[1:3])
                parts.addcmul_(weight, value.unsqueeze(2).to(parts.dtype))
            merged = merged.to(queries.dtype)
        ctx.save_for_backward(queries, merged, total, scores, *pairs)
        return merged

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, outputs, total, scores, *pairs = ctx.saved_tensors
        with torch.autocast(queries.device.type, enabled=False):
            for_queries, *for_pairs = _text_backward(
                ctx.window, gradient, queries, *pairs[:2], outputs, total, *ctx.rest
            )
            grouped, gradients, results = (
                _grouped(x, pairs[0], total.dtype) for x in (queries, gradient, outputs)
            )
            merged = (gradients * results).sum(-1)
            sums = _grouped(for_queries, pairs[0], total.dtype)
            scale = queries.shape[-1] ** -0.5
            _, *weights = (scores - total).exp().unflatten(2, grouped.shape[1:3]).unbind()
            for weight, key, value in zip(weights, pairs[2::2], pairs[3::2], strict=True):
                of_weight = (gradients * value.unsqueeze(2)).sum(-1)
                of_score = (weight * (of_weight - merged) * scale).unsqueeze(-1)
                sums.addcmul_(of_score, key.unsqueeze(2).to(sums.dtype))
                for_pairs.append((of_score * grouped).sum(2).to(key.dtype))
                for_pairs.append((weight.unsqueeze(-1) * gradients).sum(2).to(value.dtype))
            return (None, sums.flatten(1, 2).to(queries.dtype), *for_pairs)


def _grouped(heads: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, G, N/G, T, …] of [B, N, T, …]: each key head serves N/G query heads."""
    return heads.unflatten(1, (keys.shape[1], -1)).to(dtype)


def _has_kernel(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether PyTorch has flash attention for these tensors: on a CPU always, else on CUDA."""
    on_cpu = queries.device.type == "cpu"
    name = f"_scaled_dot_product_flash_attention{'_for_cpu' if on_cpu else ''}"
    # These operators have no public name, so a release may rename them.
    if not (hasattr(aten, name) and hasattr(aten, f"{name}_backward")):
        return False
    if queries.device.type != "cuda":
        return on_cpu
    params = SDPAParams(queries, keys, values, None, 0.0, True, keys.shape[1] < queries.shape[1])
    # The kernel wants heads of a multiple of 8, and is called here without padding.
    return queries.shape[-1] % 8 == 0 and can_use_flash_attention(params)


def _text_forward(
    window: SlidingWindow | None, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Any, ...]:
    """Causal attention: outputs [B, N, T, D]; the log-sum-exp of the scores, [B, N, T], at least
    float32; and what else `_text_backward` needs."""
    if window is not None or not _has_kernel(queries, keys, values):
        return blocks_forward(queries, keys, values, window)
    tensors = (queries, keys, values)
    if queries.device.type == "cpu":
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, True))
    # Without the mask of dropout, which is for debugging.
    return tuple(aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)[:8])


def _text_backward(
    window: SlidingWindow | None,
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    total: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values. outputs, total: merged with other keys."""
    tensors = (gradient, queries, keys, values, outputs, total)
    if window is not None or not _has_kernel(queries, keys, values):
        return blocks_backward(*tensors, window)
    if queries.device.type == "cpu":
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, True))
    ends, seeds = rest[:4], rest[4:]
    return tuple(
        aten._scaled_dot_product_flash_attention_backward(*tensors, *ends, 0.0, True, *seeds)
    )


def blocks_forward(
    queries: Tensor, keys: Tensor, values: Tensor, window: SlidingWindow | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention, `BLOCK` queries at a time, for windows, and for devices and dtypes without
    a flash kernel.

    Returns the outputs [B, N, T, D] and the log-sum-exp of the scores, [B, N, T].
    """
    outputs = torch.empty_like(queries)
    total = queries.new_empty(queries.shape[:3], dtype=at_least_float32(queries.dtype))
    for part, seen, scores in _blocks(queries, keys, window):
        block_total = scores.logsumexp(-1)
        weights = (scores - block_total[..., None]).exp().to(values.dtype)
        block = weights.flatten(2, 3) @ values[:, :, seen]
        outputs[:, :, part] = block.unflatten(2, scores.shape[2:4]).flatten(1, 2)
        total[:, :, part] = block_total.flatten(1, 2)
    return outputs, total


def blocks_backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    outputs: Tensor,
    total: Tensor,
    window: SlidingWindow | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `blocks_forward`, from the formula of `_MergedAttention`."""
    for_queries = torch.empty_like(queries)
    for_keys, for_values = (torch.zeros_like(x, dtype=total.dtype) for x in (keys, values))
    merged = (gradient.to(total.dtype) * outputs).sum(-1)
    for part, seen, scores in _blocks(queries, keys, window):
        rows = scores.shape[2:4]
        weights = (scores - _grouped(total[:, :, part], keys, total.dtype)[..., None]).exp()
        of_outputs = _grouped(gradient[:, :, part], keys, values.dtype).flatten(2, 3)
        of_weights = (of_outputs @ values[:, :, seen].transpose(2, 3)).unflatten(2, rows)
        block_merged = _grouped(merged[:, :, part], keys, total.dtype)[..., None]
        of_scores = weights * (of_weights - block_merged) * queries.shape[-1] ** -0.5
        of_scores = of_scores.flatten(2, 3).to(keys.dtype)
        block = of_scores @ keys[:, :, seen]
        for_queries[:, :, part] = block.unflatten(2, rows).flatten(1, 2)
        block_queries = _grouped(queries[:, :, part], keys, queries.dtype).flatten(2, 3)
        for_keys[:, :, seen] += of_scores.transpose(2, 3) @ block_queries
        weights = weights.flatten(2, 3).to(values.dtype)
        for_values[:, :, seen] += weights.transpose(2, 3) @ of_outputs
    return for_queries, for_keys.to(keys.dtype), for_values.to(values.dtype)


def _blocks(
    queries: Tensor, keys: Tensor, window: SlidingWindow | None
) -> Iterator[tuple[slice, slice | Tensor, Tensor]]:
    """Yield the tokens of each block, the tokens that one of them sees, and their scores
    [B, G, N/G, c, s], at least float32, −∞ at tokens that a token does not see."""
    length, size = queries.shape[2:]
    dtype = at_least_float32(queries.dtype)
    for begin in range(0, length, BLOCK):
        part = slice(begin, min(begin + BLOCK, length))
        block = _grouped(queries[:, :, part], keys, queries.dtype)
        seen, positions = _seen(part, window, queries.device)
        scores = block.flatten(2, 3) @ keys[:, :, seen].transpose(2, 3)
        scores = scores.unflatten(2, block.shape[2:4]).to(dtype) * size**-0.5
        of_queries = torch.arange(begin, part.stop, device=scores.device)[:, None]
        if window is None:
            scores[..., begin:].masked_fill_(positions[begin:] > of_queries, -torch.inf)
        else:
            hidden = (positions > of_queries) | ~window.sees(of_queries, positions)
            scores.masked_fill_(hidden, -torch.inf)
        yield part, seen, scores


def _seen(
    part: slice, window: SlidingWindow | None, device: torch.device
) -> tuple[slice | Tensor, Tensor]:
    """The keys that one of the tokens `part` sees, as an index; and their positions, int64 [s]."""
    first = 0 if window is None else max(part.start - window.size + 1, 0)
    positions = torch.arange(first, part.stop, device=device)
    if window is None or not min(window.sinks, first):
        return slice(first, part.stop), positions
    sinks = torch.arange(min(window.sinks, first), device=device)
    positions = torch.cat([sinks, positions])
    return positions, positions
