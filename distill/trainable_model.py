"""A model in training, with or without adapters, and plain copies of it."""

import copy

import peft
import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from decode.base.errors import UserError
from decode.base.strict import Strict
from decode.drafters.draft_vocabulary import ReducedVocabulary


class LoraConfig(Strict):
    """Low-rank adapters (LoRA, 2106.09685), built with peft."""

    r: int = Field(16, ge=1)
    """The rank of an adapter."""
    alpha: float = Field(32.0, gt=0)
    """The scale of an adapter is alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The dropout rate of an adapter's input."""
    targets: str | list[str] = "all-linear"
    """The names of the linear layers that get an adapter, or `all-linear` for all linear layers
    except the output layer."""


class Trainable:
    """A model in training. It returns copies of its current state.

    model: the same object as given; adapters are inserted into it. vocabulary: the reduced draft
    vocabulary of its output layer. Raises UserError if the adapters' targets match no layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: ReducedVocabulary | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        self.model = model
        adapted: peft.PeftModel | None = None
        if lora is not None:
            settings = peft.LoraConfig(
                r=lora.r,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora.targets,
                task_type="CAUSAL_LM",
            )
            try:
                adapted = peft.get_peft_model(model, settings)
            except ValueError as error:
                raise UserError(f"lora.targets {lora.targets!r}: {error}") from error
        # Engines may take the model apart, so keep a complete copy on the CPU. If the reduced layer
        # is tied to the embeddings, it stays tied, because both are copied together.
        self._copy, self._adapted, self._vocabulary = copy.deepcopy((model, adapted, vocabulary))

    @torch.no_grad()
    def plain(self, weights: dict[str, Tensor]) -> tuple[PreTrainedModel, ReducedVocabulary | None]:
        """Return a plain copy of the model on the CPU, and its vocabulary.

        weights: the values of the trained weights, with the names of `model`. Adapters are merged
        into their layers. The copy is in eval mode and has no gradients.
        """
        self._copy.load_state_dict(weights, strict=False)
        model, adapted, vocabulary = copy.deepcopy((self._copy, self._adapted, self._vocabulary))
        if adapted is not None:
            model = adapted.merge_and_unload()
        return model.eval().requires_grad_(False), vocabulary
