"""Hidden states that the target computes while it answers, so that no later pass reads the text."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from decode.draft import Contexts
from decode.drafters import NoDrafter
from decode.text_stream import Stop
from decode.verification import Verification


class KeptStates(NoDrafter):
    """Drafts nothing and keeps the hidden states of all tokens of each row, in order.

    captured_layers: the layers whose hidden states are kept.
    """

    def __init__(self, captured_layers: Sequence[int]) -> None:
        self.captured_layers = tuple(captured_layers)
        # By the row's number: the states of each pass, [n, H] by layer.
        self._passes = defaultdict[int, list[dict[int, Tensor]]](list)

    def observe(self, verification: Verification) -> None:
        features = verification.features
        if features is None:
            return
        # The loop's tensors may not be kept. After the prefill each row has one token of a pass.
        steps, values = verification.number > 0, features.values
        values = {layer: x.clone() for layer, x in values.items()} if steps else values
        counts = features.counts.tolist()
        for index, (row, count) in enumerate(zip(verification.rows.tolist(), counts, strict=True)):
            states = {layer: x[index, :count] for layer, x in values.items()}
            if not steps:  # without the padding of longer prompts
                states = {layer: x.to("cpu", copy=True) for layer, x in states.items()}
            self._passes[row].append(states)

    def add_rows(self, contexts: Contexts, verification: Verification) -> None:
        self.observe(verification)

    def take(self, row: int) -> dict[int, Tensor]:
        """The states of a row that has ended, [T, H] by layer on the CPU; they are kept no longer.
        Those of a text's last token are among them only if it was fed (`OneMore`)."""
        passes = self._passes.pop(row)
        return {
            layer: torch.cat([states[layer].cpu() for states in passes])
            for layer in self.captured_layers
        }


class OneMore(Stop):
    """Lets each text go on for one pass after its end, which feeds its last token too. What this
    pass gives is no part of the text.

    The rows' settings must ignore the EOS ids and allow one token more than `most`.
    """

    def __init__(self, ends: Sequence[int], most: int) -> None:
        """ends: the ids that end a text. most: the length limit of a text in tokens."""
        self._ends, self._most = frozenset(ends), most
        self.start()

    def start(self) -> None:
        self._lengths = defaultdict[int, int](int)
        self._ended = set[int]()

    def leave(self, row: int) -> None:
        self._lengths.pop(row, None)
        self._ended.discard(row)

    def cut(self, row: int, tokens: list[int]) -> int | None:
        """Texts are not drafted: there is one new token at a time."""
        (token,) = tokens
        if row in self._ended:
            return 0
        self._lengths[row] += 1
        if token in self._ends or self._lengths[row] == self._most:
            self._ended.add(row)
        return None
