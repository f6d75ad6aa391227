#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: Categorical(probs=p).log_prob of a token with probability 0 is -15.9 in float32 and -4.8 in bfloat16: the
#   entries are clamped before the logarithm. With Categorical(logits=log p) it is minus infinity.
# Guess: the log of 0 is minus infinity however the law was given. So the ratio of target and draft is 0 where the target
#   cannot write the token, and such a draft is never accepted.
# Seen:
#   torch.float32: from probs -15.94, from logits -inf
#   torch.bfloat16: from probs -4.84, from logits -inf
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch
from torch.distributions import Categorical

seen = []
for kind in (torch.float32, torch.bfloat16):
    p = torch.tensor([0.5, 0.5, 0.0], dtype=kind)
    impossible = torch.tensor(2)
    given = Categorical(probs=p).log_prob(impossible).item()
    logits = Categorical(logits=p.log()).log_prob(impossible).item()
    print(f"{kind}: from probs {given:.2f}, from logits {logits}")
    seen.append((given, logits))
infinite = float("-inf")
sys.exit(0 if all(given > -20 and logits == infinite for given, logits in seen) else 1)
END
