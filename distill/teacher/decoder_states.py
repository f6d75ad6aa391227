"""The hidden states of a decoder under an encoder (T5, BART, Marian), without its logits.

These models differ in what they do between the decoder and the output layer, and some have no
module for all of it. So the complete model runs, and its output layer reads nothing.

Shapes: B rows, T tokens of a text, S tokens of the longest source, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.model.generation_config import padded_prompts

# What the encoder reads, and its attention mask: int64 [B, S] each, padded on the right.
PaddedSources = tuple[Tensor, Tensor]


def padded_sources(
    sources: Mapping[str, Sequence[int]], ids: Sequence[str], device: torch.device
) -> PaddedSources:
    """The sources of a batch of samples `ids`. Without samples, one row of padding."""
    texts = [sources[sample] for sample in ids] or [[0]]
    return padded_prompts(texts, 0, device, right=True)


def decoder_states(
    model: PreTrainedModel, sources: PaddedSources, input_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    """[B, T, H]: what the output layer reads at each token of the decoder's texts, int64 [B, T]
    with their mask. Differentiable. Logits are `added_bias` more than the output layer's."""
    states: list[Tensor] = []

    def keep(_: nn.Module, inputs: Any) -> tuple[Tensor]:
        states.append(inputs[0])
        return (inputs[0][:, :0],)

    with model.get_output_embeddings().register_forward_pre_hook(keep):
        model(
            input_ids=sources[0],
            attention_mask=sources[1],
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            use_cache=False,
        )
    return states[0]
