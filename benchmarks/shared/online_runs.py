"""The configs of `benchmarks.online` and `benchmarks.routed`: offline distillation, then serving.

The first run distils on the first domain and serves the stream with these drafters, frozen and
learning. The second distils on all domains, with the additional tokens that the learning arm took,
and serves the same stream. The run of `benchmarks.routed` distils as the first one, and serves a
stream of all domains mixed. Its adapters are trained and evaluated in runs of their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import run_config

DOMAINS = ("maths", "code", "general")
GAMMA = 2
BATCH = 20
# The share of accepted positions that an online arm learns from, besides all rejected ones.
SHARES = {"rejected": 0.0, "mix": 0.25, "all": 1.0}
MAIN = "mix"
SMALL_LM, HEADS = "small LM", "heads"
FAMILIES = (SMALL_LM, HEADS)  # by default
# The heads of the families that are heads.
OPTIONS: dict[str, dict[str, Any]] = {
    HEADS: {"type": "medusa", "heads": GAMMA},
    "eagle1": {"type": "eagle1", "depth": GAMMA},
    "mtp": {"type": "mtp", "depth": GAMMA},
}
# The stage that distils offline, by family.
START = {SMALL_LM: "small-lm", **{family: family for family in OPTIONS}}
# OFFLINE_TOKENS: tokens of text, with padding, of an optimizer step of offline distillation.
# ROUND_TOKENS: the same for each of the ROUND_STEPS of an online round. RATE: the learning rate of
# online rounds, and of a full copy that is trained further.
OFFLINE_TOKENS, ROUND_TOKENS, ROUND_STEPS = 1024, 512, 12
RATE = 1e-3
ADAPTER_RATE = 4e-3  # adapters start at 0 and have few weights


@dataclass(frozen=True)
class Arm:
    """A drafter that serves the stream. share: a key of SHARES; None if the drafter does not learn.
    offline: whether it was distilled on all domains."""

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
    """The settings of the benchmark. data: the directory of the prepared prompts. requests: the
    number of requests served per domain, and the number of prompts per domain to distil on. seed:
    of the order of texts, init weights and recorded tokens."""

    quick: bool
    runs: Path
    data: Path
    requests: int
    temperature: float = 0.0
    families: tuple[str, ...] = FAMILIES
    seed: int = 0

    @property
    def tokens(self) -> int:
        """The most tokens of an answer."""
        return 20 if self.quick else 96

    @property
    def start_steps(self) -> int:
        return 60 if self.quick else 300

    @property
    def arms(self) -> list[Arm]:
        """All arms. In a quick run, the only online arm with heads is the mix, to save time."""
        arms = []
        for family in self.families:
            shares = [MAIN] if self.quick and family != SMALL_LM else SHARES
            arms.append(Arm(family))
            arms += [Arm(family, share) for share in shares]
            arms.append(Arm(family, offline=True))
        return arms


def first_config(settings: Settings) -> dict[str, Any]:
    """Return the run that distils on the first domain and serves the stream with the drafters."""
    steps = dict.fromkeys(settings.families, settings.start_steps)
    serving = [_serving(arm, settings) for arm in settings.arms if not arm.offline]
    stages = [*_offline(steps, settings), *serving]
    return _config("online-first", DOMAINS[:1], stages, settings)


def offline_steps(rounds: int) -> int:
    """Return the number of offline optimizer steps that take as many tokens as these rounds."""
    return math.ceil(rounds * ROUND_STEPS * ROUND_TOKENS / OFFLINE_TOKENS)


def second_config(additional_steps: dict[str, int], settings: Settings) -> dict[str, Any]:
    """Return the run that distils on all domains and serves the stream.
    additional_steps: optimizer steps by family."""
    steps = {
        family: settings.start_steps + additional_steps[family] for family in settings.families
    }
    serving = [_serving(arm, settings) for arm in settings.arms if arm.offline]
    stages = [*_offline(steps, settings), *serving]
    return _config("online-all", DOMAINS, stages, settings)


def routed_config(settings: Settings) -> dict[str, Any]:
    """Return the run of `benchmarks.routed`: a small language model is distilled on the first
    domain. It serves the mixed stream frozen, and learning from all requests, and it serves each
    domain and learns from that alone."""
    arms = {"frozen": None, "one": MAIN} | dict.fromkeys(DOMAINS, MAIN)
    serving = [
        _serving(Arm(SMALL_LM, share), settings)
        | {"name": name, "kinds": [name] if name in DOMAINS else None}
        for name, share in arms.items()
    ]
    stages = [*_offline({SMALL_LM: settings.start_steps}, settings), *serving]
    config = _config("routed", DOMAINS[:1], stages, settings)
    config["data"]["stream"] = f"{settings.data}/mixed-stream.jsonl"
    return config


def adapter_base_config(settings: Settings) -> dict[str, Any]:
    """Return the run that distils the base of the adapters, on the first domain."""
    stages = _offline({SMALL_LM: settings.start_steps}, settings)
    return _config("adapters-base", DOMAINS[:1], stages, settings)


def adapters_config(domain: str, base: Path, settings: Settings) -> dict[str, Any]:
    """Return the run that trains a drafter further on another domain, as a full copy and as an
    adapter, and evaluates both, and the drafter before, on the domain's stream. base: the directory
    of that drafter."""
    answers, student = _offline({SMALL_LM: settings.start_steps}, settings)
    start = {"drafter": {"model": str(base)}, "draft_vocabulary": None}
    full = student | start | {"name": "full", "optimizer": {"lr": RATE}}
    lora = {"r": 16, "merge": False}
    adapter = full | {"name": "adapter", "lora": lora, "optimizer": {"lr": ADAPTER_RATE}}
    config = _config(f"adapters-{domain}", [domain], [answers, full, adapter], settings)
    config["data"]["test"] = f"{settings.data}/{domain}-stream.jsonl"
    config["evaluation"] = {
        "gamma": GAMMA,
        "max_new_tokens": settings.tokens,
        "timed_prompts": 0,
        "generate": False,
        "baselines": [],
        "in_turn": [],
    }
    return config


def _config(
    name: str, domains: Sequence[str], stages: list[dict[str, Any]], settings: Settings
) -> dict[str, Any]:
    directory = settings.data
    if settings.families != FAMILIES:
        name = "-".join([name, *(START[family] for family in settings.families)])
    if settings.seed:
        name += f"-seed{settings.seed}"
    return run_config(
        f"{name}-quick-{settings.requests}" if settings.quick else name,
        settings.runs,
        stages,
        data={
            "train": [f"{directory}/{domain}-train.jsonl" for domain in domains],
            "test": f"{directory}/maths-stream.jsonl",
            "stream": [f"{directory}/{domain}-stream.jsonl" for domain in DOMAINS],
        },
    )


def _offline(steps: dict[str, int], settings: Settings) -> list[dict[str, Any]]:
    shared = {"text": "answers", "draft_vocabulary": 12000, "losses": {"forward_kl": 1.0}}

    student = {
        "kind": "distill",
        "drafter": {"layers": [0, 1]},
        "train_embeddings": False,
        "remember_teacher": True,
    }

    def training(family: str, lr: float) -> dict[str, Any]:
        loop = {"epochs": 1000, "max_steps": steps[family], "tokens_per_batch": OFFLINE_TOKENS}
        loop["seed"] = settings.seed
        return shared | {"name": START[family], "loop": loop, "optimizer": {"lr": lr}}

    return [
        {
            "name": "answers",
            "kind": "generate",
            "max_new_tokens": settings.tokens,
            "batch_size": 25,
        },
        *(
            training(family, 1e-3)
            | {"kind": "heads", "heads": OPTIONS[family], "remember_features": True}
            if family in OPTIONS
            else training(family, 2e-3) | student
            for family in steps
        ),
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
            "seed": settings.seed,
            "optimizer": {"lr": RATE, "warmup_steps": 4, "schedule": "constant"},
        }
    return {
        "name": arm.stage,
        "kind": "online",
        "drafter": {"stage": START[arm.family]},
        "batch_size": BATCH,
        "window": BATCH,
        "gamma": GAMMA,
        "sampling": {"temperature": settings.temperature},
        "max_new_tokens": settings.tokens,
        "learning": learning,
    }
