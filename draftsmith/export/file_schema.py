"""Schemas for the files of an export, stricter than any engine's loader.

Engines let errors through: they fill a missing norm with ones, drop a bias, or silently switch
speculation off for a wrong vocabulary. A schema names every tensor with its shape and dtypes, and
every setting. Anything missing, left over or different is a problem, reported in one line.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open

from decode.base.errors import UserError

# safetensors' names of the dtypes of stored weights.
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FLOATS = tuple(DTYPE_NAMES.values())
MOST_LISTED = 20  # problems in a message


@dataclass(frozen=True)
class TensorSpec:
    """shape: in PyTorch's order. dtypes: the allowed ones, by safetensors' names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. finite: whether all its values are numbers."""

    shape: tuple[int, ...]
    dtype: str
    finite: bool = True


def tensor_problems(
    expected: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Return the problems with a file's tensors, a line each; empty if there are none."""
    problems = [f"tensor {name} is missing" for name in sorted(expected.keys() - stored.keys())]
    problems += [
        f"tensor {name} is not expected" for name in sorted(stored.keys() - expected.keys())
    ]
    for name in sorted(expected.keys() & stored.keys()):
        spec, tensor = expected[name], stored[name]
        if tensor.shape != spec.shape:
            problems.append(
                f"tensor {name} has shape {list(tensor.shape)}, expected {list(spec.shape)}"
            )
        if tensor.dtype not in spec.dtypes:
            problems.append(f"tensor {name} is {tensor.dtype}, expected {' or '.join(spec.dtypes)}")
        if not tensor.finite:
            problems.append(f"tensor {name} holds values that are NaN or infinite")
    return problems


def key_problems(
    expected: Mapping[str, Callable[[Any], bool] | Any], settings: Mapping[str, Any], where: str
) -> list[str]:
    """Return the problems with settings. expected: the value itself, or a test it must pass."""
    problems = []
    for key, condition in expected.items():
        if key not in settings:
            problems.append(f"{where} has no {key}")
            continue
        value = settings[key]
        if callable(condition):
            if not condition(value):
                problems.append(f"{where}: {key} is {_short(value)}, which is not valid")
        elif value != condition:
            problems.append(f"{where}: {key} is {_short(value)}, expected {_short(condition)}")
    return problems


def extra_key_problems(
    expected: Iterable[str], settings: Mapping[str, Any], where: str
) -> list[str]:
    """Return a problem for every setting that is not expected."""
    extra = sorted(settings.keys() - set(expected))
    return [f"{where} has {key}, which is not expected" for key in extra]


def require_none(problems: Sequence[str], what: str) -> None:
    """Raise UserError with the problems, if there are any. what: how the message begins."""
    if problems:
        listed = [f"- {problem}" for problem in problems[:MOST_LISTED]]
        more = len(problems) - MOST_LISTED
        listed += [f"- and {more} more"] if more > 0 else []
        raise UserError("\n".join((f"{what}:", *listed)))


def read_tensors(files: Iterable[Path]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of safetensors files, and the problems with the files themselves."""
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                    if name in tensors:
                        problems.append(f"tensor {name} is in two files")
                    header = opened.get_slice(name)
                    values = opened.get_tensor(name)
                    finite = not values.is_floating_point() or bool(values.isfinite().all())
                    shape = tuple(header.get_shape())
                    tensors[name] = StoredTensor(shape, header.get_dtype(), finite)
        except (SafetensorError, OSError) as error:
            problems.append(f"{file.name} cannot be read ({error})")
    return tensors, problems


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_count(value: Any) -> TypeGuard[int]:
    """Whether the value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_id(value: Any) -> bool:
    """Whether the value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_bool(value: Any) -> bool:
    """Whether the value is true or false."""
    return isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether the value is a number above 0 and not infinite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
