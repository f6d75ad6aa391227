#!/usr/bin/env bash
# Versions: accelerate 1.15.0, torch 2.13.0
# Behaviour: `save_state` in the middle of a shuffled epoch, then `load_state` and `skip_first_batches`, goes on in another
#   order of the rows: some come again in that epoch, and others not at all. Nothing is said. With
#   `use_seedable_sampler` (False if not given) and `set_epoch` the rest is right.
# Guess: the rows that the epoch had not yet had, each once: the state has that of the random numbers.
# Seen:
#   use_seedable_sampler=False: the resumed epoch had 32 of 40 rows
#   use_seedable_sampler=True: the resumed epoch had 40 of 40 rows
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - "$folder" <<'END'
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches

EPOCH, DONE = 1, 6


def prepared(seedable: bool):
    """What a script makes at its start."""
    torch.manual_seed(0)
    settings = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    rows = torch.utils.data.DataLoader(torch.arange(40), batch_size=4, shuffle=True)
    return accelerator, *accelerator.prepare(rows, torch.nn.Linear(1, 1))


def seen_rows(seedable: bool) -> int:
    """How many of the 40 rows an epoch has that is killed after DONE batches and resumed."""
    accelerator, batches, _ = prepared(seedable)
    place = f"{sys.argv[1]}/{seedable}"
    seen = []
    for epoch in range(EPOCH + 1):
        batches.set_epoch(epoch)
        for number, batch in enumerate(batches, 1):
            if epoch == EPOCH and number <= DONE:
                seen += batch.tolist()
            if epoch == EPOCH and number == DONE:
                accelerator.save_state(place)
    accelerator, batches, _ = prepared(seedable)
    accelerator.load_state(place)
    batches.set_epoch(EPOCH)
    for batch in skip_first_batches(batches, DONE):
        seen += batch.tolist()
    return len(set(seen))


seen = {seedable: seen_rows(seedable) for seedable in (False, True)}
for seedable, count in seen.items():
    print(f"use_seedable_sampler={seedable}: the resumed epoch had {count} of 40 rows")
sys.exit(0 if seen[False] < 40 and seen[True] == 40 else 1)
END
