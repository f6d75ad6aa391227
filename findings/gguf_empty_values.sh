#!/usr/bin/env bash
# Versions: gguf 0.19.0
# Behaviour: GGUFWriter.add_string(key, "") and add_array(key, []) write nothing: the key is not in the
#   file. Neither gives an error or a warning. 0 and False are written.
# Guess: the key is there, with an empty value. The format has both, and a reader may take a missing
#   key for its own default (another chat template, no list at all).
# Seen:
#   written: x.array, x.empty_array, x.string, x.empty_string, x.zero, x.false
#   in the file: x.array, x.string, x.zero, x.false
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet gguf==0.19.0 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys
import tempfile

import numpy as np
from gguf import GGUFReader, GGUFWriter

with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_array("x.array", [1])
    writer.add_array("x.empty_array", [])
    writer.add_string("x.string", "text")
    writer.add_string("x.empty_string", "")
    writer.add_uint32("x.zero", 0)
    writer.add_bool("x.false", False)
    writer.add_tensor("weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = [key for key in GGUFReader(path).fields if key.startswith("x.")]
print("written: x.array, x.empty_array, x.string, x.empty_string, x.zero, x.false")
print("in the file:", ", ".join(found))
sys.exit(0 if found == ["x.array", "x.string", "x.zero", "x.false"] else 1)
END
