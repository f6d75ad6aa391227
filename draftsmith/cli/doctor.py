"""`doctor`: what works on this machine, and how fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.cli.command import (
    DeviceOption,
    DtypeOption,
    EnginePythonOption,
    FiguresOption,
    table,
    write_json,
)
from train.base.console import quieten
from train.base.exit_status import ExitStatus

if TYPE_CHECKING:
    from rich.table import Table

    from draftsmith.cli.examination import Examination

NONE = "–"


def doctor(
    target: Annotated[
        str | None,
        typer.Option(
            help="as for evaluate; default: the embedded one if it is installed, else a llama of "
            "its shape with random weights"
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    runs: Annotated[Path, typer.Option(help="the directory of runs, for its free space")] = Path(
        "runs"
    ),
    engine_python: EnginePythonOption = None,
    row: Annotated[
        bool, typer.Option("--row", help="end with a line for docs/results/machines.md")
    ] = False,
    json_file: FiguresOption = None,
) -> None:
    """Say what works on this machine and how fast: versions, devices, kernels, speeds, and whether
    decoding is lossless. Takes about a minute. An engine that accepts less of a drafter than our
    loop is no matter of the machine: `draftsmith diagnose` says why. Exit status 1: it is not
    lossless, or the target cannot run."""
    from draftsmith.cli.examination import examine
    from train.base.console import Reporter

    quieten()
    reporter = Reporter()
    examination = examine(
        *(target, dtype, device, runs, lambda what: reporter.say(f"  {what}")), engine_python
    )
    for part in tables(examination, runs):
        reporter.table(part)
    for item, reason in examination.errors.items():
        reporter.say(f"{item} failed: {reason}")
    result = examination.to_dict()
    for line in result["meaning"]:
        reporter.say(f"• {line}")
    if row:
        typer.echo(machine_row(examination))
    write_json(json_file, result)
    if not examination.sound:
        raise typer.Exit(ExitStatus.FAILED)


def tables(examination: "Examination", runs: Path) -> list["Table"]:
    """Return the tables of all figures. Figures that failed have no row."""
    figures = examination.figures
    parts = [_facts("this machine", _machine(figures, runs))]
    if "dtypes" in figures:
        columns = ("dtype", "matrix products", "GFLOP/s of PyTorch", "at most, in registers")
        speeds = "flops_per_second", "register_flops_per_second"
        rows = [
            (
                name,
                "fast" if x["fast"] else "emulated",
                *(number(x[key] and x[key] / 1e9) for key in speeds),
            )
            for name, x in figures["dtypes"].items()
        ]
        parts.append(table("matrix products", columns, rows, left=2))
    if "lossless" in figures:
        parts.append(_lossless_table(figures["lossless"]))
    if "target" in figures:
        parts.append(_facts("the target", _target(figures)))
    parts += [_passes_table(rows) for item, rows in figures.items() if item.startswith("passes")]
    return parts


def machine_row(examination: "Examination") -> str:
    """A row of the table of machines, as Markdown: the speed of plain decoding, and the cost of a
    pass over several tokens."""
    figures = examination.figures
    process, target = figures.get("process", {}), figures.get("target", {})
    machine, versions = process.get("machine", {}), process.get("versions", {})
    costs = {row["fed"]: f"{row['cost']:.2f}" for row in figures.get("passes", [])}
    reads = figures.get("read_bytes_per_second")
    cells = [
        f"{machine.get('processor', NONE)}, {machine.get('threads', NONE)} threads",
        ", ".join(machine.get("gpus", [])) or "none",
        number(machine.get("memory_gib")),
        number(reads and reads / 1e9),
        f"{target.get('name', NONE)}, {target.get('dtype', NONE)}, {target.get('device', NONE)}",
        number(figures.get("plain", {}).get("tokens_per_second")),
        *(costs.get(fed, NONE) for fed in (5, 10, 33)),
        "yes" if figures.get("lossless", {}).get("passed") else "NO",
        f"{versions.get('draftsmith', NONE)}, torch {versions.get('torch', NONE)}",
        process.get("time", NONE)[:10],
    ]
    return f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    """A figure with three digits or more, – for None."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _facts(title: str, rows: list[tuple[str, str]]) -> "Table":
    return table(title, ("what", "value"), rows, left=2)


