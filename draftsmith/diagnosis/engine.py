"""Acceptance by place there: what a server's own counters say of one request after the other."""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from draftsmith.auditing.asking import AskedTexts, ask_texts
from draftsmith.auditing.drafts import COUNTING, SETTLE_SECONDS, SLOW_SECONDS
from draftsmith.auditing.template_question import TemplateQuestion, prompt_of
from train.engines.child_process import NoAnswer, ask
from train.engines.counters import DraftCounts, parse_counters, served_models
from train.settings.server_config import ServerConfig

# vLLM, draftsmith and llama-server (in builds of 2026) have the same names, each behind its prefix.
_BY_PLACE = re.compile(
    r"^(?:vllm|llamacpp|draftsmith):spec_decode_num_accepted_tokens_per_pos(?:_total)?"
    r"\{[^}]*position=\"(\d+)\"[^}]*\}\s+([0-9.eE+-]+)",
    re.MULTILINE,
)
# SGLang counts nothing by place. A gauge has the nodes of a draft, the last token of the text
# among them.
_SGLANG_NODES = re.compile(
    r"^sglang:spec_num_draft_tokens(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE
)
# Engines that say from their start how many tokens they draft. llama-server has places of the
# drafts so far.
_SAY_GAMMA = ("vllm", "sglang", "draftsmith")
_ENGINE = re.compile(rf"^({'|'.join(COUNTING)}):", re.MULTILINE)
LONGEST_SETTLE = 10.0
# Of the texts, as many must be the target's. Rounding alone changes fewer.
LEAST_EQUAL_TEXTS = 0.7
ASKED_AGAIN = 3  # prompts with another text: does the server draw it?


@dataclass(frozen=True)
class ServerCounters:
    """engine: a name of COUNTING. by_place: accepted tokens at each place; None: it does not say
    them by place. gamma: the most tokens of a draft; None: it does not say."""

    engine: str
    counts: DraftCounts
    by_place: tuple[int, ...] | None
    gamma: int | None

    def require(self, gamma: int) -> None:
        """Raise UserError for a server that drafts another number of tokens."""
        may_be_more = self.engine not in _SAY_GAMMA
        if self.gamma in (None, gamma) or (may_be_more and self.gamma < gamma):
            return
        raise UserError(
            f"the server drafts {self.gamma} tokens at a time, but --gamma is {gamma}; give "
            f"--gamma {self.gamma}"
        )


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


def parse_reading(page: str) -> ServerCounters | None:
    """The counters of a page for Prometheus. None: it has none of drafts."""
    counts, engine = parse_counters(page), _ENGINE.search(page)
    if counts is None or engine is None:
        return None
    if engine[1] == "sglang":
        nodes = [int(float(value)) for value in _SGLANG_NODES.findall(page)]
        return ServerCounters(engine[1], counts, None, max(nodes) - 1)
    accepted: dict[int, int] = {}
    for place, value in _BY_PLACE.findall(page):
        accepted[int(place)] = accepted.get(int(place), 0) + int(float(value))
    if not accepted:
        return ServerCounters(engine[1], counts, None, None)
    gamma = max(accepted) + 1
    return ServerCounters(
        engine[1], counts, tuple(accepted.get(place, 0) for place in range(gamma)), gamma
    )


def read(url: str, key: str = "") -> ServerCounters:
    """The counters once they stand still. Raises UserError for a server that hides them, and for
    one that is busy with other requests, and NoAnswer."""
    end, last, before = time.monotonic() + LONGEST_SETTLE, None, None
    # One reading that took longer says nothing of the next.
    while before is None or time.monotonic() < end:
        try:
            page = ask(f"{url}/metrics", key=key, seconds=30).decode(errors="replace")
        except NoAnswer:
            raise
        except UserError as error:
            raise UserError(
                f"{url} hides its counters ({error}); expected /metrics. Start vLLM with a "
                "drafter, llama-server with --metrics, SGLang with --enable-metrics; for a server "
                "with a key give --key-env"
            ) from error
        found = parse_reading(page)
        if found is None:
            raise UserError(
                f"{url}/metrics has no counters of drafts: the server has no drafter, or hides "
                "them; start it with one"
            )
        if found == last:
            return found
        before, last = last, found
        time.sleep(SETTLE_SECONDS.get(found.engine, SLOW_SECONDS))
    raise UserError(
        f"the counters of {url} do not stand still: it answers other requests meanwhile. Expected "
        "a server that nobody else asks; diagnose one of your own"
    )


def ready(url: str, config: ServerConfig, gamma: int) -> str:
    """The server's engine, a name of COUNTING. Raises UserError and NoAnswer as `read`, and for a
    server that drafts another number of tokens."""
    first = read(url, config.key() or "")
    first.require(gamma)
    return first.engine


def measure(
    url: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    config: ServerConfig,
    *,
    gamma: int,
    tokens: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> ServerMeasurement:
    """Ask for `tokens` tokens of each prompt, greedily, one request at a time. expected: the
    target's own texts.

    Raises UserError for a server that hides its counters, is busy, drafts nothing, rewrites prompts
    or has another target or samples by force, and as `ask_texts`."""
    key = config.key() or ""
    before = read(url, key)
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
        asked = answer(number, seed)
        after = read(url, key)
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
        after.require(gamma)
        by_place.append(_places(after, gamma) - _places(before, gamma))
        before = after
        if number and number % 50 == 0:
            say(f"{number} of {len(prompts)} prompts asked")
    same = _are_same(texts, expected)
    other = [number for number, equal in enumerate(same) if not equal][:ASKED_AGAIN]
    if _is_other(same) and any(answer(x, seed + 1).texts[0].tokens != texts[x] for x in other):
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
    seed: int = 0,
) -> DraftCounts:
    """What the server counts for all prompts if it gets `requests` of them at a time. Raises
    UserError as `measure`."""
    before = read(url, config.key() or "")
    asked = ask_texts(
        url, target, prompts, Sampling(), config.model_copy(update={"concurrency": requests}),
        samples=1, max_new_tokens=tokens, seed=seed,
    )  # fmt: skip
    if len(asked.texts) < len(prompts):
        why = "; ".join([*asked.faults, *asked.left_out][:3]) or "it gave no text"
        raise UserError(
            f"{url} answers {len(asked.texts)} of {len(prompts)} prompts, {requests} at a time: "
            f"{why}"
        )
    own = [expected[text.number] for text in asked.texts]
    _require_texts(url, _are_same([text.tokens for text in asked.texts], own))
    after = read(url, config.key() or "")
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


def _places(reading: ServerCounters, gamma: int) -> np.ndarray:
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
