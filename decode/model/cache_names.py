"""The names that releases of transformers give to a model's cache of keys, values and states.

5.24 renames the argument `past_key_values` (in Mamba `cache_params`) of every forward to `cache`,
and the number of tokens in it, `past_key_values_length`, to `cache_length`. Code that comes with a
model may have the old names. So a module's own forward says which name it takes.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

CACHE = ("cache", "past_key_values", "cache_params")
LENGTH = ("cache_length", "past_key_values_length")


def cache_argument(module: nn.Module) -> str:
    """The argument of a module's forward that takes the cache. Empty: there is none."""
    kind: Any = type(module)  # mypy takes a class of modules for unhashable
    return _cache_argument(kind)


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword argument that gives a cache to a module. A forward that names none gets it by the
    name that transformers has today: it may wrap one that does."""
    own = GenericForSequenceClassification
    return {cache_argument(module) or _cache_argument(own): cache}


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a call. None: there is none."""
    return next((arguments[name] for name in CACHE if name in arguments), None)


def cache_of(output: Any) -> Any:
    """The cache that an output of a model has. None: there is none."""
    # Not `getattr`, because an output also answers to the old names, with a warning.
    return given_cache(vars(output))


def counts_from_cache(module: nn.Module) -> bool:
    """Whether a module's forward takes the length of the cache."""
    names = inspect.signature(type(module).forward).parameters
    return any(name in names for name in LENGTH)


@functools.cache
def _cache_argument(kind: type) -> str:
    for one in kind.__mro__:
        if "forward" not in vars(one):
            continue
        arguments = inspect.signature(vars(one)["forward"]).parameters
        if name := next((name for name in CACHE if name in arguments), ""):
            return name
        # A subclass may pass on arguments that it does not name.
        if not any(x.kind is x.VAR_KEYWORD for x in arguments.values()):
            break
    return ""
