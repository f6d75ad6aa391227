"""Splits a model into the stack that computes hidden states and the output layer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.target.pretrained import input_device, require_present


@dataclass
class SplitModel:
    """A model in two parts.

    `stack` maps token ids to hidden states after the final norm. `output` maps these to logits.
    """

    stack: nn.Module
    output: nn.Linear

    def hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return [B, T, H] for int64 ids and mask [B, T]."""
        return self.stack(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state


def split_model(model: PreTrainedModel) -> SplitModel:
    """Split a causal LM, so that logits can be computed for a few tokens at a time.

    Raises UserError if the model does more than a linear layer between hidden states and logits
    (soft capping, scaling). Without these steps the logits would not be the model's, and a loss on
    them would teach something else. Also raises UserError if the weights are offloaded.
    """
    require_present(model, "training on the target's distribution")
    output = model.get_output_embeddings()
    stack = model.base_model
    if not isinstance(output, nn.Linear) or stack is model:
        raise UserError(f"{type(model).__name__} has no linear output layer to distil through")
    split = SplitModel(stack, output)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        probe = (
            torch.arange(4, device=input_device(model))[None]
            % model.config.get_text_config().vocab_size
        )
        ones = torch.ones_like(probe)
        direct = model(input_ids=probe, attention_mask=ones, use_cache=False).logits
        halves = output(split.hidden(probe, ones))
    model.train(was_training)
    if not torch.equal(direct, halves):
        raise UserError(
            f"{type(model).__name__} does more than a linear layer between hidden states and "
            "logits (soft capping or scaling); distillation through it is not supported"
        )
    return split
