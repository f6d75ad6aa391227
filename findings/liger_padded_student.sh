#!/usr/bin/env bash
# Versions: liger-kernel 0.8.5, torch 2.13.0
# Behaviour: the fused distillation losses take a teacher with more rows than the student, and give the student a
#   logit of 0 in the rows that it lacks. Softmax counts them: the loss depends on a constant that is added to all of
#   the student's logits, and a student whose logits are below 0 gives most of its probability to rows it does not have.
# Guess: the rows that the student lacks get probability 0, so the loss is that of the common rows.
# Seen:
#   teacher of 100 rows, student's logits -10: loss 11.277
#   teacher of 100 rows, student's logits +0: loss 9.484
#   teacher of 100 rows, student's logits +10: loss 9.483
#   teacher of 90 rows, student's logits -10: loss 9.483
#   teacher of 90 rows, student's logits +0: loss 9.483
#   teacher of 90 rows, student's logits +10: loss 9.483
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet liger-kernel==0.8.5 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

# A teacher of 100 tokens, of which its tokenizer has 90, as checkpoints with padded vocabularies do. The
# student has these 90. The bias of all its logits is what a softmax does not see.
torch.manual_seed(0)
states, weight = torch.randn(50, 16), torch.randn(90, 16)
teacher_states, teacher_weight = torch.randn(50, 16), torch.randn(100, 16)
teacher_bias = torch.zeros(100)
teacher_bias[90:] = -1000.0
labels = torch.randint(0, 90, (50,))
loss_of = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)

losses = {}
for size in (100, 90):
    for shift in (-10.0, 0.0, 10.0):
        bias = torch.full((90,), shift)
        loss = loss_of(states, weight, teacher_states, teacher_weight[:size], labels, bias, teacher_bias[:size])
        losses[size, shift] = loss.item()
        print(f"teacher of {size} rows, student's logits {shift:+.0f}: loss {loss.item():.3f}")
apart = [max(found) - min(found) for found in ([losses[n, s] for s in (-10.0, 0.0, 10.0)] for n in (100, 90))]
sys.exit(0 if apart[0] > 1 and apart[1] < 0.01 else 1)
END
