#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: load_state_dict(assign=True) unties: the output layer and the embeddings of a saved tied model become two
#   parameters. They still share one memory, so an optimizer updates the same numbers twice in a step.
# Guess: a tie is kept, as without assign and as torch.save keeps it; or two tensors come of it.
# Seen:
#   assign False: parameters 1, one memory True, largest first step of Adam at 0.1: 0.10
#   assign True: parameters 2, one memory True, largest first step of Adam at 0.1: 0.20
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import io
import sys

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


torch.manual_seed(0)
saved = io.BytesIO()
torch.save(Tied().state_dict(), saved)
seen = []
for assign in (False, True):
    saved.seek(0)
    model = Tied()
    model.load_state_dict(torch.load(saved), assign=assign)
    before = model.head.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.head(model.embed(torch.arange(8))).logsumexp(-1).sum().backward()
    optimizer.step()
    step = (model.head.weight - before).abs().max().item()
    shared = model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    seen.append((len(list(model.parameters())), shared, round(step, 2)))
    print(
        f"assign {assign}: parameters {seen[-1][0]}, one memory {shared}, "
        f"largest first step of Adam at 0.1: {step:.2f}"
    )
sys.exit(0 if seen == [(1, True, 0.1), (2, True, 0.2)] else 1)
END
