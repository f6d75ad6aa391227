"""Inference engines that an export is tried in, by name; each is one file that registers itself.

No engine is a dependency. One that is not a library of ours lives in an environment of its own,
`.engines/NAME` (or `$DRAFTSMITH_ENGINES/NAME`), made by `make engine-NAME`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from decode.registry import Registry
from decode.target.loading import Target


@dataclass(frozen=True)
class Counting:
    """How an engine counts drafted and accepted tokens, where engines differ; our own loop is then
    counted the same way.

    first_drafted: the first token after the prompt is drafted too; else the prefill yields it.
    stops_at_eos: a draft ends with its first end-of-text token; else it is γ long all the same.
    past_end: what was drafted and accepted behind the end of a text counts.
    past_length: a draft is γ long also where fewer tokens may follow; else as long as those.
    """

    first_drafted: bool = False
    stops_at_eos: bool = False
    past_end: bool = False
    past_length: bool = False


@dataclass(frozen=True)
class Task:
    """What an engine is asked to do. target_spec: the target as `load_target` takes it; prompts:
    token ids; say: told what is being done."""

    target: Target
    target_spec: str
    export: Path
    prompts: Sequence[Sequence[int]]
    gamma: int
    max_new_tokens: int
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class EngineRun:
    """What an engine did, greedily. plain, drafted: texts without and with the drafter, token ids;
    an end-of-text token at a text's end may stand there or not, alike in both. drafted_tokens,
    accepted_tokens: by the engine's own count. The times are seconds for all prompts."""

    version: str
    plain: list[list[int]]
    drafted: list[list[int]]
    drafted_tokens: int
    accepted_tokens: int
    plain_seconds: float
    drafted_seconds: float


class Engine(ABC):
    """formats: which exports it reads. install: the command that installs it.

    rounding: how far apart two logits may be, relative to the largest, for the engine's own
    arithmetic to swap them between a pass over one token and a pass over several.
    """

    formats: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    counting: ClassVar[Counting]
    rounding: ClassVar[float]

    @abstractmethod
    def missing(self) -> str | None:
        """What is not installed; None when the engine can run."""

    @abstractmethod
    def run(self, task: Task) -> EngineRun:
        """All prompts one by one, without the drafter and with it. Raises UserError when the engine
        dies, never gets ready, or cannot serve this target; no process is left behind."""


ENGINES: Registry[Engine] = Registry("engine")


def home(name: str) -> Path:
    """The environment of an engine, whether it is there or not."""
    return Path(os.environ.get("DRAFTSMITH_ENGINES", ".engines")).resolve() / name


from train.export.engines import llama_server, openvino, transformers, vllm  # noqa: E402, F401
