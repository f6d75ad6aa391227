"""Reads what an engine says of its drafts: the counters of its page, and those beside an answer."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.base.errors import UserError
from train.engines.child_process import NoAnswer, ask

# Labels, whose values may have any character, and a finite number.
_VALUE = r"(?:\{.*\})?\s+([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)(?=\s|$)"
# vLLM, llama-server (in builds of 2026) and draftsmith have the same names, each behind its prefix;
# so has the server that is put before a library.
_SPEC_DECODE = r"^(vllm|llamacpp|draftsmith|transformers|openvino):spec_decode_num_"
_SAMPLE = re.compile(rf"{_SPEC_DECODE}(draft|accepted)_tokens(?:_total)?{_VALUE}", re.MULTILINE)
_BY_PLACE = re.compile(
    rf"{_SPEC_DECODE}accepted_tokens_per_pos(?:_total)?(?=\{{.*\bposition=\"(\d{{1,4}})\"){_VALUE}",
    re.MULTILINE,
)
# SGLang counts generated tokens, requests and verifications, and nothing by place; a gauge has the
# nodes of a draft, with the last token of the text among them.
_SGLANG = re.compile(
    r"^sglang:(generation_tokens_total|num_requests_total|spec_verify_calls_total"
    rf"|spec_num_draft_tokens){_VALUE}",
    re.MULTILINE,
)
# An engine may add to its counters a moment after its answer: they are read until two readings are
# equal. Ours are counted before an answer leaves.
SETTLE_SECONDS = {"draftsmith": 0.02}
SLOW_SECONDS, LONGEST_SETTLE = 0.3, 10.0
MOST_TOKENS = 1e9  # of the drafts of an answer


@dataclass(frozen=True)
class DraftCounts:
    """Drafted and accepted tokens, since an engine's start or between two readings."""

    drafted: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, earlier: "DraftCounts") -> "DraftCounts":
        """What was counted since an earlier reading; all of it if the engine began again."""
        if self.drafted < earlier.drafted or self.accepted < earlier.accepted:
            return self
        return DraftCounts(self.drafted - earlier.drafted, self.accepted - earlier.accepted)

    @property
    def rate(self) -> float | None:
        """Accepted ÷ drafted; None: nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True)
class EngineCounters:
    """engine: the prefix of its counters. by_place: accepted tokens at each place; None: it does
    not say them by place. gamma: the most tokens of a draft; None: it does not say."""

    engine: str
    counts: DraftCounts
    by_place: tuple[int, ...] | None = None
    gamma: int | None = None


class Uncounted(UserError):
    """A server whose page has no counters of drafts."""


def parse_counters(text: str) -> EngineCounters | None:
    """The sums over all labels in a page for Prometheus; None: it has no such counters.

    SGLang has no counters of drafted and accepted tokens. Each verification drafts as many tokens
    as its server was started with, and emits one token more than it accepts. The first token of a
    request comes from its prompt's pass.
    """
    sums: dict[str, float] = {}
    samples = _SAMPLE.findall(text)
    for _, name, value in samples:
        sums[name] = sums.get(name, 0.0) + float(value)
    if len(sums) == 2:
        counts = DraftCounts(sums["draft"], sums["accepted"])
        accepted: dict[int, int] = {}
        for _, place, value in _BY_PLACE.findall(text):
            accepted[int(place)] = accepted.get(int(place), 0) + int(float(value))
        if not accepted:
            return EngineCounters(samples[0][0], counts)
        by_place = tuple(accepted.get(place, 0) for place in range(max(accepted) + 1))
        return EngineCounters(samples[0][0], counts, by_place, len(by_place))
    series: dict[str, list[float]] = {}
    for name, value in _SGLANG.findall(text):
        series.setdefault(name, []).append(float(value))
    if len(series) < 4:
        return None
    gamma = int(max(series["spec_num_draft_tokens"])) - 1
    verified = sum(series["spec_verify_calls_total"])
    emitted = sum(series["generation_tokens_total"]) - sum(series["num_requests_total"])
    drafted = verified * gamma
    counts = DraftCounts(drafted, min(max(emitted - verified, 0.0), drafted))
    return EngineCounters("sglang", counts, None, gamma)


def read_counters(url: str, key: str = "") -> EngineCounters:
    """The counters of the engine at `url`. key: the key that the engine asks for. Raises NoAnswer,
    Uncounted, and UserError for a server that hides its page."""
    try:
        page = ask(f"{url}/metrics", key=key, seconds=30).decode(errors="replace")
    except NoAnswer:
        raise
    except UserError as error:
        raise UserError(
            f"{url} hides its counters ({error}); expected /metrics. Start vLLM with a drafter, "
            "llama-server with --metrics, SGLang with --enable-metrics; for a server with a key "
            "give --key-env or key_env"
        ) from error
    counters = parse_counters(page)
    if counters is None:
        raise Uncounted(
            f"{url}/metrics has no counters of drafts: the server has no drafter, or hides them; "
            "expected those of vLLM, llama-server (--metrics), SGLang (--enable-metrics) or "
            "draftsmith serve, started with a drafter"
        )
    return counters


def settled_counters(url: str, key: str = "") -> tuple[EngineCounters, bool]:
    """The counters once two readings are equal, and whether two were within LONGEST_SETTLE seconds.
    Raises as `read_counters`."""
    end, last = time.monotonic() + LONGEST_SETTLE, read_counters(url, key)
    while True:
        time.sleep(SETTLE_SECONDS.get(last.engine, SLOW_SECONDS))
        now = read_counters(url, key)
        # One reading that took longer says nothing of the next, so there are two at least.
        if now == last or time.monotonic() >= end:
            return now, now == last
        last = now


def counts_beside(reply: Mapping[str, Any]) -> DraftCounts | None:
    """What llama-server says of its drafts, beside an answer; None: this engine says nothing
    there. Raises what a conversion does for numbers that are none."""
    timings = reply.get("timings")
    if not timings:
        return None
    drafted, accepted = (float(timings.get(key) or 0) for key in ("draft_n", "draft_n_accepted"))
    if not (0 <= drafted < MOST_TOKENS and 0 <= accepted < MOST_TOKENS):  # NaN is neither
        raise ValueError("its numbers of draft tokens are none")
    return DraftCounts(drafted, accepted)


def served_models(url: str, key: str = "") -> list[str]:
    """The names that the engine at `url` gives to its model. Adapters, which vLLM and SGLang list
    with a parent, are not among them. Raises as `ask`, and UserError if it lists no model."""
    try:
        listed = json.loads(ask(f"{url}/v1/models", key=key, seconds=30))["data"]
        names = [str(model["id"]) for model in listed if not model.get("parent")]
    except (ValueError, KeyError, TypeError, AttributeError):
        names = []
    if not names:
        raise UserError(f"{url}/v1/models lists no model; expected the one that answers")
    return names


def smoke_counts(
    url: str, conversations: Sequence[Sequence[Mapping[str, str]]], tokens: int, key: str = ""
) -> DraftCounts:
    """Ask the engine for a few answers, and return what it drafted and accepted meanwhile."""
    before = read_counters(url, key).counts
    model = served_models(url, key)[0]
    for messages in conversations:
        body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        ask(f"{url}/v1/chat/completions", body, key)
    end = time.monotonic() + LONGEST_SETTLE
    while True:
        counts = read_counters(url, key).counts - before
        if counts.accepted or time.monotonic() >= end:
            return counts
        time.sleep(0.5)
