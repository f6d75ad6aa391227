"""What drafts cost behind contexts of some lengths, for untrained heads on a target of random
weights.

Only shapes matter for times. So no prompt is read: hidden states, keys and values are of random
numbers or zeros.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from decode.base.errors import UserError
from decode.draft import Contexts, Limits
from decode.drafters import DRAFTERS
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.measure.time_passes import seconds_by_turns
from decode.model.cache.cached_model import CachedLM
from decode.model.features import Features
from decode.model.loading import Target
from decode.opening.directory import split_window
from heads.heads_directory import make_ready, new_heads
from heads.heads_drafter import AttendingDrafter
from heads.heads_module import HeadOptions
from train.base.console import Reporter

TURNS = 9
SPARE = 64  # slots after the text


def with_random_weights(target: Target, positions: int) -> Target:
    """The same tokenizer and sizes with random weights, and room for at least `positions` tokens
    and a draft."""
    config = copy.deepcopy(target.model.config)
    config.max_position_embeddings = max(positions + SPARE, config.max_position_embeddings)
    torch.manual_seed(0)
    with torch.device(target.device):
        model = type(target.model)(config).to(target.dtype).eval()
    return replace(target, model=model)


def cost_rows(
    target: Target, names: Sequence[str], lengths: Sequence[int], gamma: int, reporter: Reporter
) -> list[dict[str, Any]]:
    """A row for each length and name: a kind of heads, perhaps with a window.

    plain_ms: a pass of the target over one token. draft_ms: a draft of `gamma` tokens. c: their
    ratio for each draft token. prefill_s: what the drafter reads of the prompt. Raises UserError
    for a kind without a cache of the text, and for a length below 2.
    """
    if min(lengths) < 2:
        raise UserError(f"a context of {min(lengths)} tokens; expected at least 2 with --random")
    drafters = {name: _drafter(name, target) for name in names}
    lm, rows = CachedLM(target.model), []
    for length in lengths:
        ids = torch.randint(0, target.token_count, (1, length)).to(target.device)
        one_pass = partial(lm.forward, ids[:, -1:], np.array([length - 1]))
        with torch.inference_mode():
            lm.reset(1, length + SPARE)
            (plain,) = seconds_by_turns([one_pass], turns=TURNS, device=target.device)
            for name, drafter in drafters.items():
                reporter.say(f"timing {name} behind {length} tokens")
                prefill, draft = _seconds(drafter, lm, ids, gamma)
                rows.append(
                    {
                        "drafter": name,
                        "context": length,
                        "plain_ms": 1000 * plain,
                        "draft_ms": 1000 * draft,
                        "c": draft / plain / gamma,
                        "prefill_s": prefill,
                    }
                )
    return rows


def _drafter(name: str, target: Target) -> AttendingDrafter:
    kind, window = split_window(name)
    heads = new_heads(HeadOptions.of({"type": kind}), target, None)
    make_ready(heads, target, target.dtype)
    build: Any = DRAFTERS[kind]
    drafter = build(heads, target.vocab_size)
    if not isinstance(drafter, AttendingDrafter):
        raise UserError(f"{kind} heads keep nothing of the text, so their costs stay the same")
    return drafter if window is None else drafter.with_window(window)


def _seconds(
    drafter: AttendingDrafter, lm: CachedLM, ids: torch.Tensor, gamma: int
) -> tuple[float, float]:
    """Seconds of the drafter's prefill, and of a draft after one new token."""
    length, heads = ids.shape[1], drafter.heads
    contexts = Contexts.of(ids.tolist(), length + SPARE)
    states = torch.randn(1, length - 1, heads.hidden_size, device=ids.device).to(heads.dtype)
    drafter.attach(lm)
    drafter.start(contexts)
    values = dict.fromkeys(heads.captured_layers, states)
    drafter.read(Features(values, np.array([length - 1])))
    begin = time.perf_counter()
    drafter.prefill(contexts)
    prefill = time.perf_counter() - begin
    entries = drafter.cached_entries.copy()
    limits, rng = Limits(np.array([gamma])), CounterRNG(0, torch.zeros(1, dtype=torch.int64))

    def draft() -> object:
        # As if the last token was new again.
        drafter.cached_entries = entries.copy()
        return drafter.draft(contexts, limits, Sampling(), rng)

    (seconds,) = seconds_by_turns([draft], turns=TURNS, device=ids.device)
    return prefill, seconds
