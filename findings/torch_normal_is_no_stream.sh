#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: normal numbers of a seeded generator on a CPU depend on how many are asked for at once: below 16
#   and from 16 on they are made in two ways. Uniform, exponential and whole numbers come as a stream.
# Guess: a seeded generator is a stream for every law. So noise that is drawn for all rows of a batch, or
#   row by row, or for one row more, is the same noise, and a text drawn with it too.
# Seen:
#   uniform_: the first 15 of 16 are the 15 True, four times 8 are the 32 True
#   exponential_: the first 15 of 16 are the 15 True, four times 8 are the 32 True
#   random_: the first 15 of 16 are the 15 True, four times 8 are the 32 True
#   normal_: the first 15 of 16 are the 15 False, four times 8 are the 32 False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import sys

import torch


def drawn(law: str, *sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.cat([getattr(torch.empty(n), law)(generator=generator) for n in sizes])


streams = {}
for law in ("uniform_", "exponential_", "random_", "normal_"):
    prefix = torch.equal(drawn(law, 15), drawn(law, 16)[:15])
    parts = torch.equal(drawn(law, 8, 8, 8, 8), drawn(law, 32))
    print(f"{law}: the first 15 of 16 are the 15 {prefix}, four times 8 are the 32 {parts}")
    streams[law] = prefix and parts
sys.exit(0 if [law for law in streams if not streams[law]] == ["normal_"] else 1)
END
