"""`init`: a config for one's own target and data. `quickstart`: the shipped config."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from decode.base.errors import UserError, nearest
from decode.base.paths import from_home
from train.base.console import quieten

DEFAULT_TARGET = "embedded:smollm2-135m"
# Those of `draftsmith.starter_config`. A shell that completes them does not wait for torch.
GOAL_NAMES = ["small-lm", "heads", "online"]
ENGINE_NAMES = ["vllm", "sglang", "llama.cpp", "hf"]  # of `train.run.config`
MACHINE_NAMES = ["cpu", "24gb", "48gb", "80gb", "8x80gb"]
ROWS_READ = 2000  # to look at; their number and lengths set sizes


def init(
    target: Annotated[
        str | None, typer.Option(help="hub id, directory, GGUF file, or embedded:smollm2-135m")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="prompts or conversations: a file, or a data set as org/name@split"),
    ] = None,
    goal: Annotated[
        str | None, typer.Option(help=" or ".join(GOAL_NAMES), autocompletion=lambda: GOAL_NAMES)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help=f"{' or '.join(ENGINE_NAMES)}, which will serve the drafter: kind and options are "
            "those that it reads. hf: one that reads plain model directories",
            autocompletion=lambda: ENGINE_NAMES,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="the config to write; overwrites none. Default: draftsmith.yaml, or standard "
            "output if that is no terminal"
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help=f"{' or '.join(MACHINE_NAMES)}; default: this machine",
            autocompletion=lambda: MACHINE_NAMES,
        ),
    ] = None,
) -> None:
    """Write a config for a target and data. Asks for what is not given, if there is a terminal."""
    if out is None and sys.stdout.isatty():
        out = from_home(_ask("--out", "Config to write", "draftsmith.yaml"))
    if out is not None and out.exists():
        raise UserError(f"{out} exists; expected a new file. Give --out another name")
    target = target or _ask("--target", "Target (hub id, directory or GGUF file)", DEFAULT_TARGET)
    data = data or _ask("--data", "Prompts (a file, or org/name@split)", None)
    usual = "small-lm" if engine == "hf" else "heads"
    goal = goal or _ask("--goal", "Goal (small-lm, heads or online)", usual)

    from decode.model.without_weights import load_shapes
    from draftsmith.export.readable import require_readable
    from draftsmith.starter_config import GOALS, MACHINES, Starter, data_for, this_machine
    from train.base.config_file import parse_mapping
    from train.data.read import read_examples
    from train.data.sources import SourceName
    from train.run.config_checks import validate_config

    choices = (
        ("--goal", goal, GOALS),
        ("--machine", machine, MACHINES),
        ("--engine", engine, ENGINE_NAMES),
    )
    for option, value, known in choices:
        if value is not None and value not in known:
            raise UserError(
                f"{option} is {value!r}; expected {', '.join(known)}.{nearest(value, known)}"
            )
    quieten()
    kind, detected = this_machine()
    chosen = detected if machine in (None, kind) else MACHINES[machine or kind]
    name = SourceName.parse(data)
    examples, report = read_examples(data, limit=ROWS_READ, on_bad="skip")
    prompts = [example for example in examples if example.messages is not None]
    if len({example.user_texts()[0] for example in prompts}) < 20:
        raise UserError(
            f"{data} has {len(prompts)} rows with a prompt; expected at least 20 different ones, "
            "of which some are held out. Name another --data"
        )
    if from_home(target).exists():
        target = str(from_home(target).absolute())
    shapes = load_shapes(target, dtype=chosen.dtype, device="cpu")
    source = name.of(data_for(name.path, out))
    rows = report.kept if report.kept < ROWS_READ else None
    starter = Starter(goal, target, source, chosen, shapes, prompts, rows, out, engine)
    text = starter.text()
    values, _ = parse_mapping(text, Path("the config"), "target, stages")
    require_readable(validate_config(values, base_dir=Path()))
    if out is None:
        typer.echo(text, nl=False)
    else:
        _write(out, text)
    typer.echo(
        f"{out or 'the config'}: {GOALS[goal]}, sized for {chosen.title}, after a look at "
        f"{report.kept} rows. Next: draftsmith train {out or 'CONFIG'} --dry-run",
        err=out is None,
    )


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the resolved plan and stop")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="for --dry-run, write the plan's figures here")
    ] = None,
) -> None:
    """Train a first drafter with the shipped config, into ./runs/quickstart."""
    import configs
    from draftsmith.cli.train import train

    shipped = Path(configs.__file__).parent / "quickstart.yaml"
    train(shipped, overrides, dry_run=dry_run, json_file=json_file)


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; give another --out") from error


def _ask(option: str, question: str, default: str | None) -> str:
    """The user's answer. Without a terminal the default, or a UserError that names the option."""
    if sys.stdin.isatty():
        # Standard output may be the config.
        with contextlib.redirect_stdout(sys.stderr):
            answer: str = typer.prompt(question, default=default)
        return answer
    if default is None:
        raise UserError(f"{option} is missing, and there is no terminal to ask; give {option}")
    return default
