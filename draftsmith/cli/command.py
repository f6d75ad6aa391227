"""Code that all commands share: groups of options, errors and tables, quiet libraries."""

import errno
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer
from rich.console import Console

from decode.base.artifact import write_file
from decode.base.errors import UserError, nearest
from decode.base.install_command import install_command
from decode.base.paths import fault_of, from_home
from decode.base.registry import Choice
from train.base.exit_status import ExitStatus

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from decode.draw.sampling import Sampling
    from decode.grammars import Grammar
    from decode.model.loading import Target
    from draftsmith.net.access import Guard
    from draftsmith.net.limits import ServerLimits
    from train.data.read import Example

Number = TypeVar("Number", int, float)
# Of `net.limits.ServerLimits`, those that an operator sets.
_CLIENT_LIMITS = ("connections", "client_connections", "body_seconds")

_DRAFTER = "none, ngram, a directory, a model, or several with +; docs/drafters.md has all"
DrafterOption = Annotated[str, typer.Option(help=_DRAFTER)]
DraftersOption = Annotated[list[str], typer.Option("--drafter", help=f"{_DRAFTER}; repeatable")]
TargetOption = Annotated[
    str, typer.Option(help="hub id, directory, GGUF file, or embedded:smollm2-135m")
]
DTYPE_NAMES = ["auto", "fastest", "float32", "bfloat16", "float16"]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="auto, fastest, float32, bfloat16 or float16",
        autocompletion=lambda: DTYPE_NAMES,
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
TokensOption = Annotated[int, typer.Option(help="most tokens of an answer")]
LimitOption = Annotated[int | None, typer.Option(help="maximum number of prompts")]
# The names of the files that commands write at their end, with the directories that they are in.
WRITTEN = {"json_file", "steps_file", "html_file", "html", "junit", "svg"}
FiguresOption = Annotated[Path | None, typer.Option("--json", help="write the figures here")]
EnginePythonOption = Annotated[
    str | None,
    typer.Option(
        help="Python of an environment with vLLM; default: that of make engine-vllm, else "
        "this one's"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The target, and how to load it."""

    PANEL: ClassVar[str] = "Loading the target"

    target: TargetOption
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    device_map: Annotated[
        str | None,
        typer.Option(
            help="spread the target over all devices of this machine, one part after the other: "
            "auto, balanced, balanced_low_0, sequential, or JSON of a device for each part. "
            'auto:max_memory={0:"60GiB","cpu":"9GiB"} says what the weights may take'
        ),
    ] = None
    chat_template_args: Annotated[
        str,
        typer.Option(
            help='JSON arguments of the chat template, such as {"enable_thinking": false}'
        ),
    ] = "{}"

    @property
    def template_args(self) -> dict[str, Any]:
        """`chat_template_args` by name. Raises UserError if they are no JSON object."""
        return _json_object("--chat-template-args", self.chat_template_args)

    @property
    def placement(self) -> dict[str, Any]:
        """The arguments of `load_target` that say where the layers go. Raises UserError for bad
        JSON, and for what is no amount of memory."""
        device_map = self.device_map
        if device_map is None:
            return {"device_map": None}
        if device_map.lstrip().startswith("{"):
            return {"device_map": _json_object("--device-map", device_map)}
        chosen = Choice.of(device_map)
        memory = chosen.options.get("max_memory", {})
        if chosen.options.keys() - {"max_memory"} or not isinstance(memory, dict):
            raise UserError(
                f'--device-map is {device_map!r}; expected NAME, or NAME:max_memory={{0:"60GiB",'
                '"cpu":"200GiB"}'
            )
        return {"device_map": chosen.name} | ({"max_memory": memory} if memory else {})

    def load(
        self, *drafters: str | None, encoder: bool = False, only_decodes: bool = False
    ) -> "Target":
        """Load the target. drafters: names that are looked up before. encoder: the target may have
        an encoder. only_decodes: nothing will train it, so one copy of its layers is enough."""
        import heads.kinds  # noqa: F401  (registers its drafters)
        from decode.model.forward.packed_alone import keep_packed_alone
        from decode.model.loading import load_target
        from decode.opening.directory import require_findable

        for name in filter(None, drafters):
            require_findable(name)
        target = load_target(
            self.target,
            dtype=self.dtype,
            device=self.device,
            encoder=encoder,
            chat_template_args=self.template_args,
            **self.placement,
        )
        if only_decodes:
            keep_packed_alone(target.model)
        return target


def named_numbers(option: str, text: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """`NAME=number,…` of an option. kinds: int or float, by name. Raises UserError for another
    name, and for what is no such number."""
    given = Choice.of(f"{option}:{text}").options
    for name, value in given.items():
        if name not in kinds:
            raise UserError(
                f"{option} has {name}; expected {', '.join(kinds)}.{nearest(name, kinds)}"
            )
        allowed = (int,) if kinds[name] is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            what = "a whole number" if kinds[name] is int else "a number"
            raise UserError(f"{name} of {option} is {value!r}; expected {what}")
    return given


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{option} is {text!r}; expected a JSON object ({error})") from error


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How to sample tokens."""

    PANEL: ClassVar[str] = "Sampling"

    # Beside the temperature.
    NAMES: ClassVar[Mapping[str, type]] = {
        "top_k": int,
        "top_p": float,
        "min_p": float,
        "repetition_penalty": float,
    }

    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0
    filters: Annotated[
        str,
        typer.Option(
            "--sampling", help="top_k=N,top_p=P,min_p=P,repetition_penalty=R; default: all off"
        ),
    ] = ""
    seed: int = 0

    @property
    def sampling(self) -> "Sampling":
        """Raises UserError for settings that do not exist or do not fit."""
        from decode.draw.sampling import Sampling

        given = named_numbers("--sampling", self.filters, self.NAMES)
        return Sampling(temperature=self.temperature, **given)


PolicyOption = Annotated[
    str,
    typer.Option(
        help="draft-length policy: NAME or NAME:option=value,…; maximum: --gamma. "
        "fixed:max_depth=N limits trees too"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Drafting(Drawing):
    """`Drawing`, and the options for the depth of drafts."""

    PANEL: ClassVar[str] = "Drafts"

    policy: PolicyOption = "fixed"
    gamma: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="depth of a draft, in tokens; default 4",
        ),
    ] = None
    draft_temperature: Annotated[
        float | None, typer.Option(help="the drafter's temperature; default the target's")
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return arguments for `decode.settings.DecodeSettings`. Omits γ if the user gave none."""
        settings = {
            "sampling": self.sampling,
            "policy": self.policy,
            "draft_temperature": self.draft_temperature,
        }
        return settings if self.gamma is None else settings | {"gamma": self.gamma}


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(Drafting):
    """`Drafting`, and the shape of drafts and the verification rule."""

    rule: Annotated[
        str | None,
        typer.Option(
            help="verification rule: NAME or NAME:option=value,…; default speculative, for trees "
            "multi_round"
        ),
    ] = None
    shape: Annotated[
        str | None,
        typer.Option(
            help="shape of the drafts: NAME or NAME:option=value,…; default: the tree stored with "
            "the drafter, else a chain"
        ),
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        named = {"rule": self.rule, "shape": self.shape}
        return super().settings | named


@dataclass(frozen=True, kw_only=True)
class PayingDrafts(DecodeOptions):
    """`DecodeOptions`, without drafts that do not pay."""

    policy: PolicyOption = "worth"


@dataclass(frozen=True, kw_only=True)
class CallerOptions:
    """Who may call a server, and what it holds at most."""

    PANEL: ClassVar[str] = "Callers"

    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="name that clients call this server by, if they send no key; addresses, localhost "
            "and this machine's name always fit; may be repeated"
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="site whose pages may call this server, as https://NAME; *: all; may be repeated"
        ),
    ] = None
    limits: Annotated[
        str,
        typer.Option(
            help="what the server holds at most, NAME=number,…: connections, client_connections, "
            "body_seconds, and others; docs/security.md has all"
        ),
    ] = ""

    def bounds(
        self, limits: "ServerLimits", others: Any = None, files_each: int = 1
    ) -> tuple["ServerLimits", dict[str, Any]]:
        """The limits of a server with this option, and what it gives of the fields of `others`, a
        dataclass of numbers. files_each: open files of a connection. Raises UserError for a number
        that is out of range, and for a name that the server does not have."""
        from draftsmith.net.limits import connections_that_fit

        names = {name: type(getattr(limits, name)) for name in _CLIENT_LIMITS}
        more = {field.name: type(field.default) for field in fields(others)} if others else {}
        given = named_numbers("--limits", self.limits, names | more)
        limits = replace(limits, **{name: given.pop(name) for name in names if name in given})
        fitting = connections_that_fit(limits.connections, files_each)
        return replace(limits, connections=fitting), given

    def guard(self, host: str, key: str | None, admin_key: str | None) -> "Guard":
        """The guard of a server that listens on `host`. Raises UserError for what is no name or no
        site."""
        from draftsmith.net.access import Guard

        names, sites = self.allow_host or [], self.allow_origin or []
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise UserError(f"--allow-host is {name!r}; expected a name without a port")
        for site in sites:
            if site != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", site):
                raise UserError(f"--allow-origin is {site!r}; expected https://NAME, or *")
        hosts = frozenset(name.lower() for name in (host, *names))
        return Guard(hosts, frozenset(sites), key, admin_key)


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of the command whose type is a dataclass with the options that are the
    dataclass's fields. A command that takes a group has all its options. In each option that is a
    path, ~ is the user's home: shells leave it as it is in `--out=~/x`. What cannot be written is
    refused before the command works."""
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            options += _group_options(parameter.annotation)
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: Any) -> None:
        values = {name: _from_home(value) for name, value in values.items()}
        for name in WRITTEN & values.keys():
            if values[name] is not None and values[name].is_dir():
                raise UserError(f"{values[name]} is a directory; expected a file to write")
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    # typer reads the signature and the annotations.
    wrapper: Any = run
    wrapper.__signature__ = inspect.Signature(options)
    wrapper.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _from_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_home(x) for x in value]
    if not isinstance(value, Path):
        return value
    path = from_home(value)
    if fault := fault_of(path):
        raise UserError(f"no file can be at {path}: {fault}; expected another path")
    return path


def _group_options(group: Any) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, kind, default=default, annotation=types[field.name])


