#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: torch.multinomial without replacement, asked for more indices than have a probability above 0, fills up
#   with indices of probability 0, in every row and without an error.
# Guess: an index of probability 0 is never drawn. So distinct draft tokens from a law that top-k or a grammar has
#   cut are all allowed ones, or the call is refused.
# Seen:
#   2 of 2 possible indices: 0 of 1000 rows have an impossible one
#   3 of 2 possible indices: 1000 of 1000 rows have an impossible one
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch

torch.manual_seed(0)
law = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5, 0.0]).expand(1000, -1)
impossible = {}
for count in (2, 3):
    drawn = torch.multinomial(law, count)
    impossible[count] = int((law.gather(1, drawn) == 0).any(1).sum())
    print(f"{count} of 2 possible indices: {impossible[count]} of 1000 rows have an impossible one")
sys.exit(0 if impossible == {2: 0, 3: 1000} else 1)
END
