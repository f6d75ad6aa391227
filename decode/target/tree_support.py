"""Whether a model can verify token trees: a trial that rounding cannot fool.

A node of a tree may see the text and its ancestors, and its position is its depth. So some things
must change its logits, and some must not:

1. Its parent's token must, and its position must. A model that makes positions of its own, as with
   ALiBi, ignores the second.
2. Tokens and positions of nodes that it may not see must not.
3. The slot of the cache that it stands in must not.

No tolerance on logits can judge this. In bfloat16, with activations as large as real models have,
a sum in another order changes logits as much as another token does. The trial compares bits
instead: the first two points feed the same shapes to the same slots, and a masked key has a weight
of exactly 0. Where the bits of the second point differ all the same, as they may where experts
multiply groups of tokens whose sizes have changed, the strangers are fed before, and only their
keys and values differ. The third point changes the order of sums. It is judged in the first layer
whose output differs: one layer's rounding is far smaller there than what another parent does.

Shapes: n nodes, H hidden size, V vocabulary.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from decode.target.cached_model import CachedLM

STRANGERS = 12
# Two parents with a child each, alike but for their slots; the strangers stand between them.
FIRST, LAST = (0, 1), (2 + STRANGERS, 3 + STRANGERS)
CHILDREN = (FIRST[1], LAST[1])
NODES = 4 + STRANGERS
SHIFT = 5  # to another position
# Of what another parent changes: rounding in one layer is below, an effect of the slot above.
LARGE = 0.1
# Rounding in one layer changes its output by less, in units of the dtype.
UNITS = 8

# What one feed of the tree gives: each layer's output [n, H], then the logits [n, V].
Trace = list[Tensor]


@torch.no_grad()
def reason_against_trees(lm: "CachedLM") -> str | None:
    """What this model does wrong with a token tree, for a message; None where it does nothing
    wrong.

    lm: one that is used for the trial only, with taps on all layers where the model has a list of
    them. Feeds a token and four trees of 16 nodes; a few more where bits differ. A model without
    any positions counts as one that ignores them.
    """
    trial = _Trial(lm)
    try:
        plain = trial.feed()
        strangers = trial.feed(strange=True)
        parents = trial.feed(other_parents=True)
        moved = trial.feed(shifted=True)
        reason = _must_change(plain, parents, moved)
        for child in CHILDREN:
            if reason is None and not torch.equal(plain[-1][child], strangers[-1][child]):
                reason = _must_not_see(trial, plain, strangers, parents, child)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"fails on one ({error})"
    eps = torch.finfo(lm.model.dtype).eps
    if reason is None and _slot_matters(plain, parents, eps):
        reason = "gives other logits for a token in another slot of the cache"
    if reason is not None and not all(trace[-1].isfinite().all() for trace in (plain, strangers)):
        dtype = str(lm.model.dtype).removeprefix("torch.")
        reason = f"gives logits that are not finite in {dtype}, so that cannot be judged"
    return reason


class _Trial:
    """One token in the cache and a tree of two levels after it."""

    def __init__(self, lm: "CachedLM") -> None:
        self.lm = lm
        nodes = np.arange(NODES)
        parents = np.full(NODES, -1)
        # Strangers are pairs of a parent and its child too.
        parents[1::2] = nodes[::2]
        seen = (nodes[:, None] == nodes) | (parents[:, None] == nodes)
        seen = np.pad(seen, ((1, 0), (1, 0)))
        seen[:, 0] = True  # the token before the tree
        size = lm.model.config.get_text_config().vocab_size
        ids = torch.arange(1 + NODES) * size // (1 + NODES)
        for first, last in zip(FIRST, LAST, strict=True):
            ids[1 + last] = ids[1 + first]
        self.ids = ids.to(lm.device)
        self.seen = torch.as_tensor(seen, device=lm.device)
        lm.reset(1, 1 + NODES, longest=1 + SHIFT)
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
        """What the tree gives with other strangers, other parents of the children, or children at
        another position. last_alone: of the last parent and its child only, fed after the rest."""
        ids, depth = self.ids.clone(), self.seen.sum(1) - 1
        own = slice(1 + FIRST[0] if last_alone else 3, 1 + LAST[0])
        if strange:
            ids[own], depth[own] = ids[own].flip(0), depth[own].flip(0)
        if other_parents:
            ids[[1 + FIRST[0], 1 + LAST[0]]] = ids[3].clone()
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
        return [x[0].float() for x in (*(layers[tap] for tap in sorted(layers)), logits)]


def _must_change(plain: Trace, parents: Trace, moved: Trace) -> str | None:
    for child in CHILDREN:
        for what, other in (("parent", parents), ("position", moved)):
            if torch.equal(plain[-1][child], other[-1][child]):
                return f"gives the same logits for a token whatever its {what} is"
    return None


def _must_not_see(
    trial: _Trial, plain: Trace, strangers: Trace, parents: Trace, child: int
) -> str | None:
    """For a child whose logits other strangers changed."""
    share = next(
        _share(here[child] - other[child], here[child] - control[child])
        for here, other, control in zip(plain, strangers, parents, strict=True)
        if not torch.equal(here[child], other[child])
    )
    one, other = (trial.feed(strange=strange, last_alone=True)[-1] for strange in (False, True))
    if share <= LARGE and torch.equal(one, other):
        return None
    return "gives other logits for a token when a sibling stands before it"


def _slot_matters(plain: Trace, parents: Trace, eps: float) -> bool:
    """Whether the two children differ by more than rounding."""
    one, other = CHILDREN
    for here, control in zip(plain, parents, strict=True):
        apart = here[one] - here[other]
        if not apart.any():
            continue
        beyond = bool(apart.abs().mean() > UNITS * eps * here[one].abs().mean())
        if beyond and _share(apart, here[one] - control[one]) > LARGE:
            return True
        # From here on rounding grows from layer to layer; in float32 it stays far too small.
        if eps > torch.finfo(torch.float32).eps:
            return False
    return False


def _share(apart: Tensor, control: Tensor) -> float:
    """The size of a difference, as a share of the control's; 2 where the control has none. Few
    hidden dimensions may be thousands of times as large as the others, and are cut."""
    apart, control = apart.abs(), control.abs()
    most = control.quantile(0.9)
    if not most:
        return 2.0
    return float(apart.clamp(max=most).mean() / control.clamp(max=most).mean())
