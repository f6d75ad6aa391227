"""Masks logits by the texts that a constraint allows, such as a grammar, along a draft's paths.

Each position of a draft has a text of its own: the row's, and its path. So the mask of a position
is that of its own text, as with the repetition penalty (`decode.draw.penalties`). Masked decoding
draws each token from p without the tokens that no allowed text continues with. That is not p
conditioned on an allowed text: it does not look ahead to where a token leads.

Shapes: B rows, N draft nodes, R = N+1 positions where a token is predicted (position 0 follows the
committed text, position i+1 follows node i), V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError


class Matcher(Protocol):
    """A place in a text. Any method may raise. The row's text then ends with that error."""

    def allowed(self) -> np.ndarray:
        """uint8 [⌈V/8⌉]: bit i mod 8 of byte ⌊i/8⌋ says whether token i may follow. The ids that
        end a text may follow exactly where the text is complete. They are not passed to
        `advance`."""

    def advance(self, token: int) -> bool:
        """Go on past this token. False: it may not follow, and the place stays."""

    def rollback(self, count: int) -> None:
        """Go back by this number of tokens, of those that `advance` has passed."""

    def forced(self) -> list[int]:
        """Tokens of the text that must follow, as a tokenizer cuts it. Other cuts may be allowed
        too. Empty: nothing is known to be forced. The place stays."""


class Constraint(Protocol):
    """Which texts a row may have. Only generated tokens count, not the prompt.

    ends: the ids that end a text. All of them must be EOS ids of the decode.
    """

    @property
    def ends(self) -> frozenset[int]: ...

    def start(self) -> Matcher:
        """The beginning of a new text."""


def require_ends(
    constraint: Constraint, eos: Sequence[int], ignores_eos: bool, min_tokens: int
) -> None:
    """Raise UserError unless the ids that end a text of this constraint end one of the decode."""
    if min_tokens:
        raise UserError(
            f"a row has a grammar and min_tokens {min_tokens}, but where a text is complete only "
            "an EOS may follow; leave min_tokens out"
        )
    if ignores_eos:
        raise UserError(
            "a row has a grammar and ignores EOS ids, but only an EOS can follow a complete text; "
            "leave ignore_eos out"
        )
    if not constraint.ends or not constraint.ends <= set(eos):
        raise UserError(
            f"the grammar ends its texts with the ids {sorted(constraint.ends)}, but the decode "
            f"ends texts with {sorted(eos)}; give eos_token_ids with all ids of the grammar"
        )


class Guide:
    """The constraint of one row. It follows whichever text it is asked about: it rolls back what
    differs from the last one. So the drafter and the target can ask about drafted texts in any
    order, and what a verdict rejects needs no other care.

    begin: the length of the row's prompt.
    """

    def __init__(self, constraint: Constraint, begin: int) -> None:
        self.begin = begin
        self._ends, self._matcher = constraint.ends, constraint.start()
        self._passed = np.zeros(0, dtype=np.int64)

    def allowed(self, text: np.ndarray) -> np.ndarray | None:
        """uint8 [⌈V/8⌉]: what may follow the generated tokens `text`, int64 [n], as in
        `Matcher.allowed`. None: they are not the beginning of an allowed text, or have ended."""
        return self._matcher.allowed() if self._go_to(text) else None

    def forced(self, text: np.ndarray) -> list[int]:
        """What must follow the generated tokens `text`, int64 [n], as in `Matcher.forced`."""
        return self._matcher.forced() if self._go_to(text) else []

    def _go_to(self, text: np.ndarray) -> bool:
        """Follow this text. False: it cannot be followed to its end."""
        shared = min(len(text), len(self._passed))
        differs = np.flatnonzero(text[:shared] != self._passed[:shared])
        same = int(differs[0]) if len(differs) else shared
        if same < len(self._passed):
            self._matcher.rollback(len(self._passed) - same)
        self._passed = text[:same]
        for place in range(same, len(text)):
            token = int(text[place])
            if token in self._ends or not self._matcher.advance(token):
                return False
            self._passed = text[: place + 1]
        return True


def constrain(
    guides: Sequence[Guide | None],
    logits: Tensor,
    tokens: np.ndarray,
    lengths: np.ndarray,
    nodes: Tensor,
    on_path: Tensor,
    vocabulary: Tensor | None = None,
) -> tuple[Tensor, dict[int, Exception]]:
    """(logits [B, R, V], −inf for tokens that may not follow the text before a position; the errors
    of rows whose text cannot be followed). A position behind a token that may not follow is out of
    reach, and its logits stay as they are. So do those without any token that may follow, if there
    is a vocabulary.

    guides: of each row. None: the row has no constraint. vocabulary: int64 [V], the token ids of
    the logits' columns. None: column i is token i. The other arguments are those of
    `decode.draw.penalties.TextBefore`. The nodes are read from the device once.
    """
    host = torch.cat([nodes[:, None], on_path.long()], 1).cpu().numpy()
    drafted, mask = host[:, 0], host[:, 1:].astype(bool)
    failed: dict[int, Exception] = {}
    masks: dict[tuple[int, int], np.ndarray] = {}
    for row, guide in enumerate(guides):
        if guide is None:
            continue
        text = tokens[row, guide.begin : lengths[row]]
        paths = [tuple(drafted[row, on].tolist()) for on in mask[row]]
        try:
            # Paths with the same beginning are neighbours, so little is rolled back.
            for position in sorted(range(len(paths)), key=paths.__getitem__):
                path = np.array(paths[position], dtype=np.int64)
                found = guide.allowed(np.concatenate([text, path]))
                if found is not None:
                    masks[row, position] = found
                elif not paths[position]:
                    raise ValueError("the text is not the beginning of one that the grammar allows")
        except Exception as error:
            failed[row] = error
    if not masks:
        return logits, failed
    forbidden = _forbidden(masks, logits)
    if vocabulary is None:
        forbidden = forbidden[..., : logits.shape[-1]]
    else:
        forbidden = forbidden[..., vocabulary]
        forbidden &= ~forbidden.all(-1, keepdim=True)
    return logits.masked_fill(forbidden, -torch.inf), failed


def _forbidden(masks: Mapping[tuple[int, int], np.ndarray], logits: Tensor) -> Tensor:
    """bool [B, R, 8·⌈V/8⌉]: the tokens that these masks, by row and position, do not allow."""
    bits = np.zeros((*logits.shape[:2], len(next(iter(masks.values())))), dtype=np.uint8)
    for at, mask in masks.items():
        bits[at] = ~mask
    if logits.device.type == "cpu":  # faster than tensor operations
        return torch.from_numpy(np.unpackbits(bits, axis=-1, bitorder="little")).view(torch.bool)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    return ((to_device(bits, logits.device)[..., None] >> places) & 1).bool().flatten(2)
