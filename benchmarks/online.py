"""Does a drafter that learns from its rejections keep up when the requests change?

    python -m benchmarks.online --data DIR [--family F …] [--seeds N] [--quick] [--json FILE]
                                [--plots DIR] [--runs DIR]

A stream of prompts changes its domain twice: maths, then code, then general. DIR holds maths.jsonl,
code.jsonl and general.jsonl, with one prompt per line in the format of training data. --maths,
--code and --general name other files. In each domain, some prompts are for offline distillation and
others are served. The target is SmolLM2-135M. All arms use the same γ, and decoding is greedy by
default. There are two kinds of drafter: a small language model (the target's first two layers) and
Medusa heads. --family names others: eagle1, mtp. Every arm serves the same requests:

    frozen          distilled offline on maths, then never changed
    online (…)      starts like `frozen` and learns while it serves: from rejected positions only,
                    from a mix (rejected positions and a quarter of the others), or from all
    offline on all  distilled offline on all three domains, with as many tokens of text as `frozen`
                    and the mixed online arm took in all their steps, kept or not

A quick run serves about 100 requests of each domain, with answers of at most 20 tokens. In a quick
run, the only online arm with heads is the mix.

Each of --seeds has other prompts, of which the figures are taken together. A second table says what
the mixed online arm and the offline one gain over the frozen one at the end of each domain, with
95% bootstrap intervals over requests, which both served. It names the FLOPs that the arm needed
beyond the frozen one: by the online arm those of its steps, by the offline one also the target's
answers and one pass over them. The gain is also given for these FLOPs, and for 1,000 served tokens
of the domain.

Before offline distillation, the target must answer the prompts. Online arms learn from the answers
that they serve. The table has the time of both. Acceptance at a domain's end is that of its last 40
requests, with 95% intervals over requests. An arm has recovered at the first 20 requests
of a domain whose acceptance is at most 0.02 lower than that. Net tokens per second include
learning, but not the saving of versions. Arms are kept and continue where they stopped.
"""

import json
import time
from collections.abc import Mapping
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
    format_figure,
    format_interval,
    read_summary,
    rows_table,
    run_command,
    save_figure,
    start_benchmark,
    write_json,
)
from benchmarks.shared.domain_prompts import DomainOptions, make_settings, prepare
from benchmarks.shared.online_runs import (
    BATCH,
    DOMAINS,
    FAMILIES,
    GAMMA,
    MAIN,
    OFFLINE_TOKENS,
    ROUND_STEPS,
    ROUND_TOKENS,
    START,
    Arm,
    Settings,
    first_config,
    offline_steps,
    second_config,
)
from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.measure.intervals import ratio_of_totals
from decode.model.loading import Target, load_model_and_tokenizer
from decode.opening.directory import describe_drafter, open_drafter
from distill.flops import TextFlops, layers_flops, output_flops
from draftsmith.cli.command import takes_groups
from heads.heads_directory import read_heads
from heads.layers.target_layers import output_layer
from train.data.corpus import read_answers
from train.loop.meters.stage_flops import distill_flops, heads_flops
from train.loop.meters.throughput import flops_of
from train.online.stream_progress import History
from train.report.plots import LIGHT, SERIES
from train.run.run import Run

END = 40  # requests at the end of a domain
TEXT = 128  # tokens of a text of which the FLOPs of attention are counted
# An arm has recovered if a window's acceptance is at most this far below the domain's end.
RECOVERY_TOLERANCE = 0.02


