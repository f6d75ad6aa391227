"""Where a model's weights are: on one device, distributed over several, or offloaded.

accelerate's hooks move inputs to the device of each part of a model. Offloaded weights are on the
device `meta`, without values, except while their layer runs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from decode.errors import UserError


def input_device(model: Any) -> torch.device:
    """The device of the model's embeddings. The model's inputs, and computations next to the model,
    belong there. `model.device` is the device of the first weight, which may be `meta`."""
    found: torch.device = model.device
    if found.type != "meta":
        return found
    for module in (model.get_input_embeddings(), model):
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return found


def is_hooked(module: nn.Module) -> bool:
    """Whether another library runs code around the forward of a part of the module."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in module.modules()
    )


def require_present(model: nn.Module, what: str) -> None:
    """Raises UserError if weights are offloaded. what: the part that reads the weights, such as
    'heads', for the message."""
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UserError(
            f"{what} must read the target's weights, and some of {type(model).__name__}'s are "
            "offloaded to the CPU or to disk; load the target without offloading, or use a drafter "
            "that does not read them (a small language model, or lookup)"
        )


def some_numbers(weight: Tensor, count: int) -> Tensor:
    """float32 [≤ count] on the CPU: numbers spread over a weight. For a quantised weight these are
    its dequantised values, or its integers if those are not available."""
    flat = weight.detach()
    try:
        flat = flat.flatten()
    except NotImplementedError:  # tensor classes that know few operations, such as torchao's
        flat = flat.dequantize().flatten()
    return flat[:: max(1, len(flat) // count)][:count].float().cpu()
