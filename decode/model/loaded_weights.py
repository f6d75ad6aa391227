"""What transformers loaded, compared with what the files of a model hold and its config asks for.

transformers logs the differences, fills what is missing with random numbers, and returns a model
that writes another text.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from decode.base.errors import UserError

# What some checkpoints hold beside their weights: tables that the model computes, masks, the scales
# of a quantised cache, and what a training framework keeps of a layer.
TABLES = re.compile(
    r"rotary|inv_freq|position_ids"
    r"|(causal_mask|masked_bias|_cached|version|[qkv]_scale|_extra_state)$"
)
# The projection that every layer of multi-token prediction has, and no other layer. Some families
# keep these layers behind the decoder's own, in the same list.
PREDICTS_AHEAD = "eh_proj"
# What single layers and tensors that join such a part to the model are called.
JOINS = re.compile(
    r"multi_?modal|mm_|image|visi|visual|audio|speech|video|view|language_proj|query_tok"
)


def require_all_weights(source: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise UserError unless the files hold each weight of the model in its size, and no other
    weights of the parts that were loaded.

    info: the loading info of transformers, whose `unexpected_keys` lack those that the model's
    class ignores. Weights of parts that the model does not have may be left over, such as a vision
    tower or a module of multi-token prediction, and what joins them to the model. Another single
    layer or tensor beside those of the model may not.
    """
    if info["mismatched_keys"]:
        sizes = [
            f"{name} is {list(found)}, expected {list(expected)}"
            for name, found, expected in sorted(info["mismatched_keys"])
        ]
        more = f", and {len(sizes) - 3} more" if sizes[3:] else ""
        raise UserError(
            f"the weights of {source} do not have the sizes that its config says: "
            f"{'; '.join(sizes[:3])}{more}. Use the config and the weights of one model."
        )
    if info["missing_keys"]:
        raise UserError(
            f"the weights of {source} lack {len(info['missing_keys'])} tensors that its config "
            f"requires, such as {min(info['missing_keys'])}. Name a complete causal language model."
        )
    if left := _left_over(model, info["unexpected_keys"]):
        raise UserError(
            f"the files of {source} hold {len(left)} weights for which its config has no place, "
            f"such as {min(left)} ({left[min(left)]}); without them the model writes another text. "
            "Use the config and the weights of one model."
        )


def _left_over(model: Any, unexpected: Collection[str]) -> dict[str, str]:
    """The tensors that belong to a part of the model, with what the model has there."""
    parts = dict(model.named_modules())
    # The files of some models were written from the part below the output layer.
    for name, part in model.base_model.named_modules():
        parts.setdefault(name, part)
    quantised = getattr(model, "hf_quantizer", None) is not None
    ahead = {key[: key.index(PREDICTS_AHEAD)] for key in unexpected if PREDICTS_AHEAD in key}
    found, beside, apart = dict[str, str](), dict[str, str](), set[str]()
    for key in unexpected:
        path, _, name = key.rpartition(".")
        # A quantiser has tensors of its own beside a layer's.
        if TABLES.search(key) or (quantised and name not in ("weight", "bias")):
            continue
        if any(key.startswith(start) for start in ahead):
            continue
        place = path if path in parts else path.rpartition(".")[0]
        if why := _place(parts, path, name):
            found[key] = why
        elif place not in parts:
            apart.add(_outermost(parts, key))
        elif not any(step.isdecimal() for step in path.split(".")):
            rest = key.removeprefix(f"{place}.")
            beside[key] = f"{type(parts[place]).__name__} has no {rest}"
    joins = {key for key in beside if _outermost(parts, key) in apart or JOINS.search(key)}
    return found or {key: why for key, why in beside.items() if not (apart and key in joins)}


def _outermost(parts: Mapping[str, nn.Module], key: str) -> str:
    """The part of the files that a tensor belongs to: its first step that is no part of the model.

    >>> _outermost({"": nn.Module(), "model": nn.Module()}, "model.tower.layers.0.weight")
    'model.tower'
    """
    steps = key.split(".")
    ends = range(1, len(steps) + 1)
    paths = (".".join(steps[:end]) for end in ends)
    return next((path for path in paths if path not in parts), key)


def _place(parts: Mapping[str, nn.Module], path: str, name: str) -> str | None:
    """Why a tensor of the module `path` belongs to the model. None: it does not."""
    part = parts.get(path)
    if part is not None and any(True for _ in part.parameters(recurse=False)):
        return f"{path} is a {type(part).__name__} without {name}"
    steps = path.split(".")
    for end, step in enumerate(steps):
        layers = parts.get(".".join(steps[:end]))
        if step.isdecimal() and isinstance(layers, nn.ModuleList):
            if int(step) >= len(layers):
                return f"{'.'.join(steps[:end])} has {len(layers)} layers"
            # Some layers store their mask as a tensor with the name of a bias.
            if part is None or name != "bias":
                return f"{type(layers[int(step)]).__name__} has no such part"
            return None
    return None
