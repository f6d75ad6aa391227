"""Stored cases import modules by the names of the day they were found. Python imports this file at
its start if its folder is on the path (`tools.cases`); then the old names mean today's modules."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# Longer names come first.
MOVED = {
    "decode.drafters.directory": "decode.opening.directory",
    "decode.target": "decode.model",
    "train.record.answers": "draftsmith.learn.record.kept_answers",
    "train.record": "draftsmith.learn.record",
    "train.serve.answer_tokens": "draftsmith.serve.batching.answer_tokens",
    "train.serve.answers": "draftsmith.serve.openai.answers",
    "train.serve.requests": "draftsmith.serve.batching.requests",
    "train.serve": "draftsmith.serve",
}
# What a module has no longer by this name: its place today.
RENAMED = {
    "draftsmith.serve.batching.requests": {
        "Bounds": "draftsmith.serve.batching.requests.RequestBounds"
    },
    "draftsmith.serve.openai.answers": {"AnswerText": "decode.text_stream.AnswerText"},
    "draftsmith.serve.server": {
        "Server": "draftsmith.serve.server.ServiceServer",
        "bind": "draftsmith.net.listen.bind",
    },
}

# What takes other arguments today: from today's function to the old one.
CHANGED: dict[str, dict[str, Any]] = {
    "draftsmith.serve.batching.requests": {"NewTokens": lambda made: lambda _, *rest: made(*rest)},
}


class OldModules(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        moved = any(name == old or name.startswith(f"{old}.") for old in MOVED)
        return ModuleSpec(name, self, is_package=True) if moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = next(old for old in MOVED if f"{spec.name}.".startswith(f"{old}."))
        return import_module(MOVED[old] + spec.name.removeprefix(old))

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its name of today."""


class OldMembers(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in RENAMED else None
        if spec is not None and spec.origin is not None:
            spec.loader = Lenient(name, spec.origin)
        return spec


class Lenient(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        names = RENAMED[module.__name__]
        for name, old in CHANGED.get(module.__name__, {}).items():
            setattr(module, name, old(getattr(module, name)))

        def member(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {module.__name__} has no attribute {name}")
            place, _, today = names[name].rpartition(".")
            return getattr(import_module(place), today)

        module.__getattr__ = member  # type: ignore[method-assign]


sys.meta_path[:0] = [OldModules(), OldMembers()]
