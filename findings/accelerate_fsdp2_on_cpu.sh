#!/usr/bin/env bash
# Versions: accelerate 1.15.0, torch 2.13.0
# Behaviour: Accelerator(cpu=True, fsdp_plugin=...) with two ranks trains with DDP. The plugin is dropped without
#   an error or a warning, and every rank holds whole weights.
# Guess: weights are sharded, or the two settings are refused together. torch itself shards on CPUs
#   through gloo, so a test "of FSDP2 on a CPU" passes and has tested DDP.
# Seen:
#   asked for: FSDP 2 on 2 ranks
#   got: MULTI_CPU, model DistributedDataParallel, weight Parameter of (8, 8)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0 numpy==2.4.6 || exit 2
"$folder/venv/bin/python" - <<'END'
import os
import socket
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin


def rank(number: int, port: int, results) -> None:
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    weight = next(model.parameters())
    kind = accelerator.distributed_type.value
    results.put((kind, type(model).__name__, type(weight).__name__, tuple(weight.shape)))
    accelerator.end_training()


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
context = torch.multiprocessing.get_context("fork")
results = context.Queue()
ranks = [context.Process(target=rank, args=(number, port, results)) for number in range(2)]
for process in ranks:
    process.start()
found = [results.get(timeout=120) for _ in ranks]
for process in ranks:
    process.join()
kind, model, weight, shape = found[0]
print("asked for: FSDP 2 on 2 ranks")
print(f"got: {kind}, model {model}, weight {weight} of {shape}")
stated = ("MULTI_CPU", "DistributedDataParallel", "Parameter", (8, 8))
sys.exit(0 if found == [stated, stated] else 1)
END
