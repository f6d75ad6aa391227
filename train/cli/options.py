"""Groups of options that commands share. A command that takes a group has all its options."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from decode.sampling import Sampling
    from decode.target.loading import Target

DrafterOption = Annotated[
    str,
    typer.Option(
        help="none, ngram, store, a drafter directory, a smaller model's id or path, or several "
        "with + between them"
    ),
]
TargetOption = Annotated[
    str, typer.Option(help="hub id, directory, GGUF file, or embedded:smollm2-135m")
]
TokensOption = Annotated[int, typer.Option(help="length limit of an answer, in tokens")]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The target, and how to load it."""

    target: TargetOption
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto"

    def load(self) -> "Target":
        from decode.target.loading import load_target

        return load_target(self.target, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How to sample tokens."""

    temperature: Annotated[
        float, typer.Option(help="0: greedy, whatever the checkpoint's generation_config says")
    ] = 0.0
    top_k: Annotated[int, typer.Option(help="0: off")] = 0
    top_p: Annotated[float, typer.Option(help="1: off")] = 1.0
    min_p: Annotated[float, typer.Option(help="0: off")] = 0.0
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", help="1: off")] = 1.0
    seed: int = 0

    @property
    def sampling(self) -> "Sampling":
        from decode.sampling import Sampling

        return Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        )


@dataclass(frozen=True, kw_only=True)
class Drafting(Drawing):
    """`Drawing`, and the options for the depth of drafts."""

    policy: Annotated[
        str, typer.Option(help="draft-length policy: NAME or NAME:option=value,…; most is --gamma")
    ] = "fixed"
    gamma: Annotated[
        int | None,
        typer.Option(
            help="how many tokens a draft is deep; default 4. A tree is as deep as it is: what "
            "cuts it is --policy fixed:max_depth=N"
        ),
    ] = None
    draft_temperature: Annotated[
        float | None, typer.Option(help="the drafter's temperature; default the target's")
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return arguments for `decode.settings.DecodeSettings`. Omits γ if the user gave none."""
        found = {
            "sampling": self.sampling,
            "policy": self.policy,
            "draft_temperature": self.draft_temperature,
        }
        return found if self.gamma is None else found | {"gamma": self.gamma}


@dataclass(frozen=True, kw_only=True)
class Decoding(Drafting):
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
            help="shape of the drafts: NAME or NAME:option=value,…; default the tree that the "
            "drafter is stored with, or a chain"
        ),
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"rule": self.rule, "shape": self.shape}


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of the command whose type is a group with the group's options."""
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {
        p.name: p.annotation for p in parameters if is_dataclass(p.annotation)
    }

    def options() -> Iterator[inspect.Parameter]:
        for parameter in parameters:
            if parameter.name in groups:
                yield from _options(groups[parameter.name])
            else:
                yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    shown: Any = run
    shown.__signature__ = inspect.Signature(list(options()))
    # typer reads the signature and the annotations.
    shown.__annotations__ = {p.name: p.annotation for p in shown.__signature__.parameters.values()}
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, kind, default=default, annotation=types[field.name])
