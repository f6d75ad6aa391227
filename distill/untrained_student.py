"""Creates the untrained small language model that becomes a drafter."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from decode.base.errors import UserError
from decode.model.hidden_states import layer_list_name
from decode.model.layer_settings import differs_by_layer, kept_settings
from decode.model.pretrained import complete, decoder_config, explained, has_encoder, in_one_line
from distill.chosen_layers import Rename, other_settings, require_same_layers


def student_from_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a float32 copy of `target` with only these layers (indices from 0), in order. For a
    target with an encoder, these are layers of the decoder, and all of the encoder is copied. Of a
    model that reads images too, only the part that writes text is copied.

    Embeddings, final norm and output layer are copied too. So even the untrained copy often
    predicts the target's next token. Raises UserError for an index that is out of range or
    repeated, for a model without a single list of layers, for quantised or offloaded weights, and
    if the layers would be of another kind in a model without the others.
    """
    depth = decoder_config(target).num_hidden_layers
    invalid = [layer for layer in layers if not 0 <= layer < depth]
    if invalid or not layers or list(layers) != sorted(set(layers)):
        raise UserError(
            f"layers {list(layers)} do not fit a target with {depth}; expected ascending numbers "
            f"from 0 to {depth - 1}"
        )
    if layer_list_name(target) is None:
        raise UserError(
            f"{type(target).__name__} has no single list of its {depth} layers, so a subset of "
            "them cannot be taken; start the drafter from an existing smaller model instead"
        )
    config = _text_config(target)
    fields = kept_settings(config.to_dict(), layers, depth)
    fields[_depth_name(config)] = len(layers)
    student = _build(config, fields, f"layers {list(layers)}")
    rename = _renaming(student, target, layers)
    _untie(student, target, rename)
    _copy_weights(student, target, layers, rename)
    if not has_encoder(target):
        require_same_layers(student, target, layers, rename)
    student.generation_config = copy.deepcopy(target.generation_config)
    return student


def student_from_config(target: PreTrainedModel, changes: dict[str, Any]) -> PreTrainedModel:
    """Return a randomly initialised float32 model with the config of the target, or of the part of
    it that writes text, and these changes.

    The vocabulary stays the target's. Settings with a value for each layer are cut to a smaller
    number of layers, and for a larger one they get the family's defaults. Raises UserError for
    `vocab_size`, for a key that the config does not have, and for values that make no model.
    """
    config = _text_config(target)
    for key in changes:
        if key == "vocab_size" or not hasattr(config, key):
            raise UserError(
                f"the config of a fresh student cannot change {key!r}; expected a setting of "
                f"{type(config).__name__} other than vocab_size"
            )
    fields, depth = config.to_dict(), config.num_hidden_layers
    new_depth = changes.get("num_hidden_layers", depth)
    if isinstance(new_depth, int) and 0 < new_depth < depth:
        fields = kept_settings(fields, range(new_depth), depth)
    elif new_depth != depth:
        fields = {k: v for k, v in fields.items() if not differs_by_layer(k, v, depth)}
    fields |= {config.attribute_map.get(key, key): value for key, value in changes.items()}
    what = ", ".join(f"{key}: {value!r}" for key, value in changes.items())
    student = _build(config, fields, what)
    for key, value in changes.items():
        if isinstance(value, int | float | str) and getattr(student.config, key) != value:
            raise UserError(
                f"{type(config).__name__} makes {key} {getattr(student.config, key)!r} out of "
                f"{value!r}, because other settings decide it; change those"
            )
    if student.device.type != "meta" and not has_encoder(student):
        with explained(f"a {config.model_type} model with {what} cannot run"), torch.no_grad():
            student(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    student.generation_config = copy.deepcopy(target.generation_config)
    return student


def _text_config(target: PreTrainedModel) -> Any:
    """The config of a model that writes text as the target does, and does nothing else."""
    text = target.config if has_encoder(target) else target.config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return target.config
    if text is not target.config:
        text = copy.deepcopy(text)
        text.tie_word_embeddings = target.config.tie_word_embeddings
    return text


def _depth_name(config: Any) -> str:
    """The name of the setting for the number of layers of the part that writes text."""
    names = ("num_decoder_layers", "decoder_layers") if config.is_encoder_decoder else ()
    own: str = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return next((name for name in names if hasattr(config, name)), own)


def _build(config: Any, fields: dict[str, Any], what: str) -> PreTrainedModel:
    """A model with the config of these fields. config: gives the class. what: was changed."""
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with explained(f"no {config.model_type} model can be made with {what}"):
        student = kind.from_config(
            type(config).from_dict(fields),
            dtype=torch.float32,
            attn_implementation=config._attn_implementation,
        )
    return student.train()


def _renaming(student: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int]) -> Rename:
    """Maps the target's names of modules and weights to the student's; None if it has no such."""
    stack = f"{layer_list_name(target)}."
    numbers = {str(layer): str(number) for number, layer in enumerate(layers)}
    outer = inner = ""
    if type(student) is not type(target):
        outer, inner = (f"{_decoder_name(model)}." for model in (target, student))

    def rename(name: str) -> str | None:
        if name.startswith(stack):
            number, dot, rest = name.removeprefix(stack).partition(".")
            if number not in numbers:
                return None
            name = f"{stack}{numbers[number]}{dot}{rest}"
        return inner + name.removeprefix(outer) if name.startswith(outer) else name

    return rename


def _decoder_name(model: PreTrainedModel) -> str:
    decoder = model.get_decoder()
    return next(name for name, module in model.named_modules() if module is decoder)


def _untie(student: PreTrainedModel, target: PreTrainedModel, rename: Rename) -> None:
    """Take weights apart that are one in the student and several in the target. A checkpoint of T5
    may have an output layer apart from its embeddings; a model made from its config has not."""
    weights = {rename(n): w for n, w in target.named_parameters(remove_duplicate=False)}
    firsts: dict[nn.Parameter, str] = {}
    for name, weight in list(student.named_parameters(remove_duplicate=False)):
        first = firsts.setdefault(weight, name)
        if name in weights and weights[name] is not weights.get(first, weights[name]):
            module, _, attribute = name.rpartition(".")
            setattr(student.get_submodule(module), attribute, nn.Parameter(weight.detach().clone()))


def _copy_weights(
    student: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int], rename: Rename
) -> None:
    own, weights = student.state_dict(), {}
    for name, tensor in target.state_dict().items():
        new = rename(name)
        if has_encoder(target) and new is None and name in own:
            new = name  # T5 keeps the positions of all layers in its first one.
        # Of a model that reads images too, the student is one part.
        if new is not None and (new in own or type(student) is type(target)):
            weights[new] = complete(tensor)
    try:
        student.load_state_dict(weights)
    except (RuntimeError, NotImplementedError) as error:
        reason = other_settings(student, target, layers, rename) or in_one_line(error)
        raise UserError(
            f"layers {list(layers)} of {type(target).__name__} cannot be copied: {reason}. Load "
            "the target neither quantised nor offloaded, choose other layers, or start the drafter "
            "from an existing smaller model"
        ) from error
