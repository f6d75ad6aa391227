"""Rules with one error each, which the tests of losslessness must find."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from decode.draft import Draft
from decode.rules import RULES, Rule, Verdict
from decode.rules.block import BlockVerification
from decode.rules.speculative import SpeculativeSampling
from decode.sampling import Noise, draw
from decode.scores import Scores


class PlainSpeculative(SpeculativeSampling):
    """The rule once more, in other words, with places to go wrong in."""

    def judged_q(self, q_x: Tensor) -> Tensor:
        return q_x

    def residual_row(self, accepted: Tensor) -> Tensor:
        return accepted

    def bonus_row(self, accepted: Tensor) -> Tensor:
        return accepted

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        rows, nodes = draft.tokens.shape
        p = scores.probs()
        q = draft.q
        if q is None:
            q = torch.nn.functional.one_hot(draft.tokens, p.shape[2]).float()
        uniforms = noise.uniforms(Noise.ACCEPT, 0, nodes)
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
        following = draw(weights, noise.uniforms(Noise.NEXT, 0, 1)[:, 0])
        path = torch.arange(nodes).expand(rows, -1)
        return Verdict(path, accepted, torch.minimum(accepted + 1, sizes), following)


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

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        return self.rule.verify(self.told(draft), scores, noise)


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
