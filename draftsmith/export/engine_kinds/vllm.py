"""vLLM, in a separate environment: the user's, or a build for CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.export.compare_acceptance import Counting
from draftsmith.export.engine_kinds import ENGINES, Engine, EngineTask, started
from draftsmith.export.formats import layout_of
from train.engines.programs import find_vllm

# Layouts that hold the target too: vLLM reads the drafter from the target's own directory.
WITH_TARGET = ("mtp",)


class VLLM(Engine):
    """Runs in the target's dtype. Drafts always have γ tokens, even at a text's end."""

    install = "make engine-vllm"
    counting = Counting(past_end=True, past_length=True, chooses=True)

    def version(self, python: str | None = None) -> str | None:
        build = find_vllm(python)
        return build.version if build else None

    @contextmanager
    def serving(self, task: EngineTask, drafts: bool, directory: Path) -> Iterator[str]:
        build = find_vllm(task.python)
        assert build is not None, "engine_for found it"
        export, layout = str(task.export.resolve()), layout_of(task.export)
        options: dict[str, Any] = {
            "max_num_seqs": task.concurrency,
            "enforce_eager": build.for_cpu,
            "enable_prefix_caching": False,
        }
        if not build.for_cpu:  # our own loop's target is beside it
            options["gpu_memory_utilization"] = 0.5
        drafter = {"model": export}
        if layout.name in WITH_TARGET:
            options |= drafter
            drafter = {}
        if drafts:
            method: Any = layout.vllm
            options["speculative_config"] = (
                method | drafter | {"num_speculative_tokens": task.gamma}
            )
        with started("vllm", task, task.target, options, directory) as url:
            yield url


ENGINES.register("vllm")(VLLM())
