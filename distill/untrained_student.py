"""Creates the untrained small language model that becomes a drafter."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from decode.errors import UserError
from decode.target.hidden_states import layer_list_name
from decode.target.pretrained import complete, decoder_config


def student_from_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a float32 copy of `target` with only these layers (indices from 0), in order. For a
    target with an encoder, these are layers of the decoder, and all of the encoder is copied.

    Embeddings, final norm and output layer are copied too. So even the untrained copy often
    predicts the target's next token. Raises UserError for an index that is out of range or
    repeated, for a model without a single list of layers, and for quantised or offloaded weights.
    """
    config = decoder_config(target)
    depth = config.num_hidden_layers
    invalid = [layer for layer in layers if not 0 <= layer < depth]
    if invalid or not layers or list(layers) != sorted(set(layers)):
        raise UserError(
            f"layers {list(layers)} do not fit a target with {depth}; expected ascending numbers "
            f"from 0 to {depth - 1}"
        )
    stack = layer_list_name(target)
    if stack is None:
        raise UserError(
            f"{type(target).__name__} has no single list of its {depth} layers, so a subset of "
            "them cannot be taken; start the drafter from an existing smaller model instead"
        )
    shallow = copy.deepcopy(target.config)
    _set_depth(shallow, len(layers))
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = [config.layer_types[layer] for layer in layers]
    student = _build(shallow)
    _untie(student, target)
    new_numbers = {str(layer): str(number) for number, layer in enumerate(layers)}
    weights = {}
    complete_weights = target.state_dict()
    for name, tensor in complete_weights.items():
        if name.startswith(stack + "."):
            layer, _, rest = name[len(stack) + 1 :].partition(".")
            if layer not in new_numbers:
                continue
            name = f"{stack}.{new_numbers[layer]}.{rest}"
        weights[name] = complete(tensor)
    for name in student.state_dict():
        # T5 keeps the positions of all layers in its first one.
        if name not in weights and name in complete_weights:
            weights[name] = complete(complete_weights[name])
    try:
        student.load_state_dict(weights)
    except (RuntimeError, NotImplementedError) as error:
        raise UserError(
            f"the layers of {type(target).__name__} cannot be copied, perhaps because they are "
            f"quantised or offloaded ({str(error).splitlines()[0]}); start the drafter from an "
            "existing smaller model instead"
        ) from error
    student.generation_config = copy.deepcopy(target.generation_config)
    return student


def student_from_config(target: PreTrainedModel, changes: dict[str, Any]) -> PreTrainedModel:
    """Return a randomly initialised float32 model with the target's config and these changes.

    The vocabulary stays the target's. Raises UserError for `vocab_size` and for a key that the
    config does not have.
    """
    config = copy.deepcopy(target.config)
    for key, value in changes.items():
        if key == "vocab_size" or not hasattr(config, key):
            raise UserError(
                f"the config of a fresh student cannot change {key!r}; expected a setting of "
                f"{type(config).__name__} other than vocab_size"
            )
        setattr(config, key, value)
    if "num_hidden_layers" in changes and getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: changes["num_hidden_layers"]]
    student = _build(config)
    student.generation_config = copy.deepcopy(target.generation_config)
    return student


def _untie(student: PreTrainedModel, target: PreTrainedModel) -> None:
    """Take weights apart that are one in the student and several in the target. A checkpoint of T5
    may have an output layer apart from its embeddings; a model made from its config has not."""
    weights = dict(target.named_parameters(remove_duplicate=False))
    firsts: dict[nn.Parameter, str] = {}
    for name, weight in list(student.named_parameters(remove_duplicate=False)):
        first = firsts.setdefault(weight, name)
        if name in weights and weights[name] is not weights.get(first, weights[name]):
            module, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(module), attribute, nn.Parameter(weight.detach().clone()))


def _set_depth(config: Any, layers: int) -> None:
    """Set the number of layers of the part that writes text."""
    names = ("num_decoder_layers", "decoder_layers") if config.is_encoder_decoder else ()
    setattr(config, next((n for n in names if hasattr(config, n)), "num_hidden_layers"), layers)


def _build(config: Any) -> PreTrainedModel:
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    student = kind.from_config(
        config, dtype=torch.float32, attn_implementation=config._attn_implementation
    )
    return student.train()
