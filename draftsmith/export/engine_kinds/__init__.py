"""The inference engines that verify an export, by name. Each registers itself.

No engine is added as a dependency. draftsmith uses transformers anyway; every other engine has a
separate environment, `.engines/NAME` (or `$DRAFTSMITH_ENGINES/NAME`), made by `make engine-NAME`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from decode.base.device import dtype_name
from decode.base.registry import Registry
from decode.model.loading import Target
from draftsmith.export.compare_acceptance import Counting
from train.engines.launch import launched
from train.settings.server_config import ServerConfig


@dataclass(frozen=True)
class EngineTask:
    """A job for an engine. target_spec: the target as `load_target` takes it. prompts: token ids.
    say: called with progress messages. python: that of the engine's environment; None: where
    draftsmith looks. options: the engine's own, over those that are set here. loads: the numbers
    of requests at a time for which speeds are measured, without and with drafts."""

    target: Target
    target_spec: str
    export: Path
    prompts: Sequence[Sequence[int]]
    gamma: int
    max_new_tokens: int
    say: Callable[[str], None] = lambda line: None
    python: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    loads: Sequence[int] = (1,)

    @property
    def concurrency(self) -> int:
        """The most requests at a time."""
        return max(self.loads, default=1)

    @property
    def longest(self) -> int:
        """Tokens of the longest text with its drafts. The last pass over a text may hold γ draft
        tokens, and vLLM drafts zeros if the next draft has no room for γ + 1 more."""
        return max(map(len, self.prompts)) + self.max_new_tokens + 2 * (self.gamma + 1)


class Engine(ABC):
    """An inference engine, which serves a target with or without an export.

    Which exports can be verified in it is in `formats.readers`. install: the command that installs
    it. counting: how it counts its drafts. protocol: how it is asked. log_probabilities: whether
    those that it gives are the target's.
    """

    install: ClassVar[str]
    counting: ClassVar[Counting]
    protocol: ClassVar[Literal["completions", "llama-server"]] = "completions"
    log_probabilities: ClassVar[bool] = True

    @abstractmethod
    def version(self, python: str | None = None) -> str | None:
        """The installed version; None: it is not installed. python: that of its environment."""

    @abstractmethod
    def serving(
        self, task: EngineTask, drafts: bool, directory: Path
    ) -> AbstractContextManager[str]:
        """The address of the started engine. drafts: with the export. directory: for its log and
        its files. Raises UserError if it dies, never gets ready, or cannot serve this target.
        Leaves no process behind."""

    def computes_in(self, task: EngineTask) -> str:
        """The dtype that its logits are as exact as."""
        return dtype_name(task.target.dtype)


@contextmanager
def started(
    name: Literal["vllm", "llama-server"],
    task: EngineTask,
    target: Target,
    options: Mapping[str, Any],
    directory: Path,
) -> Iterator[str]:
    """The address of an engine that is started as a stage of a run starts it."""
    config = ServerConfig(
        launch=name,
        python=task.python,
        options=dict(task.options),
        concurrency=task.concurrency,
    )
    with launched(config, target, task.longest, directory, options=options) as (url,):
        yield url


ENGINES: Registry[Engine] = Registry("engine")


from draftsmith.export.engine_kinds import libraries, llama_server, vllm  # noqa: E402, F401
