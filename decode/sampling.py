"""From logits to probabilities to tokens, and the random numbers behind the draws."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.errors import UserError

# Beyond the first top-k, how many tokens that tie with the last of them are looked for.
SPARE = 64
# How many of the likeliest tokens are looked at first, and then, before a whole vocabulary is
# sorted for top-p.
LOOKED_AT = (256, 4096)
# How many tokens are sifted together in the search for the largest few.
SIEVE = 16
# Tokens that a draw, or a search for the largest logit, takes together at first.
BLOCK = 256


@dataclass(frozen=True)
class Sampling:
    """How text is drawn: repetition penalty, temperature, top-k, top-p, min-p, in the order of
    `generate()`.

    temperature 0 is greedy decoding. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 switch
    those off. min_p: tokens less likely than this share of the likeliest one's probability are
    left out. The penalty depends on the text so far and is applied by who knows it
    (`decode.scores`, `decode.trees.growth`), before what this class does.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, value, fits, expected in (
            ("temperature", self.temperature, self.temperature >= 0, "a number ≥ 0"),
            ("top_k", self.top_k, self.top_k >= 0, "a whole number ≥ 0 (0: off)"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "a number in [0, 1]"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0,
                "a number > 0 (1: off)",
            ),
        ):
            if not fits:
                raise UserError(f"{name} is {value}; expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """float32 [..., V]: the distribution that is drawn from. Undefined for greedy decoding."""
        flat = logits.reshape(-1, logits.shape[-1])
        whole = None
        for rows, ids, probs in self._groups(flat):
            if ids is not None:
                probs = probs.new_zeros(len(probs), flat.shape[1]).scatter_(-1, ids, probs)
            if len(probs) == len(flat):
                whole = probs
                break
            if whole is None:
                whole = probs.new_zeros(flat.shape)
            whole[rows] = probs
        assert whole is not None
        return whole.view(logits.shape)

    def pick(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """int64 [...]: the argmax when greedy, else one draw per distribution, with a uniform of
        float64 [...] each (greedy: not looked at)."""
        if self.greedy:
            return argmax(logits)
        flat, uniforms = logits.reshape(-1, logits.shape[-1]), uniform.reshape(-1)
        picked = torch.zeros(len(flat), dtype=torch.int64, device=logits.device)
        for rows, ids, probs in self._groups(flat):
            drawn = draw(probs, uniforms[rows])
            picked[rows] = drawn if ids is None else ids.gather(-1, drawn[:, None])[:, 0]
        return picked.view(logits.shape[:-1])

    def _groups(self, logits: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Each distribution of logits [n, V] once: (its rows, ids [m, k] ascending of the tokens
        that hold all the mass or None for all tokens, their probabilities).

        On a CPU passes over a large vocabulary, let alone sorting one, cost more than a small
        model, and filters leave few tokens. How a row is computed does not depend on the others.
        """
        rows = torch.arange(len(logits), device=logits.device)
        for count in self._counts(logits):
            ids, probs, covered = self._candidates(logits, count)
            if covered.all():
                yield rows, ids, probs
                return
            yield rows[covered], ids[covered], probs[covered]
            rows, logits = rows[~covered], logits[~covered]
        yield rows, None, self._filtered(logits)

    def _counts(self, logits: Tensor) -> tuple[int, ...]:
        """How many of the likeliest tokens it is worth to look at, one after the other."""
        if logits.device.type != "cpu":
            return ()
        if self.top_k:
            counts: tuple[int, ...] = (self.top_k + SPARE,)
        else:
            counts = LOOKED_AT if self.top_p < 1 else ()
        return tuple(count for count in counts if 4 * count <= logits.shape[-1])

    def _filtered(self, logits: Tensor) -> Tensor:
        """float32 [..., V]: the distribution, by passes over all tokens."""
        # float32 before anything else: bfloat16 probabilities make p/q wrong by several per cent.
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        return self._kept(scores.softmax(-1))

    def _kept(self, probs: Tensor) -> Tensor:
        """What top-p and min-p leave of probabilities, sum 1. Some tokens may be missing, if they
        are none that would be left."""
        if self.top_p < 1:
            ordered, index = probs.sort(dim=-1, descending=True, stable=True)
            # A token stays while the mass before it is short of top_p; the first always does.
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            outside[..., 0] = False
            probs = probs.masked_fill(outside.scatter(-1, index, outside), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        if self.min_p:
            likeliest = probs.amax(-1, keepdim=True)
            probs = probs.masked_fill(probs < self.min_p * likeliest, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def _candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """(ids ascending [n, count], their probabilities, bool [n]: no other token has any)."""
        if self.top_k:
            values, ids = top(logits, count)
            # As many tokens may tie with the k-th as were looked for beyond it.
            covered = values[:, -1] != values[:, self.top_k - 1]
            # In the order of ids, so that a draw is the one that the whole vocabulary would give.
            ids, order = ids.sort(-1)
            return ids, self._filtered(values.gather(-1, order)), covered
        whole = (logits.float() / self.temperature).softmax(-1)
        ids = top(whole, count)[1].sort(-1).values
        probs = whole.gather(-1, ids)
        kept = self._kept(probs)
        # Whatever is less likely than a token that was left out is left out too.
        least = probs.amin(-1, keepdim=True)
        return ids, kept, ~((probs == least) & (kept > 0)).any(-1)


def argmax(logits: Tensor) -> Tensor:
    """int64 [...]: the first largest of [..., V]; where there is a NaN, its place."""
    size = logits.shape[-1]
    whole = size - size % BLOCK
    if logits.device.type != "cpu" or not whole:
        return logits.argmax(-1)
    # The largest value is found many times faster than its place: first which block, then where.
    parts = [logits[..., :whole].unflatten(-1, (-1, BLOCK)).amax(-1)]
    if whole < size:
        parts.append(logits[..., whole:].amax(-1, keepdim=True))
    block = torch.cat(parts, -1).argmax(-1)
    ids = block[..., None] * BLOCK + torch.arange(BLOCK)
    inside = logits.gather(-1, ids.clamp(max=size - 1)).masked_fill_(ids >= size, -torch.inf)
    return block * BLOCK + inside.argmax(-1)


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(the `count` largest of [..., V], largest first, and their places int64), as `topk` has it;
    which of equal ones come last is open."""
    size = values.shape[-1]
    stride = size // SIEVE
    if values.device.type != "cpu" or 4 * count > stride:
        found = values.topk(count, dim=-1)
        return found.values, found.indices
    # The largest stand in the `count` groups whose own largest are largest. Groups interleave, so
    # that all of their maxima are found in a few vector passes.
    whole = stride * SIEVE
    groups = values[..., :whole].unflatten(-1, (SIEVE, stride)).amax(-2).topk(count, -1).indices
    within = stride * torch.arange(SIEVE)
    ids = (groups[..., None] + within).flatten(-2)
    rest = torch.arange(whole, size).expand(*ids.shape[:-1], -1)
    ids = torch.cat([ids, rest], -1)
    found = values.gather(-1, ids).topk(count, dim=-1)
    return found.values, ids.gather(-1, found.indices)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: int64 [...] from weights [..., V] ≥ 0 and uniforms float64 [...] in [0, 1).

    The weights need not sum to 1. A token of weight 0 is never drawn. Weights that are not numbers
    give some token, not an error: who draws from a model's output looks at it (`Scores.peaks_at`).
    """
    size = probs.shape[-1]
    whole = size - size % BLOCK
    if not whole:
        return _draw(probs, uniform)[0]
    # First a block of tokens, then one in it: a running sum over all of a large vocabulary is slow.
    parts = [probs[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1, dtype=torch.float64)]
    if whole < size:
        parts.append(probs[..., whole:].sum(-1, keepdim=True, dtype=torch.float64))
    block, rest = _draw(torch.cat(parts, -1), uniform)
    ids = block[..., None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(-1, ids.clamp(max=size - 1)).masked_fill_(ids >= size, 0.0)
    # The clamp is for weights that are not numbers.
    return (block * BLOCK + _draw(inside, rest)[0]).clamp(max=size - 1)


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(which, where in it): an index [...] and, uniform in [0, 1), how far into its weight."""
    # float64: a float32 running sum over a large vocabulary errs by more than a rare token weighs.
    cdf = weights.double().cumsum(-1)
    total = cdf[..., -1:]
    point = torch.minimum(uniform[..., None] * total, torch.nextafter(total, -total))
    # A NaN is beyond all.
    index = torch.searchsorted(cdf, point, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index).double()
    rest = (point - (cdf.gather(-1, index) - weight)) / weight
    return index.squeeze(-1), rest.nan_to_num(0.0).clamp(0.0, 1.0).squeeze(-1)


_MASKS = {shift: (1 << (64 - shift)) - 1 for shift in (30, 27, 31, 11)}


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on int64; products wrap around."""
    x = (x ^ ((x >> 30) & _MASKS[30])) * -4658895280553007687
    x = (x ^ ((x >> 27) & _MASKS[27])) * -7723592293110705685
    return x ^ ((x >> 31) & _MASKS[31])


class Noise:
    """Uniform random numbers that depend on (seed, row, round, stream, place) and nothing else.

    Because they are computed from those counters, not taken from a generator's state, a row gets
    the same numbers alone and in any batch. Its text is the same where its logits are: in float32,
    but not in bfloat16, where other rows in the batch round them otherwise.
    """

    # Drafting, accepting and drawing the next token must be independent of each other.
    DRAFT, ACCEPT, NEXT, TEXT = 0, 1, 2, 3

    def __init__(self, seed: int, rows: Tensor) -> None:
        """rows: int64 [B], the identity of each row, such as its prompt's index in the set."""
        self._keys = _mix(_mix(torch.full_like(rows, seed)) ^ (rows + 1))
        self._round = 0
        self._lengths = np.zeros(len(rows), dtype=np.int64)

    def fork(self, part: int) -> "Noise":
        """The numbers of this round for part 0, 1, … of a drafter made of several: independent of
        each other's and of these."""
        forked = object.__new__(Noise)
        forked._keys = _mix(_mix(self._keys) ^ (part + 1))
        forked._round, forked._lengths = self._round, self._lengths
        return forked

    def next_round(self, lengths: np.ndarray | None = None) -> None:
        """lengths: int [B] on the host, of the rows' committed texts, for `of_text`."""
        self._round += 1
        if lengths is not None:
            self._lengths = lengths

    def keep_rows(self, rows: Tensor) -> None:
        self._keys = self._keys.index_select(0, rows)

    def uniforms(self, stream: int, first: int, count: int) -> Tensor:
        """float64 [B, count] in [0, 1): places first … first+count−1 of a stream in this round."""
        places = torch.arange(first, first + count, device=self._keys.device)
        return self._at(self._round * 4 + stream, places)

    def of_text(self, depths: Tensor) -> Tensor:
        """float64 [B, n] in [0, 1) for the tokens that stand so far behind the committed text,
        int64 [B, n]. The same for a place in the text, whatever round comes to it."""
        ends_B1 = torch.as_tensor(self._lengths, device=self._keys.device)[:, None]
        return self._at(self.TEXT, ends_B1 + depths)

    def _at(self, stream: int, places: Tensor) -> Tensor:
        streams_B1 = _mix(self._keys ^ (stream + 1))[:, None]
        bits = _mix(_mix(streams_B1 ^ (places + 1)))
        return ((bits >> 11) & _MASKS[11]).double() * 2.0**-53
