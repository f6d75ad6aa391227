"""Drafters made of several drafters: called in turn (A+B), or merged into one tree (A++B).

Shapes: B rows, N nodes of all drafts together, R rows of q, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.base.threads import Together
from decode.draft import Asked, Contexts, Draft, Drawn, Limits, Siblings
from decode.drafters import Drafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM
from decode.shapes import Shape
from decode.tree_nodes import first_equal, pack, renumbered
from decode.verification import Verification


class Group(Drafter):
    """Several drafters that receive all calls. Subclasses define how their drafts become one.

    Raises UserError for an empty list, and for different vocabularies.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise UserError("the list of drafters to combine is empty; give at least one drafter")
        self.drafters = list(drafters)
        sizes = {size for drafter in drafters if (size := drafter.vocab_size) is not None}
        if len(sizes) > 1:
            raise UserError(
                f"the combined drafters have vocabularies of {sorted(sizes)} tokens; expected the "
                "target's vocabulary for all of them"
            )
        self.vocab_size = next(iter(sizes), None)
        self.decoder_only = any(drafter.decoder_only for drafter in drafters)
        self.reads_cache = any(drafter.reads_cache for drafter in drafters)
        self.captured_layers = tuple(
            sorted({layer for drafter in drafters for layer in drafter.captured_layers})
        )

    @property
    def turn(self) -> Together:
        # A decoder that has one of them alone waits too.
        return Together(drafter.turn for drafter in self.drafters)

    @property
    def estimates(self) -> bool:
        return all(drafter.estimates for drafter in self.drafters)

    @property
    def token_bytes(self) -> int:
        return sum(drafter.token_bytes for drafter in self.drafters)

    @property
    def rewinds(self) -> bool:
        return all(drafter.rewinds for drafter in self.drafters)

    def max_depth(self, gamma: int) -> int:
        return max(drafter.max_depth(gamma) for drafter in self.drafters)

    def attach(self, lm: CachedLM) -> None:
        for drafter in self.drafters:
            drafter.attach(lm)

    def start(self, contexts: Contexts) -> None:
        super().start(contexts)
        for drafter in self.drafters:
            drafter.start(contexts)

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        for drafter in self.drafters:
            drafter.prefill(contexts, first)

    def observe(self, verification: Verification) -> None:
        for drafter in self.drafters:
            drafter.observe(verification)

    def rewind(self, lengths: np.ndarray) -> None:
        for drafter in self.drafters:
            drafter.rewind(lengths)

    def forget(self) -> None:
        for drafter in self.drafters:
            drafter.forget()

    @property
    def learns(self) -> bool:
        return any(drafter.learns for drafter in self.drafters)

    def keep_rows(self, rows: np.ndarray) -> None:
        super().keep_rows(rows)
        for drafter in self.drafters:
            drafter.keep_rows(rows)

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        super().add_rows(contexts, verification)
        for drafter in self.drafters:
            drafter.add_rows(contexts, verification)


class CompositeDrafter(Group):
    """Each row takes the draft of the first drafter that has one for it: for example prompt lookup,
    then the trained drafter if lookup finds nothing. A drafter is called only if some row has no
    draft yet, and not if the limits say that it rests. Until then it reads no text.

    The drafter of a row depends only on its text and on the limits, both known before a draft, so
    decoding stays lossless. If some drafters draw and others choose their tokens, chosen tokens
    declare q = 1; if those drafts are trees, siblings are mixed. Raises UserError as `Group` does,
    and if one drafter draws the siblings of its trees without replacement and another makes trees
    in a different way.
    """

    _unread: np.ndarray  # bool [B, M]: the texts that a drafter has not read yet

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.per_row = {"_unread": np.ones(len(self.drafters), dtype=bool)}

    @property
    def branches(self) -> bool:
        return any(drafter.branches for drafter in self.drafters)

    def siblings(self, sampling: Sampling) -> Siblings:
        kinds = [(drafter.siblings(sampling), drafter.branches) for drafter in self.drafters]
        together = _siblings(kinds)
        if together is None:
            named_kinds = ", ".join(
                f"{type(drafter).__name__}: {kind}{' trees' * branches}"
                for drafter, (kind, branches) in zip(self.drafters, kinds, strict=True)
            )
            raise UserError(
                f"these drafters cannot be combined ({named_kinds}); trees with distinct siblings "
                "can be combined only with chains, or with trees of the same kind"
            )
        return together

    def describe_drafts(self, max_depth: int | None = None) -> str:
        return " or ".join(dict.fromkeys(x.describe_drafts(max_depth) for x in self.drafters))

    def max_nodes(self, gamma: int) -> int:
        return max(drafter.max_nodes(gamma) for drafter in self.drafters)

    def with_shape(self, shape: Shape) -> "CompositeDrafter":
        """Gives the shape to all drafters that take shapes. Raises UserError if none does."""
        shaped: list[Drafter] = []
        refused = []
        for drafter in self.drafters:
            try:
                shaped.append(drafter.with_shape(shape))
            except UserError as error:
                shaped.append(drafter)
                refused.append(error)
        if len(refused) == len(shaped):
            raise refused[0]
        return self.with_drafters(shaped)

    def with_drafters(self, drafters: Sequence[Drafter]) -> "CompositeDrafter":
        """The same with these drafters in the place of its own."""
        return CompositeDrafter(drafters)

    def asked(self, depths: np.ndarray) -> np.ndarray:
        """bool [B, M]: which of its M drafters a row asks. depths: int [B], the max depth of each
        row. It may depend on anything that is known before the draft."""
        return np.ones((len(depths), len(self.drafters)), dtype=bool)

    def prefill(self, contexts: Contexts, first: int = 0) -> None:
        return None  # each drafter reads when it is asked

    def _read(self, member: int, contexts: Contexts) -> float:
        """Let a drafter read the texts that are new to it. Returns the seconds it takes."""
        begin, new = time.perf_counter(), self._unread[:, member]
        if not new.any():
            return 0.0
        self.drafters[member].prefill(contexts, int(new.argmax()))
        new[:] = False
        return time.perf_counter() - begin

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        depths = limits.depths.copy()
        asked = self.asked(limits.depths)
        drafts: list[Draft] = []
        sources = np.full(len(depths), -1)
        did = [Asked()] * len(self.drafters)
        for member, drafter in enumerate(self.drafters):
            open_depths = np.where(asked[:, member], depths, 0)
            if member < len(limits.by_source):
                open_depths = np.minimum(open_depths, limits.by_source[member])
            if not open_depths.any():
                continue
            reading = self._read(member, contexts)
            begin = time.perf_counter()
            its_limits = replace(limits, depths=open_depths, source=member, by_source=())
            draft = drafter.draft(contexts, its_limits, sampling, rng)
            # Drop drafts in rows that already have one, or that do not ask for one.
            draft.cut(np.where(open_depths > 0, draft.sizes, 0))
            depths[draft.sizes > 0], sources[draft.sizes > 0] = 0, member
            did[member] = Asked(time.perf_counter() - begin, draft.levels(), reading)
            if draft.sizes.any():
                drafts.append(draft)
        draft = _merged(drafts) if drafts else Draft.none(len(depths), "cpu")
        draft.sources, draft.asked = sources, did
        return draft


