"""Reads a config file, and says what is wrong in it: the line, the key, what was found and what is
expected. Nothing here imports torch, so a mistake is told within a second."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from decode.base.errors import UserError, nearest
from train.settings.schema import NO_NAME, OTHER_NAME, json_schema

# Settings of earlier versions: the value that switched each one off, and what to write instead. A
# run that has one with that value goes on.
REMOVED: Mapping[str, tuple[Any, str]] = {
    "remember_teacher": (
        False,
        "leave it out; a distill stage reads stored states with teacher: NAME of an earlier "
        "{kind: feature_cache} stage",
    ),
    "remember_features": (
        False,
        "leave it out, and set features: NAME of an earlier {kind: feature_cache} stage, which "
        "stores the states for any number of processes",
    ),
    "shard_teacher": (
        False,
        "leave it out; store the states with a {kind: feature_cache} stage and name it in "
        "teacher, or shard the target of the whole run with target.sharded",
    ),
    "source": ("target", "leave it out; the target runs over the text"),
    "logprobs": (None, "leave it out; a teacher_cache stage runs the target over the text"),
    "exact_bits": (
        True,
        "leave it out; in 16 bits chains have the bits of plain decoding where the layers run in "
        "C++, which costs no time",
    ),
    "boost": (
        None,
        "leave it out; a drafter that learns what another one misses was no better beside it",
    ),
    "replay": (None, "leave it out; an online stage learns from judged drafts"),
}

Keys = tuple[str | int, ...]  # the path to a value: keys of mappings and indices of lists
Schema = Mapping[str, Any]  # JSON schema, as pydantic writes it
M = TypeVar("M", bound=BaseModel)


class Faults:
    """The errors of checks that do not depend on each other, so that all of them are told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def collected(self, place: str = "") -> Iterator[None]:
        """A check: its UserError is told later. place: what stands before it."""
        try:
            yield
        except UserError as error:
            self.said.append(f"{place}{error}")

    def tell(self) -> None:
        """Raise UserError with all of them, a line each, if there are any."""
        if self.said:
            raise UserError("\n".join(dict.fromkeys(self.said)))


