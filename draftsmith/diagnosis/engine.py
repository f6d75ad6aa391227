"""Acceptance by place there: what a server's own counters say of one request after the other."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from draftsmith.auditing.asking import AskedTexts, ask_texts
from draftsmith.auditing.template_question import TemplateQuestion, prompt_of
from train.engines.child_process import ask
from train.engines.counters import (
    DraftCounts,
    EngineCounters,
    served_models,
    settled_counters,
)
from train.settings.server_config import ServerConfig

# Engines that say from their start how many tokens they draft. llama-server has places of the
# drafts so far.
_SAY_GAMMA = ("vllm", "sglang", "draftsmith")
# Of the texts, as many must be the target's. Rounding alone changes fewer.
LEAST_EQUAL_TEXTS = 0.7
ASKED_AGAIN = 3  # prompts with another text: does the server draw it?


@dataclass(frozen=True)
class ServerMeasurement:
    """What a server did with each of N prompts. texts: its answers. drafted: int [N]. accepted:
    tokens at each place of its drafts, int [N, γ]; in all, [N, 1], if it does not count by place.
    """

    engine: str
    texts: list[list[int]]
    drafted: np.ndarray
    accepted: np.ndarray
    by_place: bool

    def in_its_form(self, accepted: np.ndarray) -> np.ndarray:
        """Tokens by place, int [N, γ], as far as the server counts them."""
        return accepted if self.by_place else accepted.sum(1, keepdims=True)


def still_counters(url: str, key: str = "") -> EngineCounters:
    """The counters once they stand still. Raises as `read_counters`, and UserError for a server
    that is busy with other requests."""
    counters, still = settled_counters(url, key)
    if not still:
        raise UserError(
            f"the counters of {url} do not stand still: it answers other requests meanwhile. "
            "Expected a server that nobody else asks; diagnose one of your own"
        )
    return counters


def _require(gamma: int, counters: EngineCounters) -> None:
    """Raise UserError for a server that drafts another number of tokens."""
    most, may_be_more = counters.gamma, counters.engine not in _SAY_GAMMA
    if most is not None and most != gamma and not (may_be_more and most < gamma):
        raise UserError(
            f"the server drafts {most} tokens at a time, but --gamma is {gamma}; give "
            f"--gamma {most}"
        )


def ready(url: str, config: ServerConfig, gamma: int) -> str:
    """The server's engine, a name of COUNTING. Raises as `still_counters`, and UserError for a
    server that drafts another number of tokens."""
    first = still_counters(url, config.key() or "")
    _require(gamma, first)
    return first.engine


def measure_server(
    url: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    config: ServerConfig,
    *,
    gamma: int,
    tokens: int,
    say: Callable[[str], None] = lambda line: None,
) -> ServerMeasurement:
    """Ask for `tokens` tokens of each prompt, greedily, one request at a time. expected: the
    target's own texts.

    Raises UserError for a server that hides its counters, is busy, drafts nothing, rewrites prompts
    or has another target or samples by force, and as `ask_texts`."""
    key = config.key() or ""
    before = still_counters(url, key)
    texts: list[list[int]] = []
    drafted, accepted, by_place = [], [], []

    def answer(number: int, seed: int) -> AskedTexts:
        asked = ask_texts(
            url, target, prompts[number : number + 1], Sampling(), config,
            samples=1, max_new_tokens=tokens, seed=seed, alone=True,
        )  # fmt: skip
        if not asked.texts:
            why = "; ".join([*asked.faults, *asked.left_out]) or "it gave no text"
            raise UserError(f"{url} answers prompt {number + 1} with what cannot be judged: {why}")
        return asked

    for number in range(len(prompts)):
        asked = answer(number, 0)
        after = still_counters(url, key)
        counts = asked.counts if asked.counts.drafted else after.counts - before.counts
        # A pass yields one token more than it accepts, and the last one may reach past the text.
        if counts.drafted > gamma * min(tokens, tokens + gamma - counts.accepted):
            raise UserError(
                f"the server counts {counts.drafted:.0f} draft tokens for an answer of {tokens}, "
                f"{counts.accepted:.0f} of them accepted, but --gamma is {gamma}: it is busy with "
                "other requests, or drafts more. Expected a server that nobody else asks, and the "
                "number of tokens that it drafts"
            )
        texts.append([*asked.texts[0].tokens])
        drafted.append(int(counts.drafted))
        accepted.append(int(counts.accepted))
        _require(gamma, after)
        by_place.append(_places(after, gamma) - _places(before, gamma))
        before = after
        if number and number % 50 == 0:
            say(f"{number} of {len(prompts)} prompts asked")
    same = _are_same(texts, expected)
    other = [number for number, equal in enumerate(same) if not equal][:ASKED_AGAIN]
    if _is_other(same) and any(answer(x, 1).texts[0].tokens != texts[x] for x in other):
        raise UserError(
            f"{url} samples by force: it answers one prompt with different texts at temperature 0. "
            "Expected greedy text; take out what sets its temperature"
        )
    _require_texts(url, same)
    if not any(drafted):
        raise UserError(
            f"{url} drafted nothing for {len(prompts)} prompts: it ignores its drafter, or has "
            "none; read what it logs at its start"
        )
    return ServerMeasurement(
        before.engine,
        texts,
        np.array(drafted),
        np.array(accepted)[:, None] if before.by_place is None else np.array(by_place),
        before.by_place is not None,
    )


def measure_together(
    url: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    config: ServerConfig,
    *,
    requests: int,
    tokens: int,
) -> DraftCounts:
    """What the server counts for all prompts if it gets `requests` of them at a time. Raises
    UserError as `measure_server`."""
    before = still_counters(url, config.key() or "")
    asked = ask_texts(
        url, target, prompts, Sampling(), config.model_copy(update={"concurrency": requests}),
        samples=1, max_new_tokens=tokens, seed=0,
    )  # fmt: skip
    if len(asked.texts) < len(prompts):
        why = "; ".join([*asked.faults, *asked.left_out][:3]) or "it gave no text"
        raise UserError(
            f"{url} answers {len(asked.texts)} of {len(prompts)} prompts, {requests} at a time: "
            f"{why}"
        )
    own = [expected[text.number] for text in asked.texts]
    _require_texts(url, _are_same([text.tokens for text in asked.texts], own))
    after = still_counters(url, config.key() or "")
    return asked.counts if asked.counts.drafted else after.counts - before.counts


def template_fault(
    url: str, target: Target, prompt: Sequence[int], config: ServerConfig
) -> str | None:
    """How the server's chat template differs from the target's, for the text of a prompt as a
    message. None: it does not, the target has none, or the server takes no messages or does not say
    what it makes of them."""
    key = config.key() or ""
    with suppress(UserError, ValueError, LookupError, TypeError, AttributeError):
        question = TemplateQuestion.of(target, prompt, config.model or served_models(url, key)[0])
        if question is not None:
            reply = json.loads(ask(f"{url}/v1/chat/completions", question.body, key))
            ids, count = prompt_of(reply)
            return None if ids is None and count is None else question.fault(ids, count)
    return None


def _places(reading: EngineCounters, gamma: int) -> np.ndarray:
    """Accepted tokens at each place, int [γ]; 0 where the server has no series yet."""
    places = np.zeros(gamma, dtype=np.int64)
    found = reading.by_place or ()
    places[: len(found)] = found
    return places


def _are_same(texts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[bool]:
    return [list(x) == list(y)[: len(x)] for x, y in zip(texts, expected, strict=True)]


def _is_other(same: Sequence[bool]) -> bool:
    return sum(same) / len(same) < LEAST_EQUAL_TEXTS


def _require_texts(url: str, same: Sequence[bool]) -> None:
    if _is_other(same):
        raise UserError(
            f"{sum(same) / len(same):.0%} of the texts of {url} are the target's: it has another "
            "target (or a fine-tune of it), or rewrites prompts. Expected the target's greedy "
            "text; `draftsmith audit` says more"
        )
