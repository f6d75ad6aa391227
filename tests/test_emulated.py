"""The functions in C++ for bfloat16, on processors that lack its instructions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decode.base.processor import cpu_flags
from decode.model.forward import few_rows
from tests import skips
from tools.imports import ROOT

# Those in float32 need no emulation.
# Of the families one of each kind of layer: plain, with a window, with one gate_up.
CHOSEN = "bfloat16 and not product and not weight and not qwen and not smollm3"
LAYERS = ("tests/test_few_rows.py", "-k", CHOSEN)
# Where the processor has the instructions, the gate runs these tests with them.
HAS_THEM = few_rows.NUMBERS[torch.bfloat16].needs <= cpu_flags()
pytestmark = [pytest.mark.thorough] * HAS_THEM


def test_the_tests_in_bfloat16_pass_with_emulated_instructions(tmp_path: Path) -> None:
    if not {"avx2", "fma", "f16c"} <= cpu_flags():
        pytest.skip("this CPU has no AVX2 to compile for")
    # Files that others compiled are for the instructions themselves.
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), few_rows.SWITCH: "1"}
    environment[skips.SWITCH] = "1"  # what does not compile is skipped else
    environment.pop("PYTEST_ADDOPTS", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.emulated",
        "-p",
        "no:xdist",
        *LAYERS,
    ]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "this CPU has no kernels for bfloat16" not in ran.stdout
