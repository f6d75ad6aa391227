"""Does a student made of some of the target's layers compute what these layers compute?

The config of a family may not be able to describe them: under a rule by layer number, such as
experts in every second layer, a layer becomes one of another kind when its number changes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.base.errors import UserError
from decode.model.hidden_states import layer_list_name
from decode.model.pretrained import complete, in_one_line

TOKENS = 16  # of the trial
# The largest difference of a logit, as a share of the largest logit. Layers of another kind differ
# by more than 0.1. Scales that a target in bfloat16 has rounded differ by less than 0.01.
TOLERANCE = 0.03

# From a name in the target to the name in the student. None: the student does not have it.
Rename = Callable[[str], str | None]


def require_same_layers(
    student: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int], rename: Rename
) -> None:
    """Raises UserError unless the student computes what `target` would with these layers only.

    layers: the target's numbers of the student's layers. Compares classes and settings of all parts
    of the layers. If the student has weights, it also compares logits for a few tokens.
    """
    reason = other_settings(student, target, layers, rename)
    if reason is None and all(p.device.type != "meta" for p in student.parameters()):
        reason = _other_logits(student, target, layers, rename)
    if reason is not None:
        raise UserError(
            f"layers {list(layers)} of {type(target).__name__} would be others in a model of "
            f"{len(layers)} layers: {reason}. Choose other layers, or start the drafter from an "
            "existing smaller model"
        )


def other_settings(
    student: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int], rename: Rename
) -> str | None:
    """The first part of a layer that has another class or setting, in words. None: there is none.
    Arguments are those of `require_same_layers`."""
    stack = layer_list_name(target)
    for number, layer in enumerate(layers):
        top = f"{stack}.{layer}"
        for name, expected in target.get_submodule(top).named_modules(prefix=top):
            try:
                found = student.get_submodule(rename(name) or "")
            except AttributeError:
                return f"{name} would not exist"
            if type(found) is not (kind := _kind(expected)):
                return f"{name} is {kind.__name__}, and would be {type(found).__name__}"
            for key, value in _settings(expected).items():
                other = getattr(found, key, None)
                if other != value and (other, value) != (number, layer):
                    return f"{key} of {name} is {value!r}, and would be {other!r}"
    return None


def _kind(module: nn.Module) -> type:
    """The class of a module. One whose weights are sharded has a class of FSDP above it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, plain) and key != "training" and not key.startswith("_")
    }


@torch.no_grad()
def _other_logits(
    student: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int], rename: Rename
) -> str | None:
    """How far the student's logits are from those of a model with the target's config, the
    student's weights, and layers that return their input in place of the other layers."""
    ids = torch.arange(TOKENS)[None] * 7919 % student.config.get_text_config().vocab_size
    try:
        found, output = _run(student.eval(), ids, number=0)
        reference = _reference(student, target, rename)
        stack: Any = reference.get_submodule(layer_list_name(reference) or "")
        for number in set(range(len(stack))).difference(layers):
            stack[number].forward = partial(_pass_on, output)
        expected, _ = _run(reference, ids, number=layers[0])
    except Exception as error:  # of the model's own code
        return f"they do not run without the others ({type(error).__name__}: {in_one_line(error)})"
    finally:
        student.train()
    distance = float((found - expected).abs().max() / expected.abs().max())
    if distance <= TOLERANCE:
        return None
    return f"their logits would differ by {distance:.0%} of the largest"


def _run(model: PreTrainedModel, ids: Tensor, *, number: int) -> tuple[Tensor, Any]:
    """The logits, and what layer `number` returned."""
    outputs: list[Any] = []
    stack: Any = model.get_submodule(layer_list_name(model) or "")
    with stack[number].register_forward_hook(lambda module, args, output: outputs.append(output)):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits, outputs[0]


def _pass_on(output: Any, *args: Any, **kwargs: Any) -> Any:
    """The first input, in the form of a layer's `output`."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return hidden if isinstance(output, Tensor) else (hidden, *[None] * (len(output) - 1))


def _reference(student: PreTrainedModel, target: PreTrainedModel, rename: Rename) -> Any:
    """A model of the target's depth with the student's weights. The other layers have none."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            target.config,
            dtype=torch.float32,
            attn_implementation=student.config._attn_implementation,
        ).eval()
    for name, buffer in target.named_buffers():
        holder, _, own = name.rpartition(".")
        setattr(model.get_submodule(holder), own, complete(buffer).cpu())
    weights = student.state_dict()
    renamed = {name: rename(name) for name in model.state_dict()}
    known = {name: weights[own] for name, own in renamed.items() if own in weights}
    # The layers that the student lacks have no weights here: they are not run.
    model.load_state_dict(known, strict=False, assign=True)
    return model
