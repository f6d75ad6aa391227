#!/usr/bin/env bash
# Versions: trl 1.16.0, torch 2.13.0
# Behaviour: GKD's loss goes to 0 with beta, and at beta 0 it is the full KL divergence. At beta 0.01 it is a
#   hundredth of that at 0, and so is its gradient; at 0.99 beside 1 it is the same.
# Guess: beta moves smoothly from forward KL (0) to reverse KL (1), so 0.01 trains nearly as 0 does. A sweep of
#   beta at one learning rate then compares 100 learning rates.
# Seen:
#   beta 0.0: loss 96.651, gradient 2.1900
#   beta 0.01: loss 0.941, gradient 0.0208
#   beta 0.5: loss 19.749, gradient 0.4002
#   beta 0.99: loss 0.945, gradient 0.0278
#   beta 1.0: loss 96.920, gradient 2.9907
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from trl.experimental.gkd import GKDTrainer

torch.manual_seed(0)
student, teacher = torch.randn(2, 1, 100, 64)
size = {}
for beta in (0.0, 0.01, 0.5, 0.99, 1.0):
    logits = student.clone().requires_grad_()
    loss = GKDTrainer.generalized_jsd_loss(logits[None], teacher[None], beta=beta)
    loss.backward()
    size[beta] = loss.item()
    print(f"beta {beta}: loss {loss.item():.3f}, gradient {logits.grad.norm().item():.4f}")
sys.exit(0 if size[0.01] < 0.02 * size[0.0] and size[0.99] < 0.02 * size[1.0] else 1)
END
