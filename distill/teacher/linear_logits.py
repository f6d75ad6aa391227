"""Are a model's logits a linear layer of its hidden states? Then they can be computed in chunks."""

import re

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.compiled import uncompiled
from decode.model.pretrained import has_encoder, input_device, require_present
from distill.float32_products import float32_products
from distill.teacher.decoder_states import decoder_states
from distill.teacher.live_teacher import SplitModel, added_bias


def split_model(model: PreTrainedModel) -> SplitModel:
    """Split a causal LM, so that logits can be computed for a few tokens at a time.

    Raises UserError if the model does more than a linear layer between hidden states and logits
    (soft capping, scaling). Without these steps the logits would not be the model's, and a loss on
    them would teach something else. Also raises UserError if the weights are offloaded.
    """
    require_present(model, "training on the target's distribution")
    output = uncompiled(model.get_output_embeddings())
    stack = None if has_encoder(model) else model.base_model
    if not isinstance(output, nn.Linear) or stack is model:
        raise UserError(f"{type(model).__name__} has no linear output layer to distil through")
    split = SplitModel(stack, output, added_bias(model))
    was_training = model.training
    model.eval()
    with torch.no_grad(), float32_products(model):  # of both in the same way
        probe = (
            torch.arange(4, device=input_device(model))[None]
            % model.config.get_text_config().vocab_size
        )
        ones = torch.ones_like(probe)
        if stack is None:
            direct = model(input_ids=probe, decoder_input_ids=probe, use_cache=False).logits
            hidden = decoder_states(model, (probe, ones), probe, ones)
        else:
            direct = model(input_ids=probe, attention_mask=ones, use_cache=False).logits
            hidden = split.hidden(probe, ones)
        if hidden.shape[-1] != output.in_features:
            raise UserError(_more_than_linear(model, "another layer before the output layer"))
        halves = output(hidden) if split.added is None else output(hidden) + split.added
    model.train(was_training)
    if not torch.equal(direct, halves):
        raise UserError(_more_than_linear(model, _scales(model) or "soft capping or scaling"))
    return split


def require_linear_logits(model: PreTrainedModel) -> None:
    """Raises UserError if `split_model` would for logits that are scaled or capped. For a model
    without weights, its config tells."""
    if all(p.device.type != "meta" for p in model.parameters()):
        split_model(model)
    elif scales := _scales(model):
        raise UserError(_more_than_linear(model, scales))


# Settings that change logits: final_logit_softcapping, logit_scale, lm_head_multiplier …
_SCALE = re.compile(
    r"(?<!attn_)(?<!router_)logits?_(soft_?cap(ping)?|scal(e|ing))$|^(output|lm_head)_multiplier$"
)


def _scales(model: PreTrainedModel) -> str:
    """The settings by which the config says that logits are scaled or capped."""
    config = model.config.get_text_config().to_dict()
    found = {key: value for key, value in config.items() if _SCALE.search(key)}
    return ", ".join(f"{key}: {value}" for key, value in found.items() if value not in (None, 0, 1))


def _more_than_linear(model: PreTrainedModel, what: str) -> str:
    return (
        f"{type(model).__name__} does more than a linear layer between hidden states and logits "
        f"({what}); distillation through it is not supported. Use another target, or a drafter "
        "that is not trained on it"
    )
