"""Changes to the logits that depend on the text so far: repetition penalty, `LogitsProcessorList`.

In a tree every node has a text of its own, its path: two siblings' children are judged after
different texts. Shapes: B rows, N drafted nodes, R = N+1 places where a token is predicted (place
0 follows the committed text, place i+1 node i), L tokens of the longest row, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

# As transformers' LogitsProcessor: (input_ids [b, l], scores [b, V]) → scores [b, V].
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


def penalise(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (1909.05858): float32 logits [..., V], those of the tokens in ids [..., M]
    divided by the penalty where positive and multiplied where negative, each once.

    In float32, as `generate()` does: rounded to bfloat16 again, a penalised logit could tie with
    one that is not, or pass it.
    """
    found = logits.gather(-1, ids).float()
    found = torch.where(found < 0, found * penalty, found / penalty)
    return logits.to(torch.float32, copy=True).scatter_(-1, ids, found)


def tokens_before(
    tokens: np.ndarray, lengths: np.ndarray, nodes: Tensor, on_path: Tensor
) -> Tensor:
    """int64 [B, R, L+N]: the tokens of each place's text, as a set: room is filled with its first.

    tokens, lengths: the committed texts, int [B, C] and [B]. nodes: int64 [B, N]. on_path: bool
    [B, R, N], which nodes stand before each place.
    """
    width = int(lengths.max())
    inside = np.arange(width)[None, :] < lengths[:, None]
    committed = torch.as_tensor(
        np.where(inside, tokens[:, :width], tokens[:, :1]), device=nodes.device
    )
    places = on_path.shape[1]
    path = torch.where(on_path, nodes[:, None, :], committed[:, :1, None])
    return torch.cat([committed[:, None, :].expand(-1, places, -1), path], 2)


def process(
    processors: Sequence[LogitsProcessor],
    logits: Tensor,
    tokens: np.ndarray,
    lengths: np.ndarray,
    nodes: Tensor,
    on_path: Tensor,
) -> Tensor:
    """float32 logits [B, R, V] after any processors, each place with the exact text before it.

    Processors are given float32, as by `generate()`. They know no padding, so places with texts of
    one length are handed over together.
    Arguments as in `tokens_before`; nodes stand in the order of their depth.
    """
    drafted, mask = nodes.cpu().numpy(), on_path.cpu().numpy()
    texts: dict[int, list[tuple[int, int, np.ndarray]]] = {}
    for row in range(len(lengths)):
        for place in range(mask.shape[1]):
            text = np.concatenate([tokens[row, : lengths[row]], drafted[row, mask[row, place]]])
            texts.setdefault(len(text), []).append((row, place, text))
    changed = logits.to(torch.float32, copy=True)
    for same_length in texts.values():
        at_rows, at_places, ids = zip(*same_length, strict=True)
        at = (
            torch.as_tensor(at_rows, device=logits.device),
            torch.as_tensor(at_places, device=logits.device),
        )
        scores = changed[at]
        input_ids = torch.as_tensor(np.stack(ids), device=logits.device)
        for processor in processors:
            scores = processor(input_ids, scores)
        changed[at] = scores.float()
    return changed
