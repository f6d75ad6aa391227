"""Carries out `draftsmith export`: write, check, verify in an engine, and push an export."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from decode.artifact import write_file
from decode.errors import UserError
from decode.target.loading import Target, load_target
from train.console import Reporter
from train.data.chat import prompt_tokens
from train.data.read import Example, read_examples, spread
from train.export.engines import EngineTask
from train.export.hub import push, push_target
from train.export.verify import MIN_DRAFTED, Verified, engine_for, verify
from train.export.write import Measuring, check_export, export_drafter, target_repository


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command's options. `source` is a drafter if a format is given, else an export."""

    source: Path
    form: str | None = None
    out: Path | None = None
    target: str | None = None
    check: bool = False
    engine: str | None = None
    repository: str | None = None
    prompts: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 64
    gamma: int | None = None
    dtype: str | None = None
    data_licence: str | None = None
    min_drafted: int = MIN_DRAFTED
    json_file: Path | None = None
    backbone: Path | None = None


def run(asked: Asked, reporter: Reporter) -> bool:
    """Carry out the command. Returns False if verification in the engine failed."""
    _require_sense(asked)
    examples = read_examples(str(asked.prompts))[0] if asked.prompts else []
    export = asked.source
    if asked.form is not None:
        assert asked.out is not None
        export = asked.out
        export_drafter(
            asked.source,
            asked.form,
            export,
            target=asked.target,
            dtype=asked.dtype,
            gamma=asked.gamma,
            measuring=_measuring(asked, examples),
            data_licence=asked.data_licence,
            repository=asked.repository,
            backbone=asked.backbone,
            say=reporter.say,
        )
        reporter.say(f"exported to {export}")
        if asked.backbone is not None:
            reporter.say(f"exported its target to {asked.backbone}")
    record = check_export(export)
    if asked.check:
        reporter.say(f"{export}: a sound {record['layout']} export of a {record['kind']} drafter")
    if asked.engine is not None:
        engine_for(asked.engine, record["layout"])
        spec = str(asked.target or asked.backbone or record["drafter"]["target"]["name"])
        target = load_target(spec, dtype="float32")
        task = EngineTask(
            target,
            spec,
            export,
            _prompts(target, examples, asked.limit),
            asked.gamma or record["gamma"],
            asked.max_new_tokens,
            reporter.say,
        )
        found = verify(asked.engine, task, min_drafted=asked.min_drafted)
        reporter.table(table(found))
        for failure in found.failures:
            reporter.say(f"FAILED: {failure}")
        if asked.json_file:
            write_file(asked.json_file, json.dumps(found.to_dict(), indent=2))
        if found.failures:
            return False
    if asked.repository is not None:
        if record.get("backbone") and asked.backbone is None:
            raise UserError(
                f"{export} is for a target that was trained with it; give --backbone DIR, where "
                "that was exported to, and both are pushed"
            )
        if asked.backbone is not None:
            beside = target_repository(asked.repository, asked.backbone)
            reporter.say(f"pushed: {push_target(asked.backbone, beside)}")
        reporter.say(f"pushed: {push(export, asked.repository)}")
    return True


def table(found: Verified) -> Table:
    """Return a table of the engine's and our loop's results on the same prompts."""
    shown = Table(
        title=f"{found.engine} {found.run.version}: γ = {found.gamma}, {found.prompts} prompts, "
        f"{found.equal:.0%} of the texts equal to those without the drafter "
        f"({found.equal_within_rounding:.0%} within rounding), speed-up "
        f"{found.run.plain_seconds / found.run.drafted_seconds:.2f}×"
    )
    for column in ("", "drafted", "accepted", "draft efficiency"):
        shown.add_column(column, justify="left" if not column else "right")
    rows = (
        (found.engine, found.run.drafted_tokens, found.run.accepted_tokens),
        ("our loop", found.drafted, found.accepted),
    )
    for name, drafted, accepted in rows:
        share = f"{accepted / drafted:.3f}" if drafted else "–"
        shown.add_row(name, str(drafted), str(accepted), share)
    return shown


def _require_sense(asked: Asked) -> None:
    if (asked.form is None) != (asked.out is None):
        given, lacks = ("--out", "--format") if asked.form is None else ("--format", "--out")
        raise UserError(f"{given} was given without {lacks}; an export needs both")
    if asked.form is None and not (asked.check or asked.engine or asked.repository):
        raise UserError(
            "nothing to do: give --format and --out to export a drafter, or --check, --verify "
            "ENGINE or --push-to-hub REPO for an export"
        )
    if asked.engine is not None and asked.prompts is None:
        raise UserError(
            "--verify needs --prompts FILE, with prompts the drafter was not trained on"
        )


def _measuring(asked: Asked, examples: Sequence[Example]) -> Measuring | None:
    if asked.prompts is None:
        return None
    return Measuring(lambda target: _prompts(target, examples, asked.limit), asked.max_new_tokens)


def _prompts(target: Target, examples: Sequence[Example], limit: int | None) -> list[list[int]]:
    return [prompt_tokens(example, target.tokenizer) for example in spread(examples, limit)]
