"""Changes logits by the text before them: penalties, logits processors, constraints.

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
from decode.draw.penalties import AnswerSpans, TextBefore, penalised
from decode.draw.sampling import Sampling

# Same as transformers' LogitsProcessor: (input_ids [b, l], scores [b, V]) → scores [b, V].
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


def change(
    logits: Tensor,
    sampling: Sampling,
    processors: Sequence[LogitsProcessor],
    guides: Sequence[Guide | None] | None,
    answers: AnswerSpans | None,
    tokens: np.ndarray,
    lengths: np.ndarray,
    nodes: Tensor,
    on_path: Tensor,
) -> tuple[Tensor, dict[int, tuple[str, Exception]]]:
    """(logits [B, R, V] after the penalties, the processors and the constraints of the rows, in
    this order, each position with the exact text before it; what raised in a row, with its
    error). The logits of such a row are NaN, those that are lost.

    guides: as for `constrain`; None: no row has one. The others are as in `TextBefore`.
    """
    text = (tokens, lengths, nodes, on_path)
    failed: dict[int, tuple[str, Exception]] = {}
    if sampling.penalises:
        each, size = sampling.each(len(lengths)), logits.shape[-1]
        before = TextBefore(each, tokens, lengths, answers, nodes, on_path, None, size)
        logits = penalised(logits, before)
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
    answers: AnswerSpans | None,
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
    size = logits.shape[-1]
    if sampling.penalises:
        rows = sampling.each(len(lengths))
        before = TextBefore(rows, tokens, lengths, answers, nodes, on_path, vocabulary, size)
        logits = penalised(logits, before)
    if guides is None:
        return logits
    if vocabulary is None and size < vocab_size:
        vocabulary = torch.arange(size, device=logits.device)
    return constrain(guides, logits, *text, vocabulary)[0]


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
    Arguments are as in `TextBefore`. Nodes are in the order of their depth.
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
        at = tuple(to_device(np.array(x), logits.device) for x in (at_rows, at_positions))
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
