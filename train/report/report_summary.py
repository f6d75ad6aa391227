"""A report in sentences: the headline about its best drafter, and the footnotes of its table."""

from collections.abc import Callable, Iterator
from typing import Any

from decode.base.install_command import install_command
from train.base.run_files import START
from train.measure.intervals import FEWEST_PROMPTS
from train.report.drafter_table import is_baseline, row_labels, without_gamma
from train.report.format_figures import (
    MISSING,
    Row,
    disturbance,
    draft_length,
    draft_shape,
    format_machine,
    format_number,
    format_ratio,
    format_share,
    rule_name,
    target_drift,
)
from train.report.plots import can_plot

# What it means that texts differ, and yet all are identical up to rounding.
ROUNDING = (
    "where two texts differ, the two best tokens have logits so close that rounding decides; a "
    "pass over several tokens rounds in another order than a pass over one, so both tokens are "
    "the target's own choice, and the drafter changed nothing"
)


def headline(report: dict[str, Any]) -> dict[str, Any] | None:
    """Describe the best trained drafter in words. Returns None if nothing was evaluated.

    Returns {lead, label, row, verdict, before, compared, ranking, warnings}. The best drafter is
    the fastest one; without times, the one with the most tokens per step. A drafter before its
    training is not a trained one. `lead` says what it is the best of. `before` holds its figures
    before all training. `compared` holds the rows a reader should judge it by, each {what, label,
    evaluation}: the drafter itself, the best drafter that needs no training, and both combined, in
    turn or in one tree, if that was measured. `ranking` says which of them is fastest; it is "" if
    there is nothing to compare.
    """
    labelled_rows = list(zip(row_labels(report), report["rows"], strict=True))
    if not labelled_rows:
        return None
    baselines = [pair for pair in labelled_rows if is_baseline(report, pair[1])]
    # Of several drafters: `ngram+heads` or `ngram++heads`.
    combined = [pair for pair in labelled_rows if "+" in pair[1]["drafter"]]
    starts = [pair for pair in labelled_rows if pair[1]["stage"].endswith(START)]
    others = (baselines, combined, starts)
    trained = [pair for pair in labelled_rows if not any(pair in kind for kind in others)]
    label, row = max(trained or starts or baselines, key=lambda pair: _speed_and_tokens(pair[1]))
    evaluation = row["evaluation"]
    start = f"{_first_stage(report, row['stage'])}{START}"
    first = next((r for _, r in starts if r["stage"] == start), None)
    what = "trained" if trained else "before its training" if starts else "untrained"
    compared = [_compared_entry(what, label, row)]
    if (trained or starts) and baselines:
        best_baseline = max(baselines, key=lambda pair: _speed_and_tokens(pair[1]))
        compared.append(_compared_entry("untrained", *best_baseline))
    # The last row of each way: in turn, and in one tree.
    ways = {
        ("in one tree" if "++" in row["drafter"] else "in turn"): (label, row)
        for label, row in combined
    }
    compared += [_compared_entry(way, *pair) for way, pair in ways.items()]
    warnings = []
    if not trained and not starts:
        warnings.append("No trained drafter was evaluated yet; this is an untrained baseline.")
    if evaluation.get("lossless") is False:
        warnings.append(
            f"The rule {evaluation.get('rule')} is LOSSY: the text is not distributed as the "
            "target's. Do not compare this speed-up with lossless ones."
        )
    if evaluation.get("drift"):
        drift = target_drift(evaluation)
        warnings.append(
            f"{drift[0].upper()}{drift[1:]}. The original target generates different text."
        )
    identical = evaluation.get("identical_within_rounding")
    if evaluation.get("lossless") and identical is not None and identical < 1:
        warnings.append(
            f"Only {format_share(identical)} of the greedy texts equal plain decoding's, even with "
            "an allowance for rounding; a lossless rule should change nothing."
        )
    generate = evaluation.get("plain_vs_generate")
    if generate and generate["value"] < 0.95:
        warnings.append(
            f"Plain decoding runs at {generate['value']:.2f}× the speed of generate(), so the "
            "speed-up over it is too high; use the speed-up over generate() instead."
        )
    warnings += [
        f"The speed of {entry['label']} is not reliable: {reason}."
        for entry in compared
        if (reason := disturbance(entry["evaluation"]))
    ]
    if not trained and starts:
        warnings.append("No trained drafter was evaluated yet; this is one before its training.")
    if trained and first and _speed_and_tokens(first) > _speed_and_tokens(row):
        warnings.append("The drafter was better before its training: training did not help.")
    return {
        "lead": "The best trained drafter on its own" if trained else "The best drafter so far",
        "label": label,
        "row": row,
        "verdict": _verdict(evaluation),
        "before": first and first["evaluation"],
        "compared": compared,
        "ranking": ranking(compared),
        "warnings": warnings,
    }


