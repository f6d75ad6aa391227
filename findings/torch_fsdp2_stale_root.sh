#!/usr/bin/env bash
# Versions: torch 2.13.0
# Behaviour: a pass without gradients leaves the parameters of a `fully_shard`ed root gathered. Weights that are changed in
#   place behind it, through the parameters that an optimizer or a running mean holds, are not those of the next pass: it
#   reads the gathered copies. Only the root's own ones are old: layers that are sharded apart are as they were changed.
# Guess: each pass gathers the shards as they are then.
# Seen:
#   not sharded, a pass before: two doubled weights give 4.0 times the output
#   sharded, no pass before: two doubled weights give 4.0 times the output
#   sharded, a pass before: two doubled weights give 2.0 times the output
#   the same with reshard_after_forward=True: two doubled weights give 4.0 times the output
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - "$folder/store" <<'END'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
inputs = torch.ones(1, 4)


def scale(sharded: bool, passes: int, **options) -> float:
    """By how much the output grows when each of two weights is doubled, `passes` passes before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4, bias=False))
    first = model(inputs)
    if sharded:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh, **options)
    held = list(model.parameters())
    for _ in range(passes):
        model(inputs)
    for weight in held:
        weight.mul_(2)
    return round((model(inputs) / first).mean().item(), 3)


with torch.no_grad():
    seen = {
        "not sharded, a pass before": scale(False, 1),
        "sharded, no pass before": scale(True, 0),
        "sharded, a pass before": scale(True, 1),
        "the same with reshard_after_forward=True": scale(True, 1, reshard_after_forward=True),
    }
for name, grown in seen.items():
    print(f"{name}: two doubled weights give {grown} times the output")
dist.destroy_process_group()
sys.exit(0 if list(seen.values()) == [4, 4, 2, 4] else 1)
END
