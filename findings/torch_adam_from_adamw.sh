#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: an Adam whose state is restored from an AdamW decays weights as AdamW does from then on: the
#   flag decoupled_weight_decay is one of the restored settings. The other way round it is not:
#   AdamW sets its own flag again after a restore.
# Guess: the class decides how weights decay, in both directions alike. The restored state holds
#   moments, and numbers such as the learning rate.
# Seen:
#   Adam restored from Adam: decoupled False
#   Adam restored from AdamW: decoupled True
#   AdamW restored from Adam: decoupled True
#   AdamW restored from AdamW: decoupled True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from torch.optim import Adam, AdamW

found = []
for kind in (Adam, AdamW):
    for stored in (Adam, AdamW):
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.zeros(1)
        source = stored([weight], lr=0.1, weight_decay=0.1)
        source.step()
        restored = kind([weight], lr=0.1, weight_decay=0.1)
        restored.load_state_dict(source.state_dict())
        # A gradient of zero and moments of zero: decoupled decay is all that the step does to the
        # weight by its size, 1 % of it; coupled decay moves it by about the learning rate.
        weight.data.fill_(1.0)
        for state in restored.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        restored.step()
        found.append(abs(weight.item() - 0.99) < 1e-4)
        print(f"{kind.__name__} restored from {stored.__name__}: decoupled {found[-1]}")
sys.exit(0 if found == [False, True, True, True] else 1)
END
