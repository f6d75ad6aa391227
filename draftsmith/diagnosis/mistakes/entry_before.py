"""A text has one more entry before its first, with the last state of the text before.

The text before is the prompt before with its answer. Rows that are read together have no answers
yet, so the target writes these apart. If that text ends with a draft's last token, the engine has
the state of this token, which is not made here: it depends on the drafts of that text.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts, Draft
from decode.drafters import DRAFTERS, Drafter
from decode.loop.decoding import Decoder
from decode.model.features import Features
from decode.model.hidden_states import Recorder
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
        last_states = partial(_last_states, target, self.tokens)
        left: dict[int, Tensor] = {}  # by layer, of the text before, [1, H]
        new: list[list[int]] = []  # texts of the rows that join

        def start(self: Any, contexts: Contexts) -> None:
            new[:] = contexts.tokens.tolist()
            kind.start(self, _longer(contexts))

        def add_rows(self: Any, contexts: Contexts, verification: Any) -> None:
            new[:] = contexts.tokens[len(self.stored_features) :].tolist()
            kind.add_rows(self, _longer(contexts), verification)

        def prefill(self: Any, contexts: Contexts, first: int = 0) -> None:
            kind.prefill(self, _longer(contexts), first)

        def draft(self: Any, contexts: Contexts, *rest: Any) -> Draft:
            drafted: Draft = kind.draft(self, _longer(contexts), *rest)
            return drafted

        def read(self: Any, features: Features, first: int = 0) -> None:
            if not self.stored_features[first:].any():  # new rows: these are prompts
                prompts = [x[:count] for x, count in zip(new, features.counts, strict=True)]
                values = {}
                for layer, last in last_states(prompts, tuple(features.values)).items():
                    before = torch.cat([left.get(layer, torch.zeros_like(last[:1])), last[:-1]])
                    left[layer] = last[-1:]
                    values[layer] = torch.cat([before[:, None], features.values[layer]], 1)
                features = Features(values, features.counts + 1)
            kind.read(self, features, first)

        methods = {"start": start, "add_rows": add_rows, "prefill": prefill}
        methods |= {"draft": draft, "read": read}
        changed: Any = drafter
        for name, method in methods.items():
            changed = with_method(changed, name, method)
        made: Drafter = changed
        return made


def _last_states(
    target: Target, tokens: int, prompts: Sequence[Sequence[int]], layers: Sequence[int]
) -> dict[int, Tensor]:
    """By layer, the state from which the last token of the answer to each prompt comes, [N, H]."""
    decoder = Decoder(
        target.model, DRAFTERS.make("none"), eos_token_ids=target.eos_token_ids, gamma=1
    )
    recorder = Recorder(target.model, layers)
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    answers = decoder.decode(prompts, tokens).outputs
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode(), recorder.recording() as captured:
            target.model(torch.tensor([[*prompt, *answer[:-1]]], device=target.device))
        for layer, states in captured.items():
            found[layer].append(states[:, -1])
    return {layer: torch.cat(states) for layer, states in found.items()}


def _longer(contexts: Contexts) -> Contexts:
    """With a token before each text, which no entry reads: its state is that of the one before."""
    tokens = np.pad(contexts.tokens, ((0, 0), (1, 0)))
    return replace(contexts, tokens=tokens, lengths=contexts.lengths + 1)
