"""Rules, drafters and parts of the loop with one error each, which the tests of losslessness must
find. `tests.controls` lists them with how they are found."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts, Draft, Limits, Siblings
from decode.drafters import Drafter
from decode.drafters.several.cascade import VerticalCascade
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.sparse import SparseDrafter
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from decode.drafters.trained import VerifyingDrafter
from decode.draw import sampling as drawing
from decode.draw.random_numbers import CounterRNG, exponentials
from decode.draw.sampling import Sampling, _keys
from decode.model.cache.cached_model import CachedLM
from decode.rules import RULES, Rule
from decode.rules.block import BlockVerification
from decode.rules.speculative import SpeculativeSampling
from decode.verdict import Decision, Scores


class PlainSpeculative(SpeculativeSampling):
    """The rule once more, in other words, with places to go wrong in."""

    def judged_q(self, q_x: Tensor) -> Tensor:
        return q_x

    def residual_row(self, accepted: Tensor) -> Tensor:
        return accepted

    def bonus_row(self, accepted: Tensor) -> Tensor:
        return accepted

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        rows, nodes = draft.tokens.shape
        p = scores.probs()
        q = draft.q
        if q is None:
            q = torch.nn.functional.one_hot(draft.tokens, p.shape[2]).float()
        else:
            q = q.gather(1, draft.rows_of_q()[..., None].expand(-1, -1, p.shape[2]))
        uniforms = rng.uniforms(CounterRNG.ACCEPT, 0, nodes)
        accepted = torch.zeros(rows, dtype=torch.int64)
        going = torch.ones(rows, dtype=torch.bool)
        all_rows = torch.arange(rows)
        sizes = torch.as_tensor(draft.sizes)
        for i in range(nodes):
            token = draft.tokens[:, i]
            p_x, q_x = p[all_rows, i, token].double(), q[all_rows, i, token].double()
            going = going & (i < sizes) & (uniforms[:, i] * self.judged_q(q_x) < p_x)
            accepted += going
        weights = p[all_rows, self.bonus_row(accepted)]
        if nodes:
            row = accepted.clamp(max=nodes - 1)
            left = (p[all_rows, row] - q[all_rows, self.residual_row(row)]).clamp(min=0)
            rejected = (accepted < sizes) & (left.sum(1) > 0)
            fallen = (accepted < sizes) & ~rejected
            weights = torch.where(rejected[:, None], left, weights)
            weights = torch.where(fallen[:, None], p[all_rows, row], weights)
        # By the module, in which tests of enumeration put another way to draw.
        following = drawing.draw(weights, rng.of_next(accepted))
        return Decision.of_chain(draft, accepted, following)


class ClampedRatio(PlainSpeculative):
    def judged_q(self, q_x: Tensor) -> Tensor:
        return q_x.clamp(min=1e-2)


class WrongResidualRow(PlainSpeculative):
    """Subtracts the q of the first position, wherever the rejection was."""

    def residual_row(self, accepted: Tensor) -> Tensor:
        return torch.zeros_like(accepted)


class BonusOffByOne(PlainSpeculative):
    """After full acceptance draws from the distribution that judged the last drafted token."""

    def bonus_row(self, accepted: Tensor) -> Tensor:
        return (accepted - 1).clamp(min=0)


class FirstReject(BlockVerification):
    """Stops at the first place that does not stay, as token by token verification may."""

    @staticmethod
    def last(stays: Tensor) -> Tensor:
        return stays.long().cumprod(1).sum(1)


class _Wrapped(Rule):
    """A rule for trees that is told something wrong about the draft."""

    lossless, trees = True, True

    def __init__(self, rule: str) -> None:
        self.rule = RULES[rule]()

    def told(self, draft: Draft) -> Draft:
        raise NotImplementedError

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        return self.rule.decide(self.told(draft), scores, rng)


class _Unnormalised(Draft):
    def q_of(self, nodes: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        q, whole = super().q_of(nodes, vocab)
        return q, torch.ones_like(whole)


class NotRenormalised(_Wrapped):
    """Siblings without replacement: elders leave q, and what is left is taken as it is."""

    def told(self, draft: Draft) -> Draft:
        return _Unnormalised(**{field.name: getattr(draft, field.name) for field in fields(draft)})


class JudgedAsDistinct(_Wrapped):
    """Siblings with replacement, judged as if they were without."""

    def told(self, draft: Draft) -> Draft:
        return replace(draft, drawn="distinct")


class TakenForOneQ(_Wrapped):
    """Mixed siblings, judged by a rule that takes them all to be drawn from the first one's q."""

    def told(self, draft: Draft) -> Draft:
        return draft


class SharedStreams(_Wrapped):
    """Accepts a token by the very number that it won its race with."""

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        return self.rule.decide(draft, scores, _DraftersOwn(rng, draft.tokens))


