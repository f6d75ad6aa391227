"""Merges adapters into a model, and shows that the merged model computes what the trained one did.

peft adds an adapter to the weight of its layer. The model computes something else afterwards where
a weight has a second reader, or where a part of the model reads a weight without its layer: in
training, that part did not see the adapter.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from decode.base.errors import UserError

TOKENS = 8  # of the text, and rows of each layer's input
# The difference that rounding a merged weight makes, as a share of the outputs.
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 0.1  # of bfloat16 and float16


@torch.no_grad()
def merged(adapted: peft.PeftModel, model: Any) -> Any:
    """The plain model of a model with adapters, which are merged. Takes both over.

    model: what peft adapted. Raises UserError if a layer with an adapter, or a model of
    transformers as a whole, computes other numbers than before.
    """
    adapted.eval()
    inputs = {
        name.removeprefix("base_model.model."): _input(layer.get_base_layer())
        for name, layer in adapted.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }
    before = {name: model.get_submodule(name)(x) for name, x in inputs.items()}
    logits = _logits(model)
    with _keeping_ties(model):
        plain = adapted.merge_and_unload()
    for name, x in inputs.items():
        _require_same(before[name], plain.get_submodule(name)(x), f"its layer {name}")
    if logits is not None:
        _require_same(logits, _logits(plain), "it")
    return plain


def _input(layer: nn.Module) -> Tensor:
    """What a layer reads: ids or numbers, the same ones each time."""
    weight: Any = layer.weight
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, (1, TOKENS), generator=generator)
    width = weight.shape[0] if isinstance(layer, Conv1D) else weight.shape[1]
    return torch.randn(1, TOKENS, width, generator=generator).to(weight.dtype)


def _logits(model: Any) -> Tensor | None:
    """Of a short text. None for heads, which read more than a text."""
    config = getattr(model, "config", None)
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if config is None or embeddings is None:
        return None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embeddings.weight.shape[0], (1, TOKENS), generator=generator)
    more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
    result: Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return result


def _require_same(trained: Tensor, plain: Tensor | None, what: str) -> None:
    assert plain is not None
    limit = ROUNDING.get(trained.dtype, COARSE)
    apart = (trained - plain).float().norm() / trained.float().norm().clamp(min=1e-12)
    if not apart <= limit:
        raise UserError(
            f"with its adapters merged, {what} computes other numbers than in training: they "
            f"differ by {apart:.2g} of their size, expected at most {limit}. A part of the model "
            "reads the weight of an adapted layer by itself, so no drafter is written. Leave that "
            "layer out of lora.targets, or train without lora"
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
