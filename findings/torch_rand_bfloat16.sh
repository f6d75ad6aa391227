#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: uniform numbers in bfloat16 are far too often 0 (one in 500), and never above 0.996. So `rand_like(p) < p` accepts a
#   draft token of p 0.0005 five times as often as p says; in float16 1.5 times. `bernoulli` of the same p is right.
# Guess: numbers near 0 are as fine as the type can write them (bfloat16 reaches 1e-38), so that u < p is
#   true with probability p up to the rounding of p.
# Seen:
#   torch.float32: u < 0.0005 in 0.00050 of draws, bernoulli 0.00051
#   torch.float16: u < 0.0005 in 0.00075 of draws, bernoulli 0.00051
#   torch.bfloat16: u < 0.0005 in 0.00249 of draws, bernoulli 0.00051
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch

torch.manual_seed(0)
rate = {}
for kind in (torch.float32, torch.float16, torch.bfloat16):
    p = torch.full((2_000_000,), 0.0005, dtype=kind)
    rate[kind] = (torch.rand_like(p) < p).float().mean().item()
    drawn = torch.bernoulli(p).float().mean().item()
    print(f"{kind}: u < 0.0005 in {rate[kind]:.5f} of draws, bernoulli {drawn:.5f}")
sys.exit(0 if rate[torch.bfloat16] > 3 * 0.0005 and rate[torch.float32] < 1.2 * 0.0005 else 1)
END
