"""Run by the Python of the environment `peers` or `speculators`:
`peers_child.py JOB ANSWER`.

JOB: {logits: a file with `student` and `teacher`, float64 [n, V]; cases: [{peer, options}];
results: a file to write}. The file gets each case's loss, summed over tokens, and its gradient in
`student`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Loss = Callable[..., Tensor]


def trl(student: Tensor, teacher: Tensor, *, beta: float, temperature: float) -> Tensor:
    """GKD's loss. beta 0: the forward KL; 1: the reverse KL."""
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=beta, temperature=temperature, reduction="sum"
    )


def speculators(student: Tensor, teacher: Tensor, *, loss: str) -> Tensor:
    """One of the library's eager losses, which compute in float32."""
    from speculators.losses import eager

    return getattr(eager, loss)(student[None], teacher[None]).sum()


def specforge(student: Tensor, teacher: Tensor) -> Tensor:
    """The LK loss of type alpha, as SpecForge's EAGLE-3 trains with it."""
    from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss

    mask = torch.ones(len(student), dtype=torch.bool)
    rate, log_rate = compute_acceptance_rate(
        logits=student, target_probs=teacher.softmax(-1), position_mask=mask
    )
    mean = compute_lk_loss(
        kl_loss=rate.new_zeros(()),
        acceptance_rate=rate,
        log_acceptance_rate=log_rate,
        lk_loss_type="alpha",
        kl_scale=1.0,
        kl_decay=1.0,
    )
    return mean * len(student)


def modelopt(student: Tensor, teacher: Tensor) -> Tensor:
    """ModelOpt's loss of EAGLE is the cross-entropy with the target's distribution p. Without p's
    entropy it is the forward KL."""
    from modelopt.torch.speculative.plugins.hf_eagle import HFEagleModel

    p = teacher.softmax(-1)
    mask = torch.ones(1, len(student))
    mean, _ = HFEagleModel._eagle_loss(None, p[None], p.argmax(-1)[None], student[None], mask)
    return mean * len(student) + (p * teacher.log_softmax(-1)).sum()


PEERS: dict[str, Loss] = {
    "trl": trl,
    "speculators": speculators,
    "specforge": specforge,
    "modelopt": modelopt,
}


def main(job_file: str, answer_file: str) -> None:
    job: dict[str, Any] = json.loads(Path(job_file).read_text(encoding="utf-8"))
    logits = load_file(job["logits"])
    results: dict[str, Tensor] = {}
    for number, case in enumerate(job["cases"]):
        student = logits["student"].clone().requires_grad_()
        loss = PEERS[case["peer"]](student, logits["teacher"], **case["options"])
        (gradient,) = torch.autograd.grad(loss, student)
        results[f"loss{number}"], results[f"gradient{number}"] = loss.detach().double(), gradient
    save_file(results, job["results"])
    Path(answer_file).write_text("{}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