@dataclass
class ConfigSource:
    """The plain values of a config, and the source of each value.

    base_dir: data paths are relative to it. file, root: the file and its YAML nodes; None if the
    values do not come from a file. overrides: the overridden keys and their overrides, in order.
    before: the values of overridden keys before. notes: what a user should know, in sentences.
    """

    values: dict[str, Any]
    base_dir: Path
    file: Path | None = None
    root: yaml.Node | None = None
    overrides: list[tuple[Keys, str]] = field(default_factory=list)
    before: dict[Keys, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def apply(self, overrides: Sequence[str]) -> None:
        """Apply `key.sub=value` overrides. Raises UserError."""
        for override in overrides:
            self.override(override)
        self._leave_out_other_splits()

    def _leave_out_other_splits(self) -> None:
        """Leave out data.dev and data.test if an override gives other train data and neither of
        them: they would hold out prompts of another kind. Both are then split off from train."""
        train, splits = ("data", "train"), ("dev", "test")
        if train not in self.before or {("data", split) for split in splits} & set(self.before):
            return
        data = self.values["data"]
        old, new = (
            value if isinstance(value, list) else [value]
            for value in (self.before[train], data["train"])
        )
        left_out = [split for split in splits if data.get(split) is not None]
        if left_out and not any(source in old for source in new):
            data |= dict.fromkeys(left_out)
            names = " and ".join(f"data.{split}" for split in left_out)
            self.notes.append(
                f"{names} of {self.file or 'the config'} are left out, because data.train is "
                "another; test and dev are split off from it, unless you give them"
            )

    def parsed(self, kind: type[M]) -> M:
        """The values as this class of settings. Raises UserError with everything that it
        refuses."""
        try:
            return kind.model_validate(self.values)
        except ValidationError as error:
            problems = Problems(self, kind).of(error)
            raise UserError("\n".join(self.explain(*problem) for problem in problems)) from None

    def explain(self, keys: Keys, problem: str) -> str:
        """The message for a problem with the value at `keys`."""
        return f"{self.place(keys)}config key {self.dotted(keys)!r} {problem}"

    def place(self, keys: Keys) -> str:
        """Where the value at `keys` was set: `FILE:LINE: `, or the override that set it, or ''."""
        for path, override in reversed(self.overrides):
            if keys[: len(path)] == path:
                return f"override {override!r}: "
        return "" if self.file is None else f"{self.file}:{self._line(keys)}: "

    def dotted(self, keys: Keys) -> str:
        """The keys joined by dots. A list entry with a name, such as a stage, appears under it."""
        words, value = [], self.values
        for key in keys:
            value = _child(value, key)
            name = value.get("name") if isinstance(key, int) and isinstance(value, dict) else None
            words.append(name if isinstance(name, str) else str(key))
        return ".".join(words)

    def existing(self, path: Sequence[Any]) -> Keys:
        """The parts of a path of pydantic that are keys. The others are names of types."""
        keys: list[Any] = []
        value: Any = self.values
        for place, part in enumerate(path):
            is_kind = place == 2 and path[0] == "stages"
            if not is_kind and _has(value, part):
                value = value[part]
                keys.append(part)
        return tuple(keys)

    def _line(self, keys: Keys) -> int:
        """The line of a value, from 1. For a missing value, the line of the part that lacks it."""
        assert self.root is not None
        node, line = self.root, self.root.start_mark.line
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                pairs = {key_node.value: (key_node, value) for key_node, value in node.value}
                if str(key) not in pairs:
                    break
                key_node, node = pairs[str(key)]
                line = key_node.start_mark.line
            elif isinstance(node, yaml.SequenceNode) and int(key) < len(node.value):
                node = node.value[int(key)]
                line = node.start_mark.line
        return line + 1

    def override(self, override: str) -> None:
        """Apply `key.sub=value`. List entries are selected by name or number."""
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise UserError(f"override {override!r}; expected key.sub=value")
        keys: list[str | int] = []
        parent: Any = self.values
        *ancestors, last = path.split(".")
        for word in ancestors:
            keys.append(_key_in(parent, word, override))
            if isinstance(parent, dict) and parent.get(word) is None:
                parent[word] = {}
            parent = parent[keys[-1]]
        keys.append(_key_in(parent, last, override))
        self.before.setdefault(tuple(keys), _child(parent, keys[-1]))
        try:
            parent[keys[-1]] = yaml.load(text, Loader=_Loader) if text else None
        except yaml.YAMLError as error:
            raise UserError(f"override {override!r}: {text!r} is not valid YAML: {error}") from None
        self.overrides.append((tuple(keys), override))


def read_config(path: Path, overrides: Sequence[str] = ()) -> ConfigSource:
    """Read a YAML file, and apply `key.sub=value` overrides.

    Overrides select a stage by name or number: `stages.distill.epochs=3`. Raises UserError with the
    line or the override, the key, and the nearest known spelling.
    """
    values, root = read_mapping(path, "target, stages")
    source = ConfigSource(values, path.parent, path, root)
    source.apply(overrides)
    return source


def read_mapping(path: Path, keys: str) -> tuple[dict[str, Any], yaml.Node]:
    """Read a YAML file: its values and its nodes. keys: some that are expected, for the message.
    Raises UserError with the line if it holds no mapping, or a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config {path}: {error}") from error
    return parse_mapping(text, path, keys)


def parse_mapping(text: str, path: Path, keys: str) -> tuple[dict[str, Any], yaml.Node]:
    """As `read_mapping`, of the text of a file. path: for messages."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        values = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from error
    if root is None or not isinstance(values, dict):
        raise UserError(f"{path} contains {_show(values)}; expected keys such as {keys}")
    return plain_values(values), root


def plain_values(value: Any) -> Any:
    """A copy with dicts, lists and text where a program may have others, such as paths. No mapping
    or list is in two places, as those with an alias are: an override changes one place."""
    if isinstance(value, Mapping):
        return {key: plain_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


MERGE = "tag:yaml.org,2002:merge"  # of the key `<<`, which adds the keys of other mappings


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses duplicate keys and reads 1e-3 as a number."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == MERGE:
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                problem="a key is a mapping or a list; fill in a placeholder such as {{ lr }}, or "
                "put quotes around the value",
                problem_mark=key_node.start_mark,
            )
        key = loader.construct_object(key_node)
        if key in seen:
            mark = key_node.start_mark
            raise yaml.constructor.ConstructorError(
                problem=f"key {key!r} appears twice; remove one of the two", problem_mark=mark
            )
        seen.add(key)
    return loader.construct_mapping(node)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
# YAML 1.1 reads 1e-3 as a string, because it has no decimal point.
_Loader.add_constructor("!exponent", _number)
_Loader.add_implicit_resolver(
    "!exponent", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _child(value: Any, key: Any) -> Any:
    """The value at a key of a mapping or a number of a list entry; None if there is none."""
    return value[key] if _has(value, key) else None


def _has(value: Any, key: Any) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


def _key_in(parent: Any, word: str, override: str) -> str | int:
    """The key of a mapping or the index of a list entry that a word of an override refers to."""
    if isinstance(parent, dict):
        return word
    if not isinstance(parent, list):
        raise UserError(
            f"override {override!r}: {word!r} cannot be set, because it is inside a plain value; "
            "expected a key inside a mapping or a list"
        )
    names = [str(entry.get("name")) if isinstance(entry, dict) else "" for entry in parent]
    if word in names:
        return names.index(word)
    if word.isdigit() and int(word) < len(parent):
        return int(word)
    raise UserError(
        f"override {override!r}: no entry {word!r}; expected one of "
        f"{', '.join(filter(None, names))} or a number below {len(parent)}.{nearest(word, names)}"
    )


# --- what is wrong with a value -------------------------------------------------------------------

_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass
class Problems:
    """Puts what pydantic refuses of a config into words, with the JSON schema of its class."""

    source: ConfigSource
    kind: type[BaseModel]

    @cached_property
    def _schema(self) -> Schema:
        return json_schema(self.kind)

    def of(self, error: ValidationError) -> list[tuple[Keys, str]]:
        """(keys, problem) of each value. A value that may have several types has an error for each
        of them: those within it are of the type that was meant."""
        found = [(self._keys(item), item) for item in error.errors(include_url=False)]
        within = {keys[:n] for keys, _ in found for n in range(len(keys))}
        problems = (self._problem(keys, item) for keys, item in found if keys not in within)
        return list(dict.fromkeys(problems))

    def _keys(self, item: Any) -> Keys:
        path, value = item["loc"], item["input"]
        if item["type"] == "missing":
            return (*self.source.existing(path[:-1]), path[-1])
        keys = self.source.existing(path)
        if item["type"] in ("union_tag_not_found", "union_tag_invalid"):
            return (*keys, item["ctx"]["discriminator"].strip("'"))
        if item["type"] == NO_NAME or (item["type"] == OTHER_NAME and isinstance(value, dict)):
            return (*keys, "name")
        return keys

    def _problem(self, keys: Keys, item: Any) -> tuple[Keys, str]:
        kind = item["type"]
        if kind == "value_error":
            return keys, f"does not fit: {item['ctx']['error']}"
        options, defs = self._options(keys), self._schema["$defs"]
        part = {"anyOf": options}
        if kind in ("missing", "union_tag_not_found", NO_NAME):
            return keys, f"is missing; expected {describe(part, defs)}."
        if kind == "extra_forbidden" or item["loc"][-1] == "[key]":
            key = keys[-1]
            if key in REMOVED:
                return keys, f"was removed: {REMOVED[str(key)][1]}."
            known = {k: x for o in self._options(keys[:-1]) for k, x in _properties(o).items()}
            return keys, f"is unknown.{_place_of(str(key), known, defs)}"
        value: Any = self.source.values
        for key in keys:
            value = _child(value, key)
        said = f"is {_show(value)}; expected {describe(part, defs)}."
        return keys, said + _suggestion(value, options, defs)

    def _options(self, keys: Keys) -> list[Schema]:
        """The schemas of the value at `keys`, of which it must fit one."""
        value: Any = self.source.values
        options, defs = [self._schema], self._schema["$defs"]
        for key in keys:
            inner = [part for option in options if (part := _inside(option, key)) is not None]
            value = _child(value, key)
            options = [
                _chosen(option, value, defs)
                for part in inner
                for option in alternatives(part, defs)
            ]
        return options


def _chosen(option: Schema, value: Any, defs: Schema) -> Schema:
    """Of an option that is one of several classes, the class that the value names, if it does."""
    if "discriminator" not in option or not isinstance(value, dict):
        return option
    tag, by_tag = option["discriminator"]["propertyName"], option["discriminator"]["mapping"]
    name = value.get(tag)
    if isinstance(name, str) and name in by_tag:
        (chosen,) = alternatives({"$ref": by_tag[name]}, defs)
        return chosen
    return {"type": "object", "properties": {tag: {"enum": list(by_tag)}}}


def _properties(option: Schema) -> Schema:
    found: Schema = option.get("properties", {})
    return found


def _inside(option: Schema, key: str | int) -> Schema | None:
    """The schema of what a value of this schema has at a key; None if it says nothing."""
    if isinstance(key, int) and "items" in option:
        found: Schema = option["items"]
        return found
    rest = option.get("additionalProperties")
    found = _properties(option).get(str(key), rest if isinstance(rest, Mapping) else None)
    return found


def alternatives(part: Schema, defs: Schema) -> list[Schema]:
    """The schemas, with references resolved. A value must fit at least one of them."""
    if "$ref" in part:
        return alternatives(defs[part["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in part:
        return [option for entry in part["anyOf"] for option in alternatives(entry, defs)]
    return [part]


def describe(part: Schema, defs: Schema) -> str:
    """What a schema expects, in words. defs: what it may refer to."""
    found = (_describe(option, defs) for option in alternatives(part, defs))
    return " or ".join(dict.fromkeys(found))


def _describe(option: Schema, defs: Schema) -> str:
    if "title" in option:
        return str(option["title"])
    if names := _names(option):
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if "discriminator" in option:
        return f"a mapping with {option['discriminator']['propertyName']}"
    if "type" not in option:
        return "any value"
    words = _TYPES[option["type"]]
    bounds = [f"{sign} {option[key]:g}" for key, sign in _BOUNDS.items() if key in option]
    if "pattern" in option:
        bounds.append(f"that matches {option['pattern']}")
    if "minItems" in option:
        bounds.append(f"of {option['minItems']} or more")
    each = f"(each {describe(option['items'], defs)})" if option.get("items") else ""
    return " ".join(filter(None, [words, " and ".join(bounds), each]))


def _place_of(key: str, properties: Schema, defs: Schema) -> str:
    """' Did you mean …?' with the property that has this key, or with the nearest property."""
    inner = [
        f'"{name}.{key}"'
        for name, part in properties.items()
        if any(key in _properties(inside) for inside in alternatives(part, defs))
    ]
    return f" Did you mean {' or '.join(inner)}?" if inner else nearest(key, properties)


def _names(option: Schema) -> list[str]:
    return list(map(str, option.get("enum", [option["const"]] if "const" in option else [])))


def _suggestion(value: Any, options: Sequence[Schema], defs: Schema) -> str:
    """' Did you mean …?' with the likely value, or ''."""
    for option in options:
        if option.get("type") == "array" and not isinstance(value, list | dict):
            entries = alternatives(option.get("items", {}), defs)
            if any(_is_one(value, entry) for entry in entries):
                return f" Did you mean [{value}]?"
            return _suggestion(value, entries, defs)
        tagged = option.get("discriminator", {"mapping": ()})
        if isinstance(value, str) and value in tagged["mapping"]:
            return f" Did you mean {{{tagged['propertyName']}: {value}}}?"
    names = [name for option in options for name in _names(option)]
    if value is False and "no" in names:
        return ' Did you mean "no"? Without quotes it is read as false.'
    # A part's options come after its name: NAME:option=value.
    return nearest(str(value).partition(":")[0], names)


def _is_one(value: Any, option: Schema) -> bool:
    """Whether a plain value is of the type of a list's entries."""
    if names := _names(option):
        return value in names
    type_ = {"string": str, "integer": int, "number": int | float, "boolean": bool}.get(
        option.get("type", ""), ()
    )
    return isinstance(value, type_) and isinstance(value, bool) == (type_ is bool)


def _show(value: Any) -> str:
    """A value for a message. For mappings and lists, only the type."""
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)


def dotted(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested settings by dotted key, as in overrides. Parts of a list that have a
    name, such as stages, are named by it; any other list is one value.

    >>> dict(dotted({"seed": 0, "stages": [{"name": "heads", "lr": 0.1}], "tags": ["a"]}))
    {'seed': 0, 'stages.heads.name': 'heads', 'stages.heads.lr': 0.1, 'tags': ['a']}
    """
    if isinstance(values, dict):
        for key, part in values.items():
            yield from dotted(part, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, list) and values and all(_has_name(part) for part in values):
        for part in values:
            yield from dotted(part, f"{prefix}.{part['name']}")
    else:
        yield prefix, values


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)