@takes_groups
def main(
    *,
    domains: DomainOptions,
    temperature: Annotated[float, typer.Option(help="of the served answers")] = 0.0,
    family: Annotated[list[str] | None, typer.Option(help="repeat it; default: both")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="each with other prompts")] = 1,
    json_file: JsonOption = None,
    plots: Annotated[Path | None, typer.Option(help="write online.png here")] = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Distil, serve with every arm, print the table."""
    reporter = start_benchmark()
    files = domains.files
    for name in family or ():
        if name not in START:
            raise UserError(f"--family is {name!r}; expected one of {', '.join(START)}")
    settings = make_settings(domains, runs, temperature, family or FAMILIES)
    size = settings.requests
    expected = "17 minutes" if domains.quick else "3 hours"
    reporter.say(f"expected to take about {expected} on two cores for each seed")
    begin = time.perf_counter()
    counts: dict[Arm, list[np.ndarray]] = {arm: [] for arm in settings.arms}
    summaries: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in settings.arms}
    training: dict[Arm, list[dict[str, float]]] = {arm: [] for arm in settings.arms}
    flops: dict[Arm, list[float | None]] = {arm: [] for arm in settings.arms}
    measured: list[dict[str, float]] = []
    configs: dict[str, Any] = {}
    for seed in range(seeds):
        own = make_settings(domains, runs, temperature, settings.families, seed)
        prepare(files, own.data, {"train": size, "stream": size}, seed)
        first, _ = execute_run(first_config(own), reporter)
        additional_steps = {
            family: offline_steps(len(read_summary(first, Arm(family, MAIN).stage)["rounds"]))
            for family in own.families
        }
        second, _ = execute_run(second_config(additional_steps, own), reporter)
        measured.append(measure_ngram(first, own))
        configs |= {r.config.name: r.config.model_dump(mode="json") for r in (first, second)}
        for arm in own.arms:
            run = second if arm.offline else first
            counts[arm].append(read_counts(run, arm.stage))
            summaries[arm].append(read_summary(run, arm.stage))
            training[arm].append(_offline_cost(run, START[arm.family]))
            flops[arm].append(additional_flops(arm, first, second, additional_steps))
    pooled = {arm: in_turn(rows) for arm, rows in counts.items()}
    ngram = max(measured, key=lambda x: x["tokens_per_step"])
    figures = {
        arm: arm_figures(pooled[arm], _sums(summaries[arm]), size, seeds) for arm in settings.arms
    }
    costs = {arm: _sums(rows) for arm, rows in training.items()}
    reporter.table(arms_table(figures, ngram, costs))
    gained = gains(pooled, {arm: _sum_of_known(x) for arm, x in flops.items()}, size, seeds)
    reporter.table(gains_table(gained))
    if plots:
        plot_stream(pooled, size, plots / "online.png", seeds)
    if json_file:
        write_json(
            json_file,
            {
                "ratios": ratios(figures),
                "arms": {arm.name: row for arm, row in figures.items()},
                "ngram": ngram,
                "gains": gained,
                "offline_training": {arm.name: cost for arm, cost in costs.items()},
                "summaries": {arm.name: rows for arm, rows in summaries.items()},
                "seconds": time.perf_counter() - begin,
                "settings": configs,
                "machine": describe_machine(),
            },
        )


def _offline_cost(run: Run, name: str) -> dict[str, float]:
    """Return the cost of offline distillation: steps, seconds of training and of the target's
    answers."""
    training = read_summary(run, name)["training"]
    return {
        "steps": training["steps"],
        "seconds": training["training_seconds"],
        "answer_seconds": read_summary(run, "answers")["seconds"],
    }


def read_counts(run: Run, stage: str) -> np.ndarray:
    """Return the counts, int [requests, 4]; see `train.online.stream_progress.COUNTS`."""
    windows = History(run.stage_directory(stage) / "history.jsonl").read("window")
    return np.array([row for window in windows for row in window["counts"]])


def measure_ngram(run: Run, settings: Settings) -> dict[str, float]:
    """Measure prompt lookup at the end of the first domain, with the γ that gives the most tokens
    per step there."""
    file = run.directory / "measured" / "ngram.json"
    if file.exists():
        measured: dict[str, float] = json.loads(file.read_text())
        return measured
    numbers = list(range(max(settings.requests - END, 0), settings.requests))
    examples = run.read_data()["stream"]
    prompts = run.prompts([examples[i] for i in numbers])
    best: dict[str, float] = {}
    for gamma in (2, 4, 8):
        decoder = Decoder(
            run.target.model,
            open_drafter("ngram", run.target),
            eos_token_ids=run.target.eos_token_ids,
            gamma=gamma,
            sampling=Sampling(settings.temperature),
        )
        counts = decoder.decode(prompts, settings.tokens, row_ids=numbers).counts
        figures = {
            "gamma": gamma,
            "acceptance_rate": counts.acceptance_rate,
            "tokens_per_step": counts.tokens_per_step,
        }
        best = max(best or figures, figures, key=lambda x: x["tokens_per_step"])
    write_json(file, best)
    return best


def in_turn(counts: list[np.ndarray]) -> np.ndarray:
    """int [requests · seeds, 4]: request i of all seeds, then request i + 1."""
    return np.stack(counts, 1).reshape(-1, counts[0].shape[1])


def _sums(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of each number over the seeds."""
    return {
        key: sum(row[key] for row in rows)
        for key, value in rows[0].items()
        if isinstance(value, int | float)
    }


