"""Is a drafter for each domain better than one for all, and is an adapter as good as a full copy?

    python -m benchmarks.routed --data DIR [--part online|adapters] [--quick] [--json FILE]

Online: a stream of prompts mixes maths, code and general requests, one of each in turn. The files,
the target, the learning and the offline distillation on maths are those of `benchmarks.online`,
with the small language model only. Every arm starts from the same drafter and serves the same
requests:

    frozen          never changed
    one for all     one drafter that learns from all requests
    one for each    three drafters; each serves the requests of its domain and learns from them

Both learning arms take a round after every 20 of the requests that they learn from, so they take
as many optimizer steps in total. Acceptance is that of the last 40 requests of each domain, with
95% intervals over requests.

Adapters: a drafter that was distilled on maths is trained further on each other domain, for as many
steps again: as a full copy, and as an adapter (LoRA). Sizes are those of the files of weights.
Acceptance is that of the domain's held-out prompts. Runs are kept and continue where they stopped.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
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
from benchmarks.shared.domain_prompts import DomainOptions, make_settings, prepare
from benchmarks.shared.online_runs import (
    DOMAINS,
    GAMMA,
    SMALL_LM,
    START,
    Settings,
    adapter_base_config,
    adapters_config,
    routed_config,
)
from decode.base.artifact import write_file
from draftsmith.cli.command import takes_groups
from train.base.console import Reporter
from train.base.run_files import START as START_ROW


class Part(StrEnum):
    """What is compared."""

    ONLINE = "online"
    ADAPTERS = "adapters"


FROZEN, ONE, EACH = "frozen", "one for all", "one for each"


@takes_groups
def main(
    *,
    domains: DomainOptions,
    json_file: JsonOption = None,
    runs: RunsOption = Path("runs"),
    part: Annotated[Part | None, typer.Option(help="default: both")] = None,
) -> None:
    """Distil, serve with every arm, train the adapters, print the tables."""
    reporter = start_benchmark()
    files = domains.files
    settings = make_settings(domains, runs)
    size = settings.requests
    prepare(files, settings.data, {"train": size, "stream": size})
    found: dict[str, Any] = {"ratios": {}, "machine": describe_machine()}
    for name in Part if part is None else [part]:
        figures = (online if name is Part.ONLINE else adapters)(settings, reporter)
        found["ratios"] |= figures.pop("ratios")
        found[name] = figures
    if json_file:
        write_json(json_file, found)


def online(settings: Settings, reporter: Reporter) -> dict[str, Any]:
    """The figures of the arms that learn from the stream."""
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
    ratios = {
        f"acceptance_{domain}_each_vs_one": figures[EACH][domain]["value"]
        / figures[ONE][domain]["value"]
        for domain in DOMAINS
    }
    return {
        "ratios": ratios,
        "arms": figures,
        "steps": steps,
        "summaries": summaries,
        "settings": run.config.model_dump(mode="json"),
    }


def adapters(settings: Settings, reporter: Reporter) -> dict[str, Any]:
    """The sizes and the acceptance of full copies and adapters, by domain."""
    base, _ = execute_run(adapter_base_config(settings), reporter)
    start = base.stage_directory(START[SMALL_LM]) / "drafter"
    domains: dict[str, Any] = {}
    for domain in DOMAINS[1:]:
        run, report = execute_run(adapters_config(domain, start, settings), reporter)
        rates = {row["stage"]: row["evaluation"]["acceptance_rate"] for row in report["rows"]}
        domains[domain] = {
            "base": {"bytes": weights_bytes(start), "acceptance": rates[f"full{START_ROW}"]},
            **{
                stage: {
                    "bytes": weights_bytes(run.stage_directory(stage) / "drafter"),
                    "acceptance": rates[stage],
                    "trained_parameters": read_summary(run, stage)["trained_parameters"],
                }
                for stage in ("full", "adapter")
            },
        }
    reporter.table(adapters_table(domains))
    ratios = {}
    for domain, of in domains.items():
        for figure, name in (("bytes", "size"), ("acceptance", "acceptance")):
            ratios[f"adapter_{name}_vs_full_{domain}"] = of["adapter"][figure] / of["full"][figure]
        ratios[f"full_acceptance_vs_base_{domain}"] = (
            of["full"]["acceptance"] / of["base"]["acceptance"]
        )
    return {"ratios": ratios, "domains": domains}


def weights_bytes(drafter: Path) -> int:
    """Return the size of a drafter's files of weights."""
    return sum(file.stat().st_size for file in drafter.glob("*.safetensors"))


def adapters_table(domains: dict[str, Any]) -> Table:
    """Return the table of base, full copy and adapter in each domain."""
    rows = [
        {
            "domain": domain,
            "drafter": name,
            "acceptance": f"{figures['acceptance']:.3f}",
            "MB": f"{figures['bytes'] / 1e6:.1f}",
        }
        for domain, drafters in domains.items()
        for name, figures in drafters.items()
    ]
    return rows_table(f"a drafter of maths in other domains, γ = {GAMMA}", rows, left=2)


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
