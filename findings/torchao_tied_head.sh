#!/usr/bin/env bash
# Versions: torchao 0.18.0, torch 2.13.0
# Behaviour: `quantize_` quantises an output layer that is tied to the embeddings and leaves the embeddings as they
#   are. They are two tensors from then on, without a message: more memory, and other numbers in each.
# Guess: a tied weight stays one, quantised in both places or in neither.
# Seen:
#   head Int8Tensor, embeddings Parameter, apart by 0.0161
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torchao==0.18.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

torch.manual_seed(0)
model = torch.nn.ModuleDict(
    {"embed": torch.nn.Embedding(64, 32), "head": torch.nn.Linear(32, 64, bias=False)}
)
model["head"].weight = model["embed"].weight
quantize_(model, Int8WeightOnlyConfig())
head, embed = model["head"].weight, model["embed"].weight
apart = (head.dequantize() - embed).abs().max().item()
print(f"head {type(head).__name__}, embeddings {type(embed).__name__}, apart by {apart:.4f}")
sys.exit(0 if type(head) is not type(embed) and apart > 0 else 1)
END