def _siblings(kinds: Sequence[tuple[Siblings, bool]]) -> Siblings | None:
    """The kind of siblings of one draft that joins different rows. kinds: (kind, whether it
    branches) of the drafts. None if no kind describes the mix. A chain has no siblings, so for
    chains only drawn or chosen matters."""
    if all(kind == "chosen" for kind, _ in kinds):
        return "chosen"
    trees = {kind for kind, branches in kinds if branches}
    if not trees:
        return "independent"
    if len(trees) > 1:
        return None if "distinct" in trees else "mixed"
    kind = trees.pop()
    # In one draft with drawn tokens, each chosen token needs its own q.
    return "mixed" if kind == "chosen" else kind


def _merged(drafts: list[Draft]) -> Draft:
    """Joins drafts that have nodes in different rows into one draft."""
    if len(drafts) == 1:
        return drafts[0]
    device = common_device(drafts)
    drafts = [draft.to(device) for draft in drafts]
    rows = len(drafts[0].sizes)
    nodes = max(draft.tokens.shape[1] for draft in drafts)
    sizes = np.zeros(rows, dtype=np.int64)
    tokens = torch.zeros(rows, nodes, dtype=torch.int64, device=device)
    order = torch.arange(nodes, device=device)
    trees = any(not draft.is_chain for draft in drafts)
    parents = torch.full_like(tokens, -1) if trees else None
    confidence = torch.zeros(rows, nodes, device=device)
    drawn = [draft.q for draft in drafts if draft.q is not None]
    q = q_rows = None
    if drawn:
        depth = max(nodes, *(x.shape[1] for x in drawn))
        q = drawn[0].new_zeros(rows, depth, drawn[0].shape[2])
        q_rows = order.repeat(rows, 1)
    for draft in drafts:
        its_rows = to_device(np.flatnonzero(draft.sizes), device)
        count = draft.tokens.shape[1]
        sizes = np.maximum(sizes, draft.sizes)
        tokens[its_rows, :count] = draft.tokens[its_rows]
        if parents is not None:
            parents[its_rows, :count] = (draft.parent_rows() - 1)[its_rows]
        confidence[its_rows, :count] = draft.confidences()[its_rows]
        if q is None or q_rows is None:
            continue
        if draft.q is None:
            q[its_rows, :count] = one_hot(draft.tokens[its_rows], q.shape[2]).to(q.dtype)
        else:
            q[its_rows, : draft.q.shape[1]] = draft.q[its_rows]
            q_rows[its_rows, :count] = draft.rows_of_q()[its_rows]
    if not trees and all(draft.q_rows is None for draft in drafts):
        q_rows = None  # row i for node i, as in most chains
    kind = _siblings([(draft.siblings, not draft.is_chain) for draft in drafts])
    assert kind is not None, "a drafter made other siblings than it declared"
    drawn_as: Drawn = "independent" if kind == "chosen" else kind
    chosen = chosen_rows(drafts)
    return Draft(tokens, sizes, q, parents, q_rows, drawn_as, chosen, confidence=confidence)