def _first_stage(report: dict[str, Any], stage: str) -> str:
    """Return the stage that first made this stage's drafter, following `drafter.stage` back."""
    settings = {entry["name"]: entry for entry in report["config"].get("stages", [])}
    while earlier := (settings.get(stage, {}).get("drafter") or {}).get("stage"):
        # A config can name only an earlier stage, so this ends.
        stage = earlier
    return stage


def _speed_and_tokens(row: Row) -> tuple[float, float]:
    speedup = row["evaluation"].get("speedup")
    return (
        speedup["value"] if speedup else 0.0,
        row["evaluation"].get("tokens_per_step") or 0.0,
    )


def _verdict(evaluation: dict[str, Any]) -> str:
    speedup = evaluation.get("speedup")
    if speedup is None:
        tokens = format_number(evaluation.get("tokens_per_step"))
        return f"yields {tokens} tokens per step; no prompt was timed, so its speed is not known"
    if "low" not in speedup:
        return (
            f"decodes {speedup['value']:.2f} times as fast as the target alone on the timed "
            f"prompts, which are fewer than {FEWEST_PROMPTS}: too few for an interval or a verdict"
        )
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


def comparison(best: dict[str, Any]) -> str:
    """Return the compared rows of a headline in one line."""
    parts = []
    for entry in best["compared"]:
        evaluation = entry["evaluation"]
        tokens = f"{format_number(evaluation.get('tokens_per_step'))} tokens per step"
        speedup = evaluation.get("speedup")
        figures = f"{format_ratio(speedup)}, {tokens}" if speedup else tokens
        parts.append(f"{entry['label']} ({entry['what']}) {figures}")
    return "; ".join(parts)


def _compared_entry(what: str, label: str, row: Row) -> dict[str, Any]:
    return {"what": what, "label": without_gamma(label), "evaluation": row["evaluation"]}


def ranking(compared: list[dict[str, Any]]) -> str:
    """Return a sentence that names the fastest row, if all have intervals. Overlapping ones count
    as equal.

    compared: rows with their label and evaluation."""
    if len(compared) < 2:
        return ""
    speedups = [(e["label"], s) for e in compared if (s := e["evaluation"].get("speedup"))]
    if len(speedups) < len(compared):
        return "Not all of them were timed, so the fastest one is not known."
    if not all("low" in speedup for _, speedup in speedups):
        return (
            f"Fewer than {FEWEST_PROMPTS} prompts were timed, which is too few to say which of "
            "them is the fastest."
        )
    fastest, best = max(speedups, key=lambda pair: pair[1]["value"])
    others = [pair for pair in speedups if pair[0] != fastest]
    level = " and ".join(label for label, s in others if s["high"] >= best["low"])
    slower = " and ".join(label for label, s in others if s["high"] < best["low"])
    if not level:
        return f"{fastest} is faster than {slower}."
    text = f"{fastest} is not clearly faster than {level} (intervals overlap)"
    return f"{text}, but it is faster than {slower}." if slower else f"{text}."


