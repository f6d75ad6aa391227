"""An export: written completely or not at all, checked, reloaded, and uploaded to the hub."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from decode.base.artifact import (
    MANIFEST,
    file_sha256,
    read_versioned,
    temporary,
    verify_directory,
    write_directory,
)
from decode.base.errors import UserError
from decode.base.paths import fault_of
from decode.drafters import Drafter
from decode.model.loading import Target, load_target
from decode.model.same_target import require_same_target
from decode.opening.adapters import KIND as ADAPTER
from decode.opening.adapters import base_of
from decode.opening.directory import describe_drafter, open_drafter
from decode.settings import EvaluationProtocol
from decode.shapes import Chain
from draftsmith.export import ExportOptions
from draftsmith.export.compare_acceptance import interval
from draftsmith.export.file_schema import require_none
from draftsmith.export.formats import (
    EXPORT_FILE,
    FORMATS,
    ExportJob,
    Format,
    format_for,
    require_options,
)
from draftsmith.export.formats.readers import outdated
from draftsmith.export.merged import write_merged
from draftsmith.export.model_card import drafter_card, target_card
from draftsmith.export.model_directory import README, find_backbone, write_backbone
from draftsmith.export.trained_drafter import TrainedDrafter, without_directories
from draftsmith.export.trained_in_run import evaluation_in_run, training_in_run
from train.measure.evaluation import evaluate

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
    target because it needs the tokenizer. question: the first prompt as a user would write it; with
    the text it gave, it becomes the example of the README. target: if it is loaded already."""

    prompts: Callable[[Target], Sequence[Sequence[int]]]
    max_new_tokens: int = 64
    question: str | None = None
    target: Target | None = None


def export_drafter(
    drafter: Path,
    form: str,
    out: Path,
    options: ExportOptions = ExportOptions(),  # noqa: B008 (frozen)
    *,
    measuring: Measuring | None = None,
    say: Say = lambda line: None,
) -> None:
    """Write a drafter directory as an export to `out`, which must be missing or empty. An adapter
    is merged into its base first.

    form: a format, or the name of an engine. A drafter that was trained together with its target is
    not exported without it (`ExportOptions.backbone`).

    If the format does not carry a reduced draft vocabulary, it is filled up
    (`TrainedDrafter.small_lm`), and the export must be measured. Raises UserError if a measured
    export loses more draft efficiency than LOSS_ALLOWED and the standard error of few prompts, if
    the drafter cannot be exported, and for a target of another vocabulary.
    """
    out = vacant(out, "--out")
    if options.gamma is not None and options.gamma < 1:
        raise UserError(f"gamma is {options.gamma}; expected at least 1")
    trained = TrainedDrafter.open(drafter)
    with ExitStack() as stack:
        if trained.kind == ADAPTER:
            path = stack.enter_context(temporary(out))
            write_merged(drafter, path)
            trained = replace(TrainedDrafter.open(path), in_run=drafter)
        _export(trained, form, out, options, measuring, say)


def planned_layout(drafter: Path, form: str) -> str:
    """The name of the layout that `export_drafter` writes. Raises UserError if there is none."""
    trained = TrainedDrafter.open(drafter)
    kind = trained.kind
    if kind == ADAPTER:
        kind = describe_drafter(base_of(drafter, trained.description))["kind"]
    return format_for(form, kind).name


