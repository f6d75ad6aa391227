"""Changes logits by the tokens of the text before them: penalties, biases, and a least length.

In a tree, each node has a different text before it: its path. So the children of two siblings are
judged after different texts. The target's logits and the drafter's are changed alike.

A new penalty is a field of `Penalties` and a function in `EDITS`. In the service it is a field of
`TextRequest`.

Shapes: B rows, N draft nodes, R = N+1 positions where a token is predicted (position 0 follows the
committed text, position i+1 follows node i), M tokens before a position, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError, require_whole

# Beyond this value no token comes twice, or only one.
STRONGEST_PENALTY = 1e3
# OpenAI's ranges.
MOST_ADDED, MOST_BIAS, MOST_BIASES = 2, 100, 1024
MOST_STOP_IDS = 128


def require_number(name: str, value: Any, fits: Callable[[Any], bool], expected: str) -> None:
    """Raise UserError for a value that is no number or does not fit."""
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
        raise UserError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """What changes logits by the text so far, in the order of vLLM: logit_bias, repetition_penalty,
    frequency_penalty, presence_penalty, min_tokens.

    repetition_penalty (1909.05858): the logits of tokens in the text, prompt included, are divided
    by it if positive and multiplied by it if negative. frequency_penalty: is subtracted from a
    token's logit for each time that the token was generated. presence_penalty: is subtracted once
    if it was generated. logit_bias: is added to the logits of these token ids; a mapping, kept as
    pairs. min_tokens: an EOS id and a stop id are drawn only when this number of tokens exists.
    stop_token_ids: end a text like an EOS id, also where EOS ids are ignored.

    Raises UserError for a value out of its range.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        least, most = 1 / STRONGEST_PENALTY, STRONGEST_PENALTY
        require_number(
            "repetition_penalty",
            self.repetition_penalty,
            lambda x: least <= x <= most,
            f"a number from {least:g} to {most:g}, where 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            expected = f"a number from −{MOST_ADDED} to {MOST_ADDED}, where 0 is off"
            require_number(name, getattr(self, name), lambda x: abs(x) <= MOST_ADDED, expected)
        require_whole(0, min_tokens=self.min_tokens)
        stops, given = tuple(self.stop_token_ids), self.logit_bias
        if len(stops) > MOST_STOP_IDS:
            found = f"stop_token_ids has {len(stops)} ids"
            raise UserError(f"{found}; expected at most {MOST_STOP_IDS}")
        for token in stops:
            require_whole(0, stop_token_ids=token)
        biases = sorted(given.items(), key=str) if isinstance(given, Mapping) else given
        if len(biases) > MOST_BIASES:
            raise UserError(f"logit_bias has {len(biases)} ids; expected at most {MOST_BIASES}")
        # Frozen: equal settings are one kind of row, whatever they were given as.
        object.__setattr__(self, "stop_token_ids", stops)
        object.__setattr__(self, "logit_bias", tuple(map(_bias, biases)))

    def require_vocabulary(self, size: int) -> None:
        """Raise UserError for a token id outside a vocabulary of this size."""
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),  # type: ignore[misc]
            ("stop_token_ids", self.stop_token_ids),
        ):
            if beyond := [token for token in ids if token >= size]:
                raise UserError(
                    f"{name} has the token id {beyond[0]}; expected ids from 0 to {size - 1}"
                )


def _bias(pair: tuple[Any, Any]) -> tuple[int, float]:
    """A token id, which may be its decimal digits, with its bias."""
    token, value = pair
    if isinstance(token, str) and token.isdecimal() and token.isascii() and len(token) < 20:
        token = int(token)
    if type(token) is not int or token < 0:
        raise UserError(f"logit_bias has the key {token!r:.40}; expected a token id")
    name, expected = f"logit_bias of {token}", f"a number from −{MOST_BIAS} to {MOST_BIAS}"
    require_number(name, value, lambda x: abs(x) <= MOST_BIAS, expected)
    return token, float(value)


@dataclass(frozen=True)
class AnswerSpans:
    """Where the answers of rows begin, and what ends them. begins: int [B], the lengths of their
    prompts. eos: int64 [n], the ids that end a text."""

    begins: np.ndarray
    eos: np.ndarray

    def of_rows(self, rows: Any) -> "AnswerSpans":
        return AnswerSpans(self.begins[rows], self.eos)

    def joined(self, other: "AnswerSpans") -> "AnswerSpans":
        return AnswerSpans(np.concatenate([self.begins, other.begins]), self.eos)


