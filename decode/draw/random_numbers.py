"""The random numbers of a decode: a function of seed, row and place, without a state."""

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device

_MASKS = {shift: (1 << (64 - shift)) - 1 for shift in (30, 27, 31, 11, 12)}


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on int64; products wrap around."""
    x = (x ^ ((x >> 30) & _MASKS[30])) * -4658895280553007687
    x = (x ^ ((x >> 27) & _MASKS[27])) * -7723592293110705685
    return x ^ ((x >> 31) & _MASKS[31])


def _uniform(bits: Tensor) -> Tensor:
    """float64 in [0, 1) from the highest 53 of mixed bits, int64."""
    return ((bits >> 11) & _MASKS[11]).double() * 2.0**-53


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """float64 [..., k] > 0: exponential random numbers, a function of the key and the token only.

    keys: int64 [...]. tokens: int64 [k], or [..., k].
    """
    bits = mix(keys[..., None] ^ (tokens + 1))
    # The middles of 2⁵² equal parts of (0, 1), which float64 holds exactly: never 0, never 1.
    return -(((bits >> 12) & _MASKS[12]).double() * 2.0**-52 + 2.0**-53).log()


class CounterRNG:
    """Counter-based random numbers: uniform, a function of (seed, row, stream, position) only, and
    for drafts and their acceptance also of the length of the committed text.

    The tokens that the target draws have the numbers of their places in the text (`of_text`): the
    same with and without drafts. There is no generator state. So a row gets the same numbers alone,
    in any batch, and whenever it joins. A pass that drafts makes the text longer, or is its last.
    So no number is used twice in a text, also if another decode continues it with the same seed.

    Other rows of the batch change the rounding of a row's logits. A text can change by that only
    where two tokens nearly tie, or an acceptance is decided by the last bits. In float32 that
    hardly ever happens; in bfloat16 it does.

    A drafter that remembers earlier texts must not meet the numbers that these were drawn with:
    then drafts and verdicts would not be independent. Its rows get identities that no row had
    before (`decode.loop.start.new_rows`).

    couples: chains are drawn with the same noise as the text (`coupled`).
    """

    couples: bool = False
    # Drafting, accepting and drawing a token of the text must be independent of each other.
    DRAFT, ACCEPT, TEXT = 0, 1, 3

    def __init__(self, seed: int | Tensor, rows: Tensor) -> None:
        """rows: int64 [B], the identity of each row, such as the index of its prompt in the set.
        seed: the seed of all rows, or int64 [B]. All texts have length 0 until `at_lengths`."""
        seeds = seed if isinstance(seed, Tensor) else torch.full_like(rows, seed)
        self._keys = mix(mix(seeds) ^ (rows + 1))
        # On the device, so that a traced step is the same in every pass.
        self._lengths = torch.zeros_like(rows)

    @property
    def device(self) -> torch.device:
        return self._keys.device

    def fork(self, part: int) -> "CounterRNG":
        """The numbers of this pass for part 0, 1, … of a drafter with several parts. They are
        independent of the other parts' numbers and of this object's numbers. Coupled numbers stay
        those of the text."""
        if self.couples:
            return self
        forked = object.__new__(CounterRNG)
        forked._keys = mix(mix(self._keys) ^ (part + 1))
        forked._lengths = self._lengths
        return forked

    def continued(self, part: int, lengths: np.ndarray) -> "CounterRNG":
        """The numbers of this pass for part 0, 1, … of a draft, which continues texts of these
        lengths, int [B] on the host: those committed, with tokens that other parts drafted.

        As with `fork`, parts are independent. Numbers by position (`of_text`) are new in each
        pass too, because a draft can be rejected and its positions drafted again."""
        if self.couples:
            continued = self.coupled()
        else:
            continued = self.fork(part)
            continued._keys = mix(continued._keys ^ (self._lengths + 1))
        continued._lengths = to_device(lengths, self.device)
        return continued

    def coupled(self) -> "CounterRNG":
        """The numbers of this pass, for drafts that are drawn with the noise of the text."""
        coupled = object.__new__(CounterRNG)
        coupled._keys, coupled._lengths = self._keys, self._lengths
        coupled.couples = True
        return coupled

    def at_lengths(self, lengths: np.ndarray) -> None:
        """The committed texts have these lengths, int [B] on the host."""
        self._lengths = to_device(lengths, self.device)

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'], in this order."""
        at = to_device(rows, self.device)
        self._keys = self._keys.index_select(0, at)
        self._lengths = self._lengths.index_select(0, at)

    def add_rows(self, other: "CounterRNG") -> None:
        """Append the rows of another object."""
        self._keys = torch.cat([self._keys, other._keys])
        self._lengths = torch.cat([self._lengths, other._lengths])

    def uniforms(self, stream: int, first: int, count: int) -> Tensor:
        """float64 [B, count] in [0, 1): positions first … first+count−1 of a stream in this
        pass."""
        positions = torch.arange(first, first + count, device=self._keys.device)
        return _uniform(mix(self._mixed(self._lengths * 4 + stream, positions)))

    def of_text(self, depths: Tensor) -> Tensor:
        """float64 [B, n] in [0, 1) for tokens after the committed text. depths: int64 [B, n], the
        distance of each token from its end. The number depends on the position in the text, not on
        the pass."""
        return _uniform(mix(self.text_keys(depths)))

    def of_next(self, accepted: Tensor) -> Tensor:
        """float64 [B]: `of_text` for the token after accepted[b] draft tokens, int64 [B]."""
        return self.of_text(accepted[:, None])[:, 0]

    def text_keys(self, depths: Tensor) -> Tensor:
        """int64 [B, n]: keys for the random numbers of each token id after the committed text.
        depths: as for `of_text`."""
        return self._mixed(self.TEXT, self._lengths[:, None] + depths)

    def _mixed(self, stream: Tensor | int, positions: Tensor) -> Tensor:
        """stream: one number for all rows, or int64 [B]."""
        streams_B1 = mix(self._keys ^ (stream + 1))[:, None]
        return mix(streams_B1 ^ (positions + 1))