def shows_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a UserError into one message on stderr and exit status 2. So it does with a name that is
    too long for a file: any name of a model or of data may be that of a file."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (UserError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
                raise
            errors = Console(stderr=True, highlight=False, soft_wrap=True)
            errors.print(f"error: {error}", markup=False)
            raise typer.Exit(ExitStatus.BAD_INPUT) from None

    return run


def key_from(option: str, variable: str | None) -> str | None:
    """Return the key in an environment variable, None without a variable. Raises UserError if the
    variable, which the option names, is not set or empty."""
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise UserError(
            f"{option} names {variable}, which is not set or empty; expected the name of a "
            "variable with a key"
        )
    return key


def write_json(file: Path | None, figures: Any) -> None:
    """Write JSON values to the file of `--json`, if there is one."""
    if file is not None:
        write_file(file, json.dumps(figures, indent=2))


def read_schema(file: Path | None) -> str | None:
    """The text of a JSON Schema, if there is one. Raises UserError for a file that has no text."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the JSON Schema {file}: {error}") from error


@contextmanager
def says_stops(say: Callable[[str], None]) -> Iterator[None]:
    """A training that is stopped inside ends with one line and its exit status."""
    from train.loop.checkpoint import Stopped

    try:
        yield
    except Stopped as stopped:
        say(f"{stopped}; run the same command again to continue")
        raise typer.Exit(ExitStatus.STOPPED) from None


def require_packages(*names: str) -> None:
    """Raise UserError if a package of the extra `serve` is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"{name} is not installed; run {install_command('serve')}")


