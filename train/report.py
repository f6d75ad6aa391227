"""The report of a run: report.json for programs, report.html for people, a table for the terminal.

Everything is read from the run's directory (see `train.run`), so a report can be made again at any
time and comes out the same. What each figure means is written in `decode.measure`; a figure that
does not exist is None in report.json and '–' where people read it.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from decode.artifact import write_file
from decode.errors import UserError
from train import plots

FORMAT = 1
NONE = "–"
SAMPLES, SAMPLE_CHARACTERS = 3, 3000
MOST_KEPT = 8
# Parts of decoding time in the order of the loop, with their colours.
TIME = {
    "prefill": plots.REFERENCE,
    "draft": plots.SERIES[1],
    "verify": plots.SERIES[0],
    "overhead": plots.SERIES[3],
}

Row = dict[str, Any]  # {stage, drafter, order, evaluation}
Ratio = dict[str, float]  # {value, low, high}


def make_report(directory: Path) -> dict[str, Any]:
    """Write report.json and report.html into a run's directory; returns what report.json holds.

    Call it on the main process only. Raises UserError
    for a file of the run that is missing or damaged.
    """
    report, samples = collect(directory)
    write_file(directory / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    # A text may hold half a surrogate pair, which UTF-8 cannot write.
    write_file(directory / "report.html", html(report, samples).encode("utf-8", "replace"))
    return report


def collect(directory: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What report.json holds, and the sample texts by row label."""
    config = _read(directory / "config.json")
    kinds = {stage["name"]: stage["kind"] for stage in config.get("stages", [])}
    stages, rows, samples, times = [], [], [], []
    for stage, path in _numbered(directory / "stages", "done.json"):
        summary = _read(path)["summary"]
        stages.append({"name": stage, "kind": kinds.get(stage, NONE), "summary": summary})
        times.append(path.stat().st_mtime)
    for _, path in _numbered(directory / "evaluations", "evaluation.json"):
        row = _read(path)
        samples.append(row.pop("samples", None) or [])
        rows.append({key: row[key] for key in ("stage", "drafter", "order", "evaluation")})
        times.append(path.stat().st_mtime)
    # When the last figure was made, not when the report was: making it again changes nothing.
    finished = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(max(times))) if times else None
    report = {
        "format": FORMAT,
        "name": config["name"],
        "finished": finished,
        "rows": rows,
        "stages": stages,
        "provenance": _read(directory / "provenance.json"),
        "config": config,
    }
    return report, dict(zip(labels(report), samples, strict=True))


def _numbered(parent: Path, file: str) -> Iterator[tuple[str, Path]]:
    """(NAME, file) for every complete NN-NAME in a directory, by number."""
    found = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = re.fullmatch(r"(\d+)-(.+)", entry.name)
        if match and (entry / file).is_file():
            found.append((int(match[1]), match[2], entry / file))
    for _, name, path in sorted(found):
        yield name, path


def _read(path: Path) -> Any:
    try:
        # NaN and infinity are no JSON; a figure that is neither does not exist.
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the report cannot be made: {path} cannot be read ({error}). Restore it from a copy, "
            "or start the run again under another name."
        ) from error


def labels(report: dict[str, Any]) -> list[str]:
    """A short name for every row that no other row has: the stage, or the baseline's drafter."""
    names = []
    for row in report["rows"]:
        name = row["stage"]
        if is_baseline(report, row):
            gamma = row["evaluation"].get("gamma")
            other = gamma != _main_gamma(report) and not varies(row["evaluation"])
            name = row["drafter"] + (f" γ={gamma}" if other else "")
        names.append(f"{name} ({row['drafter']})" if name in names else name)
    return [f"{n} #{i + 1}" if names.count(n) > 1 else n for i, n in enumerate(names)]


def is_baseline(report: dict[str, Any], row: Row) -> bool:
    """Whether a row is of a drafter that no stage made."""
    evaluation = report["config"].get("evaluation") or {}
    known = {"ngram", *(evaluation.get("baselines") or [])}
    stages = {stage["name"] for stage in report.get("stages", [])}
    return row["drafter"] in known and row["stage"] not in stages


def _main_gamma(report: dict[str, Any]) -> Any:
    """The γ of the trained drafters."""
    configured = (report["config"].get("evaluation") or {}).get("gamma")
    found = [row["evaluation"].get("gamma") for row in report["rows"]]
    return configured or (found[-1] if found else None)


