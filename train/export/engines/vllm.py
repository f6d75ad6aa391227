"""vLLM on the CPU, in a child process with a separate environment."""

import json
import tempfile
from pathlib import Path
from typing import Any

from train.export.engines import ENGINES, Counting, Engine, EngineRun, EngineTask
from train.export.engines.child import model_directory, python_of, run_child, version_of
from train.export.formats import EXPORT_FILE

# The `method` of vLLM's speculative_config, by layout.
METHODS = {
    "hf": "draft_model",
    "medusa": "medusa",
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "speculators": "eagle3",
}

SCRIPT = Path(__file__).with_name("vllm_child.py")
ENVIRONMENT = {
    # A single process, so no other process can outlive it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads bound to cores would wait for other programs on those cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLM(Engine):
    """Runs in float32, one prompt at a time. Drafts always have γ tokens, even at a text's end."""

    formats = tuple(METHODS)
    install = "make engine-vllm"
    counting = Counting(past_end=True, past_length=True)
    # Its float32 kernels for one row and for several add in a different order.
    rounding = 1e-5

    def missing(self) -> str | None:
        found = python_of("vllm").exists() and version_of("vllm", "vllm_cpu")
        return None if found else "vLLM is not installed"

    def run(self, task: EngineTask) -> EngineRun:
        layout = json.loads((task.export / EXPORT_FILE).read_text())["layout"]
        longest = max(map(len, task.prompts))
        task.say("vLLM without and with the drafter")
        with tempfile.TemporaryDirectory() as place:
            job: dict[str, Any] = {
                "options": {
                    "model": str(model_directory(task, Path(place))),
                    "dtype": "float32",
                    "max_model_len": min(
                        longest + task.max_new_tokens + task.gamma + 1, task.target.max_positions
                    ),
                    "max_num_seqs": 1,
                    "enforce_eager": True,
                    "enable_prefix_caching": False,
                    "generation_config": "vllm",
                    "skip_tokenizer_init": True,
                    "disable_log_stats": False,
                    "distributed_executor_backend": "uni",
                },
                "speculative": {
                    "method": METHODS[layout],
                    "model": str(task.export.resolve()),
                    "num_speculative_tokens": task.gamma,
                },
                "prompts": [list(prompt) for prompt in task.prompts],
                "max_new_tokens": task.max_new_tokens,
                "eos": list(task.target.eos_token_ids),
            }
            answer = run_child("vllm", SCRIPT, job, ENVIRONMENT)
        return EngineRun(
            f"{version_of('vllm', 'vllm_cpu')}",
            answer["plain"]["texts"],
            answer["drafted"]["texts"],
            answer["drafted_tokens"],
            answer["accepted_tokens"],
            answer["plain"]["seconds"],
            answer["drafted"]["seconds"],
        )


ENGINES.register("vllm")(VLLM())