def _ranks(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Which processes measured what, if there were several."""
    ranks = max(row["evaluation"].get("ranks", 1) for row in rows)
    if ranks > 1:
        yield (
            f"{ranks} processes shared the prompts for acceptance; one of them measured all times, "
            "while the others waited"
        )


def footnotes(report: dict[str, Any]) -> list[str]:
    """Return the settings behind the table's figures, and cautions for the reader, as lines."""
    rows = report["rows"]
    if not rows:
        return ["No drafter was evaluated yet."]
    target = report["config"].get("target") or {}
    lines = [
        f"γ {_setting(report, 'gamma', draft_length)}; {_setting(report, 'sampling', _sampling)}; "
        f"rule {_setting(report, 'rule', rule_name)}" + _shapes(report),
        f"{_setting(report, 'prompts')} prompts for acceptance, "
        f"{_setting(report, 'timed_prompts', template='{} of them timed' + _batches(report))}; "
        f"{_intervals(report)}"
        f"{_speedup_basis(report)}",
        f"target {target.get('model', MISSING)} in {_dtype(report)}; {_machine(report)}",
        *_forwards(report),
        *_fixed_depths(report),
        *_ranks(rows),
        *([] if can_plot() else [f"no plots: they need {install_command('plots')}"]),
        *(f"data: {note}" for note in report.get("data_notes") or ()),
        *(
            f"stage {stage['name']} was done before its {', '.join(changed)} changed: its figures "
            "are of the settings that Config shows"
            for stage in report.get("stages") or ()
            if (changed := stage.get("changed_since"))
        ),
    ]
    lines += _speeds_reached(report)
    lines += _forecasts(report)
    for label, row in zip(row_labels(report), rows, strict=True):
        name, evaluation = without_gamma(label), row["evaluation"]
        if evaluation.get("drift"):
            lines.append(f"{name}: {target_drift(evaluation)}")
        if parts := evaluation.get("parts"):
            figures = (
                f"{format_number(parts[part]['acceptance_rate'])} ({where}; tokens per step "
                f"{format_number(parts[part]['tokens_per_step'])})"
                for part, where in (("thinking", "while thinking"), ("answer", "outside of it"))
            )
            lines.append(f"{name}: acceptance rate {' and '.join(figures)}")
        if (structured := evaluation.get("structured")) and structured["answers"]:
            lines.append(
                f"{name}: {structured['answers']} answers with a schema, "
                f"{format_share(structured['complete'])} of them complete; "
                f"{format_share(structured['forced_share'])} of their tokens are forced"
            )
        if reason := disturbance(evaluation):
            lines.append(f"* {name}: {reason}")
        if (evaluation.get("v") or 1) < 1 and evaluation.get("break_even_note"):
            lines.append(f"{name} has no break-even: {evaluation['break_even_note']}")
    plain_speeds = [ratio["value"] for ratio in _figures(rows, "plain_vs_generate")]
    if plain_speeds:
        line = f"plain decoding runs at {_range(plain_speeds, '{:.2f}×')} the speed of generate()"
        if min(plain_speeds) < 0.95:
            line += ": it is slower, so the speed-ups are too high; see those over generate()"
        lines.append(line)
    identical = _figures(rows, "identical_to_plain")
    close = _figures(rows, "identical_within_rounding")
    if identical:
        line = f"greedy texts identical to plain decoding: {_range(identical)}"
        if min(identical) == 1:
            line += ", token by token, with no allowance for rounding"
        elif close and close != identical:
            line += f"; up to choices within rounding: {_range(close)}"
        lines.append(line)
        if min(identical) < 1 and close and min(close) == 1:
            lines.append(ROUNDING)
    repetition, repeating = _figures(rows, "repetition"), _figures(rows, "share_repeating")
    if repetition:
        lines.append(
            f"tokens inside a repeated 8-gram: {_range(repetition)}; outputs with one: "
            f"{_range(repeating)}. Repeated text makes every drafter look better"
        )
    return lines


def _intervals(report: dict[str, Any]) -> str:
    """Say what intervals mean, or why there are none."""
    unit = "batches" if _batches(report) else "prompts"
    speedups = _figures(report["rows"], "speedup")
    if speedups and not any("low" in speedup for speedup in speedups):
        return f"fewer than {FEWEST_PROMPTS} timed {unit} are too few for intervals"
    return f"intervals are 95% intervals over the timed {unit}"


def _batches(report: dict[str, Any]) -> str:
    """Describe how many prompts were timed together; "" if always one."""
    if all((row["evaluation"].get("timed_batch_size") or 1) == 1 for row in report["rows"]):
        return ""
    return f" in batches of {_setting(report, 'timed_batch_size')}"


def _speedup_basis(report: dict[str, Any]) -> str:
    """Note that speed-ups compare the time per token, if some do (texts of different lengths)."""
    bases = [row["evaluation"].get("speedup_basis") for row in report["rows"]]
    return "; speed-ups compare the time per token" if "time per token" in bases else ""


def _fixed_depths(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for every drafter that sets the depth of its drafts and ignores γ."""
    gamma = (report["config"].get("evaluation") or {}).get("gamma")
    for label, row in zip(row_labels(report), report["rows"], strict=True):
        evaluation = row["evaluation"]
        depth, policy = evaluation.get("gamma"), evaluation.get("policy") or "fixed"
        ignores_gamma = gamma and depth and depth != gamma and policy == "fixed"
        if ignores_gamma and not is_baseline(report, row):
            yield (
                f"{without_gamma(label)} drafts {depth} deep ({evaluation.get('drafts')}): γ "
                f"{gamma} does not apply, because the drafter sets the depth"
            )


def _machine(report: dict[str, Any]) -> str:
    """Describe the machine of the run's last start."""
    return format_machine((report["provenance"] or [{}])[-1].get("machine") or {})


def _forecasts(report: dict[str, Any]) -> Iterator[str]:
    """What was forecast of each drafter, beside what came out. Speeds of another machine, and of
    other loads, are left out."""
    forecast = report.get("forecast") or {}
    late = ", though it was made after the training" if forecast.get("afterwards") else ""
    lines = {line["name"]: line for line in forecast.get("lines", ())}
    for row in report["rows"]:
        line, evaluation = lines.get(row["stage"]), row["evaluation"]
        if line is None:
            continue
        figures = [("tokens per step", line["tokens_per_step"], evaluation.get("tokens_per_step"))]
        if not forecast.get("elsewhere"):
            speed = (evaluation.get("speedup_without_prefill") or {}).get("value")
            figures += [
                (f"speed-up after prompts of {cell['length']} tokens", cell["speedup"], speed)
                for cell in line["cells"]
                if cell["load"] == evaluation.get("timed_batch_size")
            ]
        for what, said, came_out in figures:
            if said is not None and came_out is not None:
                inside = said["low"] <= came_out <= said["high"]
                yield (
                    f"{row['stage']}: forecast {said['value']:.2f} [{said['low']:.2f}, "
                    f"{said['high']:.2f}] {what}, and {came_out:.2f} came out, "
                    f"{'inside' if inside else 'outside'} of the 90% interval{late}"
                )


def _speeds_reached(report: dict[str, Any]) -> Iterator[str]:
    """The share of the measured matrix speed of each stage that has one."""
    summaries = {stage["name"]: stage["summary"] for stage in report.get("stages") or ()}
    shares = {name: of.get("matrix_speed_share") for name, of in summaries.items()}
    if said := [f"{name} {format_share(share)}" for name, share in shares.items() if share]:
        yield f"share of the machine's measured matrix speed that stages reached: {', '.join(said)}"


def _setting(
    report: dict[str, Any],
    key: str,
    describe: Callable[[dict[str, Any]], str] | None = None,
    template: str = "{}",
) -> str:
    """Return the setting of most rows, and the rows with another value: '4, but 8 for ngram'.
    template: of the first part."""
    evaluations = [row["evaluation"] for row in report["rows"]]
    values = [describe(e) if describe else str(e.get(key, MISSING)) for e in evaluations]
    usual = max(reversed(values), key=values.count)
    rows: dict[str, list[str]] = {usual: []}
    for label, value in zip(row_labels(report), values, strict=True):
        rows.setdefault(value, []).append(without_gamma(label))
    others = [f"{value} for {', '.join(rows[value])}" for value in rows if value != usual]
    return ", but ".join([template.format(usual), *([", ".join(others)] if others else [])])


def _shapes(report: dict[str, Any]) -> str:
    """Name the draft shapes; "" if none was requested and all drafts are chains."""
    evaluations = [row["evaluation"] for row in report["rows"]]
    if all(not e.get("shape") and draft_shape(e) == "chain" for e in evaluations):
        return ""
    return f"; drafts: {_setting(report, 'shape', draft_shape)}"


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


def _forwards(report: dict[str, Any]) -> Iterator[str]:
    """Say what computed the target, if the evaluations know it."""
    if any(row["evaluation"].get("kernels") for row in report["rows"]):
        yield f"the target's forward: {_setting(report, 'kernels', _forward)}"


def _forward(evaluation: dict[str, Any]) -> str:
    kernels = evaluation.get("kernels")
    if not kernels:
        return MISSING
    name = {"lean": "lean", "transformers": "that of transformers"}[kernels["forward"]]
    return name + (", with the bits of plain decoding" if kernels["exact_bits"] else "")


def _dtype(report: dict[str, Any]) -> str:
    dtypes = sorted({row["evaluation"].get("dtype") or MISSING for row in report["rows"]})
    return ", ".join(dtypes) or MISSING


def _figures(rows: list[Row], key: str) -> list[Any]:
    return [row["evaluation"][key] for row in rows if row["evaluation"].get(key) is not None]


def _range(values: list[float], template: str = "") -> str:
    low, high = (
        template.format(v) if template else format_share(v) for v in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"
