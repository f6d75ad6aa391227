#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: get_optimizer_state_dict of torch.distributed.checkpoint, called before the first step, fills the
#   optimizer it reads: moments of zero and a step count of 1. The training then goes on from there, so
#   the first update of AdamW is 0.74 of what it is in a training that saved nothing.
# Guess: a function that reads a state leaves it as it is. A checkpoint before the first step, which finds
#   out early whether the disk can be written, changes nothing.
# Seen:
#   before the first step: saved step 1
#   first update: 0.0100 without saving, 0.0074 after saving
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(save: bool) -> float:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01, weight_decay=0.0)
    if save:
        state = get_optimizer_state_dict(layer, optimizer)["state"]["weight"]
        print(f"before the first step: saved step {int(state['step'])}")
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return (layer.weight - before).abs().max().item()


moved = [first_update(save) for save in (False, True)]
print(f"first update: {moved[0]:.4f} without saving, {moved[1]:.4f} after saving")
sys.exit(0 if moved[1] < 0.8 * moved[0] else 1)
END