def _export(
    trained: TrainedDrafter,
    form: str,
    out: Path,
    options: ExportOptions,
    measuring: Measuring | None,
    say: Say,
) -> None:
    drafter = trained.path
    layout = format_for(form, trained.kind)
    if options.dtype not in (None, *layout.dtypes):
        raise UserError(
            f"dtype is {options.dtype!r}, but layout {layout.name} holds {', '.join(layout.dtypes)}"
        )
    for engine in layout.engines:
        if (reason := outdated(layout.name, engine)) is not None:
            say(f"note: {reason}")
    backbone = _backbone_to_export(trained, options, out)
    evaluation = evaluation_in_run(trained)
    max_depth = layout.max_depth(trained)
    if options.gamma is not None and max_depth is not None and options.gamma > max_depth:
        raise UserError(
            f"gamma is {options.gamma}, but {drafter} drafts at most {max_depth} tokens"
        )
    usual_gamma = int((evaluation or {}).get("gamma") or DEFAULT_GAMMA)
    job = ExportJob(
        trained,
        target=None,
        target_spec=str(backbone or options.target or trained.target["name"]),
        dtype=options.dtype,
        gamma=options.gamma or min(usual_gamma, max_depth or sys.maxsize),
        backbone=target_repository(options) if backbone else None,
    )
    require_options(form, layout, trained)
    layout.refuse(job)
    layout.refuse_target(job)
    fills_vocabulary = trained.is_reduced and not layout.carries_vocabulary
    if fills_vocabulary and measuring is None:
        raise UserError(
            f"{drafter} has a reduced draft vocabulary, and no reader of format {layout.name} "
            "supports it. So its output layer is filled up, and the result must be measured: give "
            "--prompts FILE, with prompts that the drafter was not trained on"
        )
    if fills_vocabulary or measuring or layout.needs_target:
        job.target = measuring.target if measuring is not None else None
        job.target = job.target or load_target(layout.target_to_load(job))
        require_same_target(trained.target, job.target, f"drafter {drafter}")
    acceptance = [_acceptance_row("in its run", evaluation)] if evaluation else []

    def fill(directory: Path) -> None:
        facts = layout.write(job, directory)
        record = {
            "format": FORMAT,
            "layout": layout.name,
            "kind": trained.kind,
            "gamma": job.gamma,
            "facts": {"kept": None, "filled_from": None, **facts, "max_depth": max_depth},
            "drafter": {
                "manifest_sha256": file_sha256(drafter / MANIFEST),
                **without_directories(trained.description),
            },
            "backbone": job.backbone,
            "repository": options.repository or out.name,
            "licence": options.licence,
            "data_licence": options.data_licence,
            "training": training_in_run(trained),
        }
        record_file = directory / EXPORT_FILE
        record_file.write_text(json.dumps(record, indent=2, default=str), encoding="utf-8")
        problems = layout.problems(directory)
        require_none(problems, f"the new export is not a valid {layout.name} export")
        example = None
        if measuring is not None:
            rows, example = _measure(job, layout, directory, measuring, fills_vocabulary, say)
            acceptance.extend(rows)
        record |= {"acceptance": acceptance, "example": example}
        record_file.write_text(json.dumps(record, indent=2, default=str), encoding="utf-8")
        (directory / README).write_text(drafter_card(record), encoding="utf-8")
        if backbone is not None and options.backbone is not None:
            write_backbone(backbone, options.backbone, target_card(record))

    write_directory(out, fill)


def target_repository(options: ExportOptions) -> str:
    """Return the future location of a target that was trained with its drafter: a repository named
    after the drafter's, or the name of the directory it is written to."""
    assert options.backbone is not None
    return f"{options.repository}-target" if options.repository else options.backbone.name


def _backbone_to_export(drafter: TrainedDrafter, options: ExportOptions, out: Path) -> Path | None:
    """Return the directory of the drafter's target if it was trained with it, else None.
    Raises UserError if `options.backbone` is missing for such a target or given for another one, or
    if the target cannot be exported."""
    if not drafter.has_backbone:
        if options.backbone is not None:
            raise UserError(
                f"--backbone was given, but {drafter} was trained for an unchanged target; leave "
                "--backbone out"
            )
        return None
    if options.backbone is None:
        raise UserError(
            f"{drafter} was trained together with its target and does not work with the original "
            "model; give --backbone DIR to export the new target too"
        )
    backbone_out = vacant(options.backbone, "--backbone")
    if backbone_out == out or backbone_out in out.parents or out in backbone_out.parents:
        raise UserError(
            f"--backbone {backbone_out} and --out {out} overlap; give two directories, neither "
            "inside the other"
        )
    return find_backbone(drafter.path, options.target)


def vacant(path: Path, option: str) -> Path:
    """Return the absolute path of an output. Raises UserError unless it is missing or an empty
    directory, and where it cannot be made."""
    path = Path(os.path.abspath(path))
    if fault := fault_of(path):
        raise UserError(f"{path} cannot be written: {fault}; give another {option}")
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists, and nothing is overwritten; give another {option}")
    return path


def check_export(directory: Path) -> dict[str, Any]:
    """Check every file against the manifest and the format's schema; return `export.json`.
    Raises UserError with the first damaged file, or with all problems that the schema finds."""
    verify_directory(directory)
    record = read_versioned(
        directory / EXPORT_FILE, FORMAT, ("layout", "kind", "facts"), "a description of an export",
        "export the drafter again",
    )  # fmt: skip
    layout = record["layout"]
    problems = FORMATS[layout].problems(directory)
    require_none(problems, f"{directory} is not a valid {layout} export")
    return record


def reload_export(directory: Path, record: dict[str, Any], target: Target) -> Drafter:
    """Load a checked export as a drafter for our own loop, in the target's dtype."""
    return FORMATS[record["layout"]].reload(directory, target)


def require_repositories(options: ExportOptions) -> None:
    """Raise UserError for names of repositories that no hub takes."""
    if options.repository is None:
        return
    try:
        for name in (options.repository, target_repository(options) if options.backbone else None):
            if name is not None:
                huggingface_hub.utils.validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(
            f"--push-to-hub is {options.repository!r}; expected org/name ({error})"
        ) from None


