"""Are a model's logits a linear layer of its hidden states? Then they can be computed in chunks."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.model.compiled import uncompiled
from decode.model.hidden_states import FINAL
from decode.model.pretrained import has_encoder, input_device, require_present
from distill.float32_products import float32_products
from distill.teacher.feature_sources import LiveFeatures


@dataclass
class LinearLogits:
    """How a model's logits come from its hidden states after the final norm: `output` maps them,
    and `added`, [V] or None, is added."""

    output: nn.Linear
    added: Tensor | None

    def rows(self, rows: Tensor | slice | None) -> tuple[Tensor, Tensor | None]:
        """The weight [d, H] and the bias [d] of some rows of the output; None means all."""
        weight, bias = output_rows(self.output, rows)
        if self.added is None:
            return weight, bias
        added = (self.added if rows is None else self.added[rows]).to(weight.dtype)
        return weight, added if bias is None else bias + added


def added_bias(model: PreTrainedModel) -> Tensor | None:
    """[V]: what BART and Marian add to the logits of the output layer."""
    bias = getattr(model, "final_logits_bias", None)
    return bias[0] if isinstance(bias, Tensor) else None


def output_rows(layer: nn.Linear, rows: Tensor | slice | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight [d, H] and the bias [d] of some rows of an output layer; None means all."""
    if rows is None:
        return layer.weight, layer.bias
    return layer.weight[rows], None if layer.bias is None else layer.bias[rows]


def linear_logits(model: PreTrainedModel) -> LinearLogits:
    """What computes a causal LM's logits for a few tokens at a time, from their hidden states.

    Raises UserError if the model does more than a linear layer between hidden states and logits
    (soft capping, scaling). Without these steps the logits would not be the model's, and a loss on
    them would teach something else. Also raises UserError if the weights are offloaded.
    """
    require_present(model, "training on the target's distribution")
    output = uncompiled(model.get_output_embeddings())
    if not isinstance(output, nn.Linear):
        raise UserError(f"{type(model).__name__} has no linear output layer to distil through")
    logits = LinearLogits(output, added_bias(model))
    was_training = model.training
    model.eval()
    with torch.no_grad(), float32_products(model):  # of both in the same way
        probe = (
            torch.arange(4, device=input_device(model))[None]
            % model.config.get_text_config().vocab_size
        )
        ones = torch.ones_like(probe)
        reads: dict[str, Tensor] = {"attention_mask": ones}
        sources: dict[str, list[int]] | None = None
        if has_encoder(model):
            reads, sources = {"decoder_input_ids": probe}, {"": probe[0].tolist()}
        direct = model(input_ids=probe, **reads, use_cache=False).logits
        hidden = LiveFeatures(model, [FINAL], sources=sources).features(probe, ones, [""])[FINAL]
        if hidden.shape[-1] != output.in_features:
            raise UserError(_more_than_linear(model, "another layer before the output layer"))
        halves = output(hidden) if logits.added is None else output(hidden) + logits.added
    model.train(was_training)
    if not torch.equal(direct, halves):
        raise UserError(_more_than_linear(model, _scales(model) or "soft capping or scaling"))
    return logits


def require_linear_logits(model: PreTrainedModel) -> None:
    """Raises UserError if `linear_logits` would for logits that are scaled or capped. For a model
    without weights, its config tells."""
    if all(p.device.type != "meta" for p in model.parameters()):
        linear_logits(model)
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
