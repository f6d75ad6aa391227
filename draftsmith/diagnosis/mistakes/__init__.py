"""Known mistakes of engines with drafters. Each is one file, and made here in our own drafter.

Shapes: B rows, n tokens, H hidden size.
"""

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

from torch import nn

from decode.base.registry import Registry, import_all
from decode.drafters import Drafter
from decode.model.loading import Target
from heads.heads_drafter import HeadsDrafter
from heads.heads_module import Heads

D = TypeVar("D", bound=HeadsDrafter)
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class Mistake(ABC):
    """says: what goes wrong. remedy: one sentence. seen: where it was found, with its source; ""
    if it is known from no public thread. engines: those it was seen in, by the names of
    `draftsmith.auditing.engine_acceptance.COUNTING`, which are likelier to make it. tokens: of an
    answer that the server is asked for."""

    says: ClassVar[str]
    remedy: ClassVar[str]
    seen: ClassVar[str] = ""
    engines: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @abstractmethod
    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        """The drafter with this mistake; the given one stays as it is. None: it cannot have it."""


MISTAKES: Registry[type[Mistake]] = Registry("mistake")


def with_heads(drafter: D, heads: Heads) -> D:
    """A drafter like this one with other heads, that keeps what mistakes did to it before."""
    changed = copy.copy(drafter)
    changed.module = changed.heads = heads
    changed.captured_layers = heads.captured_layers
    return changed


def with_method(one: T, name: str, method: Any) -> T:
    """A drafter, or heads, like this one with another method. It is one of its class, so that a
    copy keeps it."""
    kind = type(one)
    changed = copy.copy(one)
    changed.__class__ = type(kind.__name__, (kind,), {name: method})
    return changed


def copied(module: M, **changes: Any) -> M:
    """The same module, which shares its weights, with other attributes."""
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def with_options(heads: Heads, **changes: Any) -> Heads:
    """The same heads, which share their weights, with other options."""
    return copied(heads, options=heads.options.model_copy(update=changes))


import_all("draftsmith.diagnosis.mistakes")
