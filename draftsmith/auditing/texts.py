"""A text that an engine gave, and how the target's law judges each of its tokens.

Shapes: L tokens of the prompt, T tokens of the text, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from decode.draw.penalties import AnswerSpans, TextBefore, penalised
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from train.engines.answers.check_model import below_likeliest

ROWS = 64  # positions whose [V] probabilities are in memory at a time
_LABEL = b"audit"
LONGEST_GRAM = 3  # of the lookup whose proposals are watched
# Rounding of logits, in units of a dtype's ε at the largest logit: both are rounded, and their sums
# were rounded in different orders. Never less than LEAST_ROUNDING.
ROUNDINGS, LEAST_ROUNDING = 4, 1e-3
# The standard deviation of the rounding of a difference of two logits, in units of the allowance:
# one ε at the largest logit. Where log-probabilities show a larger one, the allowance grows with
# it, up to MOST_SCALE times. No rounding at all is the least that a float32 shows.
DEVIATION, MOST_SCALE, NO_ROUNDING = 1 / ROUNDINGS, 4.0, 1e-6

# The sets of tokens that come first in an order. Each is known before the token is drawn.
SETS = ("likeliest", "proposed", "seen", "end")
# The orders of u: by descending probability, with a set in front or none.
ORDERS = ("likeliest", "proposed", "seen")


@dataclass(frozen=True)
class EngineText:
    """prompt: token ids. tokens: the answer's, with the end-of-text token if it ended. number: of
    the prompt. log_p: float [T], by the engine; None if it gives none."""

    number: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    log_p: Sequence[float] | None = None


@dataclass(frozen=True)
class JudgedText:
    """Arrays [T], float64 where nothing else is said.

    gap: how far the token's logit is below the largest one, after the penalty. rounding: what the
    engine's dtype may move it by. log_p: the log-softmax of the target's own logits. outside: bool,
    the request's filters had removed the token, and not by a hair. u: [orders, T] of ORDERS.
    hit, due: [sets, T] of SETS, whether the token is in a set, and the set's probability.
    surprise, surprise_variance: log p of the token less its mean under p, and its variance under p.
    again: Σ p², the probability that two draws agree. below_due, below_variance: the mean and the
    variance of gap / rounding, if normal errors of the logits' differences choose the token.
    """

    text: EngineText
    gap: np.ndarray
    rounding: np.ndarray
    log_p: np.ndarray
    outside: np.ndarray
    u: np.ndarray
    hit: np.ndarray
    due: np.ndarray
    surprise: np.ndarray
    surprise_variance: np.ndarray
    again: np.ndarray
    below_due: np.ndarray
    below_variance: np.ndarray


class TextJudge:
    """Judges texts by a target. sampling: as in the request; if greedy, the fields of the law are
    those of temperature 1. dtype: the engine's. rounding: of logits, in place of the dtype's.
    scale: times the dtype's."""

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        seed: int,
        dtype: torch.dtype,
        rounding: float | None = None,
        scale: float = 1.0,
    ) -> None:
        self._target, self._sampling = target, sampling
        self._eps, self._rounding, self._scale = torch.finfo(dtype).eps, rounding, scale
        # The numbers U must not be those that an engine draws with from the same seed.
        self._rng = np.random.default_rng((seed, *_LABEL))

    @torch.inference_mode()
    def judge(self, text: EngineText) -> JudgedText:
        """One forward over the prompt and the text."""
        ids = torch.tensor([[*text.prompt, *text.tokens]], device=self._target.device)
        count = len(text.tokens)
        # With the rows that are no tokens: an engine may choose them, as our own loop does.
        logits = self._target.model(input_ids=ids, logits_to_keep=count + 1).logits[0, -count - 1 :]
        logits = logits[:count]
        proposals = proposed(text.prompt, text.tokens)
        uniform = torch.as_tensor(self._rng.random(count), device=ids.device)
        parts = [
            self._part(logits[first : first + ROWS], ids[0], first, proposals, uniform, count)
            for first in range(0, count, ROWS)
        ]
        fields = {
            name: torch.cat([part[name] for part in parts], -1).cpu().numpy() for name in parts[0]
        }
        return JudgedText(text, **fields)

    def _part(
        self, raw: Tensor, ids: Tensor, first: int, proposals: Tensor, uniform: Tensor, count: int
    ) -> dict[str, Tensor]:
        """The fields of the positions from `first` on. raw: [t, V]. ids: of prompt and text."""
        raw, begin = raw.float(), len(ids) - count + first
        part = slice(first, first + len(raw))
        tokens = ids[begin : begin + len(raw), None]
        seen = _tokens_before(ids, begin, len(raw))
        logits = raw
        if self._sampling.penalises:
            logits = self._penalised(raw, ids, len(ids) - count, first)
        gap = below_likeliest(logits, tokens[:, 0])
        rounding = (ROUNDINGS * self._eps * raw.abs().amax(-1)).clamp(min=LEAST_ROUNDING)
        rounding *= self._scale
        if self._rounding is not None:
            rounding = torch.full_like(rounding, max(self._rounding, NO_ROUNDING))
        warm = self._sampling.warmed
        p = warm.probs(logits).double()
        outside = p.gather(1, tokens)[:, 0] == 0
        if outside.any():
            outside &= ~self._at_the_border(logits, tokens, rounding, warm)
        return {
            "gap": gap.double(),
            "rounding": rounding.double(),
            "log_p": raw.log_softmax(-1).gather(1, tokens)[:, 0].double(),
            "outside": outside,
            **self._transformed(p, tokens, seen, proposals[part].to(p.device), uniform[part]),
            **_surprise(p, tokens),
            "again": (p**2).sum(-1),
            **_below(logits, rounding),
        }

    def _penalised(self, raw: Tensor, ids: Tensor, prompt: int, first: int) -> Tensor:
        """raw: [t, V], of the text's positions from `first` on. prompt: its tokens in ids."""
        answers = AnswerSpans(
            np.array([prompt]), np.array(self._target.eos_token_ids, dtype=np.int64)
        )
        places = torch.arange(len(ids) - prompt, device=ids.device)
        on_path = places < first + torch.arange(len(raw), device=ids.device)[:, None]
        before = TextBefore(
            [self._sampling], ids[None, :prompt].cpu().numpy(), np.array([prompt]), answers,
            ids[None, prompt:], on_path[None], None, raw.shape[1],
        )  # fmt: skip
        return penalised(raw[None], before)[0]

    def _transformed(
        self, p: Tensor, tokens: Tensor, seen: Tensor, proposals: Tensor, uniform: Tensor
    ) -> dict[str, Tensor]:
        """u in each order; whether the tokens are in each set, and the sets' probabilities."""
        p_x = p.gather(1, tokens)
        # What stands before the token by descending probability, ties by ascending id.
        ahead = p * ((p > p_x) | ((p == p_x) & (torch.arange(p.shape[1]).to(p.device) < tokens)))
        in_front = ahead.sum(-1)
        hits, dues, us = [], [], []
        for name, members in self._sets(p, seen, proposals):
            hit, due = members.gather(1, tokens)[:, 0], (p * members).sum(-1)
            hits.append(hit.double())
            dues.append(due)
            if name in ORDERS:
                members_ahead = (ahead * members).sum(-1)
                before = torch.where(hit, members_ahead, due + in_front - members_ahead)
                us.append(before + uniform * p_x[:, 0])
        return {"u": torch.stack(us), "hit": torch.stack(hits), "due": torch.stack(dues)}

    def _sets(self, p: Tensor, seen: Tensor, proposals: Tensor) -> Iterator[tuple[str, Tensor]]:
        """bool [t, V] for each of SETS."""
        nothing = torch.zeros_like(p, dtype=torch.bool)
        yield "likeliest", nothing.scatter(1, p.argmax(-1, keepdim=True), True)
        looked_up = nothing.scatter(1, proposals.clamp(min=0)[:, None], True)
        yield "proposed", looked_up & (proposals >= 0)[:, None]
        yield "seen", nothing.scatter(1, seen, True)
        ends = torch.tensor(self._target.eos_token_ids, dtype=torch.int64, device=p.device)
        yield "end", nothing.index_fill(1, ends, True)

    def _at_the_border(
        self, logits: Tensor, tokens: Tensor, rounding: Tensor, warm: Sampling
    ) -> Tensor:
        """bool [t]: whether filters keep the tokens when their borders move by the rounding."""
        move = 2 * rounding[:, None] / max(warm.temperature, 1e-6)
        if 0 < warm.top_k < logits.shape[1]:
            kth = logits.topk(warm.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < kth - 2 * rounding[:, None], -torch.inf)
        p = replace(warm, top_k=0, top_p=1.0, min_p=0.0).probs(logits).double()
        p_x = p.gather(1, tokens)
        kept = p_x > 0
        if warm.top_p < 1:
            kept &= (p * (p > p_x)).sum(-1, keepdim=True) < warm.top_p + move
        if warm.min_p:
            kept &= p_x >= warm.min_p * p.amax(-1, keepdim=True) * (-move).exp()
        return kept[:, 0]


