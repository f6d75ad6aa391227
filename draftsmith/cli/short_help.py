"""Help that fits a screen: `--help` describes the options that most people need, and `--help-all`
all of them by topic. The list of commands is shown the same way."""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

OTHERS = "Others"


def _described_in_full(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[__name__] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, hidden=True, callback=_described_in_full)
]


class ShortCommand(TyperCommand):
    """A command of which `--help` describes the options without a panel, and names the topics of
    the others."""

    def get_help_option(self, ctx: Any) -> Any:
        """`--help`, without the type of its value."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help. Without a panel, or with `--help-all`, all of it."""
        more = [x for x in self.params if getattr(x, "rich_help_panel", None)]
        if not more or ctx.meta.get(__name__):
            super().format_help(ctx, formatter)
            return
        short = copy(self)
        short.params = [copy(x) for x in self.params if x not in more]
        for parameter in short.params:
            if parameter.param_type_name == "option":
                parameter.metavar = ""  # the words say what is expected
        titles = dict.fromkeys(getattr(x, "rich_help_panel", "") for x in more)
        topics = ", ".join(sorted(titles, key=OTHERS.__eq__))
        short.epilog = f"--help-all describes {len(more)} more options: {topics}"
        super(ShortCommand, short).format_help(ctx, formatter)


class ShortGroup(TyperGroup):
    """Commands, of which `--help` only names those in a panel."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help. With `--help-all`, each command has its line."""
        if ctx.meta.get(__name__):
            super().format_help(ctx, formatter)
            return
        panels: dict[str, list[str]] = {}
        short = copy(self)
        short.commands = {}
        for name, command in self.commands.items():
            if panel := getattr(command, "rich_help_panel", None):
                panels.setdefault(panel, []).append(name)
            else:
                short.commands[name] = command
        short.params = [x for x in self.params if not (x.name or "").endswith("_completion")]
        lines = [f"{title}: {', '.join(names)}" for title, names in panels.items()]
        short.epilog = "\n".join([*lines, "--help-all describes these too."])
        super(ShortGroup, short).format_help(ctx, formatter)


def with_short_help(
    command: Callable[..., None], first: str, titles: Mapping[str, str]
) -> Callable[..., None]:
    """Let the options named in `first`, in this order, come first, and put the others into the
    panels that `titles` names, or into one of the others. Without names the options stay as they
    are. Raises ValueError for a name that the command does not have."""
    given: Mapping[str, inspect.Parameter] = inspect.signature(command).parameters
    names = first.split()
    if unknown := [name for name in names if name not in given]:
        raise ValueError(f"{command.__name__} has no {', '.join(unknown)}; expected {list(given)}")
    if not names:
        return command
    arguments = [x for x in given.values() if _is_argument(x)]
    shown = [given[name] for name in names]
    rest = [x for x in given.values() if x.name not in names and not _is_argument(x)]
    placed = [_in_panel(x, titles.get(x.name, OTHERS)) for x in rest]
    kind = inspect.Parameter.KEYWORD_ONLY
    last = inspect.Parameter("help_all", kind, default=False, annotation=HelpAll)

    def run(help_all: bool = False, **values: Any) -> None:
        command(**values)

    wrapper: Any = run
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature([*arguments, *shown, *placed, last])
    wrapper.__annotations__ = {
        name: x.annotation for name, x in wrapper.__signature__.parameters.items()
    }
    return run


def panels(command: Callable[..., None]) -> dict[str, str]:
    """The panel of each option that comes from a group of options: `PANEL` of the dataclass that
    states it."""
    titles = {}
    for parameter in inspect.signature(command).parameters.values():
        group: Any = parameter.annotation
        for field in fields(group) if is_dataclass(group) else ():
            stated = [x for x in group.__mro__ if field.name in vars(x).get("__annotations__", {})]
            titles[field.name] = getattr(stated[-1], "PANEL", OTHERS)
    return titles


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(x, typer.models.ArgumentInfo) for x in get_args(parameter.annotation)[1:])


def _in_panel(parameter: inspect.Parameter, title: str) -> inspect.Parameter:
    kind, *stated = get_args(parameter.annotation) or (parameter.annotation,)
    info: Any = copy(stated[0]) if stated else typer.Option()
    info.rich_help_panel = title
    return parameter.replace(annotation=Annotated[kind, info])
