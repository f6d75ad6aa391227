"""llama.cpp among the loops that `benchmarks.decode` compares: llama-server with the target's own
weights, plain and with its drafts.

The target is written as a GGUF file in its dtype; `llama-quantize` makes the smaller ones of it. A
time is that of one request over loopback, which adds about two milliseconds.
"""

import functools
import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from benchmarks.common import Unable
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.model.loading import target_gguf
from draftsmith.export.formats.gguf_layout import FILE, metadata, tokenizer_keys, write_gguf
from draftsmith.export.formats.small_lm_gguf import ARCHITECTURES, gguf_tensors, own_weights
from train.engines.child_process import Server, serving
from train.engines.counters import DraftCounts, counts_beside
from train.engines.programs import llama_server_program

if TYPE_CHECKING:
    from benchmarks.shared.decode_contestants import Models

CONTEXT = 4096


@dataclass(frozen=True)
class Answer:
    """An engine's new tokens, and its counts of draft tokens."""

    tokens: list[int]
    drafted: int
    accepted: int


# From a prompt and a number of new tokens to an engine's answer.
Answers = Callable[[Sequence[int], int], Answer]


def llama_answers(models: "Models", gamma: int, max_n: int) -> dict[str, Callable[[], Answers]]:
    """By contestant, a function that starts its server. `models.closing` stops the servers. Raises
    Unable without llama-server, and for a target that cannot be written as GGUF."""
    file = functools.cache(functools.partial(_written, models))

    def drafter() -> list[str]:
        return [
            *("--spec-type", "draft-simple", "--spec-draft-p-min", "0"),
            *("--spec-draft-n-max", str(gamma), "-md", str(file("drafter"))),
        ]

    def lookup() -> list[str]:
        return [
            *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(max_n)),
            *("--spec-ngram-simple-size-m", str(gamma)),
        ]

    def starting(kind: str, drafts: Callable[[], list[str]]) -> Callable[[], Answers]:
        def start() -> Answers:
            return functools.partial(_answer, _server(models, ["-m", str(file(kind)), *drafts()]))

        return start

    return {
        "llama": starting("target", list),
        "llama_q8": starting("Q8_0", list),
        "llama_q4": starting("Q4_0", list),
        "llama_drafter": starting("target", drafter),
        "llama_lookup": starting("target", lookup),
    }


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


def _server(models: "Models", options: Sequence[str]) -> Server:
    command = [str(program()), *options, "--host", "127.0.0.1", "--port", "{port}"]
    command += ["-np", "1", "-c", str(CONTEXT), "-t", str(torch.get_num_threads())]
    return models.closing.enter_context(serving("llama-server", command, "/health"))


def _answer(server: Server, prompt: Sequence[int], tokens: int) -> Answer:
    settings = {"temperature": 0, "top_k": 1, "cache_prompt": False, "ignore_eos": True}
    body = {"prompt": list(prompt), "n_predict": tokens, "return_tokens": True, **settings}
    answer = server.ask("/completion", body)
    if not isinstance(answer, dict) or len(answer.get("tokens", ())) != tokens:
        raise UserError(f"llama-server answers {json.dumps(answer)[:200]}; asked: {tokens} tokens")
    counts = counts_beside(answer) or DraftCounts()
    return Answer(answer["tokens"], int(counts.drafted), int(counts.accepted))


def _written(models: "Models", kind: str) -> Path:
    """A GGUF file of the target, of the drafter, or of the target in a quantised type."""
    program()  # before a file is written
    folder = Path(models.closing.enter_context(tempfile.TemporaryDirectory()))
    model = models.assistant if kind == "drafter" else models.target.model
    write_target(folder, model, models.target.name)
    if kind in ("target", "drafter"):
        return folder / FILE
    return quantised(folder / FILE, kind)


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
