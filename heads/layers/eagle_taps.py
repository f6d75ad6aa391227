"""The layers of the target whose outputs EAGLE-3 and P-EAGLE read."""

from collections.abc import Sequence

from decode.base.errors import UserError
from heads.layers.target_layers import require_layers


def auxiliary_layers(layers: int) -> tuple[int, int, int]:
    """Return the auxiliary layers of a target with n layers: the inputs of 2, n // 2 and n − 3.

    Layers are counted from 0. The input of a layer is the output of the layer before it, so the
    returned numbers are one lower. vLLM, SGLang and llama.cpp use the same default if a drafter's
    config names no layers.

    Raises UserError if these three layers are not distinct and in ascending order.

    >>> auxiliary_layers(30)
    (1, 14, 26)
    """
    low, middle, high = 2, layers // 2, layers - 3
    if not low < middle < high:
        raise UserError(
            f"EAGLE-3 reads the inputs of the target's layers 2, n // 2 and n − 3. With "
            f"{layers} layers these are {low}, {middle} and {high}; expected a target with at "
            "least 7 layers. Train eagle1 heads instead"
        )
    return low - 1, middle - 1, high - 1


def captured_outputs(named: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs EAGLE-3 captures. named: None stands for
    `auxiliary_layers`. Raises UserError for layers that a target with n layers does not have, and
    for layers that are not in ascending order."""
    if named is None:
        return auxiliary_layers(layers)
    require_layers("captured_layers", named, layers)
    return tuple(named)