class SeveralDrafters(Group):
    """Each drafter drafts alone. Paths with the same beginning share their nodes.

    If any drafter draws its tokens, each node has the q of its drafter (1 for a chosen token), and
    siblings are mixed: independent draws from different q's. A token equal to an earlier sibling
    then stays as a leaf, and its children move to the earlier one (`decode.shapes.chains` explains
    why). If all drafters choose their tokens, equal nodes become one.

    Siblings are in the order of the drafters. Raises UserError as `Group` does, and if one drafter
    draws without replacement: together with other draws this is not one kind of siblings.
    """

    @property
    def branches(self) -> bool:
        return True

    def siblings(self, sampling: Sampling) -> Siblings:
        kinds = [drafter.siblings(sampling) for drafter in self.drafters]
        if "distinct" in kinds:
            name = type(self.drafters[kinds.index("distinct")]).__name__
            raise UserError(
                f"{name} draws siblings without replacement; such drafts cannot be merged with "
                "those of other drafters. Set draw=independent or draw=top in its shape"
            )
        if len(kinds) > 1 and set(kinds) != {"chosen"}:
            return "mixed"
        return kinds[0]

    def max_nodes(self, gamma: int) -> int:
        return sum(drafter.max_nodes(gamma) for drafter in self.drafters)

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        its_limits = replace(limits, stops=None, by_source=())
        # With the same random numbers, drafters would not draw independently.
        drafts = [
            drafter.draft(contexts, its_limits, sampling, rng.fork(part))
            for part, drafter in enumerate(self.drafters)
        ]
        if not any(draft.sizes.any() for draft in drafts):
            return Draft.none(len(limits.depths), "cpu")
        device = common_device(drafts)
        drafts = [draft.to(device) for draft in drafts if draft.sizes.any()]
        if len(drafts) == 1 and drafts[0].siblings == "chosen":
            return replace(drafts[0], sources=None, asked=())
        depth = limits.max_depth
        tokens, parents = _joined(drafts)
        keep = torch.cat([draft.valid() for draft in drafts], 1)
        depths = torch.cat([draft.ancestors().sum(2) for draft in drafts], 1)
        q, q_rows = joined_q(drafts)

        # Shallow nodes first; at one depth, in the order of the drafters.
        by_depth = torch.where(keep, depths, depth + 1).sort(dim=1, stable=True).indices
        tokens, keep = tokens.gather(1, by_depth), keep.gather(1, by_depth)
        confidence = torch.cat([draft.confidences() for draft in drafts], 1).gather(1, by_depth)
        place = by_depth.argsort(1)
        above = renumbered(parents.gather(1, by_depth), place)
        first = first_equal(tokens, torch.where(keep, above, -1), depth)
        above = renumbered(above, first)
        if q is None:
            keep &= first == torch.arange(tokens.shape[1], device=tokens.device)
        if q_rows is not None:
            q_rows = q_rows.gather(1, by_depth)
        drawn: Drawn = "independent" if len(self.drafters) == 1 else "mixed"
        chosen = chosen_rows(drafts)
        return pack(keep, above).draft(tokens, q, q_rows, drawn, chosen, confidence)


def common_device(drafts: list[Draft]) -> torch.device:
    """An accelerator if a draft is on one: a copy from there would wait."""
    devices = [draft.tokens.device for draft in drafts]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def chosen_rows(drafts: Sequence[Draft]) -> np.ndarray:
    """bool [B]: the rows in which only chosen tokens were drafted."""
    there = [draft.sizes > 0 for draft in drafts]
    chosen = [draft.chosen_rows() for draft in drafts]
    any_: np.ndarray = np.any(there, axis=0)
    return any_ & np.all(~np.array(there) | chosen, axis=0)


def _joined(drafts: list[Draft]) -> tuple[Tensor, Tensor]:
    """Tokens and parents, int64 [B, N] each: the drafts side by side."""
    parents = []
    before = 0
    for draft in drafts:
        above = draft.parent_rows() - 1
        parents.append(torch.where(above < 0, -1, above + before))
        before += above.shape[1]
    return torch.cat([draft.tokens for draft in drafts], 1), torch.cat(parents, 1)


def joined_q(drafts: list[Draft]) -> tuple[Tensor | None, Tensor | None]:
    """(q [B, R, V], q_rows int64 [B, N]). (None, None) if no token was drawn."""
    drawn = next((draft.q for draft in drafts if draft.q is not None), None)
    if drawn is None:
        return None, None
    q = []
    q_rows = []
    before = 0
    for draft in drafts:
        if draft.q is not None:
            q.append(draft.q)
            rows = draft.rows_of_q()
        else:
            # A chosen token is a draw from a one-hot distribution.
            q.append(one_hot(draft.tokens, drawn.shape[2]).to(drawn.dtype))
            rows = torch.arange(draft.tokens.shape[1], device=drawn.device)
            rows = rows.expand_as(draft.tokens)
        q_rows.append(rows + before)
        before += q[-1].shape[1]
    return torch.cat(q, 1), torch.cat(q_rows, 1)
