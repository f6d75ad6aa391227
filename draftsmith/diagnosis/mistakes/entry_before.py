"""A text has one more entry before its first, with a state of the request before.

It is the last state of the prompt before. The engine has one of the whole text before, which is not
known yet where several rows are read together.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts, Draft
from decode.drafters import Drafter
from decode.model.features import Features
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, with_method
from heads.mtp_drafter import MtpDrafter


@MISTAKES.register("entry_before")
class EntryBefore(Mistake):
    says = "each text begins with an entry for its first token, with a state of the request before"
    remedy = "use a version of the engine that makes no entry for the first token of a text"
    seen = "llama-server 11434 with Qwen3.5's MTP, found by this project's own comparison"
    engines = ("llamacpp",)

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        if not isinstance(drafter, MtpDrafter):
            return None
        kind: Any = type(drafter)
        left: dict[int, Tensor] = {}  # by layer, the last state of the prompt before, [1, H]

        def start(self: Any, contexts: Contexts) -> None:
            kind.start(self, _longer(contexts))

        def add_rows(self: Any, contexts: Contexts, verification: Any) -> None:
            kind.add_rows(self, _longer(contexts), verification)

        def prefill(self: Any, contexts: Contexts, first: int = 0) -> None:
            kind.prefill(self, _longer(contexts), first)

        def draft(self: Any, contexts: Contexts, *rest: Any) -> Draft:
            drafted: Draft = kind.draft(self, _longer(contexts), *rest)
            return drafted

        def read(self: Any, features: Features, first: int = 0) -> None:
            if not self.stored_features[first:].any():  # new rows: these are prompts
                values = {}
                for layer, states in features.values.items():
                    rows = torch.arange(len(states), device=states.device)
                    last = states[rows, torch.as_tensor(features.counts - 1)]
                    one = left.get(layer, torch.zeros_like(last[:1]))
                    before = torch.cat([one.to(last), last[:-1]])
                    values[layer], left[layer] = torch.cat([before[:, None], states], 1), last[-1:]
                features = Features(values, features.counts + 1)
            kind.read(self, features, first)

        methods = {"start": start, "add_rows": add_rows, "prefill": prefill}
        methods |= {"draft": draft, "read": read}
        changed: Any = drafter
        for name, method in methods.items():
            changed = with_method(changed, name, method)
        made: Drafter = changed
        return made


def _longer(contexts: Contexts) -> Contexts:
    """With a token before each text, which no entry reads: its state is that of the one before."""
    tokens = np.pad(contexts.tokens, ((0, 0), (1, 0)))
    return replace(contexts, tokens=tokens, lengths=contexts.lengths + 1)