# Figures as people read them.


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Whole per cents; what is not all or nothing is never rounded to 0% or 100%."""
    if value is None:
        return NONE
    shown = f"{value:.0%}"
    if shown == "0%" and value > 0:
        return f"{value:.1%}" if value >= 0.0005 else "<0.1%"
    if shown == "100%" and value < 1:
        return f"{value:.1%}" if value < 0.9995 else ">99.9%"
    return shown


def ratio(value: Ratio | None) -> str:
    """'1.23× [1.18, 1.29]'."""
    if value is None:
        return NONE
    return f"{value['value']:.2f}× [{value['low']:.2f}, {value['high']:.2f}]"


def break_even(evaluation: dict[str, Any]) -> str:
    """The break-even acceptance; 'never' where not even full acceptance would pay."""
    if evaluation.get("c") is None or evaluation.get("v") is None or varies(evaluation):
        return NONE
    value = evaluation.get("break_even_acceptance")
    return "never" if value is None else number(value)


def varies(evaluation: dict[str, Any]) -> bool:
    """Whether draft lengths vary, so that there is no one γ."""
    return (evaluation.get("policy") or "fixed").partition(":")[0] != "fixed"


def draft_length(evaluation: dict[str, Any]) -> str:
    """'4', or '≤ 8 by heuristic:most=8'."""
    most = evaluation.get("gamma")
    if not varies(evaluation):
        return NONE if most is None else str(most)
    return f"≤ {most} by {evaluation['policy']}"


def duration(seconds: float | None) -> str:
    """'0.8 s', '42 s', '3 min 5 s', '2 h 7 min'."""
    if seconds is None:
        return NONE
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def drafter_name(row: Row) -> str:
    """The drafter, with its rule where that does not keep the target's distribution, and a word
    where the target is not the run's."""
    evaluation = row["evaluation"]
    lossy = evaluation.get("lossless") is False
    notes = [f"{evaluation.get('rule')}, LOSSY"] if lossy else []
    notes += ["new target"] if evaluation.get("drift") else []
    return row["drafter"] + (f" ({', '.join(notes)})" if notes else "")


# The columns of the table: heading, and the cell of a row.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "stage": lambda row: row["stage"],
    "drafter": drafter_name,
    "acceptance rate": lambda row: number(row["evaluation"].get("acceptance_rate")),
    "draft efficiency": lambda row: number(row["evaluation"].get("draft_efficiency")),
    "tokens/step": lambda row: number(row["evaluation"].get("tokens_per_step")),
    "c": lambda row: number(row["evaluation"].get("c")),
    "break-even acceptance": lambda row: break_even(row["evaluation"]),
    "speed-up": lambda row: ratio(row["evaluation"].get("speedup")),
}
# Headings as the terminal has room for them.
SHORT = {
    "acceptance rate": "acceptance rate α",
    "tokens/step": "tokens/ step",
    "break-even acceptance": "break- even α",
}
# The further figures, on request.
DETAILS: dict[str, Callable[[dict[str, Any]], str]] = {
    "γ": draft_length,
    "γ, mean": lambda e: number((e.get("draft_lengths") or {}).get("mean_gamma")),
    "v": lambda e: number(e.get("v")),
    "tokens per verification pass": lambda e: number(e.get("verify_width")),
    "nodes per step": lambda e: number(e.get("nodes_per_step")),
    "la/k, mean over drafts": lambda e: number((e.get("draft_lengths") or {}).get("la_k")),
    "plain steps": lambda e: percent((e.get("draft_lengths") or {}).get("plain_share")),
    "draft, verify, overhead, ms per step": lambda e: _milliseconds(e),
    "speed-up without prefill": lambda e: ratio(e.get("speedup_without_prefill")),
    "speed-up, texts that do not repeat": lambda e: ratio(e.get("speedup_not_repeating")),
    "tokens/step, texts that do not repeat": lambda e: number(
        e.get("tokens_per_step_not_repeating")
    ),
    "speed-up over generate()": lambda e: ratio(e.get("vs_generate")),
    "plain decoding over generate()": lambda e: ratio(e.get("plain_vs_generate")),
    "identical to plain": lambda e: percent(e.get("identical_to_plain")),
    "identical within rounding": lambda e: percent(e.get("identical_within_rounding")),
    "repetition": lambda e: percent(e.get("repetition")),
    "KL(original‖new target), nats per token": lambda e: number(
        (e.get("drift") or {}).get("kl"), 4
    ),
    "perplexity of held-out text, original → new target": lambda e: _perplexities(e),
    "verification passes": lambda e: f"{e['steps']:,}" if e.get("steps") is not None else NONE,
}