class _DraftersOwn(CounterRNG):
    def __init__(self, rng: CounterRNG, tokens: Tensor) -> None:
        vars(self).update(vars(rng))
        keys = _keys(rng.uniforms(CounterRNG.DRAFT, 0, tokens.shape[1]))
        self._won_with = 1 - (-exponentials(keys, tokens[..., None])[..., 0]).exp()

    def uniforms(self, stream: int, first: int, count: int) -> Tensor:
        if stream == CounterRNG.ACCEPT:
            return self._won_with[:, first : first + count]
        return super().uniforms(stream, first, count)


class SharedCascade(VerticalCascade):
    """Its inner rule accepts and draws by the very random numbers that the target's rule uses."""

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        # Of this object only: another thread may draft without the error.
        shared = copy.copy(rng)
        vars(shared)["continued"] = lambda part, lengths: rng
        return super().draft(contexts, limits, sampling, shared)


class LenientCascade(VerticalCascade):
    """Has a lossy inner rule, and declares the q of a lossless one."""

    def __init__(self, model: VerifyingDrafter, inner: Drafter, lenience: float) -> None:
        super().__init__(model, inner)
        self.rule = RULES.make(f"lenience:{lenience=}")  # __init__ would refuse it

    def siblings(self, sampling: Sampling) -> Siblings:
        return "independent"


class ForgottenRows(CompositeDrafter):
    """Takes row i of q for node i of every chain."""

    def draft(self, contexts: Contexts, *rest: Any) -> Draft:
        draft = super().draft(contexts, *rest)
        if draft.is_chain:
            draft.q_rows = None
        return draft


class ColdDrafter(SmallLMDrafter):
    """Draws at 0.9 times the temperature, and declares the q of the temperature asked for."""

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        cold = replace(sampling, temperature=0.9 * sampling.temperature)
        draft = super().draft(contexts, limits, cold, rng)
        if draft.q is not None:
            asked = draft.q**0.9
            draft.q = asked / asked.sum(-1, keepdim=True)
        return draft


class ChangingDrafter(SmallLMDrafter):
    """Changes what it has drawn."""

    def draft(self, contexts: Contexts, *rest: Any) -> Draft:
        draft = super().draft(contexts, *rest)
        if draft.q is not None:
            self.change(draft, draft.q)
        return draft

    def change(self, draft: Draft, q: Tensor) -> None:
        raise NotImplementedError


class DroppingDrafter(ChangingDrafter):
    """Drops drawn tokens for their own q, with all that follows them."""

    def change(self, draft: Draft, q: Tensor) -> None:
        own = q.gather(2, draft.tokens[..., None])[..., 0]
        kept = (own > 0.3).long().cumprod(1).sum(1)
        draft.sizes = np.minimum(draft.sizes, kept.cpu().numpy())


class ChoosingDrafter(ChangingDrafter):
    """Drafts the likeliest tokens, and declares the whole distribution."""

    def change(self, draft: Draft, q: Tensor) -> None:
        draft.tokens = q.argmax(-1)


class StaleCache(SmallLMDrafter):
    """Takes its own last token for cached, which was drawn but never fed: so after full acceptance
    it reads a slot that nothing was written to."""

    def draft(self, contexts: Contexts, limits: Limits, *rest: Any) -> Draft:
        draft = super().draft(contexts, limits, *rest)
        self._cached = self._cached + (limits.depths > 0)
        return draft


class NeverCopied(SparseDrafter):
    """Lacks the keys and values of the tokens that the target read since the last choice."""

    def _copy(self, target: CachedLM, tokens: np.ndarray) -> None:
        return None


@contextmanager
def path_one_slot_off() -> Iterator[None]:
    """The keys and values of an accepted path are moved to one slot behind where they belong."""
    commit = CachedLM.commit

    def wrong(self: CachedLM, start: np.ndarray, columns: Tensor, counts: np.ndarray) -> None:
        commit(self, start + 1, columns - 1, counts)

    with mock.patch.object(CachedLM, "commit", wrong):
        yield


@contextmanager
def processors_see_the_row() -> Iterator[None]:
    """Each node is judged after processors that saw the committed text, not the node's path."""
    with mock.patch("decode.loop.decoding.Scores", _RowsText):
        yield


class _NoPath(Draft):
    def ancestors(self) -> Tensor:
        return torch.zeros_like(super().ancestors())


class _RowsText(Scores):
    def __init__(self, logits: Tensor, sampling: Sampling, draft: Draft, *rest: Any) -> None:
        super().__init__(logits, sampling, _NoPath(draft.tokens, draft.sizes), *rest)


class NotRestricted(SharedVocabularyDrafter):
    """Draws from the shared tokens, and declares their q among all of the drafter's tokens."""

    def draft_logits(self, logits: Tensor) -> Tensor:
        shared = super().draft_logits(logits)
        share = shared.float().logsumexp(-1) - logits.float().logsumexp(-1)
        self._shares.append(share.exp().reshape(len(logits), -1))
        return shared

    def draft(self, contexts: Contexts, *rest: Any) -> Draft:
        self._shares: list[Tensor] = []
        draft = super().draft(contexts, *rest)
        if draft.q is not None:
            draft.q = draft.q * torch.cat(self._shares, 1)[:, : draft.q.shape[1], None]
        return draft
