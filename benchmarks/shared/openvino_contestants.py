"""OpenVINO GenAI among the loops that `benchmarks.decode` compares: the target in its own dtype,
plain and with OpenVINO's drafts, in a child process that answers line by line."""

import functools
import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from benchmarks.common import Unable
from benchmarks.shared.llama_contestants import Answer, Answers
from decode.base.device import dtype_name
from decode.base.errors import UserError
from train.engines.child_process import package_version, python_of

if TYPE_CHECKING:
    from benchmarks.shared.decode_contestants import Models

CHILD = Path(__file__).with_name("openvino_decode_child.py")
Child = subprocess.Popen[str]


def openvino_answers(models: "Models", gamma: int, max_n: int) -> dict[str, Callable[[], Answers]]:
    """By contestant, a function that starts its process. `models.closing` ends the processes.
    Raises Unable if OpenVINO is not installed, UserError if it fails."""
    folder = functools.cache(functools.partial(_saved, models))

    def start(kind: str) -> Answers:
        job = {
            **{name: str(folder() / name) for name in ("target", "drafter", "converted")},
            **{"kind": kind, "precision": dtype_name(models.target.model.dtype), "gamma": gamma},
            **{"max_n": max_n, "threads": torch.get_num_threads()},
        }
        file = folder() / f"{kind}.json"
        file.write_text(json.dumps(job), "utf-8")
        log = folder() / f"{kind}.log"
        errors = models.closing.enter_context(log.open("w", encoding="utf-8"))
        child = models.closing.enter_context(subprocess.Popen(
            [python_of("openvino"), CHILD, file],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8",
        ))  # fmt: skip
        models.closing.callback(child.kill)
        _line(child, log)
        return functools.partial(_answer, child, log)

    return {
        f"openvino{ending}": functools.partial(start, kind)
        for ending, kind in (("", "plain"), ("_drafter", "drafter"), ("_lookup", "lookup"))
    }


def _saved(models: "Models") -> Path:
    """A folder with the directories of the target and of the drafter."""
    if package_version("openvino", "openvino_genai") is None:
        raise Unable("OpenVINO GenAI is not installed (make engine-openvino)")
    folder = Path(models.closing.enter_context(tempfile.TemporaryDirectory()))
    for name, model in (("target", models.target.model), ("drafter", models.assistant)):
        model.save_pretrained(folder / name)
        models.target.tokenizer.save_pretrained(folder / name)
    return folder


def _answer(
    child: "subprocess.Popen[str]", log: Path, prompt: Sequence[int], tokens: int
) -> Answer:
    assert child.stdin is not None
    child.stdin.write(json.dumps({"prompt": list(prompt), "tokens": tokens}) + "\n")
    child.stdin.flush()
    found = _line(child, log)
    if len(found["tokens"]) != tokens:
        raise UserError(f"OpenVINO gave {len(found['tokens'])} tokens; asked: {tokens} tokens")
    return Answer(found["tokens"], found["drafted"], found["accepted"])


def _line(child: Child, log: Path) -> dict[str, Any]:
    """The next line of a child. Raises UserError with the end of its log if it ended."""
    output: IO[str] | None = child.stdout
    assert output is not None
    if line := output.readline():
        found: dict[str, Any] = json.loads(line)
        return found
    last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
    raise UserError(f"OpenVINO's process ended: {''.join(last)[:300]}")