def _perplexities(evaluation: dict[str, Any]) -> str:
    drift = evaluation.get("drift")
    if not drift:
        return NONE
    return f"{number(drift['perplexity_original'])} → {number(drift['perplexity_new'])}"


def moved(evaluation: dict[str, Any]) -> str:
    """Of a drafter whose target was trained too: what its figures are towards, and the drift."""
    drift = evaluation["drift"]
    return (
        "the target was trained too; speed-up and losslessness are towards the new target. On "
        f"{drift['tokens']:,} held-out tokens KL(original‖new) is {drift['kl']:.4f} nats per token "
        f"and perplexity {_perplexities(evaluation)}"
    )


def _milliseconds(evaluation: dict[str, Any]) -> str:
    parts = (evaluation.get("draft_lengths_timed") or {}).get("ms_per_step") or {}
    shown = [number(parts.get(part)) for part in ("draft", "verify", "overhead")]
    return NONE if set(shown) == {NONE} else ", ".join(shown)


def table(report: dict[str, Any]) -> Table:
    """The rows for the terminal; print `footnotes` below it."""
    # Narrow enough for 80 columns.
    made = Table(
        title=Text(f"run {report['name']}"),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    rows = [[cell(row) for cell in COLUMNS.values()] for row in report["rows"]]
    for index, heading in enumerate(COLUMNS):
        cells = [row[index] for row in rows]
        if heading in ("stage", "drafter"):
            short = max(map(len, cells), default=0) <= 13
            made.add_column(heading, overflow="fold", no_wrap=heading == "drafter" and short)
            continue
        # A fixed width: headings wrap at words, figures never do.
        heading = SHORT.get(heading, heading)
        width = max(map(len, [*heading.split(), *cells]))
        made.add_column(heading, justify="right", width=width)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def footnotes(report: dict[str, Any]) -> list[str]:
    """What the table's figures were measured with, and what they must be read with."""
    rows = report["rows"]
    if not rows:
        return ["No drafter was evaluated yet."]
    target = report["config"].get("target") or {}
    lines = [
        f"γ {_each(report, 'gamma', draft_length)}; {_each(report, 'sampling', _sampling)}; "
        f"rule {_each(report, 'rule', rule_name)}" + _shapes(report),
        f"{_each(report, 'prompts')} prompts for acceptance, {_each(report, 'timed_prompts')} of "
        "them timed; intervals are 95% bootstrap intervals over the timed prompts",
        f"target {target.get('model', NONE)} in {_dtype(report)}; {machine(report)}",
        *_own_depths(report),
    ]
    for label, row in zip(labels(report), rows, strict=True):
        if row["evaluation"].get("drift"):
            lines.append(f"{_bare(label)}: {moved(row['evaluation'])}")
    plain = [r["value"] for r in _all(rows, "plain_vs_generate")]
    if plain:
        line = f"plain decoding runs at {_range(plain, '{:.2f}×')} the speed of generate()"
        if min(plain) < 0.95:
            line += ": it is slower, so the speed-ups are too high; see those over generate()"
        lines.append(line)
    identical, close = _all(rows, "identical_to_plain"), _all(rows, "identical_within_rounding")
    if identical:
        line = f"greedy texts identical to plain decoding: {_range(identical)}"
        if close and close != identical:
            line += f"; up to choices within rounding: {_range(close)}"
        lines.append(line)
    repetition, repeating = _all(rows, "repetition"), _all(rows, "share_repeating")
    if repetition:
        lines.append(
            f"tokens inside a repeated 8-gram: {_range(repetition)}; outputs with one: "
            f"{_range(repeating)}. Loops flatter every drafter"
        )
    return lines


def _own_depths(report: dict[str, Any]) -> Iterator[str]:
    """A line for every drafter whose drafts are as deep as they are, not as γ says."""
    asked = (report["config"].get("evaluation") or {}).get("gamma")
    for label, row in zip(labels(report), report["rows"], strict=True):
        evaluation = row["evaluation"]
        most, policy = evaluation.get("gamma"), evaluation.get("policy") or "fixed"
        if asked and most and most != asked and policy == "fixed" and not is_baseline(report, row):
            yield (
                f"{_bare(label)} drafts {most} deep ({evaluation.get('drafts')}): γ {asked} is for "
                "drafts that have no depth of their own"
            )


def rule_name(evaluation: dict[str, Any]) -> str:
    """'speculative (lossless)' or 'NAME (LOSSY: …)'."""
    if evaluation.get("lossless") is False:
        return f"{evaluation.get('rule')} (LOSSY: the text is not distributed as the target's)"
    return f"{evaluation.get('rule')} (lossless)"


def drafted_in(evaluation: dict[str, Any]) -> str:
    """'chain', 'sequoia:nodes=8', or 'its own, a tree of 12 nodes, 4 deep' for a stored one."""
    drafts = evaluation.get("drafts") or "chain"
    return evaluation.get("shape") or (drafts if drafts == "chain" else f"its own, a {drafts}")


def machine(report: dict[str, Any]) -> str:
    """The machine of the run's last start."""
    found = (report["provenance"] or [{}])[-1].get("machine") or {}
    processor = found.get("processor") or "unknown processor"
    cores, threads = found.get("cores"), found.get("threads")
    text = processor + (f", {cores} cores" if cores else "")
    text += f", {threads} thread{'s' if threads != 1 else ''}" if threads else ""
    return ", ".join([*(found.get("gpus") or []), text])


def _each(
    report: dict[str, Any],
    key: str,
    show: Callable[[dict[str, Any]], str] | None = None,
) -> str:
    """A setting as most rows have it, with the rows that have another: '4 (ngram: 8)'."""
    pairs = [
        (_bare(label), show(row["evaluation"]) if show else str(row["evaluation"].get(key, NONE)))
        for label, row in zip(labels(report), report["rows"], strict=True)
    ]
    values = [value for _, value in pairs]
    usual = max(reversed(values), key=values.count)
    others = [f"{label}: {value}" for label, value in pairs if value != usual]
    return usual + (f" ({', '.join(others)})" if others else "")


def _shapes(report: dict[str, Any]) -> str:
    """Said where one was asked for, or some drafts are no chains."""
    found = [row["evaluation"] for row in report["rows"]]
    if all(not e.get("shape") and drafted_in(e) == "chain" for e in found):
        return ""
    return f"; shape {_each(report, 'shape', drafted_in)}"


def _bare(label: str) -> str:
    """A row's label without its γ."""
    return label.partition(" γ=")[0]


def _sampling(evaluation: dict[str, Any]) -> str:
    sampling = evaluation.get("sampling") or {}
    parts = []
    if not sampling.get("temperature"):
        parts.append("greedy decoding")
    else:
        parts.append(f"temperature {sampling['temperature']:g}")
        if sampling.get("top_k"):
            parts.append(f"top-k {sampling['top_k']}")
        if sampling.get("top_p", 1.0) < 1:
            parts.append(f"top-p {sampling['top_p']:g}")
        if sampling.get("min_p"):
            parts.append(f"min-p {sampling['min_p']:g}")
    if sampling.get("repetition_penalty", 1.0) != 1:
        parts.append(f"repetition penalty {sampling['repetition_penalty']:g}")
    if evaluation.get("draft_temperature") is not None:
        parts.append(f"drafter's temperature {evaluation['draft_temperature']:g}")
    return ", ".join(parts)


def _dtype(report: dict[str, Any]) -> str:
    dtypes = sorted({row["evaluation"].get("dtype") or NONE for row in report["rows"]})
    return ", ".join(dtypes) or NONE


def _all(rows: list[Row], key: str) -> list[Any]:
    return [row["evaluation"][key] for row in rows if row["evaluation"].get(key) is not None]


def _range(values: list[float], form: str = "") -> str:
    shown = [form.format(v) if form else percent(v) for v in (min(values), max(values))]
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"


# The headline.


def headline(report: dict[str, Any]) -> dict[str, Any] | None:
    """The best drafter a stage made, in words; None where nothing was evaluated.

    {label, row, verdict, against, before, baseline, warnings}. The best is the fastest, or without
    times the one with most tokens per step; `before` are its figures before all training, and
    `baseline` is the best of the drafters that need none.
    """
    named = list(zip(labels(report), report["rows"], strict=True))
    if not named:
        return None
    baselines = [pair for pair in named if is_baseline(report, pair[1])]
    trained = [pair for pair in named if not is_baseline(report, pair[1])]
    label, row = max(trained or baselines, key=lambda pair: _worth(pair[1]))
    evaluation = row["evaluation"]
    start = f"{_first_stage(report, row['stage'])} (start)"
    before = next((r["evaluation"] for _, r in named if r["stage"] == start), None)
    against: tuple[str, Row] | None = None
    if trained and baselines:
        against = max(baselines, key=lambda pair: _worth(pair[1]))
    warnings = []
    if not trained:
        warnings.append("No trained drafter was evaluated yet; this is an untrained baseline.")
    if evaluation.get("lossless") is False:
        warnings.append(
            f"The rule {evaluation.get('rule')} is LOSSY: the text is not distributed as the "
            "target's. Do not compare this speed-up with lossless ones."
        )
    if evaluation.get("drift"):
        found = moved(evaluation)
        warnings.append(f"{found[0].upper()}{found[1:]}. The original target's text is another.")
    within = evaluation.get("identical_within_rounding")
    if evaluation.get("lossless") and within is not None and within < 1:
        warnings.append(
            f"Only {percent(within)} of the greedy texts equal plain decoding's, rounding allowed "
            "for; a lossless rule should change nothing."
        )
    generate = evaluation.get("plain_vs_generate")
    if generate and generate["value"] < 0.95:
        warnings.append(
            f"Plain decoding runs at {generate['value']:.2f}× the speed of generate(), so the "
            "speed-up over it is too high; read the one over generate() instead."
        )
    if row["stage"].endswith(" (start)"):
        warnings.append("The best row is a drafter before its training: training did not help.")
    return {
        "label": label,
        "row": row,
        "verdict": _verdict(evaluation),
        "against": _against(evaluation, against) if against else None,
        "before": before,
        "baseline": against,
        "warnings": warnings,
    }


def _first_stage(report: dict[str, Any], stage: str) -> str:
    """The stage that began the drafter with which this one went on (`drafter.stage`)."""
    settings = {entry["name"]: entry for entry in report["config"].get("stages", [])}
    while earlier := (settings.get(stage, {}).get("drafter") or {}).get("stage"):
        # Only an earlier stage can be named, so this ends.
        stage = earlier
    return stage


def _worth(row: Row) -> tuple[float, float]:
    speedup = row["evaluation"].get("speedup")
    return (
        speedup["value"] if speedup else 0.0,
        row["evaluation"].get("tokens_per_step") or 0.0,
    )


def _verdict(evaluation: dict[str, Any]) -> str:
    speedup = evaluation.get("speedup")
    if speedup is None:
        tokens = number(evaluation.get("tokens_per_step"))
        return f"yields {tokens} tokens per step; no prompt was timed, so its speed is not known"
    if speedup["low"] > 1:
        return f"decodes {speedup['value']:.2f} times as fast as the target alone"
    if speedup["high"] < 1:
        return (
            f"is slower than the target alone, at {speedup['value']:.2f} times its speed; "
            "it does not pay on this machine"
        )
    return (
        f"is neither clearly faster nor clearly slower than the target alone "
        f"({speedup['value']:.2f} times its speed; the interval includes 1)"
    )


def _against(evaluation: dict[str, Any], baseline: tuple[str, Row]) -> str:
    label, row = _bare(baseline[0]), baseline[1]
    ours, theirs = evaluation.get("speedup"), row["evaluation"].get("speedup")
    if ours is None or theirs is None:
        mine, other = evaluation.get("tokens_per_step"), row["evaluation"].get("tokens_per_step")
        return f"yields {number(mine)} tokens per step, {label} yields {number(other)}"
    if ours["low"] > theirs["high"]:
        return f"is faster than {label}, which needs no training"
    if ours["high"] < theirs["low"]:
        return f"is slower than {label}, which needs no training: this drafter is not finished"
    return f"is not clearly different from {label}, which needs no training (intervals overlap)"


# The page.


def html(report: dict[str, Any], samples: dict[str, list[Any]]) -> str:
    """The page, with nothing that must be loaded from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "percent": percent,
        "ratio": ratio,
        "duration": duration,
    }
    best = headline(report)
    named = list(zip(labels(report), report["rows"], strict=True))
    return environment.get_template("report.html.j2").render(
        report=report,
        best=best,
        columns=list(COLUMNS),
        cells=[[cell(row) for cell in COLUMNS.values()] for row in report["rows"]],
        best_index=report["rows"].index(best["row"]) if best else None,
        details=[
            (heading, [show(row["evaluation"]) for _, row in named])
            for heading, show in DETAILS.items()
        ],
        labels=[label for label, _ in named],
        footnotes=footnotes(report),
        plots=_plots(report),
        stages=[_stage(index, stage) for index, stage in enumerate(report["stages"])],
        samples=_samples(samples, best),
        config=yaml.safe_dump(report["config"], sort_keys=False, allow_unicode=True),
        few=plots.FEW,
        light=plots.variables(plots.LIGHT),
        dark=plots.variables(plots.DARK),
    )


def _plots(report: dict[str, Any]) -> dict[str, Markup]:
    names, evaluations = labels(report), [row["evaluation"] for row in report["rows"]]
    colours, used = [], 0
    for row in report["rows"]:
        colours.append(plots.SERIES[used % len(plots.SERIES)])
        if is_baseline(report, row):
            colours[-1] = plots.REFERENCE
        else:
            used += 1

    def reference(key: str) -> tuple[str, float] | None:
        found = [
            (_bare(name), row["evaluation"].get(key))
            for name, row in zip(names, report["rows"], strict=True)
            if row["drafter"] == "ngram" and row["evaluation"].get(key) is not None
        ]
        return max(found, key=lambda pair: pair[1]) if found else None

    def figures(key: str) -> list[Any]:
        return [evaluation.get(key) for evaluation in evaluations]

    made = {
        "acceptance": plots.bars(
            "acceptance",
            names,
            figures("acceptance_rate"),
            colours,
            axis="acceptance rate α",
            end=1.0,
            reference=reference("acceptance_rate"),
            marks=figures("break_even_acceptance"),
            mark_label="break-even",
        ),
        "tokens": plots.bars(
            "tokens",
            names,
            figures("tokens_per_step"),
            colours,
            axis="tokens per step τ (plain decoding: 1)",
            reference=reference("tokens_per_step"),
        ),
        "speed": plots.intervals(
            "speed", names, figures("speedup"), colours, axis="speed-up over plain decoding (×)"
        ),
        "positions": plots.by_position(
            "positions",
            names,
            [found or [] for found in figures("acceptance_by_position")],
            [found or [] for found in figures("reached_by_position")],
            colours,
        ),
        "accepted": _accepted_plot(names, evaluations),
        "time": _time_plot(names, evaluations),
    }
    for index, stage in enumerate(report["stages"]):
        summary = stage["summary"]
        training = summary.get("training") or {}
        made[f"loss-{index}"] = plots.curves(
            f"loss-{index}", training.get("history") or [], summary.get("losses") or []
        )
        made[f"stream-{index}"] = plots.stream(
            f"stream-{index}", summary.get("windows") or [], summary.get("rounds") or []
        )
        made[f"dev-{index}"] = plots.agreement(f"dev-{index}", training.get("dev") or [])
    return {name: Markup(svg) for name, svg in made.items()}  # plots escape what they write


def _accepted_plot(names: list[str], evaluations: list[dict[str, Any]]) -> str:
    passes = [evaluation.get("steps_by_accepted") or [] for evaluation in evaluations]
    depth = max(map(len, passes), default=0)
    # Long drafts: what is kept beyond MOST_KEPT is one part, or none could be told apart.
    parts = [
        (str(kept), [sum(row[kept : kept + 1]) / (sum(row) or 1) for row in passes])
        for kept in range(min(depth, MOST_KEPT))
    ]
    if depth > MOST_KEPT:
        beyond = [sum(row[MOST_KEPT:]) / (sum(row) or 1) for row in passes]
        last = MOST_KEPT if depth == MOST_KEPT + 1 else f"{MOST_KEPT}+"
        parts.append((str(last), beyond))
    return plots.stacks(
        "accepted",
        names,
        parts,
        axis="share of verification passes",
        title="drafted tokens accepted in one pass",
    )


def _time_plot(names: list[str], evaluations: list[dict[str, Any]]) -> str:
    """Each drafter's time as a share of plain decoding's for the same prompts."""

    def shares(seconds: dict[str, float] | None, whole: float) -> list[float | None]:
        return [(seconds or {}).get(part, 0.0) / whole if whole else None for part in TIME]

    timed = [evaluation.get("seconds") or {} for evaluation in evaluations]
    wholes = [sum((s.get("plain") or {}).get(part, 0.0) for part in TIME) for s in timed]
    rows = [shares(s.get("drafted"), whole) for s, whole in zip(timed, wholes, strict=True)]
    if not any(wholes):
        return ""
    first = next(i for i, whole in enumerate(wholes) if whole)
    rows = [shares(timed[first]["plain"], wholes[first]), *rows]
    return plots.stacks(
        "time",
        ["plain decoding", *names],
        [(part, [row[i] for row in rows]) for i, part in enumerate(TIME)],
        list(TIME.values()),
        axis="wall time, share of plain decoding's",
        title="part of the decoding loop",
        line=("plain decoding", 1.0),
        totals=True,
    )


def _stage(index: int, stage: dict[str, Any]) -> dict[str, Any]:
    """A stage for the page: its name, kind and figures, and its plot's name."""
    summary = dict(stage["summary"])
    training = dict(summary.pop("training", None) or {})
    for plotted in ("windows", "rounds"):
        summary.pop(plotted, None)
    losses = [e["loss"] for e in training.pop("history", None) or [] if e.get("loss") is not None]
    figures = {"loss": f"{losses[0]:.3f} → {losses[-1]:.3f}"} if losses else {}
    for dev in (training.pop("dev", None) or [])[-1:]:
        figures |= {f"dev {k.replace('_', ' ')}": f"{v:.3f}" for k, v in dev.items() if k != "step"}
    clock = training.pop("clock", None) or {}
    if clock:
        whole = sum(clock.values())
        shares = sorted(clock.items(), key=lambda item: -item[1])
        figures["time in"] = ", ".join(f"{k} {percent(v / whole)}" for k, v in shares)
    for key, value in {**training, **summary}.items():
        unit = next((end for end in _UNITS if key.endswith(end)), "")
        name = re.sub(r"seconds$", "time", key) if unit == "seconds" else key
        figures[name.removesuffix("_bytes").replace("_", " ")] = _plain_value(value, unit)
    name, kind = stage["name"], stage["kind"]
    captions = [(f"{plot}-{index}", caption) for plot, caption in STAGE_PLOTS.items()]
    return {"name": name, "kind": kind, "figures": figures, "plots": captions}


STAGE_PLOTS = {
    "loss": "Training loss. Bold: running mean over a tenth of the steps.",
    "stream": "Acceptance over the stream, by windows of requests in their order.",
    "dev": "Agreement with the target on text it wrote for dev prompts.",
}
# Endings of keys that say how a value is shown.
_UNITS = ("_share", "seconds", "_bytes")


def _plain_value(value: Any, unit: str) -> str:
    if value is None:
        return NONE
    if isinstance(value, dict):
        pairs = [f"{str(k).replace('_', ' ')} {_plain_value(v, '')}" for k, v in value.items()]
        return ", ".join(pairs) or NONE
    if isinstance(value, list | tuple):
        return ", ".join(_plain_value(v, "") for v in value) or NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if unit == "seconds":
        return duration(value)
    if unit == "_share":
        return percent(value)
    if unit == "_bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _samples(samples: dict[str, list[Any]], best: dict[str, Any] | None) -> dict[str, Any] | None:
    """{label, texts} of the best row, else of the last row that has any."""
    chosen = best["label"] if best and samples.get(best["label"]) else None
    label = chosen or next((name for name in reversed(samples) if samples[name]), None)
    if label is None:
        return None
    texts = []
    for sample in samples[label][:SAMPLES]:
        text = {key: _cut(sample.get(key)) for key in ("prompt", "plain", "drafted")}
        same = sample.get("plain") == sample.get("drafted") if text["plain"] else None
        texts.append({**text, "same": same})
    return {"label": label, "texts": texts}


def _cut(text: Any) -> str:
    whole = "" if text is None else str(text)
    return whole if len(whole) <= SAMPLE_CHARACTERS else whole[:SAMPLE_CHARACTERS] + " […]"
