"""Runs the notebook of the documentation without Jupyter: its code cells in order, as one script.

python -m tools.notebook --write     runs it as it is and stores what it prints and plots
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "first_drafter.ipynb"
# Ends the output of each cell. A plot is a file, named by the number of its cell.
MARK = "\x1e"
PREAMBLE = """
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
cell = 0
plt.show = lambda: plt.savefig(f"plot-{cell}.png", dpi=80)
"""

Output = dict[str, Any]


def run_notebook(
    notebook: dict[str, Any], directory: Path, **parameters: Any
) -> list[list[Output]]:
    """The outputs of each code cell, in the notebook format. The first code cell has parameters; a
    value given here replaces one of them. Raises AssertionError with the error of the code."""
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    cells[0] += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    parts = [f"cell = {i}\n{code}\nprint({MARK!r}, flush=True)" for i, code in enumerate(cells)]
    script = directory / "notebook.py"
    script.write_text("\n".join([PREAMBLE, *parts]), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        capture_output=True,
        encoding="utf-8",
        timeout=280,
        check=False,
        # DeepSpeed prints which accelerator it sees, unless it is told.
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout.split(f"{MARK}\n")[: len(cells)]
    return [_outputs(text, directory / f"plot-{i}.png") for i, text in enumerate(printed)]


def _outputs(printed: str, plot: Path) -> list[Output]:
    outputs: list[Output] = []
    if printed:
        lines = printed.splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if plot.exists():
        image = base64.b64encode(plot.read_bytes()).decode()
        data = {"image/png": image, "text/plain": ["a plot"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def write_outputs() -> None:
    """Run the notebook and store its outputs in it."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as place:
        outputs = run_notebook(notebook, Path(place))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, (cell, found) in enumerate(zip(code, outputs, strict=True), start=1):
        cell |= {"execution_count": count, "outputs": found}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tools.notebook --write")
    write_outputs()
