"""What a model keeps of the rows that it decodes: slots, running states, and what an encoder read.

Shapes: B rows (sequences).
"""

import numpy as np
from transformers import PreTrainedModel

from decode.base.errors import MemoryShortage
from decode.model.cache.slots import Slots
from decode.model.forward.prepare_model import Forward
from decode.model.forward.transformers_forward import TransformersForward
from decode.model.kinds.encoder_decoder import CrossAttentionCache, DecoderForward
from decode.model.kinds.layer_kinds import layer_windows, recurrent_layers, require_slots
from decode.model.kinds.recurrent_states import RecurrentStates
from decode.model.memory import require_memory
from decode.model.pretrained import input_device


class CachedRows:
    """What a model keeps of rows: how they begin, join and leave.

    slots: None before the first `reset`. sources: what its encoder read; None for a model without
    one. states: those of its recurrent layers; None for a model without such layers.
    """

    def __init__(self, model: PreTrainedModel, forward: Forward) -> None:
        self.model = model
        self.slots: Slots | None = None
        self.sources: CrossAttentionCache | None = None
        self.states: RecurrentStates | None = None
        numbers, layers = recurrent_layers(model), len(layer_windows(model))
        self._slot_layers = layers - len(numbers)
        if isinstance(forward, DecoderForward):
            self.sources = CrossAttentionCache(model, forward, layers)
        if numbers:
            require_slots(model)
            assert isinstance(forward, TransformersForward)
            self.states = RecurrentStates(forward.model, numbers)

    def reset(self, rows: int, capacity: int, *, step: int, states: int, other_bytes: int) -> None:
        """Start `rows` empty sequences of at most `capacity` slots. step, states: as for `Slots`.
        other_bytes: what each token takes beside the keys and values. Raises as
        `require_memory`."""
        self.slots = None  # the memory of the old slots is free again
        require_memory(self.model, rows, capacity, drafter_bytes=other_bytes)
        device = input_device(self.model)
        self.slots = Slots(self._slot_layers, rows, capacity, device, step=step, states=states)
        if self.sources is not None:
            self.sources.reset(rows)
        if self.states is not None:
            self.states.reset(rows, self.slots.allocated[1])

    def add_rows(self, count: int, capacity: int, other_bytes: int) -> None:
        """Append empty sequences to those that run. The arguments are as for `reset`, capacity for
        all rows. Raises as `reset` does, and then changes nothing."""
        slots = self.slots
        assert slots is not None
        rows, least, held = slots.rows + count, False, slots.allocated
        try:
            grown = slots.grown(rows, capacity)
            require_memory(self.model, *grown, held, drafter_bytes=other_bytes)
        except MemoryShortage:
            # Rows that nobody uses need not get longer too.
            least = True
            grown = slots.least(rows, capacity)
            require_memory(self.model, *grown, held, drafter_bytes=other_bytes)
        slots.add_rows(count, capacity, least=least)
        if self.sources is not None:
            self.sources.add_rows(count)
        if self.states is not None:
            self.states.add_rows(count, slots.allocated[1])

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'] on the host, in this order. A row that is named again is
        copied; there must be as many rows as are named (`add_rows`)."""
        assert self.slots is not None
        self.slots.keep_rows(rows)
        if self.sources is not None:
            self.sources.keep_rows(rows)
        if self.states is not None:
            self.states.keep_rows(rows)
