"""The target's logits for a draft: the processors, and the distributions that rules use.

In a tree, each node has a different text before it: its path. So the children of two siblings are
judged after different texts.

Shapes: B rows, N draft nodes, R = N+1 places where a token is predicted (place 0 follows the
committed text, place i+1 follows node i), L tokens of the longest row, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from decode.contexts import Contexts
from decode.draft import Draft
from decode.sampling import Sampling

# Same as transformers' LogitsProcessor: (input_ids [b, l], scores [b, V]) → scores [b, V].
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


def penalise(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (1909.05858): float32 logits [..., V]. The logits of the tokens in
    ids [..., M] are divided by the penalty if positive and multiplied by it if negative, each once.

    The result is float32, as in `generate()`. Rounded to bfloat16, a penalised logit could tie with
    an unpenalised one or change its order with it.
    """
    found = logits.gather(-1, ids).float()
    found = torch.where(found < 0, found * penalty, found / penalty)
    return logits.to(torch.float32, copy=True).scatter_(-1, ids, found)


def tokens_before(
    tokens: np.ndarray, lengths: np.ndarray, nodes: Tensor, on_path: Tensor
) -> Tensor:
    """int64 [B, R, L+N]: the set of tokens in the text before each place. Unused entries repeat the
    first token of the text.

    tokens, lengths: the committed texts, int [B, C] and [B]. nodes: int64 [B, N]. on_path: bool
    [B, R, N], the nodes on the path to each place.
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
    """float32 logits [B, R, V] after the processors, each place with the exact text before it.

    Processors get float32, as in `generate()`. They do not know padding, so one call gets only
    places with texts of the same length. Arguments are as in `tokens_before`. Nodes are in the
    order of their depth.
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


class Scores:
    """Computes only what a rule asks for: all distributions, one distribution per row, or tokens.

    logits: [B, N+1, V], after processors, before temperature and filters. float32 if a penalty or a
    processor changed them, else in the model's dtype. raw: the logits as the model returned them.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        draft: Draft | None = None,
        contexts: Contexts | None = None,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.raw = logits
        self.sampling = sampling
        if sampling.repetition_penalty != 1 or processors:
            assert draft is not None
            assert contexts is not None
            ancestors = draft.ancestors()
            # Not `pad`: before torch 2.10 it refuses a draft without nodes.
            root = ancestors.new_zeros(len(ancestors), 1, ancestors.shape[2])
            before = torch.cat([root, ancestors], 1)  # [B, N+1, N]
            text = (contexts.tokens, contexts.lengths, draft.tokens, before)
            if sampling.repetition_penalty != 1:
                logits = penalise(logits, tokens_before(*text), sampling.repetition_penalty)
            if processors:
                logits = process(processors, logits, *text)
        self.logits = logits
        self._probs: Tensor | None = None

    def probs(self) -> Tensor:
        """float32 [B, N+1, V]: the distributions that tokens are drawn from."""
        if self._probs is None:
            self._probs = self.sampling.probs(self.logits)
        return self._probs

    def probs_at(self, rows: Tensor) -> Tensor:
        """float32 [B, V]: the distribution at one place of each row. rows: int64 [B], the places. A
        tree has many more places than a walk through it visits."""
        return self.sampling.probs(self.logits_at(rows))

    def logits_at(self, rows: Tensor) -> Tensor:
        """[B, V]: the processed logits at one place per row."""
        return self.logits[torch.arange(len(rows), device=rows.device), rows]

    def peaks_at(self, places: Tensor) -> Tensor:
        """[B, P]: the largest processed logit at some places of each row, int64 [B, P]. It is not
        finite if the model's logits are NaN or the processors mask all tokens."""
        if places.shape[1] >= self.logits.shape[1]:
            return self.logits.amax(-1).gather(1, places)
        rows_B1 = torch.arange(len(places), device=places.device)[:, None]
        return self.logits[rows_B1, places].amax(-1)

    def pick(self, uniforms: Tensor) -> Tensor:
        """int64 [B, N+1]: the token that the target picks at every place (greedy: the argmax)."""
        return self.sampling.pick(self.logits, uniforms)
