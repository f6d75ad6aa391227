#!/usr/bin/env bash
# Versions: accelerate 1.15.0, torch 2.13.0
# Behaviour: `gather_for_metrics` cuts what it is given of the last batch to the number of its rows, also on one process. Of
#   values that stand one a token, such as losses or accepted drafts, it keeps as many as that batch has rows.
# Guess: on one process nothing is doubled, so nothing is cut; on several, rows that were doubled go.
# Seen:
#   10 texts in batches of 5, tokens given and gathered: [(15, 15), (40, 40)]
#   10 texts in batches of 4, tokens given and gathered: [(10, 10), (26, 26), (19, 2)]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
texts = [torch.ones(length) for length in range(1, 11)]
kept = {}
for size in (5, 4):
    batches = torch.utils.data.DataLoader(texts, batch_size=size, collate_fn=torch.cat)
    kept[size] = [
        (len(tokens), len(accelerator.gather_for_metrics(tokens)))
        for tokens in accelerator.prepare(batches)
    ]
    print(f"10 texts in batches of {size}, tokens given and gathered: {kept[size]}")
sys.exit(0 if kept == {5: [(15, 15), (40, 40)], 4: [(10, 10), (26, 26), (19, 2)]} else 1)
END
