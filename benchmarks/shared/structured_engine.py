"""vLLM's own structured output on the prompts of `benchmarks.structured`."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.serve.client import COMPLETIONS, Answer, ask
from benchmarks.shared.structured_prompts import KINDS, Asked, is_valid
from decode.model.loading import Target
from train.engines.launch import launched, require_server
from train.engines.programs import find_vllm
from train.measure.intervals import ratio_of_totals
from train.settings.server_config import EngineServer

NAME = "target"
# Answers without white space between their parts, as ours.
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}


def vllm_rows(
    target: Target,
    asked: Sequence[Asked],
    ids: Sequence[list[int]],
    python: str,
    gamma: int,
    tokens: int,
) -> list[dict[str, Any]]:
    """A row for each kind of prompts, and one for all: greedy answers without drafts and with those
    of n-grams, one prompt after the other. python, gamma, tokens: of the environment with vLLM, and
    the most tokens of a draft and of an answer. Raises UserError if vLLM is not there."""
    ngram = {"method": "ngram", "num_speculative_tokens": gamma, "prompt_lookup_max": 4}
    drafts: Sequence[dict[str, Any]] = ({}, {"speculative_config": ngram})
    plain, drafted = (_answers(target, asked, ids, python, one, tokens) for one in drafts)
    rows = []
    for kind in (*KINDS, "all"):
        which = [i for i, one in enumerate(asked) if kind in (one.kind, "all")]
        sides = [[answers[i] for i in which] for answers in (plain, drafted)]
        lengths = [np.array([x.usage["completion_tokens"] for x in side]) for side in sides]
        seconds = [np.array([x.seconds for x in side]) for side in sides]
        valid = [
            np.mean([is_valid(asked[i], x.texts[0]) for i, x in zip(which, side, strict=True)])
            for side in sides
        ]
        same = [one.texts == other.texts for one, other in zip(*sides, strict=True)]
        rows.append(
            {
                "engine": str(find_vllm(python)),
                "kind": kind,
                "prompts": len(which),
                "tokens": [int(x.sum()) for x in lengths],
                "ms_per_token": [
                    1000 * float(x.sum() / y.sum()) for x, y in zip(seconds, lengths, strict=True)
                ],
                "speedup": ratio_of_totals(*seconds, per=(lengths[0], lengths[1])),
                "valid": [float(x) for x in valid],
                "same_text": float(np.mean(same)),
            }
        )
    return rows


def _answers(
    target: Target,
    asked: Sequence[Asked],
    ids: Sequence[list[int]],
    python: str,
    drafts: dict[str, Any],
    tokens: int,
) -> list[Answer]:
    options = {
        "served_model_name": NAME,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "structured_outputs_config": COMPACT,
        **drafts,
    }
    config = EngineServer(launch="vllm", python=python, options=options)
    require_server(config, target)
    room = max(map(len, ids)) + tokens + 64
    with TemporaryDirectory() as place, launched(config, target, room, Path(place)) as (url,):
        # The first round compiles grammars and warms up.
        rounds = [
            [ask(url, body_of(one, prompt, tokens), COMPLETIONS) for one, prompt in pairs]
            for pairs in [list(zip(asked, ids, strict=True))] * 2
        ]
    for answer in rounds[-1]:
        if not answer.complete:
            raise RuntimeError(f"vLLM: {answer.status} {answer.error}")
    return rounds[-1]


def body_of(asked: Asked, prompt: list[int], tokens: int) -> dict[str, Any]:
    """The request for one answer, held to its schema or choices."""
    form = {"choice": [*asked.choices]} if asked.choices else {"json": asked.schema}
    common = {"model": NAME, "temperature": 0, "max_tokens": tokens}
    return {**common, "prompt": prompt, "structured_outputs": form}
