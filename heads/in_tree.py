"""PaSS in the passes that verify: look-ahead tokens behind the nodes of a draft (as BiTA's,
2401.12522), so that a step is one pass of the target.

Shapes: B rows, P places of a draft, k look-ahead tokens, H hidden size.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.drafters.trained import ParallelGrowth
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import LayerView
from decode.model.cache.probes import Probes
from decode.model.loading import Target
from decode.opening.combinations import COMBINATIONS, Combination, Opening
from decode.shapes import Growth, Shape
from decode.verification import Verification
from heads.pass_heads import PassDrafter, PassHeads


class InTreeDrafter(PassDrafter):
    """Drafts from the look-ahead tokens that the target read behind the last accepted token, in the
    pass that verified it. Then the draft needs no pass.

    The pass that accepts token a also gives the token after it, y. The look-ahead tokens behind a
    did not see y: the first one stands in the place of y and predicts the token after y. So a draft
    has at most k tokens here, and none of them comes from the target's own distribution. Their q is
    known before they are drawn.

    The first places of a draft have look-ahead tokens behind them (`Probes`): the text's last
    token, then the nodes in their order, shallow ones first. The draft may be that of another
    drafter. A row drafts with a pass, as `PassDrafter` does, if it has no such states for its text:
    when it starts, after a pass without drafts, and when it accepted a node without look-ahead
    tokens. Which form a row uses depends on this row only.

    places: how many places have look-ahead tokens. None: all. Raises UserError as `PassDrafter`
    does, and for places below 2: the first token of a draft with a pass comes from the target's own
    distribution, so it is accepted.
    """

    per_row = MappingProxyType({"_lengths": -1})
    _lengths: np.ndarray  # [B]: the length of the text that the states continue; −1 without states

    def __init__(
        self,
        heads: PassHeads,
        vocab_size: int,
        shape: Shape | None = None,
        *,
        places: int | None = None,
    ) -> None:
        super().__init__(heads, vocab_size, shape)
        if places is not None and places < 2:
            raise UserError(
                f"places is {places}; expected a whole number ≥ 2, or none for all: with 1, only "
                "the text's last token has look-ahead tokens, and a pass adds a token after it"
            )
        self.places, self.tokens = places, heads.depth - 1
        self.start(Contexts.of((), 0))

    def start(self, contexts: Contexts) -> None:
        self._probes: Probes | None = None  # of this pass
        self._states = torch.zeros(0)  # [B, k, H]
        super().start(contexts)

    def room(self, nodes: int, gamma: int) -> int:
        return nodes + Probes.count(min(self.tokens, gamma), self.places, nodes)

    def probes(self, max_depth: int) -> Probes:
        view = self._view
        assert view is not None, "attach() comes before probes()"
        count = min(self.tokens, max_depth)
        ids = view.vocab_size + torch.arange(count, device=view.device)
        self._probes = Probes(view, ids, self.places)
        return self._probes

    def observe(self, verification: Verification) -> None:
        probes, self._probes = self._probes, None
        if probes is None:
            return  # the texts have grown, so what there is continues them no more
        columns, accepted = verification.columns(), verification.accepted
        place = np.take_along_axis(columns, accepted[:, None], axis=1)[:, 0]
        # Without a draft, a row that decodes alone has no probes.
        fresh = (place < probes.states.shape[1]) & (verification.depths > 0)
        if verification.waits is not None:
            fresh &= ~verification.waits
        device = probes.states.device
        at = to_device(np.where(fresh, place, 0), device)
        states = probes.states[torch.arange(len(at), device=device), at]
        if self._states.shape == states.shape:
            states = torch.where(to_device(fresh, device)[:, None, None], states, self._states)
        else:
            self._lengths = np.full(len(fresh), -1)
        self._states = states
        self._lengths = np.where(fresh, verification.contexts.lengths, self._lengths)

    def rewind(self, lengths: np.ndarray) -> None:
        self._lengths = np.where(lengths < self._lengths, -1, self._lengths)

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        if len(self._states):
            self._states = self._states.index_select(0, to_device(rows, self._states.device))

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        new = len(contexts.lengths) - len(self._lengths)
        super().add_rows(contexts, verification)
        if len(self._states):
            self._states = pad(self._states, (0, 0, 0, 0, 0, new))

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        ready = self._ready(contexts)
        if not ready.any():
            return super().draft(contexts, limits, sampling, rng)
        depths = np.where(ready, np.minimum(limits.depths, self._states.shape[1]), limits.depths)
        limits = replace(limits, depths=depths)
        if (depths > 0)[~ready].any():
            return super().draft(contexts, limits, sampling, rng)
        if not depths.any():
            return Draft.none(len(depths), "cpu")
        logits = self._logits(limits.max_depth)
        growth = ParallelGrowth(
            contexts, sampling, self.vocab_size or 0, self.heads.vocabulary, logits
        )
        return self.shape.grow(growth, limits, sampling, rng)

    def growth(
        self, view: LayerView, contexts: Contexts, sampling: Sampling, max_depth: int
    ) -> Growth:
        growth = super().growth(view, contexts, sampling, max_depth)
        assert isinstance(growth, ParallelGrowth)
        ready = self._ready(contexts)
        if ready.any():
            logits = self._logits(max_depth)
            its_rows = to_device(np.flatnonzero(ready), logits.device)
            growth.logits[its_rows, : logits.shape[1]] = logits[its_rows].to(growth.logits.dtype)
        return growth

    def _ready(self, contexts: Contexts) -> np.ndarray:
        """bool [B]: the rows whose states continue their texts."""
        ready: np.ndarray = self._lengths == contexts.lengths
        return ready

    def _logits(self, max_depth: int) -> Tensor:
        """[B, d, V']: at depth 1 … d of the next draft."""
        states = self._states[:, :max_depth].to(self.heads.dtype)
        return self.heads.output.at(1, states)


@COMBINATIONS.register("in_tree")
@dataclass(frozen=True, kw_only=True)
class InTree(Combination):
    """Look-ahead embeddings are read in the passes that verify (`InTreeDrafter`).

    drafter: the directory of `pass` heads."""

    drafter: str
    places: int | None = None

    def open(self, opened: Opening, target: Target) -> Drafter:
        drafter = opened(self.drafter)
        if not isinstance(drafter, PassDrafter):
            raise UserError(
                f"the drafter of in_tree is {self.drafter}, a {type(drafter).__name__}; expected "
                "the directory of heads of the type pass"
            )
        return InTreeDrafter(drafter.heads, target.vocab_size, drafter.shape, places=self.places)
