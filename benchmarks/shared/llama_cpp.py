"""llama.cpp's programs, and GGUF files for them."""

import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common import Unable
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.model.loading import target_gguf
from draftsmith.export.formats.gguf_layout import FILE, metadata, tokenizer_keys, write_gguf
from draftsmith.export.formats.small_lm_gguf import ARCHITECTURES, gguf_tensors, own_weights
from train.engines.programs import llama_server_program


def program(name: str = "llama-server") -> Path:
    """One of llama.cpp's programs. Raises Unable if it is not installed."""
    server = llama_server_program()
    if server is None or not server.with_name(name).exists():
        raise Unable(f"{name} is not installed (make engine-llama)")
    return server.with_name(name)


def quantised(file: Path, kind: str) -> Path:
    """A file beside this one, with the same weights in a type of llama-quantize. Raises UserError
    if it makes none."""
    made = file.with_name(f"{kind}.gguf")
    command: list[str | Path] = [program("llama-quantize"), file, made, kind]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise UserError(f"llama-quantize makes no {kind}: {done.stderr.strip()[-300:]}")
    return made


def server_command(file: Path, *, rows: int, context: int) -> list[str]:
    """The command of llama-server for a file, without a port. context: tokens of each of its
    `rows` texts. Raises Unable if it is not installed."""
    command = [str(program()), "-m", str(file), "--host", "127.0.0.1", "-np", str(rows)]
    return [*command, "-c", str(context * rows), "-t", str(torch.get_num_threads())]


def write_target(folder: Path, model: PreTrainedModel, spec: str) -> None:
    """Write the GGUF file `FILE` of a model in its dtype, with the tokenizer of `spec`."""
    config: Any = model.config
    if config.model_type not in ARCHITECTURES:
        raise Unable(f"a {config.model_type} model is not written as GGUF here")
    name, dtype = ARCHITECTURES[config.model_type].name, dtype_name(model.dtype)
    described = metadata(config, name, dtype)
    tensors = gguf_tensors(config, own_weights(model))
    try:
        stored = target_gguf(spec)
    except UserError as error:
        raise Unable(str(error)) from error
    copied = tokenizer_keys(stored, config.vocab_size)
    write_gguf(folder / FILE, name, described, copied, tensors, dtype)
