"""A trial that tells whether a model can verify token trees, robust against rounding.

A node of a tree may see the text and its ancestors, and its position is its depth. So:

1. Its parent's token and its position must change its logits. A model that computes positions
   itself, as with ALiBi, ignores the position.
2. Tokens and positions of nodes that it must not see must not change its logits. The trial changes
   some of these nodes, called strangers.
3. Its slot in the cache must not change its logits.

A tolerance on logits cannot test this. In bfloat16, with activations as large as in real models, a
different order of summation changes logits as much as another token does. So the trial compares
bits. Points 1 and 2 feed the same shapes to the same slots, and a masked key has a weight of
exactly 0. For point 2, bits may still differ, for example if experts multiply groups of tokens and
the group sizes have changed. In that case the strangers are fed earlier, in a separate forward, and
only their keys and values differ. Point 3 changes the order of summation. It is judged in the first
layer with a different output. There, the rounding of one layer is far smaller than the effect of
another parent.

Shapes: n nodes, H hidden size, V vocabulary.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from decode.device import dtype_name

if TYPE_CHECKING:
    from decode.target.cache.cached_model import CachedLM

STRANGERS = 12
# Two parents with one child each, equal except for their slots. The strangers are between them.
FIRST, LAST = (0, 1), (2 + STRANGERS, 3 + STRANGERS)
CHILDREN = (FIRST[1], LAST[1])
NODES = 4 + STRANGERS
SHIFT = 5  # distance to another position
# Share of the change that another parent causes. Rounding in one layer is below this share, an
# effect of the slot is above it.
LARGE = 0.1
# Rounding in one layer changes its output by less than this, in units of the dtype's eps.
UNITS = 8

# The result of feeding the tree once: each layer's output [n, H], then the logits [n, V].
Trace = list[Tensor]


@torch.no_grad()
def reason_against_trees(lm: "CachedLM") -> str | None:
    """What this model does wrong with a token tree, for a message. None if it does nothing wrong.

    lm: used for the trial only. It captures the hidden states of all layers, if the model has a
    list of layers. The trial feeds a token and four trees of 16 nodes, and a few more if bits
    differ. A model without any positions counts as one that ignores them.
    """
    trial = _Trial(lm)
    try:
        plain = trial.feed()
        strangers = trial.feed(strange=True)
        parents = trial.feed(other_parents=True)
        shifted = trial.feed(shifted=True)
        reason = _must_change(plain, parents, shifted)
        for child in CHILDREN:
            if reason is None and not torch.equal(plain[-1][child], strangers[-1][child]):
                reason = _must_not_see(trial, plain, strangers, parents, child)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"fails on a token tree ({error})"
    eps = torch.finfo(lm.model.dtype).eps
    if reason is None and _slot_matters(plain, parents, eps):
        reason = "gives different logits for a token in another slot of the cache"
    if reason is not None and not all(trace[-1].isfinite().all() for trace in (plain, strangers)):
        dtype = dtype_name(lm.model.dtype)
        reason = f"gives logits that are not finite in {dtype}, so it cannot be tested"
    return reason


class _Trial:
    """One token in the cache and a tree of two levels after it."""

    def __init__(self, lm: "CachedLM") -> None:
        self.lm = lm
        nodes = np.arange(NODES)
        parents = np.full(NODES, -1)
        # Strangers are also pairs of a parent and its child.
        parents[1::2] = nodes[::2]
        seen = (nodes[:, None] == nodes) | (parents[:, None] == nodes)
        seen = np.pad(seen, ((1, 0), (1, 0)))
        seen[:, 0] = True  # the token before the tree
        size = lm.model.config.get_text_config().vocab_size
        ids = torch.arange(1 + NODES) * size // (1 + NODES)
        for first, last in zip(FIRST, LAST, strict=True):
            ids[1 + last] = ids[1 + first]
        # Another token, also in a vocabulary of a few tokens.
        self.other_parent = (int(ids[1 + FIRST[0]]) + max(size // 2, 1)) % size
        self.ids = ids.to(lm.device)
        self.seen = torch.as_tensor(seen, device=lm.device)
        lm.reset(1, 1 + NODES)
        if lm.sources is not None:
            lm.encode([self.ids.tolist()], 0)
        self.start = np.zeros(1, dtype=np.int64)
        lm.forward(self.ids[None, :1], self.start)

    def feed(
        self,
        *,
        strange: bool = False,
        other_parents: bool = False,
        shifted: bool = False,
        last_alone: bool = False,
    ) -> Trace:
        """Feed the tree. strange: with other strangers. other_parents: with other parents of the
        children. shifted: with the children at another position. last_alone: feed the last parent
        and its child after the rest, and return the result of these two only."""
        ids, depth = self.ids.clone(), self.seen.sum(1) - 1
        strangers = slice(1 + FIRST[0] if last_alone else 3, 1 + LAST[0])
        if strange:
            ids[strangers], depth[strangers] = ids[strangers].flip(0), depth[strangers].flip(0)
        if other_parents:
            ids[[1 + FIRST[0], 1 + LAST[0]]] = self.other_parent
        if shifted:
            depth[[1 + child for child in CHILDREN]] += SHIFT
        if last_alone:
            self._forward(ids, depth, 1, 1 + LAST[0])
            return self._forward(ids, depth, 1 + LAST[0], 1 + NODES)
        return self._forward(ids, depth, 1, 1 + NODES)

    def _forward(self, ids: Tensor, depth: Tensor, begin: int, end: int) -> Trace:
        logits = self.lm.forward(
            ids[None, begin:end],
            self.start + begin,
            depth_BN=depth[None, begin:end],
            ancestors_BNM=self.seen[None, begin:end, :end],
        )
        layers = self.lm.features
        return [x[0].float() for x in (*(layers[layer] for layer in sorted(layers)), logits)]


def _must_change(plain: Trace, parents: Trace, shifted: Trace) -> str | None:
    for child in CHILDREN:
        for what, other in (("parent", parents), ("position", shifted)):
            if torch.equal(plain[-1][child], other[-1][child]):
                return f"gives the same logits for a token if its {what} changes"
    return None


def _must_not_see(
    trial: _Trial, plain: Trace, strangers: Trace, parents: Trace, child: int
) -> str | None:
    """Judges a child whose logits change with other strangers."""
    share = next(
        _share(here[child] - other[child], here[child] - control[child])
        for here, other, control in zip(plain, strangers, parents, strict=True)
        if not torch.equal(here[child], other[child])
    )
    one, other = (trial.feed(strange=strange, last_alone=True)[-1] for strange in (False, True))
    if share <= LARGE and torch.equal(one, other):
        return None
    return "gives different logits for a token when a sibling comes before it"


def _slot_matters(plain: Trace, parents: Trace, eps: float) -> bool:
    """Whether the two children differ by more than rounding."""
    one, other = CHILDREN
    for here, control in zip(plain, parents, strict=True):
        difference = here[one] - here[other]
        if not difference.any():
            continue
        beyond = bool(difference.abs().mean() > UNITS * eps * here[one].abs().mean())
        if beyond and _share(difference, here[one] - control[one]) > LARGE:
            return True
        # In later layers the rounding grows. In float32 it stays far below the limit.
        if eps > torch.finfo(torch.float32).eps:
            return False
    return False


def _share(difference: Tensor, control: Tensor) -> float:
    """The size of a difference, as a share of the control's size. 2 if the control is 0. A few
    hidden dimensions may be thousands of times as large as the others, so they are clipped."""
    difference, control = difference.abs(), control.abs()
    limit = control.quantile(0.9)
    if not limit:
        return 2.0
    return float(difference.clamp(max=limit).mean() / control.clamp(max=limit).mean())
