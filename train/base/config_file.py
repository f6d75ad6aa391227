"""Reads a config file and checks it against the schema of all configs, train/schema.json.

Nothing here imports torch, so a mistake is reported within a second, with the line of the file.
`train.run.config` then builds the config from the values. The schema is generated from its classes.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml
from jsonschema import Draft4Validator, Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

from decode.base.errors import UserError, nearest

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
    "replay": (None, "leave it out; an online stage learns from judged drafts"),
}

Keys = tuple[str | int, ...]  # the path to a value: keys of mappings and indices of lists
Schema = Mapping[str, Any]  # JSON schema, as pydantic writes it


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
        """Apply `key.sub=value` overrides, and check the values. Raises UserError."""
        for override in overrides:
            self.override(override)
        self.check()
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
        if left_out and not set(old) & set(new):
            data |= dict.fromkeys(left_out)
            names = " and ".join(f"data.{split}" for split in left_out)
            self.notes.append(
                f"{names} of {self.file or 'the config'} are left out, because data.train is "
                "another; test and dev are split off from it, unless you give them"
            )

    def check(self) -> None:
        """Raise UserError with everything in the values that the schema refuses."""
        problems = find_problems(self.values, schema())
        if problems:
            raise UserError("\n".join(self.explain(*problem) for problem in problems))

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
        """The parts of a path that lead to a value. pydantic's paths also contain type names."""
        keys: list[Any] = []
        value: Any = self.values
        for part in path:
            if (child := _child(value, part)) is not None:
                value = child
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
    """Read a YAML file, apply `key.sub=value` overrides, and check the values.

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
    return plain(values), root


def plain(value: Any) -> Any:
    """A copy with dicts, lists and text where a program may have others, such as paths. No mapping
    or list is in two places, as those with an alias are: an override changes one place."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
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
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return value[key]
    return None


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


# --- the schema -----------------------------------------------------------------------------------

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


def _is_number(_: Any, value: Any) -> bool:
    return Draft4Validator.TYPE_CHECKER.is_type(value, "number") and not math.isnan(value)


# To draft 4, 1.0 is no whole number.
_Checker = extend(
    Draft202012Validator, type_checker=Draft4Validator.TYPE_CHECKER.redefine("number", _is_number)
)


@cache
def schema() -> Schema:
    """The schema of all configs, generated by `python -m tests.reference --write`."""
    return json.loads((Path(__file__).parents[1] / "schema.json").read_text("utf-8"))


def alternatives(part: Schema) -> list[Schema]:
    """The schemas, with references resolved. A value must fit at least one of them."""
    if "$ref" in part:
        return alternatives(schema()["$defs"][part["$ref"].rpartition("/")[2]])
    if "anyOf" in part:
        return [option for entry in part["anyOf"] for option in alternatives(entry)]
    return [part]


def describe(part: Schema) -> str:
    """What a schema expects, in words."""
    return " or ".join(dict.fromkeys(_describe(option) for option in alternatives(part)))


def _describe(option: Schema) -> str:
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
    each = f"(each {describe(option['items'])})" if option.get("items") else ""
    return " ".join(filter(None, [words, " and ".join(bounds), each]))


@cache
def _checker() -> Validator:
    """Checks a value against the schema of all configs. Its parts may refer to this schema."""
    return _Checker(schema())


def find_problems(value: Any, part: Schema, keys: Keys = ()) -> list[tuple[Keys, str]]:
    """(keys, problem) for every part of a value that does not fit the schema."""
    errors = _checker().evolve(schema=part).iter_errors(value)
    found = (_problems(error, (*keys, *error.path)) for error in errors)
    return list(dict.fromkeys(chain.from_iterable(found)))


def _problems(error: ValidationError, keys: Keys) -> Iterator[tuple[Keys, str]]:
    value: Any = error.instance
    part = cast(Schema, error.schema)
    options = alternatives(part)
    fitting = [x for x in options if _checker().is_type(value, x.get("type", "object"))]
    if error.validator == "anyOf" and fitting:
        yield from min((find_problems(value, option, keys) for option in fitting), key=len)
    elif error.validator == "oneOf" and fitting:
        tag, by_tag = part["discriminator"]["propertyName"], part["discriminator"]["mapping"]
        known = {"properties": {tag: {"enum": list(by_tag)}}, "required": [tag]}
        chosen = {"$ref": by_tag[value[tag]]} if value.get(tag) in list(by_tag) else known
        yield from find_problems(value, chosen, keys)
    elif error.validator == "additionalProperties":
        for key in value:
            if key not in part.get("properties", {}):
                if key in REMOVED:
                    yield (*keys, key), f"was removed: {REMOVED[key][1]}."
                    continue
                yield (*keys, key), f"is unknown.{_place_of(str(key), part['properties'])}"
    elif error.validator == "required":
        for key in part["required"]:
            if key not in value:
                yield (*keys, key), f"is missing; expected {describe(part['properties'][key])}."
    else:
        yield keys, f"is {_show(value)}; expected {describe(part)}.{_suggestion(value, options)}"


def _place_of(key: str, properties: Schema) -> str:
    """' Did you mean …?' with the property that has this key, or with the nearest property."""
    inner = [
        f'"{name}.{key}"'
        for name, part in properties.items()
        if any(key in inside.get("properties", {}) for inside in alternatives(part))
    ]
    return f" Did you mean {' or '.join(inner)}?" if inner else nearest(key, properties)


def _names(option: Schema) -> list[str]:
    return list(map(str, option.get("enum", [option["const"]] if "const" in option else [])))


def _suggestion(value: Any, options: Sequence[Schema]) -> str:
    """' Did you mean …?' with the likely value, or ''."""
    for option in options:
        if option.get("type") == "array" and not isinstance(value, list | dict):
            if not find_problems([value], option):
                return f" Did you mean [{value}]?"
            return _suggestion(value, alternatives(option.get("items", {})))
        tagged = option.get("discriminator", {"mapping": ()})
        if isinstance(value, str) and value in tagged["mapping"]:
            return f" Did you mean {{{tagged['propertyName']}: {value}}}?"
    names = [name for option in options for name in _names(option)]
    if value is False and "no" in names:
        return ' Did you mean "no"? Without quotes it is read as false.'
    # A part's options come after its name: NAME:option=value.
    return nearest(str(value).partition(":")[0], names)


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
