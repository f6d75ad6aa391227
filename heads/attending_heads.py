"""Heads with layers that attend to the text, as they are trained.

Shapes: F features of a token, H hidden size.
"""

from typing import Self

from pydantic import Field
from torch import Tensor

from decode.base.errors import UserError
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.loading import Target
from heads.heads_module import HeadBatch, HeadOptions, Heads


class AttendingOptions(HeadOptions):
    """Options of heads with layers that attend to the text."""

    window: int | None = Field(None, ge=1)
    """The number of tokens that the heads' layers see, in training and in drafts: the last ones,
    the token itself included. At least the length of a draft. None: all of the text."""
    sinks: int = Field(0, ge=0)
    """With `window`, the first tokens of the text that they see besides (2309.17453)."""

    @property
    def longest_draft(self) -> int:
        """The max number of tokens of a draft. A window must hold them."""
        return 1

    def for_target(self, target: Target) -> Self:
        self.require_window()
        return self

    def require_window(self) -> None:
        """Raise UserError for a window that does not hold a draft, or sinks without a window."""
        if self.window is None and self.sinks:
            raise UserError(f"sinks is {self.sinks}, but there is no window; set window")
        if self.window is not None and self.window < self.longest_draft:
            raise UserError(
                f"a window of {self.window} tokens is shorter than the longest draft of these "
                f"{self.type} heads; expected at least {self.longest_draft}"
            )


class AttendingHeads(Heads):
    """Heads with layers that attend to the text. A subclass defines their input in `fuse`.

    attending_layers: how many of them have keys and values. stacked_layers: how many of them read
    the output of the one below at each token of the text. spare_slots: the slots that a draft uses
    after the room for the text.
    """

    attending_layers: int = 1
    stacked_layers: int = 1
    spare_slots: int = 0

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