def _machine(figures: dict[str, Any], runs: Path) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if "system" in figures:
        rows.append(("system", figures["system"]))
    if process := figures.get("process"):
        machine, versions = process["machine"], process["versions"]
        rows += [
            ("python", process["python"]),
            *((name, str(versions[name])) for name in versions),
            ("processor", machine["processor"]),
            ("threads in use", str(machine["threads"])),
            ("memory, GiB", number(machine["memory_gib"])),
        ]
    if packages := figures.get("packages"):
        present = [f"{name} {version}" for name, version in packages.items() if version]
        absent = [name for name, version in packages.items() if not version]
        rows += [("optional packages", ", ".join(present) or NONE)]
        rows += [("not installed", ", ".join(absent) or NONE)]
    if "gpus" in figures:
        gpus = [
            f"{gpu['name']}, {number(gpu['memory_gib'])} GiB ({number(gpu['free_gib'])} free), "
            f"compute capability {gpu['capability']}"
            for gpu in figures["gpus"]
        ]
        rows.append(("GPUs", "\n".join(gpus) or "none"))
    for item, name, unit in (
        ("cores", "cores", 1),
        ("free_memory_gib", "free memory, GiB", 1),
        ("read_bytes_per_second", "reading memory, GB/s", 1e9),
        ("load", "load average at the start", 1),
        ("disk_free_gib", f"free for {runs}, GiB", 1),
    ):
        if item in figures:
            rows.append((name, number(figures[item] / unit)))
    share = figures.get("others_share")
    rows.append(("used by other programs", NONE if share is None else f"{share:.0%}"))
    if "accelerate_config" in figures:
        rows.append(("accelerate config", figures["accelerate_config"] or "none"))
    return rows


def _target(figures: dict[str, Any]) -> list[tuple[str, str]]:
    target = figures["target"]
    rows = [
        ("name", target["name"]),
        ("dtype, device", f"{target['dtype']}, {target['device']}"),
        ("parameters, millions", number(target["parameters"] / 1e6)),
        ("weights that a pass reads, MB", number(target["weight_bytes"] / 1e6)),
    ]
    if kernels := figures.get("kernels"):
        reason = kernels["not_packed_because"]
        rows += [
            ("packed products", f"none: {reason}" if reason else str(kernels["packed"])),
            ("packed weights", _weights(kernels)),
            ("forward", kernels["forward"]),
            ("attention", "ours" if kernels["attention"] else "that of transformers"),
            ("exact bits", "yes" if kernels["exact_bits"] else "no"),
        ]
    if plain := figures.get("plain"):
        rows += [
            ("plain decoding, ms a token", number(plain["ms_per_token"])),
            ("plain decoding, tokens a second", number(plain["tokens_per_second"])),
        ]
    if prefill := figures.get("prefill"):
        name = f"prefill of {prefill['tokens']} tokens, tokens a second"
        rows.append((name, number(prefill["tokens_per_second"])))
    return rows


def _weights(kernels: dict[str, Any]) -> str:
    forms = ", ".join(f"{number(size)} MB in {form}" for form, size in kernels["weights"].items())
    pages = "2 MB" if kernels["huge_pages"] else "usual"
    return f"{forms}; {pages} pages" if forms else "none of ours"


def _passes_table(passes: list[dict[str, Any]]) -> "Table":
    columns = ("tokens", "ms", "share of the limit", "plain passes", "highest speed-up")
    keys = ("fed", "ms", "of_limit", "cost", "highest_speedup")
    rows = [[number(row[key]) for key in keys] for row in passes]
    title = f"passes of the target after {passes[0]['context']:,} tokens"
    return table(title, columns, rows, left=0)


def _lossless_table(lossless: dict[str, Any]) -> "Table":
    rows = [
        (name, "equal" if same else "NOT EQUAL", number(lossless["sampled"].get(name)))
        for name, same in lossless["greedy"].items()
    ]
    verdict = "pass" if lossless["passed"] else "FAIL"
    columns = ("decoding", "greedy texts", "sampled texts, standard deviations")
    return table(f"lossless on a tiny model, float32: {verdict}", columns, rows, left=2)
