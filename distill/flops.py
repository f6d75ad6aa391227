"""The floating point operations (FLOPs) that a pass or a training step needs, from shapes.

The rule is that of PaLM (2204.02311, appendix B): for each weight and token 2 FLOPs forward, and
backward 4 for a trained weight and 2 for a frozen one under which something is trained. An output
layer counts for the tokens whose logits are computed. In each layer's attention it is 4 times the
width of its heads for each pair of tokens, as if every token saw the complete row, and 12 times in
training. What is computed twice to save memory counts once, and padding does not count.
"""

from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from decode.model.kinds.layer_kinds import attention_sizes

FORWARD, BACKWARD = 2, 2  # per weight; a trained weight needs BACKWARD twice


@dataclass(frozen=True)
class TextFlops:
    """FLOPs of a text by what they grow with: its tokens, the pairs of tokens of a row, and the
    tokens that are predicted."""

    per_token: float = 0.0
    per_pair: float = 0.0
    per_prediction: float = 0.0

    def __add__(self, other: "TextFlops") -> "TextFlops":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return TextFlops(*(mine + its for mine, its in pairs))


def layers_flops(model: Any, *, trained: bool) -> TextFlops:
    """The layers of a language model, without its output layer. trained: with the backward pass.

    Of experts only those count that a token goes to. Layers with a running state count by their
    weights. A weight that is not trained, beside others that are, needs no gradient of its own.
    """
    config = model.config.get_text_config()
    per_token = 0.0
    for name, weight in _product_weights(model, model.get_output_embeddings()):
        passes = FORWARD + (BACKWARD * (1 + weight.requires_grad) if trained else 0)
        per_token += passes * weight.numel() * _active_share(name, config)
    width = sum(size.heads * size.head_size for size in attention_sizes(model))
    return TextFlops(per_token) + attention_flops(width, trained=trained)


def attention_flops(width: int, *, trained: bool) -> TextFlops:
    """The attention of a layer without its weights. width: the width of all heads' queries
    together."""
    return TextFlops(per_pair=(12.0 if trained else 4.0) * width)


def output_flops(rows: int, width: int, *, trained: bool | None) -> TextFlops:
    """An output layer [rows, width]. trained: False if only what is below it is trained; None if
    there is no backward pass."""
    passes = FORWARD if trained is None else FORWARD + BACKWARD * (1 + trained)
    return TextFlops(per_prediction=float(passes * rows * width))


def products_flops(*modules: nn.Module, config: Any = None) -> float:
    """The FLOPs of a training step for each token that goes through all of these modules once.
    config: says how many experts a token goes to. None: there are none."""
    passes = FORWARD + 2 * BACKWARD
    weights = (named for module in modules for named in _product_weights(module, None))
    return float(
        passes * sum(weight.numel() * _active_share(name, config) for name, weight in weights)
    )


def _product_weights(module: nn.Module, output: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    """The weights of matrix products, those of the output layer apart. Embeddings are looked up,
    and vectors scale or are added."""
    left_out = set() if output is None else set(output.modules())
    return [
        (f"{place}.{name}", weight)
        for place, part in module.named_modules()
        if part not in left_out and not isinstance(part, nn.Embedding)
        for name, weight in part.named_parameters(recurse=False)
        if weight.dim() > 1
    ]


def _active_share(name: str, config: Any) -> float:
    """The share of this weight's experts that a token goes to; 1 for other weights."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((getattr(config, key) for key in names if getattr(config, key, None)), None)
    if count is None or ".experts." not in f"{name}.":
        return 1.0
    return float(config.num_experts_per_tok / count)