def rounding_scale(texts: Sequence[JudgedText]) -> float:
    """How much larger the engine's rounding is than its dtype says, by the log-probabilities that
    it gives; 1 without them, and where it is not. An answer that is far off costs itself: it is the
    median of the answers, weighted by how much each can tell, and one without them is not off.

    An error n of each logit moves log p(x) by n_x − Σ p·n, so its variance by that of one logit
    times 1 − 2·p(x) + Σ p². A difference of two logits has twice the variance of one."""
    if not any(x.text.log_p for x in texts):
        return 1.0
    told = [x.text.log_p or x.log_p for x in texts]
    off = [np.array(one)[: len(x.log_p)] - x.log_p for one, x in zip(told, texts, strict=True)]
    due = [1 - 2 * np.exp(x.log_p) + x.again for x in texts]
    units = [DEVIATION * x.rounding for x in texts]
    moved = [((one / unit) ** 2).sum() for one, unit in zip(off, units, strict=True)]
    weight = np.array([x.sum() for x in due]).clip(min=1e-9)
    square = np.array(moved) / weight
    order = np.argsort(square)
    middle = np.searchsorted(weight[order].cumsum(), weight.sum() / 2)
    return min(max(math.sqrt(2 * float(square[order][middle])), 1.0), MOST_SCALE)


