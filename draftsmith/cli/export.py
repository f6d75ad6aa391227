"""`export` writes a drafter for inference engines, and proves it there; `import` reads one."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.base.errors import UserError
from decode.base.paths import from_home
from draftsmith.cli.command import (
    EnginePythonOption,
    LimitOption,
    Loading,
    TokensOption,
    table,
    tokenized_prompts,
    write_json,
)
from draftsmith.export import ExportOptions, ImportOptions
from train.base.console import quieten
from train.base.exit_status import ExitStatus

if TYPE_CHECKING:
    from rich.table import Table

    from draftsmith.auditing.verify_export import ExportVerification


def export(
    *,
    drafter: Annotated[
        Path, typer.Argument(help="a drafter directory; without --format, an export")
    ],
    form: Annotated[
        str | None,
        typer.Option("--format", help="a layout (hf, gguf, medusa, …) or its engine"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the new directory to write")] = None,
    options: ExportOptions,
    check: Annotated[
        bool, typer.Option("--check", help="check an export against its format's schema")
    ] = False,
    verify: Annotated[
        str | None,
        typer.Option(help="run it in this engine: transformers, llama-server, vllm, openvino"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file with held-out prompts, to measure and to verify on"),
    ] = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    engine_python: EnginePythonOption = None,
    engine_dtype: Annotated[
        str, typer.Option(help="dtype of the target in vLLM and in our loop, for --verify")
    ] = "float32",
    engine_options: Annotated[
        str | None,
        typer.Option(
            help="for --verify with vllm or llama-server, its own as JSON: "
            "'{\"tensor_parallel_size\": 2}'"
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            help="for --verify, tokens a second at these numbers of requests: 1,8,32; 0: no speeds"
        ),
    ] = "1",
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="write the export's measured acceptance and the results of --verify here"
        ),
    ] = None,
) -> None:
    """Write a drafter in a layout that inference engines read, and prove that they use it.

    Exit status 1: --verify found that the engine does not use the drafter as our loop does.
    """
    if (form is None) != (out is None):
        present, missing = ("--out", "--format") if form is None else ("--format", "--out")
        raise UserError(f"{present} was given without {missing}; an export needs both")
    if form is None and not (check or verify or options.repository):
        raise UserError(
            "nothing to do: give --format and --out to export a drafter, or --check, --verify "
            "ENGINE or --push-to-hub REPO for an export"
        )
    if verify is not None and prompts is None:
        raise UserError(
            "--verify needs --prompts FILE, with prompts the drafter was not trained on"
        )
    if verify is not None and "://" in verify:
        raise UserError(
            f"--verify starts an engine, and {verify} is a running server; ask that with: "
            f"draftsmith audit {verify} --target MODEL --drafter DIRECTORY"
        )
    from decode.model.loading import Target, load_target
    from draftsmith.auditing.verify_export import (
        engine_for_drafter,
        engine_for_export,
        require_engine,
        verify_export,
    )
    from draftsmith.diagnosis.entry import cause_in_engine
    from draftsmith.export.engine_kinds import EngineTask
    from draftsmith.export.export_directory import (
        Measuring,
        check_export,
        export_drafter,
        push_export,
        push_target,
        require_repositories,
        target_repository,
    )
    from draftsmith.export.formats import FORMATS
    from draftsmith.export.trained_drafter import TrainedDrafter, target_hub_id
    from train.base.console import Reporter
    from train.data.read import read_examples

    require_repositories(options)
    engine = _engine_options(verify, engine_dtype, engine_python, engine_options, concurrency)
    if verify is not None:  # before anything is measured
        if form is None:
            require_engine(verify, engine_python)
        else:
            engine_for_drafter(verify, drafter, form, engine_python)
    quieten()
    reporter = Reporter()
    examples = read_examples(str(prompts))[0] if prompts else []

    def prompts_for(target: Target) -> list[list[int]]:
        return tokenized_prompts(examples, target, limit)

    directory = drafter
    if form is not None and out is not None:
        directory = out
        question = examples[0].user_texts()[-1] if examples else None
        measuring = Measuring(prompts_for, max_new_tokens, question) if prompts else None
        export_drafter(drafter, form, out, options, measuring=measuring, say=reporter.say)
        reporter.say(f"exported to {out}")
        if options.backbone is not None:
            reporter.say(f"exported its target to {options.backbone}")
    record = check_export(directory)
    if form is not None:
        # The export itself names no directory of this machine, so its README cannot say this.
        named = TrainedDrafter.open(drafter).description["target"]["name"]
        layout, served = FORMATS[record["layout"]], str(options.backbone or options.target or named)
        if not layout.is_ours:
            served = target_hub_id(served) or served
        snippets = layout.serving(served, str(directory), record["gamma"])
        fitting = [x for x in snippets if x[0].lower().startswith(form.lower())]
        for engine_name, _, snippet in (fitting or snippets)[:1]:
            reporter.say(f"to serve it in {engine_name}:\n{snippet}")
    if options.repository is not None and options.backbone is None and record.get("backbone"):
        raise UserError(
            f"{directory} needs the target that was trained with it; give --backbone DIR, the "
            "directory that this target was exported to, to push both"
        )
    if check:
        kind = record["kind"]
        reporter.say(f"{directory}: a valid {record['layout']} export of a {kind} drafter")
    figures = {key: record.get(key) for key in ("layout", "kind", "acceptance")}
    if verify is None:
        write_json(json_file, figures)
    else:
        engine_for_export(verify, directory, record["layout"], engine_python)
        # An export does not say where its target is on this machine.
        described = record["drafter"] if form is None else TrainedDrafter.open(drafter).description
        named = described["target"]["name"]
        target_spec = str(options.target or options.backbone or named)
        if target_spec == named and not (target_hub_id(named) or from_home(named).exists()):
            raise UserError(
                f"{directory} names its target as {named}, which is no hub id and not here; give "
                "it with --target"
            )
        target = load_target(target_spec, dtype=engine_dtype)
        task = EngineTask(
            target,
            target_spec,
            directory,
            prompts_for(target),
            options.gamma or record["gamma"],
            max_new_tokens,
            reporter.say,
            **engine,
        )
        trained = drafter if form is not None else None
        verification = verify_export(verify, task, partial(cause_in_engine, trained, task))
        reporter.table(_verification_table(verification))
        if verification.loads:
            reporter.table(_loads_table(verification))
        for failure in verification.failures:
            reporter.say(f"FAILED: {failure}")
        write_json(json_file, figures | verification.to_dict())
        if verification.failures:
            raise typer.Exit(ExitStatus.FAILED)
    if options.repository is not None:
        if options.backbone is not None:
            reporter.say(f"pushed: {push_target(options.backbone, target_repository(options))}")
        reporter.say(f"pushed: {push_export(directory, options.repository)}")


def import_drafter(
    *,
    source: Annotated[str, typer.Argument(help="a directory, a hub id (org/name) or a GGUF file")],
    loading: Loading,
    out: Annotated[Path, typer.Option(help="the new drafter directory")],
    options: ImportOptions,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file with prompts, to measure it on")
    ] = None,
    claimed: Annotated[
        float | None,
        typer.Option(help="tokens per step that its publisher states; default: of its card"),
    ] = None,
    gamma: Annotated[
        int | None, typer.Option(help="tokens per draft, to measure; default: 4, or its max depth")
    ] = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write what was imported and measured here")
    ] = None,
) -> None:
    """Read a published drafter (heads or a small model) and write a drafter directory."""
    if prompts is None and (claimed is not None or gamma is not None):
        raise UserError(
            "--claimed and --gamma are for a measurement; give --prompts FILE too, with prompts "
            "like those of the published figure"
        )
    from draftsmith.export.import_directory import import_drafter, measure_import
    from train.base.console import Reporter
    from train.data.read import read_examples

    quieten()
    reporter = Reporter()
    examples = read_examples(str(prompts))[0] if prompts else []
    target = loading.load()
    imported = import_drafter(source, target, out, options)
    depth = "" if imported.depth is None else f", drafts up to {imported.depth} tokens"
    reporter.say(
        f"imported to {out}: {imported.kind}, read from layout {imported.layout}, "
        f"{imported.dtype}{depth}"
    )
    for note in imported.notes:
        reporter.say(f"note: {note}")
    if imported.settings is not None:
        settings = {"type": imported.kind} | imported.settings
        reporter.say(f"to train it further: start: {out}, heads: {json.dumps(settings)}")
    record = {"out": str(out), **vars(imported), "measured": None}
    if prompts is not None:
        claim = imported.claimed if claimed is None else claimed
        ids = tokenized_prompts(examples, target, limit)
        figures = measure_import(
            out, target, ids, gamma=gamma, max_new_tokens=max_new_tokens, say=reporter.say
        )
        record |= {"measured": figures, "claimed": claim}
        stated = "–" if claim is None else f"{claim:.2f}"
        measured = [f"{figures[key]:.2f}" for key in ("tokens_per_step", "acceptance_rate")]
        title = f"{len(ids)} prompts, γ = {figures['gamma']}, greedy, chains"
        columns = ("", "tokens per step", "acceptance rate")
        reporter.table(table(title, columns, [["claimed", stated, "–"], ["measured", *measured]]))
    write_json(json_file, record)


def _engine_options(
    engine: str | None,
    dtype: str,
    python: str | None,
    options: str | None,
    concurrency: str,
) -> dict[str, Any]:
    """The parts of a task for an engine that a user gave. Raises UserError for those that do not
    fit."""
    given = {
        "--engine-python": python,
        "--engine-options": options,
    }
    if dtype != "float32":
        given["--engine-dtype"] = dtype
    used = [name for name, value in given.items() if value is not None]
    if engine == "llama-server":
        used = [name for name in used if name != "--engine-options"]
    if used and engine != "vllm":
        raise UserError(f"{used[0]} is for --verify vllm; give both, or leave it out")
    try:
        parsed = json.loads(options or "{}")
        loads = [int(number) for number in concurrency.split(",")] if concurrency != "0" else []
        if not isinstance(parsed, dict) or min(loads, default=1) < 1:
            raise ValueError
    except ValueError:
        raise UserError(
            f"{' '.join(filter(None, (options, concurrency)))}; expected a JSON object for "
            "--engine-options, and numbers such as 1,8,32 or 0 alone for --concurrency"
        ) from None
    return {"python": python, "options": parsed, "loads": loads}


def _loads_table(verification: "ExportVerification") -> "Table":
    """Return a table of tokens a second, without and with the drafter."""
    rows = [
        [str(at.requests), f"{at.plain:.1f}", f"{at.drafted:.1f}", f"{at.drafted / at.plain:.2f}×"]
        for at in verification.loads
    ]
    columns = ("requests at a time", "tokens/s without drafts", "with drafts", "")
    return table("speed in the engine, greedy", columns, rows, left=0)


def _verification_table(verification: "ExportVerification") -> "Table":
    """Return a table of the engine's and our loop's results on the same prompts."""
    rows = []
    for name, counts in (
        (verification.engine, verification.theirs),
        ("our loop", verification.ours),
    ):
        efficiency = "–" if counts.rate is None else f"{counts.rate:.3f}"
        rows.append([name, f"{counts.drafted:.0f}", f"{counts.accepted:.0f}", efficiency])
    return table(
        f"{verification.engine} {verification.version}: γ = {verification.gamma}, "
        f"{verification.prompts} prompts",
        ("", "drafted", "accepted", "draft efficiency"),
        rows,
    )
