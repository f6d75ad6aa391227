#!/usr/bin/env bash
# Versions: onnxruntime 1.32.0, onnx 1.23.2
# Behaviour: a model of `quantize_dynamic` has one scale for the states of all tokens of a pass. A token's logits
#   depend on the tokens behind it: with drafts to check, the likeliest token is another one than without.
# Guess: weights are int8, and each token is computed from itself and what stands before it, so a greedy text
#   whose drafts are checked in one pass is the text that is written token by token.
# Seen:
#   float32: the likeliest token of 0 of 500 places changes with the token beside it
#   int8: the likeliest token of 17 of 500 places changes with the token beside it
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import logging
import pathlib
import sys
import tempfile

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

logging.disable(logging.WARNING)

# An output layer of a model: states [tokens, 256] to the logits of 1,000 tokens.
numbers = numpy.random.default_rng(0)
weight = numbers.normal(size=(256, 1000)).astype("float32") / 16
graph = helper.make_graph(
    [helper.make_node("MatMul", ["states", "weight"], ["logits"])],
    "layer",
    [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["tokens", 256])],
    [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["tokens", 1000])],
    [numpy_helper.from_array(weight, "weight")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
with tempfile.TemporaryDirectory() as folder:
    plain, whole = (str(pathlib.Path(folder, name)) for name in ("plain.onnx", "int8.onnx"))
    onnx.save(model, plain)
    quantize_dynamic(plain, whole, weight_type=QuantType.QInt8)
    sessions = {name: onnxruntime.InferenceSession(path) for name, path in (("float32", plain), ("int8", whole))}

states = numbers.normal(size=(500, 256)).astype("float32")
draft = 4 * numbers.normal(size=(1, 256)).astype("float32")
changed = {}
for name, session in sessions.items():
    alone = [session.run(None, {"states": state[None]})[0][0] for state in states]
    beside = [session.run(None, {"states": numpy.vstack([state, draft])})[0][0] for state in states]
    changed[name] = sum(one.argmax() != two.argmax() for one, two in zip(alone, beside))
    print(f"{name}: the likeliest token of {changed[name]} of 500 places changes with the token beside it")
sys.exit(0 if changed["float32"] == 0 and changed["int8"] > 5 else 1)
END
