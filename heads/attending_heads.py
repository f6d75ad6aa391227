"""Heads with layers that attend to the text, as they are trained.

Shapes: F features of a token, H hidden size.
"""

from typing import Any

from torch import Tensor

from decode.model.cache.sliding_window import SlidingWindow
from decode.model.loading import Target
from heads.heads_module import HeadBatch, Heads


class AttendingHeads(Heads):
    """Heads with layers that attend to the text. A subclass defines their input in `fuse`.

    attending_layers: how many of them have keys and values. stacked_layers: how many of them read
    the output of the one below at each token of the text. spare_slots: the slots that a draft uses
    after the room for the text.
    """

    attending_layers: int = 1
    stacked_layers: int = 1
    spare_slots: int = 0

    @classmethod
    def for_target(cls, options: Any, target: Target) -> Any:
        options.require_window()
        return options

    @property
    def window(self) -> SlidingWindow | None:
        """What the layers see of the text. None: all of it."""
        options = self.options
        return None if options.window is None else SlidingWindow(options.window, options.sinks)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., H]: the layer's first input states, computed from the features [..., F]."""
        return features

    def inputs_of(self, batch: HeadBatch) -> Tensor:
        """[B, T, H]: the layer's first input states: those of a record, or else made here."""
        if batch.inputs is not None:
            return batch.inputs.to(self.dtype)
        return self.fuse(batch.of(self.captured_layers).to(self.dtype))
