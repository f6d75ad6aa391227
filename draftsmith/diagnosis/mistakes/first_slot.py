"""Each token is paired with the target's state one place too early."""

import numpy as np
from torch import Tensor

from decode.base.device import to_device
from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_method
from heads.heads_drafter import AttendingDrafter


@MISTAKES.register("first_slot")
class FirstSlot(Mistake):
    says = "the slots are off by one: each token is read with the state of the token before its own"
    remedy = "use a version of the engine that writes the first state of a text to the first slot"

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, AttendingDrafter):
            return None
        take = type(drafter).take_missing

        def take_missing(
            self: AttendingDrafter, entries: np.ndarray, rows: slice = slice(None)
        ) -> tuple[np.ndarray, Tensor]:
            columns, states = take(self, entries, rows)
            own = self.states[rows]
            before = to_device(np.maximum(columns - 1, 0), own.device)
            return columns, own.gather(1, before[..., None].expand(-1, -1, states.shape[-1]))

        return with_method(drafter, "take_missing", take_missing)
