"""Turns logits into probabilities and tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.base.device import reads_are_free
from decode.base.errors import require_whole
from decode.draw.constraint import Constraint
from decode.draw.penalties import OFF, Penalties, require_number
from decode.draw.random_numbers import exponentials, mix
from decode.draw.top import argmax, top

# How many tokens beyond the top k are searched for ties with the k-th.
SPARE = 64
# For top-p: how many of the likeliest tokens to look at in the first and second try, before the
# full vocabulary is sorted.
LOOKED_AT = (256, 4096)
# Block size in the first stage of a draw.
BLOCK = 256
# Logits that are drawn from together on a CPU, so that their probabilities stay in its caches.
AT_ONCE = 1 << 20
# The settings of the first version.
FIRST = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Beyond this value a text is noise: all tokens are equally likely.
HOTTEST = 1e6


@dataclass(frozen=True)
class Sampling(Penalties):
    """How text is drawn: penalties, temperature, top-k, top-p, min-p, in the order of `generate()`.

    temperature 0 is greedy decoding. top_k 0, top_p 1 and min_p 0 switch these settings off. A
    top_k of −1, as vLLM writes it, becomes 0. min_p: removes tokens with a probability below min_p
    times the largest probability. grammar: the texts that may be drawn (`decode.draw.constraint`).
    Its mask comes after the penalties and before the temperature, like a logits processor of
    `generate()`.

    This class applies neither the penalties nor the grammar, because they depend on the text so
    far. `decode.verdict` and `decode.shapes` apply them before they call this class.

    Raises UserError for a value that is not a finite number in its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    grammar: Constraint | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        most = f"{HOTTEST:g}"
        for name, fits, expected in (
            ("temperature", lambda x: 0 <= x <= HOTTEST, f"a number from 0 (greedy) to {most}"),
            ("top_p", lambda x: 0 < x <= 1, "a number in (0, 1], where 1 is off"),
            ("min_p", lambda x: 0 <= x <= 1, "a number in [0, 1], where 0 is off"),
        ):
            require_number(name, getattr(self, name), fits, expected)
        require_whole(-1, top_k=self.top_k)
        object.__setattr__(self, "top_k", max(int(self.top_k), 0))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def greedy_rows(self, rows: int) -> np.ndarray:
        """bool [rows]: which rows are greedy."""
        return np.full(rows, self.greedy)

    @property
    def warmed(self) -> "Sampling":
        """The same, but temperature 1 without filters where it is greedy, which has no
        probabilities."""
        return Sampling(temperature=1.0) if self.greedy else self

    @property
    def numbers(self) -> dict[str, Any]:
        """The settings by their names, as JSON has them, without the grammar. Those that came with
        later versions are left out where they are off, so earlier records are equal to new ones."""
        biases: Any = self.logit_bias
        values = vars(self) | {"logit_bias": {str(token): x for token, x in biases}}
        values |= {"stop_token_ids": list(self.stop_token_ids), "grammar": None}
        return {name: x for name, x in values.items() if x or name in FIRST}

    @property
    def without_grammar(self) -> "Sampling":
        """The same for logits that the grammar has masked."""
        return self if self.grammar is None else replace(self, grammar=None)

    @property
    def penalises(self) -> bool:
        """Whether any logits are changed."""
        values = vars(self)
        return {name: values[name] for name in OFF} != OFF

    def each(self, rows: int) -> Sequence[Penalties]:
        """The settings of each of this number of rows."""
        return [self] * rows

    def at(self, rows: Tensor) -> "Sampling":
        """For tensors whose row i is drawn as row rows[i], int64 [n]."""
        return self

    def probs(self, logits: Tensor) -> Tensor:
        """float32 [..., V]: the distribution that tokens are drawn from. Undefined if greedy."""
        flat = logits.reshape(-1, logits.shape[-1])
        full = None
        for rows, ids, probs in self._groups(flat):
            if ids is not None:
                probs = probs.new_zeros(len(probs), flat.shape[1]).scatter_(-1, ids, probs)
            if len(probs) == len(flat):
                full = probs
                break
            if full is None:
                full = probs.new_zeros(flat.shape)
            full[rows] = probs
        assert full is not None
        return full.view(logits.shape)

    def pick(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """int64 [...]: the argmax if greedy, else one draw per distribution. uniform: float64
        [...], one number per distribution, unused if greedy."""
        if self.greedy:
            return argmax(logits)
        flat, uniforms = logits.reshape(-1, logits.shape[-1]), uniform.reshape(-1)
        part = max(AT_ONCE // flat.shape[1], 1)
        if reads_are_free(flat.device) and len(flat) > part:
            every = zip(flat.split(part), uniforms.split(part), strict=True)
            return torch.cat([self.pick(*some) for some in every]).view(logits.shape[:-1])
        picked = torch.zeros(len(flat), dtype=torch.int64, device=logits.device)
        for rows, ids, probs in self._groups(flat):
            if ids is None:
                picked[rows] = draw(probs, uniforms[rows])
            else:
                picked[rows] = draw_of(ids, probs, uniforms[rows], flat.shape[1])
        return picked.view(logits.shape[:-1])

    def race(self, logits: Tensor, keys: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """int64 [...]: the argmax if greedy, else one draw per distribution, with random numbers
        for each token: the token with the largest p/E, where E is exponential. This is the argmax
        of log p + G with Gumbel noise G. Two distributions p and q that draw with the same keys
        draw the same token with probability ≥ (1 − TV)/(1 + TV) (2408.07978).

        keys: int64 [...], one for each distribution (`CounterRNG.text_keys`), unused if greedy.
        vocabulary: int64 [V], the token ids of the columns. None: column i is token i.
        """
        if self.greedy:
            return argmax(logits)
        flat, flat_keys = logits.reshape(-1, logits.shape[-1]), keys.reshape(-1)
        columns = torch.arange(flat.shape[1], device=flat.device)[None]
        winners = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
        for rows, ids, probs in self._groups(flat):
            places = columns if ids is None else ids
            tokens = places if vocabulary is None else vocabulary[places]
            first = _race(probs, flat_keys[rows], tokens)
            winners[rows] = first if ids is None else ids.gather(-1, first[:, None])[:, 0]
        return winners.view(logits.shape[:-1])

    def _groups(self, logits: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """The distributions of logits [n, V] in groups of rows, each row once. A group is (its rows
        [m], the ids [m, k] of the tokens that hold all the mass, ascending, or None for all tokens,
        their probabilities).

        On a CPU, passes over a large vocabulary cost more than a small model, and sorting it costs
        even more. Filters leave few tokens. The result of a row does not depend on other rows.
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
        """How many of the likeliest tokens to look at, in the order of the tries."""
        if not reads_are_free(logits.device):
            return ()
        if self.top_k:
            counts: tuple[int, ...] = (self.top_k + SPARE,)
        else:
            counts = LOOKED_AT if self.top_p < 1 else ()
        return tuple(count for count in counts if 4 * count <= logits.shape[-1])

    def _filtered(self, logits: Tensor) -> Tensor:
        """float32 [..., V]: the distribution, computed over all tokens."""
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        return self._kept(self._softmax(logits))

    def _softmax(self, logits: Tensor) -> Tensor:
        """float32 [..., V]: the softmax at this temperature, without filters."""
        # float32 before anything else: bfloat16 probabilities make p/q wrong by several per cent.
        scores = logits.float()
        if self.temperature != 1:
            # The largest score is 0, so no temperature makes it infinite. float32 has no divisor
            # below its smallest normal number.
            scores = scores - scores.amax(-1, keepdim=True)
            scores /= max(self.temperature, torch.finfo(torch.float32).tiny)
        return scores.softmax(-1)

    def _kept(self, probs: Tensor) -> Tensor:
        """Probabilities after top-p and min-p, with sum 1. The input may lack tokens that these
        filters would remove."""
        if self.top_p < 1:
            ordered, index = probs.sort(dim=-1, descending=True, stable=True)
            # A token stays if the mass before it is below top_p. The first token always stays.
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
        """(ids ascending [n, count], their probabilities, bool [n]: whether all other tokens have
        probability 0)."""
        if self.top_k:
            values, ids = top(logits, count)
            # Not covered if all the spare tokens tie with the k-th: there may be more ties.
            covered = values[:, -1] != values[:, self.top_k - 1]
            # In the order of ids, so a draw gives the same token as over the full vocabulary.
            ids, order = ids.sort(-1)
            return ids, self._filtered(values.gather(-1, order)), covered
        full = self._softmax(logits)
        ids = top(full, count)[1].sort(-1).values
        probs = full.gather(-1, ids)
        kept = self._kept(probs)
        # If the filters remove a token, they remove all less likely tokens too.
        smallest = probs.amin(-1, keepdim=True)
        return ids, kept, ~((probs == smallest) & (kept > 0)).any(-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """int64 [...]: one draw from each of the weights [..., V] ≥ 0. uniform: float64 [...] in
    [0, 1), one random number per draw.

    It is a race in two stages: among blocks of tokens by their sums, then among the tokens of the
    block that wins. In a race with weights w, the winner is the largest w/E, where E is an
    exponential random number of each entrant. So a draw takes V/256 + 256 exponentials, and a
    rounding of the weights changes a token only where two entrants nearly tie. (In a running sum
    over the tokens, it would move the borders of all tokens that follow.)

    The weights need not sum to 1. A token of weight 0 is never drawn. NaN weights give some token,
    not an error: callers that draw from a model's output check it (`Scores.peaks_at`).
    """
    size = weights.shape[-1]
    keys = _keys(uniform)
    if size <= BLOCK:
        return _race(weights, keys, torch.arange(size, device=weights.device))
    aligned = size - size % BLOCK
    sums = [weights[..., :aligned].unflatten(-1, (-1, BLOCK)).sum(-1, dtype=torch.float64)]
    if aligned < size:
        sums.append(weights[..., aligned:].sum(-1, keepdim=True, dtype=torch.float64))
    block = _race_of_blocks(torch.cat(sums, -1), keys)[..., None]
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, ids.clamp(max=size - 1)).masked_fill_(ids >= size, 0.0)
    return ids.gather(-1, _race(inside, keys, ids)[..., None])[..., 0].clamp_(max=size - 1)


def draw_of(ids: Tensor, weights: Tensor, uniform: Tensor, size: int) -> Tensor:
    """int64 [n]: `draw` from a vocabulary of this size, where only ids, int64 [n, k], have
    weights, [n, k]."""
    keys = _keys(uniform)
    if size > BLOCK:
        blocks = ids // BLOCK
        sums = weights.new_zeros(len(ids), -(-size // BLOCK), dtype=torch.float64)
        sums.scatter_add_(1, blocks, weights.double())
        block = _race_of_blocks(sums, keys)[:, None]
        weights = weights.masked_fill(blocks != block, 0.0)
    return ids.gather(1, _race(weights, keys, ids)[:, None])[:, 0]


def _keys(uniform: Tensor) -> Tensor:
    """int64 [...]: the keys of a draw's exponentials, from all bits of its random number."""
    return mix((uniform * 2.0**53).long())


def _race_of_blocks(sums: Tensor, keys: Tensor) -> Tensor:
    # The numbers of the blocks are negative, so that no block has the random number of a token.
    return _race(sums, keys, -1 - torch.arange(sums.shape[-1], device=sums.device))


def _race(weights: Tensor, keys: Tensor, entrants: Tensor) -> Tensor:
    """int64 [...]: the index of the winner. entrants: int64 [k] or [..., k], what each is called;
    the same name has the same random number with the same key."""
    return (weights / exponentials(keys, entrants)).argmax(-1)
