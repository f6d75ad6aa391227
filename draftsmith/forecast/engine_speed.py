"""What steps with drafts cost in a user's engine, at his load: asked of servers that are up.

An engine simulates acceptance from its start on: vLLM with `rejection_sample_method: synthetic`,
llama-server with `--spec-synth-len` or `--spec-synth-rates`, SGLang with `SGLANG_SIMULATE_ACC_LEN`.
Each server with a drafter is a point of speed against tokens per step, which its counters tell; one
without a drafter has the plain speed.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np

from decode.base.errors import UserError, nearest
from draftsmith.auditing.engine_acceptance import counters_if_shown
from draftsmith.auditing.entry import server_config
from draftsmith.forecast.answer import EngineCell, Speed
from draftsmith.forecast.step_costs import piece
from train.engines.child_process import ask
from train.engines.counters import (
    DraftCounts,
    Uncounted,
    counts_beside,
    read_counters,
    served_models,
)

# Tokens of the two answers to a prompt: what the longer one takes more is steps alone.
SHORT, LONG = 1, 129
REPEATS = 3
# By the prefixes of their counters; other engines have no simulated acceptance.
LLAMA = "llamacpp"
SIMULATES = ("vllm", "sglang", LLAMA)


@dataclass(frozen=True)
class ServedDrafter:
    """A server that is up. stage: whose drafter it has; "": it is asked whether it has one."""

    url: str
    stage: str

    @classmethod
    def parse(cls, text: str, stages: Sequence[str]) -> "list[ServedDrafter]":
        """Those of `[STAGE=]URL,…`. stages: the stages that make a drafter. Raises UserError for
        other names and addresses, and for servers that do not answer."""
        found = []
        for part in text.split(","):
            stage, _, address = part.strip().rpartition("=")
            url = server_config([address]).urls[0]
            if stage and stage not in stages:
                raise UserError(
                    f"--engine {part} names {stage!r}, but the stages that make a drafter are "
                    f"{', '.join(stages)}.{nearest(stage, stages)}"
                )
            served_models(url)
            found.append(cls(url, stage))
        return found


@dataclass(frozen=True)
class Measured:
    """engine: by its counters; "": it has no drafter. drafted: tokens of a draft."""

    engine: str
    drafted: float
    speed: Speed


def measure_engines(
    servers: Sequence[ServedDrafter],
    stages: Sequence[str],
    text: Sequence[int],
    loads: Sequence[int],
    lengths: Sequence[int],
) -> tuple[dict[str, list[EngineCell]], list[str]]:
    """What each stage's drafter costs there, and what was not measured. text: token ids that
    prompts are made of. Raises UserError for a server whose drafter is of no known stage, and, if
    nothing could be measured, that it hides its counters, drafts nothing or does not answer."""
    cells, notes = dict[str, list[EngineCell]](), list[str]()
    failed: UserError | None = None
    for length, load in product(lengths, loads):
        plain: list[float] = []
        found: dict[str, list[Measured]] = {}
        for server in servers:
            try:
                one = measure_speed(server.url, text, load, length)
            except UserError as error:  # such as a text that is too long for it
                failed = failed or error
                notes.append(f"{load} rows of {length} tokens: {error}")
                continue
            if not one.engine:
                plain.append(one.speed.speed)
                continue
            stage = server.stage or (stages[0] if len(stages) == 1 else "")
            if not stage:
                raise UserError(
                    f"the drafter of {server.url} may be that of any of {', '.join(stages)}; say "
                    f"whose it is: --engine {stages[0]}={server.url}"
                )
            found.setdefault(stage, []).append(one)
        for stage, several in found.items():
            speeds = tuple(sorted((x.speed for x in several), key=lambda x: x.tokens_per_step))
            drafted = max(round(x.drafted) for x in several)
            known = median(plain) if plain else None
            cell = EngineCell(load, length, several[0].engine, drafted, speeds, known)
            cells.setdefault(stage, []).append(cell)
            notes += [
                f"{x.engine} has no simulated acceptance: its speed is measured at that of the "
                "drafter that it has"
                for x in several
                if x.engine not in SIMULATES
            ]
        if not plain:
            notes.append(
                "no server without a drafter was given to --engine, so it is not known above which "
                "acceptance drafts pay there; name one beside the others"
            )
    if failed is not None and not cells:
        raise failed
    return cells, list(dict.fromkeys(notes))


def measure_speed(url: str, text: Sequence[int], load: int, length: int) -> Measured:
    """The speed at so many requests at a time, after prompts of this length."""
    model = served_models(url)[0]
    prompts = [piece(text, length, 7 * row) for row in range(load)]
    before, replies, times = counters_if_shown(url, None), list[_Reply](), list[float]()
    with ThreadPoolExecutor(load) as pool:

        def at_once(tokens: int) -> list[_Reply]:
            return list(pool.map(lambda prompt: _ask(url, model, prompt, tokens), prompts))

        first = at_once(SHORT)  # so that prompts are known to all that follow, or to none
        if before is None and first[0].counts is None:
            with suppress(Uncounted):  # a hidden page says nothing: it may have a drafter
                read_counters(url)
        for _ in range(REPEATS):
            short, long = at_once(SHORT), at_once(LONG)
            more = sum(x.tokens for x in long) - sum(x.tokens for x in short)
            if more <= 0:
                raise UserError(
                    f"{url} ends its answers after {SHORT} token; expected {LONG}, with ignore_eos"
                )
            seconds = sum(x.seconds for x in long) - sum(x.seconds for x in short)
            times.append(max(seconds, 1e-9) / more)
            replies += long
    after = counters_if_shown(url, None)
    speed = load / median(times)
    noise = float(np.std(np.log(times), ddof=1) / REPEATS**0.5)
    if before is not None and after is not None:
        engine, counts = after.engine, after.counts - before.counts
    else:
        engine, counts = LLAMA, sum((x.counts or DraftCounts() for x in replies), DraftCounts())
    # llama-server has the counters without a drafter too.
    if engine == LLAMA and not counts.drafted:
        return Measured("", 0.0, Speed(1.0, speed, noise))
    # A request's first token comes from its prompt. Each step adds a token to those accepted.
    written = sum(x.tokens - 1 for x in replies)
    steps = written - counts.accepted
    if not counts.drafted or steps <= 0:
        raise UserError(
            f"{url} counts {counts.drafted:.0f} draft tokens and {counts.accepted:.0f} accepted "
            f"ones for {written} tokens: expected a server that drafts, and that nobody else asks"
        )
    return Measured(engine, counts.drafted / steps, Speed(written / steps, speed, noise))


@dataclass(frozen=True)
class _Reply:
    """An answer. counts: of its drafts; None: answers of this engine do not say them."""

    tokens: int
    seconds: float
    counts: DraftCounts | None


def _ask(url: str, model: str, prompt: Sequence[int], tokens: int) -> _Reply:
    """The answer to a prompt. Raises as `ask`, and UserError for one that does not count tokens."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    begin = time.perf_counter()
    answer = ask(f"{url}/v1/completions", body)
    seconds = time.perf_counter() - begin
    try:
        reply = json.loads(answer)
        return _Reply(int(reply["usage"]["completion_tokens"]), seconds, counts_beside(reply))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{url}/v1/completions answers {answer[:200]!r}, without usage.completion_tokens"
        ) from error
