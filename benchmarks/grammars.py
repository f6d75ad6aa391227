"""Compares the library that masks with another one: reading a tokenizer, compiling, masks, memory.

    python -m benchmarks.grammars --python PYTHON [--json FILE]

PYTHON is that of an environment with xgrammar, such as vLLM's. llguidance draws a text for each
schema of `benchmarks.structured`, and both libraries then mask before each of its tokens, each in
a process of its own.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import (
    TARGET,
    JsonOption,
    TargetOption,
    describe_machine,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.shared.structured_prompts import FUNCTIONS, PERSON, PERSONS, call
from decode.model.loading import load_target
from train.engines.child_process import run_job

CHILD = Path(__file__).with_name("shared") / "grammar_child.py"
SCHEMAS = [
    PERSON,
    PERSONS,
    {"anyOf": [call(name, arguments) for name, arguments in FUNCTIONS.items()]},
]


def main(
    python: Annotated[Path, typer.Option(help="of an environment with xgrammar")],
    target: TargetOption = TARGET,
    json_file: JsonOption = None,
) -> None:
    """Run both and print their table."""
    reporter = start_benchmark()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        load_target(target, dtype="float32", device="cpu").tokenizer.save_pretrained(directory)
        job: dict[str, Any] = {"tokenizer": directory, "schemas": SCHEMAS, "texts": None}
        for library, its_python in (("llguidance", Path(sys.executable)), ("xgrammar", python)):
            reporter.say(library)
            found[library] = run_job(
                library, CHILD, job | {"library": library}, python=its_python.absolute()
            )
            job["texts"] = found[library]["texts"]
    rows = [_cells(library, row) for library, row in found.items()]
    reporter.table(rows_table("masks of JSON Schemas", rows))
    if json_file is not None:
        ours, theirs = (sum(found[name]["mask_ms"]) for name in ("llguidance", "xgrammar"))
        figures = {"ratios": {"masks_vs_xgrammar": theirs / ours}, "libraries": found}
        write_json(json_file, figures | {"process": describe_machine()})


def _cells(library: str, row: dict[str, Any]) -> dict[str, str]:
    return {
        "library": f"{library} {row['version']}",
        "tokenizer, s": f"{row['tokenizer_seconds']:.2f}",
        "compile, ms": f"{1000 * median(row['compile_seconds']):.1f}",
        "mask, ms: mean": f"{np.mean(row['mask_ms']):.3f}",
        "median": f"{np.median(row['mask_ms']):.3f}",
        "99%": f"{np.quantile(row['mask_ms'], 0.99):.3f}",
        "memory, MiB": f"{row['memory_mib']:.0f}",
        "tokens taken": f"{sum(row['taken'])} of {sum(map(len, row['texts']))}",
    }


if __name__ == "__main__":
    run_command(main)
