"""Registries of parts by name (drafters, verification rules, losses, stages), with options."""

import ast
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from decode.base.errors import UserError, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """The name of a part, and the options to create it with.

    >>> Choice.of("lenience:lenience=0.7")
    Choice(name='lenience', options={'lenience': 0.7})
    >>> str(Choice.of({"name": "by_batch", "table": {1: 8, 4: 2}}))
    'by_batch:table={1:8,4:2}'
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: "str | Mapping[str, Any] | Choice") -> "Choice":
        """Parse `name` or `name:option=value,…`, or a mapping with `name` and the options.

        A value is a number, list or dictionary in Python syntax, or true, false or none. Any other
        value is text. Raises UserError if `spec` has another form.
        """
        if isinstance(spec, Choice):
            return spec
        if isinstance(spec, str):
            name, _, rest = spec.partition(":")
            options: dict[str, Any] = {}
            for item in _split_options(rest):
                key, equals, value = item.partition("=")
                if not equals or not key.strip():
                    raise UserError(
                        f"{item!r} in {spec!r}; expected name or name:option=value,option=value"
                    )
                if key.strip() in options:
                    raise UserError(f"option {key.strip()!r} is given twice in {spec!r}")
                options[key.strip()] = _parse_value(value.strip())
            return cls(name.strip(), options)
        if isinstance(spec, Mapping) and isinstance(spec.get("name"), str):
            return cls(spec["name"], {k: v for k, v in spec.items() if k != "name"})
        raise UserError(
            f"{spec!r} does not name a part; expected a name, or a mapping with name and options"
        )

    def __str__(self) -> str:
        """The text form, which `of` parses."""
        options = ",".join(f"{key}={_format_value(value)}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


def _split_options(text: str) -> list[str]:
    """Split at commas that are outside brackets and quotes."""
    items, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "," and not depth:
            items.append("")
            continue
        else:
            # A bracket that closes nothing is a sign like others.
            depth = max(depth + (sign in "([{") - (sign in ")]}"), 0)
        items[-1] += sign
    return items if text else []


_WORDS = {"true": True, "false": False, "none": None, "null": None}


def _parse_value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        is_plain = _parse_value(value) == value and not set(value) & set(",([{\"'")
        return value if is_plain else repr(value)
    return repr(value).replace(" ", "")


class Registry(Generic[T]):
    """Maps names to parts. A part is one file with one `@registry.register(name)`, in a package
    that calls `import_all`.

    what: a word for its parts, in errors. gone: what to use instead of parts that earlier versions
    had, by name, and of their options, by `name:option`.

    >>> shapes = Registry[type]("shape")
    >>> @shapes.register("circle")
    ... class Circle: ...
    >>> shapes["circle"] is Circle
    True
    """

    def __init__(self, what: str, gone: Mapping[str, str] | None = None) -> None:
        self.what, self.gone = what, gone or {}
        self._parts: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers a part as `name`. ValueError if the name is already taken."""

        def add(part: T) -> T:
            if name in self._parts:
                raise ValueError(f"{self.what} {name!r} is registered twice")
            self._parts[name] = part
            return part

        return add

    def __getitem__(self, name: str) -> T:
        """The part called `name`. If unknown, raises UserError with the nearest known name."""
        if name in self.gone:
            raise UserError(f"the {self.what} {name!r} is gone; {self.gone[name]}")
        if name not in self._parts:
            raise UserError(
                f"unknown {self.what} {name!r}; known: {', '.join(sorted(self._parts))}."
                f"{nearest(name, self._parts)}"
            )
        return self._parts[name]

    def make(self, choice: str | Mapping[str, Any] | Choice, **defaults: Any) -> Any:
        """Create the part (a class) with the options of the choice.

        defaults: options for parts that have them, used if the choice does not set them.
        Raises UserError for an unknown name or option, with the nearest known one, for a value of
        the wrong type, for a value that the part refuses, and for a missing value.
        """
        chosen = Choice.of(choice)
        part: Any = self[chosen.name]
        known = options_of(part)
        what = f"{self.what} {chosen.name}"
        for key in chosen.options:
            if instead := self.gone.get(f"{chosen.name}:{key}"):
                raise UserError(f"{what}: the option {key} is gone; {instead}")
            if key not in known:
                has = f"its options are {', '.join(known)}" if known else "it has none"
                raise UserError(f"{what} has no option {key!r}; {has}.{nearest(key, known)}")
        arguments = {k: v for k, v in defaults.items() if k in known} | chosen.options
        for key, parameter in known.items():
            if key in chosen.options:
                arguments[key] = _checked(
                    f"{what}: option {key}", arguments[key], parameter.annotation
                )
            elif key not in arguments and parameter.default is parameter.empty:
                raise UserError(f"{what} needs the option {key}; give it as {chosen.name}:{key}=…")
        return part(**arguments)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._parts))

    def __contains__(self, name: object) -> bool:
        return name in self._parts


def import_all(package: str) -> None:
    """Import each file of a package, so that it registers its parts. Folders in it are left out."""
    for module in pkgutil.iter_modules(import_module(package).__path__):
        if not module.ispkg:
            import_module(f"{package}.{module.name}")


def registered_names(*packages: str, without: str = "\0") -> tuple[str, ...]:
    """The names that the files of these packages register parts by, sorted. Files with the text
    `without` are left out. The files are read, not imported: many import torch."""
    top = Path(__file__).parents[2]
    folders = [top.joinpath(*package.split(".")) for package in packages]
    texts = [file.read_text("utf-8") for folder in folders for file in folder.glob("*.py")]
    found = (x for text in texts if without not in text for x in _REGISTERED.findall(text))
    return tuple(sorted(found))


_REGISTERED = re.compile(r'^@[A-Z]+\.register\("(\w+)"\)$', re.MULTILINE)


def options_of(part: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a part's constructor, by name, with annotations resolved."""
    if part.__init__ is object.__init__:
        return {}
    hints = get_type_hints(part.__init__)
    return {
        name: parameter.replace(annotation=hints.get(name, Any))
        for name, parameter in inspect.signature(part).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _checked(what: str, value: Any, annotation: Any) -> Any:
    try:
        # Validated as JSON, which accepts a list for a tuple and a string for a numeric key.
        return TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        reason = reason.replace("Input should be", "expected")
        raise UserError(f"{what} is {value!r}; {reason}") from None
