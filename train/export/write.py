"""Writes an export, completely or not at all, and checks one."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.artifact import MANIFEST, CorruptArtifact, verify_directory, write_directory
from decode.drafters import Drafter
from decode.drafters.directory import open_drafter
from decode.errors import UserError
from decode.measure.evaluation import EvaluationProtocol, evaluate
from decode.target.identity import require_same_target
from decode.target.loading import DTYPES, Target, load_target
from decode.trees import Chain
from train.export.card import model_card, target_card
from train.export.formats import EXPORT_FILE, FORMATS, ExportJob, Format, format_for
from train.export.new_target import find_backbone, has_backbone, write_backbone
from train.export.source import describe_source, found_in_run, is_reduced

FORMAT = 1
# How much lower an export's draft efficiency may be than its drafter's. Losses come from rounding
# to another dtype, or from filling up a reduced draft vocabulary: the added tokens are then drafted
# instead of better ones.
LOSS_ALLOWED = 0.03
DEFAULT_GAMMA = 4

Say = Callable[[str], None]


@dataclass
class Measuring:
    """The settings for measuring an export. prompts: returns the prompts as token ids; takes the
    target because it needs the tokenizer."""

    prompts: Callable[[Target], Sequence[Sequence[int]]]
    max_new_tokens: int = 64


def export_drafter(
    drafter: Path,
    form: str,
    out: Path,
    *,
    target: str | None = None,
    dtype: str | None = None,
    gamma: int | None = None,
    measuring: Measuring | None = None,
    data_licence: str | None = None,
    repository: str | None = None,
    backbone: Path | None = None,
    say: Say = lambda line: None,
) -> None:
    """Write a drafter directory as an export to `out`, which must be missing or empty.

    form: a format, or the name of an engine.
    target: default the one it was trained for. dtype: of the weights, default as stored.
    gamma: the default γ for readers; default that of the drafter's evaluation in its run, else 4,
    but at most the drafter's max depth.
    repository: the future location, for the README.
    backbone: where to write the target of a drafter that was trained together with it. Such a
    drafter is not exported alone.

    If the format does not carry a reduced draft vocabulary, it is filled up (`read_small_lm`) and
    the export must be measured. Raises UserError if a measured export loses more than LOSS_ALLOWED
    of draft efficiency, if the drafter cannot be exported, and for a target of another vocabulary.
    """
    out = _vacant(out, "--out")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    if gamma is not None and gamma < 1:
        raise UserError(f"gamma is {gamma}; expected at least 1")
    description = describe_source(drafter)
    chosen = format_for(form, str(description["kind"]))
    moved = _moved_target(drafter, description, target, out, backbone)
    in_run = found_in_run(drafter)
    max_depth = chosen.max_depth(drafter)
    if gamma is not None and max_depth is not None and gamma > max_depth:
        raise UserError(f"gamma is {gamma}, and {drafter} drafts at most {max_depth} tokens")
    gamma = gamma or min(
        int((in_run or {}).get("gamma") or DEFAULT_GAMMA), max_depth or sys.maxsize
    )
    spec = str(moved or target or description["target"]["name"])
    found_at = None if backbone is None else target_repository(repository, backbone)
    job = ExportJob(drafter, description, None, spec, dtype, gamma, found_at)
    chosen.refuse(job)
    reduced = is_reduced(drafter) and not chosen.carries_vocabulary
    if reduced and measuring is None:
        raise UserError(
            f"{drafter} drafts a reduced vocabulary, which no reader of format {chosen.name} "
            "knows: its output layer is filled up, and that must be measured. Give --prompts FILE, "
            "with prompts it was not trained on"
        )
    if reduced or measuring or chosen.needs_target:
        job.target = load_target(chosen.loads(job))
        require_same_target(description["target"], job.target, f"drafter {drafter}")
    rows = [_row("in its run", in_run)] if in_run else []

    def fill(directory: Path) -> None:
        facts = chosen.write(job, directory)
        record = {
            "format": FORMAT,
            "layout": chosen.name,
            "kind": job.kind,
            "gamma": gamma,
            "facts": facts | {"max_depth": max_depth},
            "drafter": {"manifest_sha256": _sha256(drafter / MANIFEST), **description},
            "backbone": found_at,
        }
        write_export_file = directory / EXPORT_FILE
        write_export_file.write_text(json.dumps(record, indent=2, default=str))
        _require_sound(chosen, directory, "what was just written")
        acceptance = list(rows)
        if measuring is not None:
            assert job.target is not None
            acceptance += _measured(job, chosen, directory, measuring, reduced, say)
        record["acceptance"] = acceptance
        write_export_file.write_text(json.dumps(record, indent=2, default=str))
        card = model_card(
            chosen,
            description,
            facts,
            acceptance,
            gamma=gamma,
            repository=repository or out.name,
            data_licence=data_licence,
            backbone=found_at,
        )
        (directory / "README.md").write_text(card)
        if moved is not None and backbone is not None and found_at is not None:
            card = target_card(
                chosen,
                description,
                gamma=gamma,
                repository=found_at,
                drafter=repository or out.name,
                data_licence=data_licence,
            )
            write_backbone(moved, backbone, card)

    write_directory(out, fill)


def target_repository(repository: str | None, backbone: Path) -> str:
    """Return the future location of a target that was trained with its drafter: a repository named
    after the drafter's, or the name of the directory it is written to."""
    return f"{repository}-target" if repository else backbone.name


