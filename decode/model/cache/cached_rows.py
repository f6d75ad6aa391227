"""What a model keeps of the rows that it decodes: slots, running states, and what an encoder read.

Shapes: B rows (sequences).
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from decode.base.errors import MemoryShortage
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.cache.slots import Slots
from decode.model.forward.prepare_model import Forward, refresh_packed
from decode.model.forward.transformers_forward import TransformersForward
from decode.model.hidden_states import captured_modules
from decode.model.kinds.encoder_decoder import DecoderForward, Sources
from decode.model.kinds.layer_kinds import layer_windows, recurrent_layers, require_slots
from decode.model.kinds.recurrent_states import RecurrentStates
from decode.model.memory import require_memory
from decode.model.pretrained import input_device, longest_text


class CachedRows:
    """The rows of a `CachedLM`, which feeds them: how they begin, join and leave.

    forward_pass: what runs the model. drafter_bytes: what a drafter keeps of each token beside
    this model. repeats_rows: `keep_rows` may name a row more than once. Its copies are then rows
    too. kept_layers: those whose hidden states the slots keep of all tokens of all rows. See
    `reset`. The other attributes are those of `CachedLM`.
    """

    repeats_rows: bool = True
    kept_layers: tuple[int, ...] = ()
    sources: Sources | None = None
    states: RecurrentStates | None = None

    def __init__(self, model: PreTrainedModel, forward: Forward, pass_tokens: int) -> None:
        self.model, self.forward_pass, self.pass_tokens = model, forward, pass_tokens
        self.device, self.dtype = input_device(model), model.dtype
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_positions = longest_text(config)
        windows = layer_windows(model)
        self._use_windows([None if size is None else SlidingWindow(size) for size in windows])
        self._slots: Slots | None = None
        self.drafter_bytes = 0
        if isinstance(forward, DecoderForward):
            self.sources = Sources(model, forward, len(windows))
        numbers = recurrent_layers(model)
        if numbers:
            require_slots(model)
            assert isinstance(forward, TransformersForward)
            self.states = RecurrentStates(forward.model, numbers)

    def _use_windows(self, windows: Sequence[SlidingWindow | None]) -> None:
        """Let each layer see only this much of the text."""
        self._windows = list(windows)
        # Layers with the same window have the same mask: which one each layer has.
        self._distinct_windows = list(dict.fromkeys(windows))
        self._mask_of = [self._distinct_windows.index(window) for window in windows]

    @property
    def max_prompt(self) -> int:
        """Prompts must have fewer tokens."""
        return self.max_positions if self.sources is None else self.sources.max_prompt

    def texts_and_sources(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]:
        """The first tokens of the texts of these prompts, and the sources that an encoder reads.
        Without an encoder the texts begin with the prompts, and sources is None."""
        if self.sources is None:
            return prompts, None
        return [[self.sources.start_id]] * len(prompts), prompts

    def encode(self, sources: Sequence[Sequence[int]], first: int) -> None:
        """Let the encoder read the sources (token ids) of the rows from `first` on, before their
        first `forward`. Raises UserError if memory is missing."""
        assert self.sources is not None
        self.sources.read(sources, first, self.pass_tokens)

    def capture(self, layers: Sequence[int]) -> None:
        """Capture these layers from now on. Raises UserError for a layer that the model lacks."""
        captured_modules(self.model, layers)
        self.captured_layers = tuple(layers)
        if self.captured_layers != self.kept_layers:
            self.kept_layers = ()  # the texts would have holes

    @property
    def shared_layers(self) -> tuple[int, ...] | None:
        """The layers whose hidden states texts in the slots have, if those of all tokens are kept
        there and no others. None: such texts are of no use to other decodes."""
        layers = self.kept_layers
        assert self._slots is not None
        whole = layers == self.captured_layers and len(layers) == self._slots.states
        return layers if whole else None

    def reset(self, rows: int, capacity: int, *, keep_states: bool = False) -> None:
        """Start `rows` empty sequences of at most `capacity` slots. keep_states: keep the captured
        hidden states of all tokens beside their keys (`kept_layers`). Raises as `require_slots` and
        `require_memory`."""
        require_slots(self.model)
        self._slots = None  # the memory of the old slots is free again
        self.kept_layers = self.captured_layers if keep_states else ()
        require_memory(self.model, rows, capacity, drafter_bytes=self._other_bytes)
        refresh_packed(self.forward_pass)
        self._slots = Slots(
            len(self._windows) - len(recurrent_layers(self.model)),
            rows,
            capacity,
            self.device,
            step=self.forward_pass.slot_step,
            states=len(self.kept_layers),
        )
        if self.sources is not None:
            self.sources.reset(rows)
        if self.states is not None:
            self.states.reset(rows, self._slots.allocated[1])

    @property
    def _other_bytes(self) -> int:
        """What each token takes beside the model's keys and values."""
        width = self.model.config.get_text_config().hidden_size * self.dtype.itemsize
        return self.drafter_bytes + len(self.kept_layers) * width

    def add_rows(self, count: int, capacity: int) -> None:
        """Append empty sequences to those that run. `capacity` is as for `reset`, for all rows.
        Raises as `reset` does, and then changes nothing."""
        slots, drafter = self._slots, self._other_bytes
        assert slots is not None
        rows, least, held = slots.rows + count, False, slots.allocated
        try:
            require_memory(self.model, *slots.grown(rows, capacity), held, drafter_bytes=drafter)
        except MemoryShortage:
            # Rows that nobody uses need not get longer too.
            least = True
            require_memory(self.model, *slots.least(rows, capacity), held, drafter_bytes=drafter)
        slots.add_rows(count, capacity, least=least)
        if self.sources is not None:
            self.sources.add_rows(count)
        if self.states is not None:
            self.states.add_rows(count, slots.allocated[1])

    def keep_rows(self, rows: np.ndarray) -> None:
        """Keep only these rows, int [B'] on the host, in this order. A row that is named again is
        copied; there must be as many rows as are named (`add_rows`)."""
        assert self._slots is not None
        self._slots.keep_rows(rows)
        if self.sources is not None:
            self.sources.keep_rows(rows)
        if self.states is not None:
            self.states.keep_rows(rows)
