"""A model in training, with or without adapters, and the plain models made of its weights."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import ReducedVocabulary
from distill.merging import merged
from distill.student_settings import DrafterLora, LoraConfig


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


class Trainable:
    """A model in training, and how plain models are made of its weights. It holds no second copy
    of these.

    model: the same object as given; adapters are inserted into it. vocabulary: the reduced draft
    vocabulary of its output layer. layers: the names of the layers that get an adapter, for a
    model that transformers does not define. Raises UserError if the adapters' targets match no
    layer, one that losses read directly, one whose weight another layer shares, or one that cannot
    have an adapter that is kept.
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
                with warnings.catch_warnings():
                    # Such an adapter is refused below.
                    warnings.filterwarnings("ignore", ".*a tied layer is part of the adapter")
                    # peft asks transformers by an old name.
                    warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
                    adapted = peft.get_peft_model(model, settings)
            except ValueError as error:
                raise UserError(f"lora.targets {lora.targets!r}: {error}") from error
            _require_own_weights(model)
        # Engines may take the model apart, so keep its structure, without its weights.
        self._parts = _rebuilt(
            (model, adapted, vocabulary),
            {
                id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                for p in model.parameters()
            },
        )

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights of `model` on the CPU, as long as no engine has prepared it."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def merged_model(self, weights: Mapping[str, Tensor]) -> tuple[Any, ReducedVocabulary | None]:
        """Return a plain model on the CPU made of these weights, and its vocabulary.

        weights: all of them, trained or not, with the names of `model`. The model takes them over.
        Adapters are merged into their layers; raises UserError if the merged model computes other
        numbers. The model is in eval mode and has no gradients.
        """
        model, adapted, vocabulary = self._filled(weights)
        if adapted is not None:
            model = merged(adapted, model)
        return model.eval().requires_grad_(False), vocabulary

    def adapter(self, weights: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Return peft's config of the adapters and their weights, with the names of peft's files.

        weights: as for `merged_model`.
        """
        _, adapted, _ = self._filled(weights)
        assert adapted is not None
        state = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        return adapted.peft_config["default"], state

    def _filled(self, weights: Mapping[str, Tensor]) -> Any:
        """(model, adapted model, vocabulary) with these weights. What was tied is tied."""
        named = dict(self._parts[0].named_parameters())
        if named.keys() != weights.keys():
            lost, unknown = sorted(named.keys() - weights), sorted(weights.keys() - named)
            raise UserError(
                f"these are not the weights of the model in training: {len(lost)} are missing "
                f"({', '.join(lost[:3]) or 'none'}) and {len(unknown)} are unknown "
                f"({', '.join(unknown[:3]) or 'none'}), so no drafter is written. The stage's "
                "checkpoints have the trained weights; this is a fault of draftsmith"
            )
        return _rebuilt(
            self._parts,
            {id(p): nn.Parameter(weights[name], p.requires_grad) for name, p in named.items()},
        )


def _rebuilt(parts: Any, parameters: dict[int, nn.Parameter]) -> Any:
    """A copy of `parts` with other parameters. parameters: by the id of those that they replace."""
    return copy.deepcopy(parts, dict(parameters))


def _require_own_weights(model: Any) -> None:
    """Raise UserError for an adapter that could not be merged into the model that is trained: the
    output layer's, which losses read without it, or one on a weight that another layer shares."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, layer in model.named_modules():  # one that is used twice is one owner
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, layer))
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if layer is output:
            raise UserError(
                f"lora.targets gives the output layer {name} an adapter, but losses read that "
                "layer directly; leave it out of the targets"
            )
        base = layer.get_base_layer()
        for parameter in base.parameters(recurse=False):
            if others := [x for x, owner in owners[id(parameter)] if owner is not base]:
                raise UserError(
                    f"lora.targets gives {name} an adapter, but its weight is tied to {others[0]}, "
                    "so merging the adapter would change both; leave it out of the targets, or "
                    "start from a drafter whose config has tie_word_embeddings: false"
                )


def _require_linear(model: Any, lora: DrafterLora) -> None:
    """Raise UserError if a layer would get an adapter that cannot be kept apart."""
    if lora.targets == "all-linear":
        return
    modules = dict(model.named_modules())
    for name in lora.layers(modules):
        if isinstance(modules[name], nn.Embedding):
            raise UserError(
                f"lora.targets gives {name} an adapter, but adapters that are kept (merge: false) "
                "belong to linear layers; leave it out of the targets, or set merge: true"
            )
