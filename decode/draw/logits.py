"""Changes logits by the text before them: the repetition penalty, logits processors, constraints.

In a tree, each node has a different text before it: its path. So the children of two siblings are
judged after different texts.

Shapes: B rows, N draft nodes, R = N+1 positions where a token is predicted (position 0 follows the
committed text, position i+1 follows node i), L tokens of the longest row, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.draw.constraint import Guide, constrain
from decode.draw.sampling import Sampling

# Same as transformers' LogitsProcessor: (input_ids [b, l], scores [b, V]) → scores [b, V].
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


def change(
    logits: Tensor,
    sampling: Sampling,
    processors: Sequence[LogitsProcessor],
    guides: Sequence[Guide | None] | None,
    tokens: np.ndarray,
    lengths: np.ndarray,
    nodes: Tensor,
    on_path: Tensor,
) -> tuple[Tensor, dict[int, tuple[str, Exception]]]:
    """(logits [B, R, V] after the repetition penalty, the processors and the constraints of the
    rows, in this order, each position with the exact text before it; what raised in a row, with its
    error). The logits of such a row are NaN, those that are lost.

    guides: as for `constrain`; None: no row has one. The others are as in `tokens_before`.
    """
    text = (tokens, lengths, nodes, on_path)
    failed: dict[int, tuple[str, Exception]] = {}
    if sampling.penalises:
        logits = penalise(logits, tokens_before(*text), sampling.penalty(logits.device))
    if processors:
        logits, errors = process(processors, logits, *text)
        failed |= {row: ("a logits processor", error) for row, error in errors.items()}
    if guides is not None:
        logits, errors = constrain(guides, logits, *text)
        if errors:
            rows = torch.tensor(list(errors), device=logits.device)
            logits = logits.index_fill(0, rows, torch.nan)
        failed |= {row: ("the grammar", error) for row, error in errors.items()}
    return logits, failed


def change_drafts(
    logits: Tensor,
    sampling: Sampling,
    guides: Sequence[Guide | None] | None,
    vocabulary: Tensor | None,
    vocab_size: int,
    tokens: np.ndarray,
    lengths: np.ndarray,
    nodes: Tensor,
    on_path: Tensor,
) -> Tensor:
    """`change` for the logits of a drafter, [B, n, V'], without processors. A text that cannot be
    followed any more gets a draft all the same.

    vocabulary: int64 [V'], ascending, the token ids of the columns. None: column i is token i.
    vocab_size: V ≥ V', of the target.
    """
    text = (tokens, lengths, nodes, on_path)
    if sampling.penalises:
        penalty = sampling.penalty(logits.device)
        logits = penalise_drafts(logits, tokens_before(*text), penalty, vocabulary)
    if guides is None:
        return logits
    size = logits.shape[-1]
    if vocabulary is None and size < vocab_size:
        vocabulary = torch.arange(size, device=logits.device)
    return constrain(guides, logits, *text, vocabulary)[0]


def penalise(logits: Tensor, ids: Tensor, penalty: float | Tensor) -> Tensor:
    """Repetition penalty (1909.05858): float32 logits [..., V]. The logits of the tokens in
    ids [..., M] are divided by the penalty if positive and multiplied by it if negative, each once.
    penalty: one number, or a tensor that fits logits [..., 1].

    The result is float32, as in `generate()`. Rounded to bfloat16, a penalised logit could tie with
    an unpenalised one or change its order with it.
    """
    before = logits.gather(-1, ids).float()
    after = torch.where(before < 0, before * penalty, before / penalty)
    return logits.to(torch.float32, copy=True).scatter_(-1, ids, after)


def penalise_drafts(
    logits: Tensor, ids: Tensor, penalty: float | Tensor, vocabulary: Tensor | None
) -> Tensor:
    """The same for the logits of a drafter, [..., V']. vocabulary: int64 [V'], ascending, the token
    ids of the columns. None: column i is token i. Tokens without a column change nothing."""
    size = logits.shape[-1]
    # They go to an extra column, which is then removed.
    if vocabulary is None:
        columns = ids.clamp(max=size)
    else:
        columns = torch.searchsorted(vocabulary, ids).clamp(max=size - 1)
        columns = torch.where(vocabulary[columns] == ids, columns, size)
    return penalise(torch.nn.functional.pad(logits, (0, 1)), columns, penalty)[..., :-1]


def tokens_before(
    tokens: np.ndarray, lengths: np.ndarray, nodes: Tensor, on_path: Tensor
) -> Tensor:
    """int64 [B, R, L+N]: the set of tokens in the text before each position. Unused entries
    repeat the first token of the text.

    tokens, lengths: the committed texts, int [B, C] and [B]. nodes: int64 [B, N]. on_path: bool
    [B, R, N], the nodes on the path to each position.
    """
    width = int(lengths.max())
    inside = np.arange(width)[None, :] < lengths[:, None]
    committed = to_device(np.where(inside, tokens[:, :width], tokens[:, :1]), nodes.device)
    positions = on_path.shape[1]
    path = torch.where(on_path, nodes[:, None, :], committed[:, :1, None])
    return torch.cat([committed[:, None, :].expand(-1, positions, -1), path], 2)


def process(
    processors: Sequence[LogitsProcessor],
    logits: Tensor,
    tokens: np.ndarray,
    lengths: np.ndarray,
    nodes: Tensor,
    on_path: Tensor,
) -> tuple[Tensor, dict[int, Exception]]:
    """(float32 logits [B, R, V] after the processors, each position with the exact text before it;
    what processors raised, by row). Where one raised, the logits are NaN.

    Processors get float32, as in `generate()`. They do not know padding, so one call gets only
    positions with texts of the same length. If one raises, each of these positions is tried alone.
    Arguments are as in `tokens_before`. Nodes are in the order of their depth.
    """
    host = torch.cat([nodes[:, None], on_path.long()], 1).cpu().numpy()
    drafted, mask = host[:, 0], host[:, 1:].astype(bool)
    texts: dict[int, list[tuple[int, int, np.ndarray]]] = {}
    for row in range(len(lengths)):
        for position in range(mask.shape[1]):
            text = np.concatenate([tokens[row, : lengths[row]], drafted[row, mask[row, position]]])
            texts.setdefault(len(text), []).append((row, position, text))
    changed = logits.to(torch.float32, copy=True)
    failed: dict[int, Exception] = {}
    groups = list(texts.values())
    while groups:
        same_length = groups.pop()
        at_rows, at_positions, ids = zip(*same_length, strict=True)
        at = (
            to_device(np.array(at_rows), logits.device),
            to_device(np.array(at_positions), logits.device),
        )
        scores = changed[at]
        input_ids = to_device(np.stack(ids), logits.device)
        try:
            for processor in processors:
                scores = processor(input_ids, scores)
            changed[at] = scores.float()
        except Exception as error:
            if len(same_length) > 1:
                groups += [[one] for one in same_length]
                continue
            failed[at_rows[0]] = error
            changed[at] = torch.nan
    return changed, failed