def push_export(directory: Path, repository: str) -> str:
    """Check an export, upload it to a model repository, and return the URL.

    Creates the repository if it does not exist. Raises UserError for an unsound export, and if the
    hub refuses or cannot be reached. The directory stays unchanged.
    """
    check_export(directory)
    return _upload(directory, repository, "Drafter exported by draftsmith")


def push_target(directory: Path, repository: str) -> str:
    """Like `push_export`, for a target that was exported with its drafter."""
    verify_directory(directory)
    return _upload(directory, repository, "Target trained with its drafter by draftsmith")


def _upload(directory: Path, repository: str, message: str) -> str:
    try:
        huggingface_hub.create_repo(repository, repo_type="model", exist_ok=True)
        url = huggingface_hub.upload_folder(
            repo_id=repository,
            repo_type="model",
            folder_path=directory,
            commit_message=message,
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"{directory} was not pushed to {repository} ({error}). The directory is complete: log "
            "in with `hf auth login`, or check the name, and push it again"
        ) from error
    return str(url)


def _measure(
    job: ExportJob,
    layout: Format,
    directory: Path,
    measuring: Measuring,
    fills_vocabulary: bool,
    say: Say,
) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """Measure the drafter and its export, a row each, and return the example for the README. Raises
    UserError if the loss is too large."""
    target = job.loaded_target
    prompts = measuring.prompts(target)
    # Always as a chain, even if the drafter is stored with a tree: layouts describe only chains.
    protocol = EvaluationProtocol(
        gamma=job.gamma,
        shape="chain",
        max_new_tokens=measuring.max_new_tokens,
        timed_prompts=0,
        generate=False,
    )
    trained = open_drafter(str(job.drafter), target)
    if trained.branches:  # Engines draft chains.
        trained = trained.with_shape(Chain())
    drafters = {
        "as trained (reduced vocabulary)" if fills_vocabulary else "as trained": trained,
        "this export": layout.reload(directory, target),
    }
    rows, example = [], None
    for where, drafter in drafters.items():
        evaluation = evaluate(target, drafter, prompts, protocol)
        if measuring.question is not None:
            text = target.tokenizer.decode(evaluation.outputs[0], skip_special_tokens=True)
            example = {"prompt": measuring.question, "text": text}
        row = _acceptance_row(where, evaluation.counts.to_dict() | {"prompts": len(prompts)})
        ids = json.dumps([[int(token) for token in prompt] for prompt in prompts])
        asked = hashlib.sha256(ids.encode()).hexdigest()
        row |= {"gamma": job.gamma, "dtype": evaluation.dtype, "prompts_sha256": asked}
        rows.append(row)
        if row["draft_efficiency"] is None:
            raise UserError(
                f"nothing was drafted on {len(prompts)} prompts, so the export cannot be measured; "
                "give more prompts, or a larger --max-new-tokens"
            )
        say(f"draft efficiency {where}: {row['draft_efficiency']:.3f}")
    before, after = (row["draft_efficiency"] for row in rows)
    if after < before - LOSS_ALLOWED - _noise(rows):
        reason = (
            "the rows outside its reduced vocabulary were filled up, and their tokens are drafted "
            "instead of better ones; train it without draft_vocabulary, or train heads with the "
            "target's own output layer (output: target)"
            if fills_vocabulary
            else "the weights were rounded; export it with --dtype float32"
        )
        raise UserError(
            f"the export loses too much: its draft efficiency is {after:.3f}, the drafter's is "
            f"{before:.3f}, and {LOSS_ALLOWED + _noise(rows):.3f} less is allowed on "
            f"{len(prompts)} prompts. Nothing was written: {reason}"
        )
    return rows, example


def _noise(rows: Sequence[Mapping[str, Any]]) -> float:
    """The standard error of the difference of two draft efficiencies, each a share of the drafted
    tokens. It is what few prompts leave open."""
    return math.sqrt(
        sum(
            row["draft_efficiency"] * (1 - row["draft_efficiency"]) / row["drafted"] for row in rows
        )
    )


def _acceptance_row(where: str, figures: dict[str, Any]) -> dict[str, Any]:
    """What is expected of an engine. acceptance_by_position: accepted / reached at each place of a
    draft. interval_by_position: of each, as if tokens were independent. prompts_sha256: of their
    token ids as JSON; None: measured in the run. The target's hash is beside the rows, as that of
    the drafter's target."""
    rates = ("acceptance_rate", "draft_efficiency", "tokens_per_step", "drafted", "prompts")
    by_position = ("acceptance_by_position", "reached_by_position", "prompts_sha256")
    others = ("gamma", "dtype", "timed_prompts", "speedup")
    shares = zip(
        figures.get("acceptance_by_position") or [],
        figures.get("reached_by_position") or [],
        strict=True,
    )
    intervals = [interval(round(share * of), of) if of else None for share, of in shares]
    row = {key: figures.get(key) for key in (*rates, *by_position, *others)}
    return {"where": where} | row | {"interval_by_position": intervals}
