"""The inference engines that verify an export, by name. Each is one file that registers itself.

No engine is added as a dependency. draftsmith uses transformers anyway; every other engine has a
separate environment, `.engines/NAME` (or `$DRAFTSMITH_ENGINES/NAME`), made by `make engine-NAME`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from decode.base.registry import Registry
from decode.model.loading import Target


@dataclass(frozen=True)
class Counting:
    """How an engine counts drafted and accepted tokens. Engines differ, and our own loop is counted
    in the same way.

    first_drafted: the first token after the prompt is drafted too; else the prefill yields it.
    stops_at_eos: a draft ends with its first end-of-text token; else it always has γ tokens.
    past_end: tokens drafted and accepted after the end of a text count.
    past_length: a draft has γ tokens even if fewer may follow; else it is cut to that number.
    chooses: draft tokens are the drafter's likeliest ones also where the text is drawn; else they
    are drawn too.
    """

    first_drafted: bool = False
    stops_at_eos: bool = False
    past_end: bool = False
    past_length: bool = False
    chooses: bool = False


@dataclass(frozen=True)
class EngineTask:
    """A job for an engine. target_spec: the target as `load_target` takes it. prompts: token ids.
    say: called with progress messages. python: that of the engine's environment; None: where
    draftsmith looks. options: the engine's own, over those that are set here. loads: the numbers
    of requests at a time for which speeds are measured too."""

    target: Target
    target_spec: str
    export: Path
    prompts: Sequence[Sequence[int]]
    gamma: int
    max_new_tokens: int
    say: Callable[[str], None] = lambda line: None
    python: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    loads: Sequence[int] = ()


@dataclass(frozen=True)
class LoadSpeed:
    """Tokens a second at `requests` requests at a time, greedily, without and with the drafter."""

    requests: int
    plain: float
    drafted: float


@dataclass(frozen=True)
class EngineRun:
    """The results of an engine, decoded greedily. plain_texts, drafted_texts: without and with the
    drafter, as token ids; either both keep an end-of-text token at the end of a text or neither
    does. drafted_tokens, accepted_tokens: by the engine's own count. The times are seconds for all
    prompts, one by one. loads: the speeds at the loads of the task."""

    version: str
    plain_texts: list[list[int]]
    drafted_texts: list[list[int]]
    drafted_tokens: int
    accepted_tokens: int
    plain_seconds: float
    drafted_seconds: float
    loads: Sequence[LoadSpeed] = ()


class Engine(ABC):
    """An inference engine.

    formats: the exports that can be verified in it. unverified: why others cannot be, though it
    reads them. install: the command that installs it. rounding: the largest difference of two
    logits, relative to the largest logit, at which the engine's arithmetic may swap their order
    between a pass over one token and a pass over several.
    """

    formats: ClassVar[tuple[str, ...]]
    unverified: ClassVar[dict[str, str]] = {}
    install: ClassVar[str]
    counting: ClassVar[Counting]
    rounding: ClassVar[float]

    def missing(self, python: str | None = None) -> str | None:
        """Return a message that names the missing package; None if the engine can run. python: that
        of its environment."""
        return None

    @abstractmethod
    def run(self, task: EngineTask) -> EngineRun:
        """Run all prompts one by one, without and with the drafter. Raises UserError if the engine
        dies, never gets ready, or cannot serve this target. Leaves no process behind."""


ENGINES: Registry[Engine] = Registry("engine")


from draftsmith.export.engines import llama_server, openvino, transformers, vllm  # noqa: E402, F401
