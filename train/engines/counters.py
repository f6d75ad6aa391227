"""Reads an engine's own counters of drafted and accepted tokens, and asks it for a few answers."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decode.base.errors import UserError
from train.engines.child_process import ask

# Labels, whose values may have any character, and a finite number.
_VALUE = r"(?:\{.*\})?\s+([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)(?=\s|$)"
# vLLM, llama-server and draftsmith have the same names, each behind its prefix; so has the server
# that is put before a library.
_SAMPLE = re.compile(
    r"^(?:vllm|llamacpp|draftsmith|transformers|openvino):spec_decode_num_(draft|accepted)_tokens(?:_total)?"
    rf"{_VALUE}",
    re.MULTILINE,
)
# SGLang counts generated tokens, requests and verifications; a gauge has the nodes of a draft, with
# the last token of the text among them.
_SGLANG = re.compile(
    r"^sglang:(generation_tokens_total|num_requests_total|spec_verify_calls_total"
    rf"|spec_num_draft_tokens){_VALUE}",
    re.MULTILINE,
)
# An engine may add to its counters a moment after its answer.
_SETTLE_SECONDS = 10.0


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


def parse_counters(text: str) -> DraftCounts | None:
    """The sums over all labels in a page for Prometheus; None: it has no such counters.

    SGLang has no counters of drafted and accepted tokens. Each verification drafts as many tokens
    as its server was started with, and emits one token more than it accepts. The first token of a
    request comes from its prompt's pass.
    """
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    if len(sums) == 2:
        return DraftCounts(sums["draft"], sums["accepted"])
    series: dict[str, list[float]] = {}
    for name, value in _SGLANG.findall(text):
        series.setdefault(name, []).append(float(value))
    if len(series) < 4:
        return None
    verified = sum(series["spec_verify_calls_total"])
    emitted = sum(series["generation_tokens_total"]) - sum(series["num_requests_total"])
    drafted = verified * (max(series["spec_num_draft_tokens"]) - 1)
    return DraftCounts(drafted, min(max(emitted - verified, 0.0), drafted))


def read_counters(url: str, key: str = "") -> DraftCounts:
    """The counters of the engine at `url`. key: the key that the engine asks for. Raises NoAnswer,
    and UserError if the engine refuses the key or has no such counters."""
    counts = parse_counters(ask(f"{url}/metrics", key=key, seconds=30).decode(errors="replace"))
    if counts is None:
        raise UserError(
            f"{url}/metrics has no spec_decode counters; expected those of vLLM, llama-server "
            "(--metrics), SGLang (--enable-metrics) or draftsmith serve, started with a drafter"
        )
    return counts


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
    before = read_counters(url, key)
    model = served_models(url, key)[0]
    for messages in conversations:
        body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
        ask(f"{url}/v1/chat/completions", body, key)
    end = time.monotonic() + _SETTLE_SECONDS
    while (counts := read_counters(url, key) - before).accepted == 0 and time.monotonic() < end:
        time.sleep(0.5)
    return counts
