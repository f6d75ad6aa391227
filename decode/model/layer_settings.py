"""Settings of a config that differ between layers, for a model with some of the layers only.

Configs say in several ways what each layer is: a list with a value for each layer (`layer_types`,
`no_rope_layers`), a mapping from layer numbers (`per_layer_config`), a list of layer numbers
(`mlp_only_layers`), or how many of the first or last layers are of a kind.
"""

from collections.abc import Sequence
from typing import Any

# How many of the first layers are dense, in models with experts.
_COUNTS_OF_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# How many of the last layers read the keys of earlier ones.
_COUNTS_OF_LAST = ("num_kv_shared_layers",)


def kept_settings(fields: dict[str, Any], layers: Sequence[int], depth: int) -> dict[str, Any]:
    """The settings for a model with only these layers.

    fields: the fields of the config of a model with `depth` layers, as `to_dict` gives them.
    layers: numbers from 0, ascending. The number of layers itself is not changed.

    >>> kept_settings({"layer_types": ["a", "b", "c"], "mlp_only_layers": [2]}, [0, 2], 3)
    {'layer_types': ['a', 'c'], 'mlp_only_layers': [1]}
    """
    return {key: _kept(key, value, list(layers), depth) for key, value in fields.items()}


def _kept(key: str, value: Any, layers: list[int], depth: int) -> Any:
    if isinstance(value, list) and _are_layer_numbers(key, value, depth):
        return [layers.index(layer) for layer in value if layer in layers]
    if differs_by_layer(key, value, depth):
        if isinstance(value, dict):
            return {layers.index(int(n)): v for n, v in value.items() if int(n) in layers}
        return [value[layer] for layer in layers]
    if isinstance(value, int) and key in _COUNTS_OF_FIRST:
        return sum(layer < value for layer in layers)
    if isinstance(value, int) and key in _COUNTS_OF_LAST:
        return sum(layer >= depth - value for layer in layers)
    return value


def differs_by_layer(key: str, value: Any, depth: int) -> bool:
    """Whether a setting is a list with a value for each of `depth` layers, or a mapping from layer
    numbers."""
    if isinstance(value, dict):
        return bool(value) and all(str(name).isdecimal() for name in value)
    return isinstance(value, list) and len(value) == depth and not key.endswith("token_id")


def _are_layer_numbers(key: str, value: list[Any], depth: int) -> bool:
    named = "layer" in key or key.endswith(("idxs", "indices"))
    numbers = all(type(x) is int and 0 <= x < depth for x in value)
    return named and numbers and len(set(value)) == len(value)