def _moved_target(
    drafter: Path,
    description: dict[str, Any],
    target: str | None,
    out: Path,
    backbone: Path | None,
) -> Path | None:
    """Return the directory of the drafter's target if it was trained with it, else None.
    Raises UserError if `backbone` is missing for such a target or given for another one, or if the
    target cannot be exported."""
    if not has_backbone(description):
        if backbone is not None:
            raise UserError(
                f"--backbone was given, and {drafter} was trained for a target that stayed as it "
                "is; leave it out"
            )
        return None
    if backbone is None:
        raise UserError(
            f"{drafter} was trained together with its target, and is of no use with the model that "
            "was before; give --backbone DIR to export the new target too"
        )
    place = _vacant(backbone, "--backbone")
    if place == out or place in out.parents or out in place.parents:
        raise UserError(
            f"--backbone {place} and --out {out} are not beside each other; name two directories, "
            "neither within the other"
        )
    return find_backbone(drafter, target)


def _vacant(path: Path, option: str) -> Path:
    """Return the absolute path of an output. Raises UserError unless it is missing or an empty
    directory."""
    path = Path(os.path.abspath(path))
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists, and an export overwrites nothing; name another {option}")
    return path


def check_export(directory: Path) -> dict[str, Any]:
    """Check every file against the manifest and the format's schema; return `export.json`.
    Raises UserError with the first damaged file, or with all problems that the schema finds."""
    verify_directory(directory)
    try:
        record = json.loads((directory / EXPORT_FILE).read_text())
        found, layout, _, _ = (record[key] for key in ("format", "layout", "kind", "facts"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(
            directory, EXPORT_FILE, f"does not say what was exported ({error})"
        ) from error
    if found != FORMAT:
        raise UserError(
            f"{directory} has export format {found}; this version of draftsmith reads {FORMAT}"
        )
    _require_sound(FORMATS[layout], directory, str(directory))
    described: dict[str, Any] = record
    return described


def reload(directory: Path, record: dict[str, Any], target: Target) -> Drafter:
    """Load a checked export as a drafter for our own loop, in the target's dtype."""
    return FORMATS[record["layout"]].reload(directory, target)


def _require_sound(form: Format, directory: Path, what: str) -> None:
    problems = form.problems(directory)
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise UserError(f"{what} is no sound {form.name} export:\n{listed}")


def _measured(
    job: ExportJob,
    form: Format,
    directory: Path,
    measuring: Measuring,
    reduced: bool,
    say: Say,
) -> list[dict[str, Any]]:
    """Measure the drafter and its export, a row each. Raises UserError if the loss is too large."""
    target = job.target
    assert target is not None
    prompts = measuring.prompts(target)
    # Always as a chain, even if the drafter is stored with a tree: layouts describe only chains.
    protocol = EvaluationProtocol(
        gamma=job.gamma,
        shape="chain",
        max_new_tokens=measuring.max_new_tokens,
        timed_prompts=0,
        generate=False,
    )
    rows = []
    before = open_drafter(str(job.drafter), target)
    if before.branches:  # Engines draft chains.
        before = before.with_shape(Chain())
    after = form.reload(directory, target)
    names = ("as trained (reduced vocabulary)" if reduced else "as trained", "this export")
    for name, drafter in zip(names, (before, after), strict=True):
        found = evaluate(target, drafter, prompts, protocol)
        rows.append(_row(name, found.counts.to_dict() | {"prompts": len(prompts)}))
        rows[-1] |= {"gamma": job.gamma, "dtype": found.dtype}
        if rows[-1]["draft_efficiency"] is None:
            raise UserError(
                f"nothing was drafted on {len(prompts)} prompts, so the export cannot be measured; "
                "give more prompts, or a larger --max-new-tokens"
            )
        say(f"draft efficiency {name}: {rows[-1]['draft_efficiency']:.3f}")
    was, now = (row["draft_efficiency"] for row in rows)
    if now < was - LOSS_ALLOWED:
        reason = (
            "the rows that its reduced vocabulary lacks are filled up, and they take tokens from "
            "those it learnt; train it without draft_vocabulary, or heads with the target's own "
            "output layer (output: target)"
            if reduced
            else "the weights were rounded; export it with --dtype float32"
        )
        raise UserError(
            f"the export accepts less than the drafter: draft efficiency {now:.3f}, before it "
            f"{was:.3f}, and {LOSS_ALLOWED} is allowed. Nothing was written: {reason}"
        )
    return rows


def _row(where: str, figures: dict[str, Any]) -> dict[str, Any]:
    keys = ("acceptance_rate", "draft_efficiency", "tokens_per_step", "drafted", "prompts")
    also = ("gamma", "dtype")
    return {"where": where} | {key: figures.get(key) for key in (*keys, *also)}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
