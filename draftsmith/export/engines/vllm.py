"""vLLM, in a child process with a separate environment: the user's, or a build for CPUs."""

import json
from pathlib import Path
from typing import Any, ClassVar

from decode.base.device import dtype_name
from draftsmith.export.engines import ENGINES, Counting, EngineTask
from draftsmith.export.engines.library_engine import LibraryEngine
from draftsmith.export.formats import EXPORT_FILE, FORMATS
from train.engines.programs import VLLM_ENVIRONMENT, VLLM_PACKAGE, find_vllm

# Layouts that hold the target too: vLLM reads the drafter from the target's own directory.
WITH_TARGET = ("mtp",)


class VLLM(LibraryEngine):
    """Runs in the target's dtype, one prompt at a time, and then at the loads of the task. Drafts
    always have γ tokens, even at a text's end."""

    formats = (
        *("hf", "pard", "medusa", "eagle1", "eagle3", "p_eagle", "speculators", "dflash"),
        *("speculators-dflash", "mtp"),
    )
    unverified: ClassVar[dict[str, str]] = dict.fromkeys(
        ("dspark", "speculators-dspark", "dflash2", "speculators-dflash2", "speculators-xpress"),
        "vLLM reads it only in its newer runner, in which this was never run; measure it with "
        "--prompts in our own loop",
    )
    install = "make engine-vllm"
    counting = Counting(past_end=True, past_length=True, chooses=True)
    name, title, package = "vllm", "vLLM", VLLM_PACKAGE
    work = "runs without and with the drafter"
    env = VLLM_ENVIRONMENT

    def place(self, python: str | None) -> tuple[Path, str] | None:
        build = find_vllm(python)
        return (build.python, build.version) if build else None

    def job(self, task: EngineTask, target: Path, directory: Path) -> dict[str, Any]:
        export = task.export.resolve()
        layout = json.loads((export / EXPORT_FILE).read_text(encoding="utf-8"))["layout"]
        has_target = layout in WITH_TARGET
        method: Any = FORMATS[layout].vllm
        drafter = {} if has_target else {"model": str(export)}
        longest_text = max(map(len, task.prompts)) + task.max_new_tokens
        # The last pass over a text may hold γ draft tokens, and the next draft needs room for γ + 1
        # more, or vLLM drafts zeros.
        room = longest_text + 2 * (task.gamma + 1)
        build = find_vllm(task.python)
        assert build is not None, "engine_for found it"
        # On a GPU our own loop's target is beside it.
        place = {} if build.for_cpu else {"gpu_memory_utilization": 0.5}
        parallel = task.options.get("tensor_parallel_size", 1) > 1
        return {
            "options": place
            | {
                "model": str(export if has_target else target),
                "dtype": dtype_name(task.target.dtype),
                "max_model_len": min(room, task.target.max_positions),
                "max_num_seqs": max([1, *task.loads]),
                "enforce_eager": build.for_cpu,
                "enable_prefix_caching": False,
                "generation_config": "vllm",
                "skip_tokenizer_init": True,
                "disable_log_stats": False,
                "distributed_executor_backend": "mp" if parallel else "uni",
            }
            | dict(task.options),
            "speculative": method | drafter | {"num_speculative_tokens": task.gamma},
        }


ENGINES.register("vllm")(VLLM())
