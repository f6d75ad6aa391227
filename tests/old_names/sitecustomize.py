"""Stored cases import modules by the names of the day they were found. Python imports this file at
its start if its folder is on the path (`tests.cases`); then the old names mean today's modules."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Longer names come first.
MOVED = {
    "decode.drafters.directory": "decode.opening.directory",
    "decode.target": "decode.model",
    "train.record.answers": "draftsmith.learn.record.kept_answers",
    "train.record": "draftsmith.learn.record",
    "train.serve.answer_tokens": "draftsmith.serve.openai.answer_tokens",
    "train.serve.answers": "draftsmith.serve.openai.answers",
    "train.serve.requests": "draftsmith.serve.batching.requests",
    "train.serve": "draftsmith.serve",
}
RENAMED = {
    "train.serve.requests": {"Bounds": "RequestBounds"},
    "train.serve.server": {"Server": "ServiceServer"},
}


class OldNames(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        moved = any(name == old or name.startswith(f"{old}.") for old in MOVED)
        return ModuleSpec(name, self, is_package=True) if moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = next(old for old in MOVED if f"{spec.name}.".startswith(f"{old}."))
        return import_module(MOVED[old] + spec.name.removeprefix(old))

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        for old, new in RENAMED.get(module.__spec__.name, {}).items():
            setattr(module, old, getattr(module, new))


sys.meta_path.insert(0, OldNames())
