"""Optimizer steps with their seconds and memory, for contestants in different environments.

Of ours it imports only what measures memory, which needs psutil.
"""

import gc
from collections.abc import Callable, Iterable
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared.process_memory import resident_memory
from train.loop.meters.peak_memory import peak_memory, restart_peak

WARM_UP = 64  # tokens
LEARNING_RATE, BETAS, CLIP = 1e-4, (0.9, 0.95), 1.0


def measure_steps(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[int, int], Tensor],
    *,
    texts: int,
    tokens: int,
    half: bool,
) -> dict[str, Any]:
    """Take one step on each text: forward, backward, clipping, AdamW. One thread, on the CPU.

    loss_of(text, tokens): the loss of the first `tokens` tokens of a text. half: forward under
    autocast to bfloat16. Returns the median of the processor's seconds, which other programs
    disturb less; the loss and the gradient's norm of each step; and the peak memory in bytes above
    that before the first step, which has weights and texts, but no activations, gradients and
    moments of AdamW.
    """
    torch.set_num_threads(1)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
    )

    def backward(text: int, tokens: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = loss_of(text, tokens)
        loss.backward()
        return float(loss)

    backward(0, min(tokens, WARM_UP))
    optimizer.zero_grad()
    gc.collect()
    restart_peak("cpu")
    before = resident_memory()
    seconds, losses, norms = [], [], []
    for text in range(texts):
        start = process_time()
        losses.append(backward(text, tokens))
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(process_time() - start)
    return {
        "seconds": median(seconds),
        "step_seconds": seconds,
        "tokens_per_second": tokens / median(seconds),
        "peak_bytes": peak_memory("cpu") - before,
        "losses": losses,
        "gradient_norms": norms,
        "trained_parameters": sum(parameter.numel() for parameter in trained),
    }
