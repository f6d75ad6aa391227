"""Keys and values of texts that have left a decode, for prompts that begin like them.

Shapes: B rows, L tokens of a text, n layers, H heads, D head size.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.slot_memory import SlotStates
from decode.model.kinds.layer_kinds import recurrent_layers
from decode.model.pretrained import adapters_in_use, has_encoder

# Shorter beginnings are not worth a copy: most texts share a few tokens of the template.
SHORTEST = 16
DEFAULT_BYTES = 256 << 20


@dataclass
class _Kept:
    tokens: np.ndarray  # int64 [L]
    states: SlotStates
    layers: tuple[int, ...]  # whose hidden states are kept too


class PrefixCache:
    """At most `max_bytes` of keys and values, and of the hidden states that drafters read. Beyond
    that it drops what was used longest ago. A text that is too long keeps its beginning.

    A prompt reuses the longest beginning that it shares with a kept text, if that has at least
    SHORTEST tokens. In float32 the text of an answer is the same as without reuse. In 16 bits it is
    the same within rounding, because passes of other widths round differently.

    The cache serves one model. `serve` drops all texts if the model or its weights are not those
    that the texts were computed with. A change that PyTorch does not count (through `.data`) needs
    `clear`. reused, read: prompt tokens so far that were reused, and that were computed. Raises
    UserError for a negative max_bytes.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < 0:
            raise UserError(f"the prefix cache has {max_bytes} bytes; expected a number ≥ 0")
        self.max_bytes = max_bytes
        self._texts: OrderedDict[int, _Kept] = OrderedDict()  # used longest ago first
        self._next = 0
        self._served: tuple[object, ...] = ()  # the weights and adapters of the texts' model
        self.bytes = 0
        self.reused = 0
        self.read = 0

    def __len__(self) -> int:
        return len(self._texts)

    def clear(self) -> None:
        self._texts.clear()
        self.bytes = 0

    def serve(self, model: PreTrainedModel) -> None:
        """Be ready for this model. Raises UserError for one with running states."""
        if recurrent_layers(model):
            raise UserError(
                f"{type(model).__name__} keeps a running state, which the prefix cache does not "
                "hold; decode without a prefix cache"
            )
        weights = tuple(
            (id(p), p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()
        )
        served = weights, adapters_in_use(model)
        if served != self._served:
            self.clear()
            self._served = served

    def find(self, prompt: np.ndarray, layers: tuple[int, ...] = ()) -> SlotStates | None:
        """The states of the longest known beginning of a prompt, int64 [L], or None. layers: whose
        hidden states it must have too, and no others."""
        best, longest = None, SHORTEST - 1
        for number, kept in self._texts.items():
            if kept.layers != layers:
                continue
            shared = _shared(prompt, kept.tokens)
            if shared > longest:
                best, longest = number, shared
        if best is None:
            return None
        self._texts.move_to_end(best)
        return self._texts[best].states.first(longest)

    def add(self, text: np.ndarray, states: SlotStates, layers: tuple[int, ...] = ()) -> None:
        """Keep a text, int64 [L], with its states, and hidden states of these layers among them.
        Texts that it continues are dropped."""
        for number, kept in list(self._texts.items()):
            if kept.layers != layers:
                continue
            shared = _shared(text, kept.tokens)
            if shared == len(text):
                self._texts.move_to_end(number)  # a known text goes on from here
                return
            if shared == len(kept.tokens):
                self._drop(number)
        self._texts[self._next] = _Kept(text.copy(), states, layers)
        self._next += 1
        self.bytes += states.nbytes
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self._texts)))

    def reuse(self, lm: CachedLM, contexts: Contexts, fed: np.ndarray, first: int) -> np.ndarray:
        """Copy known keys and values into the slots of the rows from `first` on. Returns how many
        tokens of each row need not be fed, int [B]: at most fed[b] − 1, because the last one gives
        logits.

        If the drafter reads hidden states, only texts that were kept with the same ones are known.
        """
        start, layers = np.zeros(len(fed), dtype=np.int64), lm.shared_layers
        if layers is None:
            return start
        for row, tokens in enumerate(contexts.tokens):
            states = self.find(tokens[: max(fed[row] - 1, 0)], layers)
            if states is not None:
                lm.slots.put(first + row, states)
                start[row] = states.count
        start = np.minimum(start, contexts.tokens.shape[1] - int((fed - start).max()))
        self.reused += int(start.sum())
        self.read += int((fed - start).sum())
        return start

    def remember(self, lm: CachedLM, contexts: Contexts, rows: np.ndarray) -> None:
        """Keep the keys and values of rows, int [n], before they leave, and the hidden states that
        the drafter reads."""
        layers = lm.shared_layers
        if layers is None:
            return
        room = self.max_bytes // max(lm.slots.token_bytes, 1)
        for row in rows.tolist():
            # The target has not read the last token.
            count = min(int(contexts.lengths[row]) - 1, room)
            if count >= SHORTEST:
                self.add(contexts.tokens[row, :count], lm.slots.take(row, count), layers)

    def _drop(self, number: int) -> None:
        self.bytes -= self._texts.pop(number).states.nbytes


def prefix_cache(model: PreTrainedModel, max_bytes: int | None = None) -> PrefixCache | None:
    """A cache of `max_bytes` bytes, or None for 0. max_bytes None: DEFAULT_BYTES for a model in
    float32. For others it is 0, because there reuse can change a text by rounding. Also None
    for a model with an encoder, whose texts depend on all of their sources, and for one with
    running states: a state is kept only for the end of a text, and no prompt ends exactly there."""
    if has_encoder(model) or recurrent_layers(model):
        return None
    if max_bytes is None:
        max_bytes = DEFAULT_BYTES if model.dtype == torch.float32 else 0
    return PrefixCache(max_bytes) if max_bytes else None


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
