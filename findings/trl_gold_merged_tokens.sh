#!/usr/bin/env bash
# Versions: trl 1.16.0, torch 2.13.0
# Behaviour: the loss of GOLD across tokenizers, in its default `uld_token_merge_strategy="observed"`, takes the
#   law behind a token for the law of that token. Where the teacher has one token for two of the student's, it
#   multiplies by the probability of seeing the second token twice, which is nearly 0 in a sound model. The place
#   that predicts an answer's first token, and all others that begin a group, learn nothing. With "bayesian" all learn.
# Guess: the two strategies differ in how a split token's probability is spread; every token of an answer is learned.
# Seen:
#   (gradient at the places that predict the four tokens of an answer; the teacher has two tokens for them)
#   observed: 0e+00 0e+00 1e-04 0e+00
#   bayesian: 1e-03 2e-03 1e-03 2e-03
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet trl==1.16.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import logging
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch
from trl.experimental.gold import GOLDConfig
from trl.experimental.gold.gold_trainer import ULDLoss

# Two tokens of prompt, four of answer and an end. The teacher has a token for each two of the student's.
student_ids = torch.tensor([[1, 2, 3, 4, 5, 6, 0]])
student_bytes = torch.tensor([[[0, 0], [0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 4]]])
teacher_ids = torch.tensor([[1, 2, 7, 8, 0]])
teacher_bytes = torch.tensor([[[0, 0], [0, 0], [0, 2], [2, 4], [4, 4]]])


def answers(ids: torch.Tensor) -> torch.Tensor:
    return ids.masked_fill(torch.arange(ids.shape[1]) < 2, -100)


def sure(ids: torch.Tensor) -> torch.Tensor:
    """Logits of a model that expects each next token with probability 0.999."""
    logits = torch.zeros(1, ids.shape[1], 9)
    logits[0, torch.arange(ids.shape[1] - 1), ids[0, 1:]] = 9.0
    return logits


small = {}
for strategy in ("observed", "bayesian"):
    config = GOLDConfig(
        output_dir="unused",
        use_uld_loss=True,
        uld_token_merge_strategy=strategy,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    torch.manual_seed(0)
    logits = sure(student_ids).requires_grad_()
    loss = ULDLoss(config)(
        logits,
        torch.randn(1, 5, 9),
        answers(student_ids),
        answers(teacher_ids),
        student_ids,
        teacher_ids,
        student_bytes,
        teacher_bytes,
    )
    loss.backward()
    size = logits.grad[0].abs().sum(-1)[1:5]
    small[strategy] = (size < 1e-6).tolist()
    print(f"{strategy}: " + " ".join(f"{value:.0e}" for value in size.tolist()))
sys.exit(0 if small == {"observed": [True, True, False, True], "bayesian": [False] * 4} else 1)
END