class TextBefore:
    """The text before each position.

    rows: the settings of each row. tokens, lengths: the committed texts, int [B, C] and [B].
    answers: None: all of a text is generated. nodes: int64 [B, N]. on_path: bool [B, R, N], the
    nodes on the path to each position. vocabulary: int64 [V], ascending, the token ids of the
    logits' columns; None: column i is token i. size: V. A token without a column changes nothing.
    """

    def __init__(
        self,
        rows: Sequence[Penalties],
        tokens: np.ndarray,
        lengths: np.ndarray,
        answers: AnswerSpans | None,
        nodes: Tensor,
        on_path: Tensor,
        vocabulary: Tensor | None,
        size: int,
    ) -> None:
        self.rows, self._vocabulary, self._size = rows, vocabulary, size
        self._tokens, self._lengths = tokens, lengths
        self._nodes, self._on_path = nodes, on_path
        self._begins = np.zeros_like(lengths) if answers is None else answers.begins
        self.eos: list[int] = [] if answers is None else answers.eos.tolist()

    def each(self, name: str) -> Tensor:
        """float32 [B, 1, 1]: a field of each row."""
        values = np.array([getattr(row, name) for row in self.rows], np.float32)
        return to_device(values[:, None, None], self._nodes.device)

    def generated(self) -> Tensor:
        """int64 [B, R, 1]: how many tokens are generated before each position."""
        committed = to_device(self._lengths - self._begins, self._nodes.device)
        return committed[:, None, None] + self._on_path.sum(-1, keepdim=True)

    def places(self, *, prompt: bool) -> tuple[Tensor, Tensor]:
        """(int64 [B, R, M], the columns of the tokens before each position; bool [B, R, M], which
        of them are tokens of it). prompt: the tokens of the prompt too."""
        begins = np.zeros_like(self._begins) if prompt else self._begins
        width = int(self._lengths.max())
        first = min(int(begins.min()), width - 1)  # at least one entry
        columns = np.arange(first, width)[None]
        inside = (columns >= begins[:, None]) & (columns < self._lengths[:, None])
        positions, device = self._on_path.shape[1], self._nodes.device
        committed = to_device(self._tokens[:, first:width], device)
        ids = torch.cat([committed, self._nodes], 1)[:, None].expand(-1, positions, -1)
        known = to_device(inside, device)[:, None].expand(-1, positions, -1)
        at, has = self._columns(ids)
        return at, torch.cat([known, self._on_path], 2) & has

    def listed(self, each: Sequence[Sequence[tuple[int, float]]]) -> tuple[Tensor, Tensor]:
        """(int64 [B, 1, K], float32 [B, 1, K]): columns of token ids, and a value for each, listed
        by row. What fills up a row has the value 0."""
        most = max(map(len, each))
        padded = [[*pairs, *[(0, 0.0)] * (most - len(pairs))] for pairs in each]
        table = np.array(padded, dtype=np.float64).reshape(len(each), 1, most, 2)
        ids = to_device(table[..., 0].astype(np.int64), self._nodes.device)
        values = to_device(table[..., 1].astype(np.float32), self._nodes.device)
        at, has = self._columns(ids)
        return at, torch.where(has, values, 0.0)

    def _columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of token ids, and which of them have one."""
        if self._vocabulary is None:
            return ids.clamp(max=self._size - 1), ids < self._size
        at = torch.searchsorted(self._vocabulary, ids.contiguous()).clamp(max=self._size - 1)
        return at, self._vocabulary[at] == ids


def penalised(logits: Tensor, text: TextBefore) -> Tensor:
    """float32 [B, R, V]: a copy of logits after all penalties of the rows.

    The result is float32, as in `generate()`. Rounded to bfloat16, a penalised logit could tie with
    an unpenalised one or change its order with it.
    """
    changed = logits.to(torch.float32, copy=True)
    for name, edit in EDITS.items():
        if any(getattr(row, name) != OFF[name] for row in text.rows):
            edit(changed, text)
    return changed


def _once(at: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Columns where all that are not inside repeat one that is, and bool [..., 1]: whether there is
    one. So all entries of one column say the same."""
    first = at.gather(-1, inside.int().argmax(-1, keepdim=True))
    return torch.where(inside, at, first), inside.any(-1, keepdim=True)


def _add_bias(logits: Tensor, text: TextBefore) -> None:
    at, values = text.listed([row.logit_bias for row in text.rows])  # type: ignore[misc]
    size = (*logits.shape[:2], at.shape[-1])
    logits.scatter_add_(-1, at.expand(size), values.expand(size))


def _repetition(logits: Tensor, text: TextBefore) -> None:
    """1909.05858: logits of the tokens are divided by the penalty if positive, and multiplied by it
    if negative, each once."""
    at, any_ = _once(*text.places(prompt=True))
    penalty, before = torch.where(any_, text.each("repetition_penalty"), 1.0), logits.gather(-1, at)
    logits.scatter_(-1, at, torch.where(before < 0, before * penalty, before / penalty))


def _frequency(logits: Tensor, text: TextBefore) -> None:
    at, inside = text.places(prompt=False)
    # Equal values are added for each time, so their order makes no difference.
    logits.scatter_add_(-1, at, torch.where(inside, -text.each("frequency_penalty"), 0.0))


def _presence(logits: Tensor, text: TextBefore) -> None:
    at, any_ = _once(*text.places(prompt=False))
    less = torch.where(any_, text.each("presence_penalty"), 0.0)
    logits.scatter_(-1, at, logits.gather(-1, at) - less)


def _least_length(logits: Tensor, text: TextBefore) -> None:
    ends = [[*text.eos, *row.stop_token_ids] if row.min_tokens else [] for row in text.rows]
    at, held = text.listed([[(token, 1.0) for token in ids] for ids in ends])
    early = text.generated() < text.each("min_tokens")
    less = torch.where((held > 0) & early, -torch.inf, 0.0)
    logits.scatter_add_(-1, at.expand(less.shape), less)


# What each field does to logits, in this order and in place.
EDITS: dict[str, Callable[[Tensor, TextBefore], None]] = {
    "logit_bias": _add_bias,
    "repetition_penalty": _repetition,
    "frequency_penalty": _frequency,
    "presence_penalty": _presence,
    "min_tokens": _least_length,
}
OFF: dict[str, Any] = {name: getattr(Penalties(), name) for name in EDITS}
