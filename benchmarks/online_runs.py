"""The two runs of `benchmarks.online` as configs: what is distilled offline, and what serves.

The first distils on the first domain and serves the stream with what came of it, frozen and
learning; the second distils on all domains, on as many tokens more as the learning arm took, and
serves the same stream.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import UNJUDGED

DOMAINS = ("maths", "code", "general")
TARGET = "embedded:smollm2-135m"
GAMMA = 2
BATCH = 20
# What an online arm learns from beside what was rejected: the share of what was accepted.
SHARES = {"rejected": 0.0, "mix": 0.25, "all": 1.0}
MAIN = "mix"
SMALL_LM, HEADS = "small LM", "heads"
FAMILIES = (SMALL_LM, HEADS)
# By family, the stage that distils offline.
START = {SMALL_LM: "small-lm", HEADS: "heads"}
# Tokens of text, padding included, of an optimizer step of offline distillation, and of one of the
# ROUND_STEPS of an online round; the learning rates of the latter.
OFFLINE_TOKENS, ROUND_TOKENS, ROUND_STEPS = 1024, 512, 12
RATES = {SMALL_LM: 1e-3, HEADS: 1e-3}


@dataclass(frozen=True)
class Arm:
    """A drafter that serves the stream. share: as in SHARES, None for one that learns nothing.
    offline: distilled on all domains."""

    family: str
    share: str | None = None
    offline: bool = False

    @property
    def name(self) -> str:
        if self.share is not None:
            return f"{self.family}, online ({self.share})"
        return f"{self.family}, {'offline on all' if self.offline else 'frozen'}"

    @property
    def stage(self) -> str:
        how = f"online-{self.share}" if self.share else "offline" if self.offline else "frozen"
        return f"{START[self.family]}-{how}"


@dataclass(frozen=True)
class Settings:
    """Of one run of the benchmark. data: the directory of the prepared prompts; requests: served of
    each domain, and as many prompts to distil on."""

    quick: bool
    runs: Path
    data: Path
    requests: int
    temperature: float = 0.0

    @property
    def tokens(self) -> int:
        """Of an answer at most."""
        return 20 if self.quick else 96

    @property
    def start_steps(self) -> int:
        return 60 if self.quick else 300

    @property
    def arms(self) -> list[Arm]:
        """Of heads, in a quick run, only the mix learns: there is no time for all."""
        found = []
        for family in FAMILIES:
            shares = [MAIN] if self.quick and family == HEADS else SHARES
            found.append(Arm(family))
            found += [Arm(family, share) for share in shares]
            found.append(Arm(family, offline=True))
        return found


def first_config(settings: Settings) -> dict[str, Any]:
    """The run that distils on the first domain and serves the stream with what came of it."""
    steps = dict.fromkeys(FAMILIES, settings.start_steps)
    serving = [_serving(arm, settings) for arm in settings.arms if not arm.offline]
    stages = [*_offline(steps, settings), *serving]
    return _config("online-first", DOMAINS[:1], stages, settings)


def offline_steps(rounds: int) -> int:
    """So many optimizer steps of offline distillation take as many tokens as these rounds."""
    return math.ceil(rounds * ROUND_STEPS * ROUND_TOKENS / OFFLINE_TOKENS)


def second_config(taken: dict[str, int], settings: Settings) -> dict[str, Any]:
    """The run that distils on all domains, by family with so many steps more, and serves the
    stream."""
    steps = {family: settings.start_steps + taken[family] for family in FAMILIES}
    serving = [_serving(arm, settings) for arm in settings.arms if arm.offline]
    stages = [*_offline(steps, settings), *serving]
    return _config("online-all", DOMAINS, stages, settings)


def _config(
    name: str, learnt: Sequence[str], stages: list[dict[str, Any]], settings: Settings
) -> dict[str, Any]:
    data = settings.data
    return {
        "name": f"{name}-quick-{settings.requests}" if settings.quick else name,
        "output_dir": str(settings.runs),
        "trackers": [],
        "precision": "bf16",
        "target": {"model": TARGET, "dtype": "bfloat16", "device": "cpu"},
        "data": {
            "train": [f"{data}/{domain}-train.jsonl" for domain in learnt],
            "test": f"{data}/maths-stream.jsonl",
            "stream": [f"{data}/{domain}-stream.jsonl" for domain in DOMAINS],
        },
        # The run's own evaluation is of other prompts for every row; here it would be time lost.
        "evaluation": UNJUDGED,
        "stages": stages,
    }


def _offline(steps: dict[str, int], settings: Settings) -> list[dict[str, Any]]:
    shared = {"text": "answers", "draft_vocabulary": 12000, "losses": {"forward_kl": 1.0}}

    def training(family: str, lr: float) -> dict[str, Any]:
        loop = {"epochs": 1000, "max_steps": steps[family], "tokens_per_batch": OFFLINE_TOKENS}
        return shared | {"name": START[family], "loop": loop, "optimizer": {"lr": lr}}

    return [
        {
            "name": "answers",
            "kind": "generate",
            "max_new_tokens": settings.tokens,
            "batch_size": 25,
        },
        training(SMALL_LM, 2e-3)
        | {
            "kind": "distill",
            "drafter": {"layers": [0, 1]},
            "train_embeddings": False,
            "remember_teacher": True,
        },
        training(HEADS, 1e-3)
        | {
            "kind": "heads",
            "heads": {"type": "medusa", "heads": GAMMA},
            "remember_features": True,
        },
    ]


def _serving(arm: Arm, settings: Settings) -> dict[str, Any]:
    learning = None
    if arm.share is not None:
        learning = {
            "every_requests": BATCH,
            "steps": ROUND_STEPS,
            "tokens_per_batch": ROUND_TOKENS,
            "accepted": SHARES[arm.share],
            "k": 64,
            "holdout_every": 5,
            "holdout_requests": 8,
            "optimizer": {"lr": RATES[arm.family], "warmup_steps": 4, "schedule": "constant"},
        }
    return {
        "name": arm.stage,
        "kind": "online",
        "drafter": {"stage": START[arm.family]},
        "batch_size": BATCH,
        "window": BATCH,
        "gamma": GAMMA,
        "temperature": settings.temperature,
        "max_new_tokens": settings.tokens,
        "learning": learning,
    }
