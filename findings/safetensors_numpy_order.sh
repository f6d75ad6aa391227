#!/usr/bin/env bash
# Versions: safetensors 0.8.0, numpy 2.4.6
# Behaviour: `safetensors.numpy.save_file` writes an array as it lies in memory. A transposed array, or every second
#   column of one, is read back with its shape and other numbers, without an error. `safetensors.torch` refuses both.
# Guess: the numbers of the array are written, as `numpy.save` writes them, or it is refused as a tensor is.
# Seen:
#   plain: [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] is read back as [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
#   transposed: [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] is read back as [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
#   every second column: [[0.0, 2.0], [3.0, 5.0]] is read back as [[0.0, 1.0], [2.0, 3.0]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys
import tempfile
from pathlib import Path

import numpy
from safetensors.numpy import load_file, save_file

plain = numpy.arange(6, dtype="float32").reshape(2, 3)
arrays = {"plain": plain, "transposed": plain.T, "every second column": plain[:, ::2]}
found = {}
with tempfile.TemporaryDirectory() as folder:
    for name, array in arrays.items():
        save_file({"x": array}, Path(folder, "x.safetensors"))
        read = load_file(Path(folder, "x.safetensors"))["x"]
        found[name] = numpy.array_equal(array, read)
        print(f"{name}: {array.tolist()} is read back as {read.tolist()}")
sys.exit(0 if list(found.values()) == [True, False, False] else 1)
END
