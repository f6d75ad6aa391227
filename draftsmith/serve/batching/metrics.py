"""What the service counts, in the format that Prometheus reads, and how fast it answers.

The names are vLLM's behind our prefix, so its dashboards need only another prefix.
"""

import math

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from decode.stats import Judged
from decode.verification import Verification

PREFIX = "draftsmith"
LONGEST_RETRY = 120  # seconds; OpenAI's client ignores longer ones
# Seconds: of a pass on a GPU up to a long answer on a laptop.
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_SECONDS_PER_TOKEN = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


class Metrics:
    """Counters, gauges and histograms of one service, labelled with the model's name.

    Draft tokens past the end of a text count as neither drafted nor accepted. Every other token of
    a pass counts, also those of texts that were given up later.

    depth: of drafts. Its positions have series from the start, so that they say how deep drafts
    are.
    """

    def __init__(self, model_name: str, depth: int = 0) -> None:
        disable_created_metrics()  # a second series for each counter that dashboards do not read
        self.registry = CollectorRegistry()
        self._name = model_name
        self.drafts = self._counter("spec_decode_num_drafts", "drafts that were verified")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "draft tokens")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "accepted draft tokens")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "accepted draft tokens by position, from 0",
            "position",
        )
        self._reached_at = self._counter(
            "spec_decode_num_reached_tokens_per_pos",
            "draft tokens that were judged with all before them accepted, by position, from 0: "
            "accepted / reached is the acceptance rate α",
            "position",
        )
        for position in range(depth):
            self._accepted_at.labels(self._name, position)
            self._reached_at.labels(self._name, position)
        self.passes = self._counter("num_passes", "verification passes over the running rows")
        self.steps = self._counter("num_steps", "passes of single texts")
        self.emitted = self._counter("num_step_tokens", "tokens that the passes of texts gave")
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts whose texts began")
        self.prefix_tokens = self._counter(
            "prefix_cache_queries", "tokens of prompts that were looked up in the prefix cache"
        )
        self.reused_tokens = self._counter(
            "prefix_cache_hits", "those that were in the prefix cache, and were not computed"
        )
        self.generation_tokens = self._counter("generation_tokens", "tokens that were generated")
        self.running = self._gauge("num_requests_running", "texts that have a row")
        self.waiting = self._gauge("num_requests_waiting", "texts that wait for a free row")
        self.lenience = self._gauge("lenience", "l of the verification rule; 1 if it has none")
        self.drafter_version = self._gauge("drafter_version", "version of the learnt drafter")
        self._rounds = self._counter("learning_rounds", "rounds of learning, by result", "result")
        self._left_out = self._counter(
            "learning_left_out", "texts that were not learnt from, by the setting", "setting"
        )
        self._ended = self._counter(
            "request_success", "texts that ended, by reason", "finished_reason"
        )
        self._failed = self._counter(
            "request_failure", "requests without an answer, by reason", "reason"
        )
        self.queue_time = self._seconds("request_queue_time_seconds", "until a row was free")
        self.first_token = self._seconds("time_to_first_token_seconds", "until the first token")
        self.latency = self._seconds("e2e_request_latency_seconds", "until a text ended")
        self.token_time = self._seconds(
            "inter_token_latency_seconds",
            "between two passes of a text, divided by the tokens of the second",
            _SECONDS_PER_TOKEN,
        )

    def passed(self, step: Verification, judged: Judged) -> None:
        """Count a pass and its draft tokens."""
        self.passes.inc()
        self.steps.inc(len(step.rows))
        self.emitted.inc(int(step.emitted.sum()))
        self.drafts.inc(int(judged.drafted.any(1).sum()))
        self.drafted.inc(int(judged.drafted.sum()))
        self.accepted.inc(int(judged.accepted.sum()))
        for series, counts in (
            (self._accepted_at, judged.accepted),
            (self._reached_at, judged.reached),
        ):
            for position, count in enumerate(counts.sum(0).tolist()):
                series.labels(self._name, position).inc(count)

    def ended(self, reason: str) -> None:
        """Count a text that ended. reason: stop or length."""
        self._ended.labels(self._name, reason).inc()

    def failed(self, reason: str) -> None:
        """Count a request that got no answer, or only a part of one."""
        self._failed.labels(self._name, reason).inc()

    def learnt(self, result: str) -> None:
        """Count a round of learning. result: kept, undone or failed."""
        self._rounds.labels(self._name, result).inc()

    def not_learnt(self, setting: str) -> None:
        """Count a text that a setting of its request keeps from learning."""
        self._left_out.labels(self._name, setting).inc()

    def totals(self) -> dict[str, int]:
        """For `/live`: the tokens that were generated; the passes of single texts and the tokens
        that they gave; and of their draft tokens, those that were drafted, reached and accepted, as
        in `decode.stats.Counts`."""
        counters = {
            "generated": self.generation_tokens,
            "steps": self.steps,
            "emitted": self.emitted,
            "drafted": self.drafted,
            "reached": self._reached_at,
            "accepted": self.accepted,
        }
        return {
            name: int(sum(x.value for metric in counter.collect() for x in metric.samples))
            for name, counter in counters.items()
        }

    def text(self) -> bytes:
        """All series, in the text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        """A counter; its series has the ending _total. labels: those whose values come later."""
        names = ("model_name", *labels)
        counter = Counter(f"{PREFIX}:{name}", meaning, names, registry=self.registry)
        return counter if labels else counter.labels(self._name)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        gauge = Gauge(f"{PREFIX}:{name}", meaning, ("model_name",), registry=self.registry)
        return gauge.labels(self._name)

    def _seconds(self, name: str, meaning: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        histogram = Histogram(
            f"{PREFIX}:{name}",
            f"seconds {meaning}",
            ("model_name",),
            registry=self.registry,
            buckets=buckets,
        )
        return histogram.labels(self._name)


class AnswerSpeed:
    """Moving averages: tokens per second of the last passes, and tokens of the last texts."""

    def __init__(self) -> None:
        self._tokens_per_second = self._tokens_per_text = math.nan

    def passed(self, tokens: int, seconds: float) -> None:
        """A pass gave `tokens` tokens."""
        self._tokens_per_second = _averaged(self._tokens_per_second, tokens / max(seconds, 1e-6))

    def ended(self, tokens: int) -> None:
        """A text has ended with `tokens` tokens."""
        self._tokens_per_text = _averaged(self._tokens_per_text, tokens)

    def seconds_for(self, texts: int) -> int:
        """Seconds until `texts` texts are answered; 1 if no text has ended yet."""
        seconds = texts * self._tokens_per_text / self._tokens_per_second
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY) if math.isfinite(seconds) else 1


def _averaged(before: float, new: float) -> float:
    """An exponential moving average. before: NaN at first."""
    return new if math.isnan(before) else 0.9 * before + 0.1 * new