def _below(logits: Tensor, rounding: Tensor) -> dict[str, Tensor]:
    """`below_due` and `below_variance`. Another token is chosen if the error of its difference from
    the likeliest is larger than that difference: at most the sum of these probabilities."""
    gaps = ((logits.amax(-1, keepdim=True) - logits) / rounding[:, None]).double()
    chosen = torch.special.ndtr(-gaps / DEVIATION)
    return {
        "below_due": (gaps * chosen).sum(-1).clamp(max=1.0),
        "below_variance": (gaps**2 * chosen).sum(-1).clamp(max=1.0),
    }


def _tokens_before(ids: Tensor, begin: int, size: int) -> Tensor:
    """int64 [t, L+T]: the set of tokens before each of `size` positions from `begin` on. Unused
    entries repeat the first token of the text."""
    places = torch.arange(len(ids), device=ids.device)
    before = places < (begin + places[:size])[:, None]
    return torch.where(before, ids, ids[0])


def _surprise(p: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """`surprise` and its variance. A token at the border of the filters, which ours remove, says
    nothing here."""
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    mean = (p * log_p).sum(-1)
    surprise = log_p.gather(1, tokens)[:, 0] - mean
    return {
        "surprise": torch.where(p.gather(1, tokens)[:, 0] > 0, surprise, 0.0),
        "surprise_variance": (p * log_p**2).sum(-1) - mean**2,
    }


def proposed(prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """int64 [T]: what a lookup in the text so far proposes at each token: what followed the last
    place of its last 3, 2 or 1 tokens, the longest that occurred before. −1: nothing."""
    following: dict[tuple[int, ...], int] = {}
    proposals, text = [], [*prompt, *tokens]
    for end, token in enumerate(text):
        grams = [tuple(text[end - n : end]) for n in range(LONGEST_GRAM, 0, -1) if n <= end]
        if end >= len(prompt):
            proposals.append(next((following[gram] for gram in grams if gram in following), -1))
        following |= dict.fromkeys(grams, token)
    return torch.tensor(proposals, dtype=torch.int64)