def _sum_of_known(numbers: list[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def additional_flops(arm: Arm, first: Run, second: Run, steps: dict[str, int]) -> float | None:
    """The FLOPs that an arm needed beyond the frozen one: of its optimizer steps, and for offline
    distillation of the target's answers to more prompts and a pass over them. What both do to serve
    is not in it. steps: additional offline steps by family. None: those of the drafter are not
    known."""
    if arm.share is None and not arm.offline:
        return 0.0
    target = first.target
    path = first.stage_directory(START[arm.family]) / "drafter"
    rule = drafter_flops(path, target)
    if rule is None:
        return None
    if not arm.offline:
        rounds = read_summary(first, arm.stage)["rounds"]
        rows = len(rounds) * ROUND_STEPS * ROUND_TOKENS // TEXT
        return flops_of(rule, [TEXT] * rows, sum(x["positions"] for x in rounds))
    predicted = [
        read_summary(run, START[arm.family])["training"]["tokens"] for run in (first, second)
    ]
    rows = steps[arm.family] * OFFLINE_TOKENS // TEXT
    more = predicted[1] - predicted[0]
    own = flops_of(rule, [TEXT] * rows, more)
    output = output_layer(target.model)
    reading = layers_flops(target.model, trained=False)
    reading += output_flops(output.out_features, output.in_features, trained=None)
    texts = []
    for run in (first, second):
        answers = read_answers(run.stage_directory("answers"))
        answered = [len(answer["tokens"]) for answer in answers]
        prompts = run.prompts(run.read_data()["train"])
        lengths = [len(p) + n for p, n in zip(prompts, answered, strict=True)]
        # Answered, and read once more.
        texts.append(2 * flops_of(reading, lengths, sum(answered)))
    return own + texts[1] - texts[0]


def drafter_flops(path: Path, target: Target) -> TextFlops | None:
    """The FLOPs of a training step of a drafter, without the target. None for heads whose FLOPs are
    not known."""
    if describe_drafter(path)["kind"] == "small_lm":
        model = load_model_and_tokenizer(str(path), dtype="float32", device="cpu").model
        model.requires_grad_(True).get_output_embeddings().requires_grad_(False)
        return distill_flops(model, target.model, runs_target=False, reads_logits=False)
    heads = read_heads(path, target)
    return heads_flops(heads, target.model, runs_target=False, reads_logits=False)


def gains(
    counts: dict[Arm, np.ndarray], flops: Mapping[Arm, float | None], size: int, seeds: int
) -> list[dict[str, Any]]:
    """What learning arms gain in acceptance over the frozen one, at the end of each domain.

    counts: as `in_turn` returns them. flops: of all seeds together; None: not known.
    """
    rows = []
    for arm, own in counts.items():
        if arm.share != MAIN and not arm.offline:
            continue
        for number, domain in enumerate(DOMAINS):
            block = slice(number * size * seeds, (number + 1) * size * seeds)
            ends = (x[block][-END * seeds :] for x in (own, counts[Arm(arm.family)]))
            gain = gain_of(*ends)
            all_flops = flops[arm]
            tera = None if all_flops is None else all_flops / seeds / 1e12
            rows.append(
                {"arm": arm.name, "domain": domain, **gain, "teraflops": tera}
                | {"per_teraflop": gain["value"] / tera if tera else None}
                | {"per_1000_tokens": 1000 * gain["value"] * seeds / int(own[block, 1].sum())}
            )
    return rows


def gain_of(own: np.ndarray, frozen: np.ndarray) -> dict[str, float]:
    """{value, low, high}: the gain in accepted / reached over the same requests, with its 95%
    bootstrap interval over them. own, frozen: int [requests, 4]."""
    draws = np.random.default_rng(0).integers(len(own), size=(2000, len(own)))

    def rate(counts: np.ndarray) -> np.ndarray:
        drawn: np.ndarray = counts[draws].sum(1)
        return drawn[:, 3] / np.maximum(drawn[:, 2], 1)

    low, high = np.quantile(rate(own) - rate(frozen), [0.025, 0.975])
    value = acceptance(own)["value"] - acceptance(frozen)["value"]
    return {"value": value, "low": float(low), "high": float(high)}


def gains_table(rows: list[dict[str, Any]]) -> Table:
    """The table of `gains`."""
    cells = [
        {
            "arm": row["arm"],
            "domain": row["domain"],
            "gain": f"{row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]",
            "more TFLOPs": format_figure(row["teraflops"], ".3f"),
            "gain / TFLOP": format_figure(row["per_teraflop"], "+.3f"),
            "gain / 1,000 tokens": f"{row['per_1000_tokens']:+.4f}",
        }
        for row in rows
    ]
    return rows_table(f"gain over the frozen drafter, last {END} requests", cells, left=3)


def arm_figures(
    counts: np.ndarray, summary: dict[str, Any], size: int, seeds: int = 1
) -> dict[str, Any]:
    """Return an arm's figures: acceptance in each domain and at its end, recovery time, costs.

    counts: int [requests · seeds, 4], see `train.online.stream_progress.COUNTS` and `in_turn`.
    summary: its numbers are those of all seeds together. size: requests per domain.
    """
    block, batch = size * seeds, BATCH * seeds
    keys = ("acceptance", "end", "end_tokens_per_step", "recovered_after")
    figures: dict[str, Any] = {key: {} for key in keys}
    for number, domain in enumerate(DOMAINS):
        requests = counts[number * block : (number + 1) * block]
        figures["acceptance"][domain] = acceptance(requests)
        figures["end"][domain] = acceptance(requests[-END * seeds :])
        steps, emitted = requests[-END * seeds :, :2].sum(0)
        figures["end_tokens_per_step"][domain] = float(emitted / steps)
        level = figures["end"][domain]["value"] - RECOVERY_TOLERANCE
        rates = [acceptance(requests[i : i + batch])["value"] for i in range(0, block, batch)]
        recovered = next((i for i, rate in enumerate(rates) if rate >= level), len(rates))
        figures["recovered_after"][domain] = recovered * BATCH
    seconds = summary["decoding_seconds"] + summary["learning_seconds"]
    return figures | {
        "tokens_per_step": float(counts[:, 1].sum() / counts[:, 0].sum()),
        "net_tokens_per_second": summary["tokens"] / seconds,
        "learning_share": summary["learning_seconds"] / seconds,
        "learning_seconds": summary["learning_seconds"],
        "versions_kept": summary["versions_kept"],
        "versions_rolled_back": summary["versions_rolled_back"],
    }


def acceptance(counts: np.ndarray) -> dict[str, float]:
    """Return accepted / reached, with a 95% interval over requests."""
    ratio = ratio_of_totals(counts[:, 3], counts[:, 2])
    assert ratio is not None
    return ratio


def ratios(figures: dict[Arm, dict[str, Any]]) -> dict[str, float]:
    """Return the figures to compare between versions of this project."""
    values = {}
    for family in dict.fromkeys(arm.family for arm in figures):
        name = family.replace(" ", "_")
        frozen, learning, offline = (
            figures[arm] for arm in (Arm(family), Arm(family, MAIN), Arm(family, offline=True))
        )
        for domain in DOMAINS:
            end = [row["end"][domain]["value"] for row in (frozen, learning, offline)]
            values[f"{name}_acceptance_gain_{domain}"] = end[1] - end[0]
            values[f"{name}_acceptance_{domain}_vs_offline"] = end[1] / end[2]
        speed = "net_tokens_per_second"
        values[f"{name}_net_speed_vs_frozen"] = learning[speed] / frozen[speed]
    return values


def arms_table(
    figures: dict[Arm, dict[str, Any]],
    ngram: dict[str, float],
    training: dict[Arm, dict[str, float]],
) -> Table:
    """Return the table of all arms. training: the cost of each arm's offline distillation."""
    first = DOMAINS[0]
    frozen = ", ".join(
        f"{arm.name} {row['end_tokens_per_step'][first]:.2f}"
        for arm, row in figures.items()
        if arm.share is None and not arm.offline
    )
    rows = []
    for arm, row in figures.items():
        recovered = " / ".join(str(row["recovered_after"][domain]) for domain in DOMAINS[1:])
        versions = f"{row['versions_kept']} / {row['versions_rolled_back']}"
        learns, cost = arm.share is not None, training[arm]
        cells = {
            "arm": arm.name,
            **{domain: format_interval(row["end"][domain], 3) for domain in DOMAINS},
            "recovered after": recovered if learns else "–",
            "kept / undone": versions if learns else "–",
            "learning": f"{row['learning_seconds']:.0f} s ({row['learning_share']:.0%})",
            "offline": f"{cost['seconds']:.0f} s + {cost['answer_seconds']:.0f} s",
            "net tokens/s": f"{row['net_tokens_per_second']:.0f}",
        }
        rows.append(cells)
    return rows_table(
        f"acceptance rate at γ = {GAMMA}, last {END} requests of each domain",
        rows,
        left=1 + len(DOMAINS),
        caption=f"tokens a step on {first}: ngram at its best γ of {ngram['gamma']:.0f} "
        f"{ngram['tokens_per_step']:.2f} (acceptance {ngram['acceptance_rate']:.3f}), {frozen}",
    )


def plot_stream(counts: dict[Arm, np.ndarray], size: int, file: Path, seeds: int = 1) -> None:
    """Plot acceptance over the stream by batches of requests, with marks at changes of domain."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    families = [*dict.fromkeys(arm.family for arm in counts)]
    panels = figure.subplots(len(families), sharex=True, sharey=True, squeeze=False)[:, 0]
    for family, axes in zip(families, panels, strict=True):
        family_counts = {arm: rows for arm, rows in counts.items() if arm.family == family}
        for (arm, rows), colour in zip(family_counts.items(), SERIES, strict=False):
            starts = range(0, len(rows), BATCH * seeds)
            rates = [acceptance(rows[i : i + BATCH * seeds])["value"] for i in starts]
            middles = [i / seeds + BATCH / 2 for i in starts]
            label = arm.name.partition(", ")[2]
            axes.plot(middles, rates, "o-", color=colour, markersize=3, label=label)
        for number, domain in enumerate(DOMAINS):
            if number:
                axes.axvline(number * size, color=LIGHT["muted"], linestyle=":")
            axes.text((number + 0.5) * size, 0.01, domain, ha="center", color=LIGHT["muted"])
        axes.set_ylim(bottom=0)
        axes.set_title(family, loc="left")
        axes.set_ylabel("acceptance rate α")
        axes.grid(color=LIGHT["grid"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    panels[-1].set_xlabel("requests served")
    save_figure(figure, file)


if __name__ == "__main__":
    run_command(main)
