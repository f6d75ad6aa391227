"""Is a drafter for each domain better than one for all, if both learn from the same requests?

    python -m benchmarks.routed --data DIR [--quick] [--json FILE] [--runs DIR]

A stream of prompts mixes maths, code and general requests, one of each in turn. The files, the
target, the learning and the offline distillation on maths are those of `benchmarks.online`, with
the small language model only. Every arm starts from the same drafter and serves the same requests:

    frozen          never changed
    one for all     one drafter that learns from all requests
    one for each    three drafters; each serves the requests of its domain and learns from them

Both learning arms take a round after every 20 of the requests that they learn from, so they take
as many optimizer steps in total. Acceptance is that of the last 40 requests of each domain, with
95% intervals over requests. Runs are kept and continue where they stopped.
"""

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common import (
    JsonOption,
    RunsOption,
    describe_machine,
    execute_run,
    format_interval,
    read_summary,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.online import END, acceptance, read_counts
from benchmarks.shared.domain_prompts import (
    CodeOption,
    DataOption,
    GeneralOption,
    MathsOption,
    QuickOption,
    RequestsOption,
    domain_files,
    make_settings,
    prepare,
)
from benchmarks.shared.online_runs import DOMAINS, GAMMA, routed_config
from decode.base.artifact import write_file

FROZEN, ONE, EACH = "frozen", "one for all", "one for each"


def main(
    data: DataOption = None,
    maths: MathsOption = None,
    code: CodeOption = None,
    general: GeneralOption = None,
    quick: QuickOption = False,
    requests: RequestsOption = None,
    json_file: JsonOption = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Distil, serve with every arm, print the table."""
    reporter = start_benchmark()
    files = domain_files(data, maths, code, general)
    settings = make_settings(quick, runs, requests)
    size = settings.requests
    prepare(files, settings.data, {"train": size, "stream": size})
    mix(settings.data)
    run, _ = execute_run(routed_config(settings), reporter)
    stages = ("frozen", "one", *DOMAINS)
    figures = arm_figures({stage: read_counts(run, stage) for stage in stages})
    summaries = {stage: read_summary(run, stage) for stage in stages}
    steps = {
        FROZEN: 0,
        ONE: summaries["one"]["optimizer_steps"],
        EACH: sum(summaries[domain]["optimizer_steps"] for domain in DOMAINS),
    }
    reporter.table(arms_table(figures, steps))
    if json_file:
        write_json(
            json_file,
            {
                "ratios": {
                    f"acceptance_{domain}_each_vs_one": figures[EACH][domain]["value"]
                    / figures[ONE][domain]["value"]
                    for domain in DOMAINS
                },
                "arms": figures,
                "steps": steps,
                "summaries": summaries,
                "settings": run.config.model_dump(mode="json"),
                "machine": describe_machine(),
            },
        )


def mix(directory: Path) -> None:
    """Write the stream: one request of each domain in turn."""
    streams = [
        (directory / f"{domain}-stream.jsonl").read_text().splitlines() for domain in DOMAINS
    ]
    turns = zip(*streams, strict=True)
    write_file(directory / "mixed-stream.jsonl", "".join(f"{x}\n" for turn in turns for x in turn))


def arm_figures(counts: dict[str, np.ndarray]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the acceptance at the end of each domain, by arm.

    counts: by stage, int [requests, 4], see `train.online.stream_progress.COUNTS`. The stages
    `frozen` and `one` served the mixed stream, and each other one its domain.
    """
    count = len(DOMAINS)
    arms: dict[str, Any] = {FROZEN: {}, ONE: {}, EACH: {}}
    for place, domain in enumerate(DOMAINS):
        arms[FROZEN][domain] = acceptance(counts["frozen"][place::count][-END:])
        arms[ONE][domain] = acceptance(counts["one"][place::count][-END:])
        arms[EACH][domain] = acceptance(counts[domain][-END:])
    return arms


def arms_table(figures: dict[str, dict[str, dict[str, float]]], steps: dict[str, int]) -> Table:
    """Return the table of all arms. steps: optimizer steps of rounds that were kept, by arm."""
    rows = [
        {"arm": arm}
        | {domain: format_interval(figures[arm][domain], 3) for domain in DOMAINS}
        | {"kept steps": str(steps[arm])}
        for arm in figures
    ]
    title = f"acceptance rate at γ = {GAMMA}, last {END} requests of each domain"
    return rows_table(title, rows, left=1 + len(DOMAINS))


if __name__ == "__main__":
    run_command(main)
