"""What the files of an export must hold: our own tables, stricter than any engine's loader.

Engines let errors through: a missing norm is filled with ones, a bias is dropped, a wrong
vocabulary switches speculation off without a word. A schema names every tensor with its shape and
dtypes, and every setting; anything missing, left over or different is a problem, said in one line.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

# safetensors' names of the dtypes that weights are stored in.
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FLOATS = tuple(DTYPE_NAMES.values())


@dataclass(frozen=True)
class TensorSpec:
    """shape: as PyTorch has it. dtypes: by safetensors' names, any of which will do."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class FoundTensor:
    """A tensor in a file. finite: whether all its values are numbers."""

    shape: tuple[int, ...]
    dtype: str
    finite: bool = True


def tensor_problems(
    expected: Mapping[str, TensorSpec], found: Mapping[str, FoundTensor]
) -> list[str]:
    """What is wrong with a file's tensors, a line each; empty when nothing is."""
    problems = [f"tensor {name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [
        f"tensor {name} is not expected" for name in sorted(found.keys() - expected.keys())
    ]
    for name in sorted(expected.keys() & found.keys()):
        spec, tensor = expected[name], found[name]
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
    expected: Mapping[str, Callable[[Any], bool] | Any], found: Mapping[str, Any], where: str
) -> list[str]:
    """What is wrong with settings. expected: the value itself, or a test that it must pass."""
    problems = []
    for key, wanted in expected.items():
        if key not in found:
            problems.append(f"{where} has no {key}")
        elif callable(wanted):
            if not wanted(found[key]):
                problems.append(f"{where}: {key} is {_short(found[key])}, which cannot be")
        elif found[key] != wanted:
            problems.append(f"{where}: {key} is {_short(found[key])}, expected {_short(wanted)}")
    return problems


def safetensors_found(files: Iterable[Path]) -> tuple[dict[str, FoundTensor], list[str]]:
    """The tensors of some files, and what is wrong with the files themselves."""
    found: dict[str, FoundTensor] = {}
    problems = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                    if name in found:
                        problems.append(f"tensor {name} stands in two files")
                    piece = opened.get_slice(name)
                    values = opened.get_tensor(name)
                    finite = not values.is_floating_point() or bool(values.isfinite().all())
                    shape = tuple(piece.get_shape())
                    found[name] = FoundTensor(shape, piece.get_dtype(), finite)
        except (SafetensorError, OSError) as error:
            problems.append(f"{file.name} cannot be read ({error})")
    return found, problems


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def whole(value: Any) -> bool:
    """A whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def number(value: Any) -> bool:
    """A number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