def numbers(text: str, option: str, kind: type[Number]) -> list[Number]:
    """Parse numbers separated by commas. Raises UserError for anything else."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{option} is {text!r}; expected {expected} separated by commas") from None


def given_or_shipped(prompts: Path | None) -> "Sequence[Example]":
    """The rows of a file with prompts; None: of the shipped test prompts. Raises UserError as
    `read_examples`."""
    import configs
    from train.data.read import read_examples

    shipped = Path(configs.__file__).parent / "prompts" / "test.jsonl"
    return read_examples(str(prompts or shipped))[0]


def tokenized_prompts(
    examples: Sequence["Example"], target: "Target", limit: int | None
) -> list[list[int]]:
    """Return the token ids of at most `limit` prompts, spread over all examples."""
    from train.data.chat_tokens import prompt_tokens
    from train.data.read import spread

    return [
        prompt_tokens(example, target.tokenizer, encoder=target.has_encoder)
        for example in spread(examples, limit)
    ]


def prompt_grammars(
    examples: Sequence["Example"], target: "Target", limit: int | None
) -> list["Grammar | None"] | None:
    """Return the grammars of the answers to the prompts of `tokenized_prompts`, made from the JSON
    Schemas of their rows. None: no row has one. Raise UserError with the row's place for a schema
    that cannot be used."""
    from train.data.read import spread
    from train.data.row_grammars import row_grammars

    chosen = spread(examples, limit)
    made = row_grammars(chosen, target)
    return [made.get(example.schema) for example in chosen] if made else None


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence["str | Text"]],
    *,
    left: int = 1,
    caption: str | None = None,
) -> "Table":
    """Return a table for the terminal. left: how many columns of text are aligned left."""
    from rich.table import Table

    result = Table(title=title, caption=caption)
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        result.add_row(*row)
    return result
