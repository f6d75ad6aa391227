"""A model in training, with or without adapters, and plain copies of it."""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import peft
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

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
    """The linear layers that get an adapter: the ends of their names, an expression for their whole
    names, or `all-linear` for all except the output layer."""

    def layers(self, sizes: Mapping[str, Any]) -> list[str]:
        """Those of the linear layers with these names that get an adapter."""
        if self.targets == "all-linear":
            return list(sizes)
        if isinstance(self.targets, str):
            return [x for x in sizes if re.fullmatch(self.targets, x)]
        return [x for x in sizes if any(f".{x}".endswith(f".{end}") for end in self.targets)]

    def parameters(self, sizes: Mapping[str, tuple[int, int]]) -> int:
        """The number of weights of the adapters on a model with these linear layers."""
        return sum(self.r * sum(sizes[name]) for name in self.layers(sizes))


def linear_sizes(model: nn.Module, left_out: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of a model's linear layers by name, without its output layer and the
    parts that are left out."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    sizes = {}
    for name, layer in model.named_modules():
        inside = any(f"{name}.".startswith(f"{part}.") for part in left_out)
        if isinstance(layer, nn.Linear | Conv1D) and layer is not output and not inside:
            inputs, outputs = (
                layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
            )
            sizes[name] = (inputs, outputs)
    return sizes


class DrafterLora(LoraConfig):
    """Low-rank adapters of a drafter."""

    merge: bool = True
    """Write the drafter with its adapters merged in. false: write the adapters alone, as a small
    directory that names its base (`decode.opening.adapters`)."""


class Trainable:
    """A model in training. It returns copies of its current state.

    model: the same object as given; adapters are inserted into it. vocabulary: the reduced draft
    vocabulary of its output layer. layers: the names of the layers that get an adapter, for a
    model that transformers does not define. Raises UserError if the adapters' targets match no
    layer, or match one that cannot have an adapter that is kept.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: ReducedVocabulary | None = None,
        lora: LoraConfig | None = None,
        layers: Sequence[str] | None = None,
    ) -> None:
        self.model = model
        if layers is not None and lora is not None and not layers:
            raise UserError(f"lora.targets {lora.targets!r}: they match no linear layer")
        adapted: peft.PeftModel | None = None
        if lora is not None:
            if isinstance(lora, DrafterLora) and not lora.merge:
                _require_linear(model, lora)
            settings = peft.LoraConfig(
                r=lora.r,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora.targets if layers is None else list(layers),
                task_type="CAUSAL_LM" if layers is None else None,
                fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in model.modules()),
            )
            try:
                adapted = peft.get_peft_model(model, settings)
            except ValueError as error:
                raise UserError(f"lora.targets {lora.targets!r}: {error}") from error
        # Engines may take the model apart, so keep a complete copy on the CPU. If the reduced layer
        # is tied to the embeddings, it stays tied, because both are copied together.
        self._copy, self._adapted, self._vocabulary = copy.deepcopy((model, adapted, vocabulary))

    @torch.no_grad()
    def plain(self, weights: dict[str, Tensor]) -> tuple[Any, ReducedVocabulary | None]:
        """Return a plain copy of the model on the CPU, and its vocabulary.

        weights: the values of the trained weights, with the names of `model`. Adapters are merged
        into their layers. The copy is in eval mode and has no gradients.
        """
        self._copy.load_state_dict(weights, strict=False)
        model, adapted, vocabulary = copy.deepcopy((self._copy, self._adapted, self._vocabulary))
        if adapted is not None:
            with _keeping_ties(model):
                model = adapted.merge_and_unload()
        return model.eval().requires_grad_(False), vocabulary

    def adapter(self, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Return peft's config of the adapters and their weights, with the names of peft's files.

        weights: as for `plain`.
        """
        assert self._adapted is not None
        self._copy.load_state_dict(weights, strict=False)
        state = peft.get_peft_model_state_dict(self._adapted, save_embedding_layers=False)
        return self._adapted.peft_config["default"], state


def _require_linear(model: Any, lora: DrafterLora) -> None:
    """Raise UserError if a layer would get an adapter that cannot be kept apart."""
    if lora.targets == "all-linear":
        return
    output = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    for name in lora.layers(modules):
        if modules[name] is output or isinstance(modules[name], nn.Embedding):
            raise UserError(
                f"lora.targets gives {name} an adapter, but adapters that are kept (merge: false) "
                "belong to linear layers other than the output layer; leave it out of the targets, "
                "or set merge: true"
            )


@contextmanager
def _keeping_ties(model: Any) -> Iterator[None]:
    """Keep what a model's config says of tied layers: peft changes it, with a warning, for a model
    with a reduced output layer."""
    config: Any = getattr(model, "config", None)
    tied = getattr(config, "tie_word_embeddings", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        yield
    if tied is not None:
        config.tie_word_embeddings = tied
