"""Does a drafter that learns from its rejections keep up when the requests change?

    python -m benchmarks.online --data DIR [--quick] [--json FILE] [--plots DIR] [--runs DIR]

A stream of prompts changes its domain twice: maths, then code, then general. DIR holds maths.jsonl,
code.jsonl and general.jsonl, a prompt a line as training data has them; --maths, --code and
--general name other files. Of each, some prompts are for offline distillation and others are
served. All is at one γ, greedy, for SmolLM2-135M, and every arm serves the same requests:

    frozen        distilled offline on maths, and left as it is
    online, …     begins where `frozen` does and learns while it serves: from rejected places only,
                  from these and a quarter of the others, from all
    offline, all  distilled offline on all three domains, with as many optimizer steps as `frozen`
                  and the mixed online arm took together, whether they were kept or not

Offline distillation must first have the target answer its prompts; what online arms learn from is
what they serve. The time of both is in the table. Acceptance at a domain's end is that of its last
40 requests, with 95% bootstrap intervals over requests. Net tokens per second include learning, not
the saving of versions. Arms are kept and go on where they were.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import Accelerator
from rich.table import Table

from benchmarks.common import describe_machine, write_json
from decode.artifact import write_file
from decode.errors import UserError
from decode.loop import Decoder
from decode.measure import ratio_of_totals
from decode.sampling import Sampling
from decode.store import open_drafter
from train.cli import cores, quieten, shows_errors
from train.config import validate_config
from train.console import Reporter
from train.data.read import Example, read_examples
from train.plots import LIGHT, SERIES
from train.run import Run, make_directory

DOMAINS = ("maths", "code", "general")
TARGET = "embedded:smollm2-135m"
GAMMA = 3
BATCH = 20
END = 40  # requests at the end of a domain
# How far a window may be below the domain's end to count as recovered.
WITHIN = 0.02
# Arm → the share of accepted places that is learnt from.
ONLINE = {"online, rejected": 0.0, "online, mix": 0.25, "online, all": 1.0}
MAIN = "online, mix"
ARMS = ("frozen", *ONLINE, "offline, all")


def main(
    data: Annotated[Path | None, typer.Option(help="holds maths, code and general.jsonl")] = None,
    maths: Annotated[Path | None, typer.Option(help="prompts of the first domain")] = None,
    code: Annotated[Path | None, typer.Option(help="of the second")] = None,
    general: Annotated[Path | None, typer.Option(help="of the third")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="100 short requests a domain")] = False,
    temperature: Annotated[float, typer.Option(help="of what is served")] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
    plots: Annotated[Path | None, typer.Option(help="write online.png here")] = None,
    runs: Annotated[Path, typer.Option(help="where runs are kept")] = Path("runs"),
) -> None:
    """Distil, serve with every arm, print the table."""
    quieten()
    torch.set_num_threads(cores())
    reporter = Reporter()
    files = _files(data, maths, code, general)
    sizes = {"train": 100 if quick else 400, "stream": 100 if quick else 400}
    reporter.say(f"expected to take about {'13 minutes' if quick else '2 hours'} on two cores")
    place = runs / ("online-quick-data" if quick else "online-data")
    prepare(files, place, sizes)
    settings: dict[str, Any] = {
        "quick": quick,
        "runs": runs,
        "data": place.absolute(),
        "temperature": temperature,
    }
    begin = time.perf_counter()
    first = _run(first_config(**settings), reporter)
    summaries = {arm: _summary(first, arm) for arm in ("frozen", *ONLINE)}
    taken = len(summaries[MAIN]["rounds"]) * _steps(quick)["online"]
    second = _run(second_config(taken, **settings), reporter)
    summaries["offline, all"] = _summary(second, "offline, all")
    counts = {arm: _counts(second if arm == "offline, all" else first, arm) for arm in summaries}
    size = sizes["stream"]
    ngram = measure_ngram(first, size, quick=quick, temperature=temperature)
    rows = {arm: _row(counts[arm], summaries[arm], size) for arm in ARMS}
    training = {
        "frozen": _training(first, "start"),
        "offline, all": _training(second, "start"),
    }
    reporter.table(table(rows, ngram, training))
    if plots:
        plot(counts, size, plots / "online.png")
    if json_file:
        write_json(
            json_file,
            {
                "ratios": ratios(rows, ngram),
                "arms": rows,
                "ngram": ngram,
                "offline_training": training,
                "summaries": summaries,
                "seconds": time.perf_counter() - begin,
                "settings": {
                    run.config.name: run.config.model_dump(mode="json") for run in (first, second)
                },
                "machine": describe_machine(),
            },
        )


def _files(data: Path | None, *given: Path | None) -> dict[str, Path]:
    files = {}
    for domain, file in zip(DOMAINS, given, strict=True):
        if file is None and data is None:
            raise UserError(f"no prompts for the domain {domain}; give --data DIR or --{domain}")
        files[domain] = file or (data or Path()) / f"{domain}.jsonl"
    return files


def prepare(files: dict[str, Path], place: Path, sizes: dict[str, int]) -> None:
    """Write each domain's prompts to learn from offline and those to serve, if they are not there.

    Raises UserError for a file that is missing, broken or too short.
    """
    for domain, file in files.items():
        if all((place / f"{domain}-{split}.jsonl").exists() for split in sizes):
            continue
        found, _ = read_examples(str(file), limit=sum(sizes.values()))
        prompts = [example for example in found if example.messages is not None]
        if len(prompts) < sum(sizes.values()):
            raise UserError(
                f"{file} has {len(prompts)} prompts among its first {sum(sizes.values())} rows; "
                f"expected all to be prompts, and {sum(sizes.values())} of them"
            )
        begin = 0
        for split, count in sizes.items():
            lines = [_line(domain, e) for e in prompts[begin : begin + count]]
            write_file(place / f"{domain}-{split}.jsonl", "".join(lines))
            begin += count


def _line(domain: str, example: Example) -> str:
    # What the data says in answer is left out: all learn from the target's own answers.
    assert example.messages is not None
    turns = list(example.messages)
    while turns[-1]["role"] == "assistant":
        turns.pop()
    return json.dumps({"id": f"{domain} {example.id}", "messages": turns, "kind": domain}) + "\n"


def _steps(quick: bool) -> dict[str, int]:
    """Optimizer steps of the start, and of a round of online learning."""
    return {"start": 60 if quick else 300, "online": 4 if quick else 8}


def first_config(**settings: Any) -> dict[str, Any]:
    """The run that distils on the first domain and serves the stream with what came of it."""
    quick = settings["quick"]
    stages = [*_offline(_steps(quick)["start"], quick=quick), _serving("frozen", None, **settings)]
    for arm, share in ONLINE.items():
        learning = {
            "every_requests": BATCH,
            "steps": _steps(quick)["online"],
            "tokens_per_batch": 1024,
            "accepted": share,
            "k": 64,
            "holdout_every": 5,
            "holdout_requests": 8,
            "optimizer": {"lr": 1e-3, "warmup_steps": 4, "schedule": "constant"},
        }
        stages.append(_serving(arm, learning, **settings))
    return _config("online-first", ["maths"], stages, **settings)


def second_config(taken: int, **settings: Any) -> dict[str, Any]:
    """The run that distils on all domains, with so many steps more, and serves the stream."""
    quick = settings["quick"]
    offline = _offline(_steps(quick)["start"] + taken, quick=quick)
    stages = [*offline, _serving("offline, all", None, **settings)]
    return _config("online-all", list(DOMAINS), stages, **settings)


def _config(
    name: str, learnt: Sequence[str], stages: list[dict[str, Any]], **settings: Any
) -> dict[str, Any]:
    data = settings["data"]
    return {
        "name": f"{name}-quick" if settings["quick"] else name,
        "output_dir": str(settings["runs"]),
        "trackers": [],
        "target": {"model": TARGET, "dtype": "bfloat16", "device": "cpu"},
        "data": {
            "train": [f"{data}/{domain}-train.jsonl" for domain in learnt],
            "test": f"{data}/maths-stream.jsonl",
            "stream": [f"{data}/{domain}-stream.jsonl" for domain in DOMAINS],
        },
        # The run's own evaluation is of other prompts for every row; here it would be time lost.
        "evaluation": {
            "prompts": 1,
            "max_new_tokens": 2,
            "timed_prompts": 0,
            "generate": False,
            "baselines": [],
        },
        "stages": stages,
    }


def _offline(steps: int, *, quick: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": "answers",
            "kind": "generate",
            "prompts": 100 if quick else None,
            "max_new_tokens": 32 if quick else 96,
            "batch_size": 25,
        },
        {
            "name": "start",
            "kind": "distill",
            "text": "answers",
            "drafter": {"layers": [0, 1]},
            "draft_vocabulary": 12000,
            "train_embeddings": False,
            "loop": {"epochs": 1000, "max_steps": steps, "tokens_per_batch": 1024},
            "optimizer": {"lr": 2e-3},
        },
    ]


def _serving(arm: str, learning: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    return {
        "name": _name(arm),
        "kind": "online",
        "drafter": {"stage": "start"},
        "batch_size": BATCH,
        "window": BATCH,
        "gamma": GAMMA,
        "temperature": settings["temperature"],
        "max_new_tokens": 32 if settings["quick"] else 96,
        "learning": learning,
    }


def _name(arm: str) -> str:
    return arm.replace(", ", "-")


def _run(raw: dict[str, Any], reporter: Reporter) -> Run:
    run = Run(validate_config(raw, base_dir=Path()), Accelerator(cpu=True), reporter)
    run.execute()
    return run


def _directory(run: Run, name: str) -> Path:
    index = next(i for i, stage in enumerate(run.config.stages) if stage.name == name)
    return run.directory / "stages" / f"{index:02d}-{name}"


def _summary(run: Run, arm: str) -> dict[str, Any]:
    done = json.loads((_directory(run, _name(arm)) / "done.json").read_text())
    summary: dict[str, Any] = done["summary"]
    return summary


def _training(run: Run, name: str) -> dict[str, float]:
    """What offline distillation cost: steps, seconds of training and of the target's answers."""
    training = _summary(run, name)["training"]
    return {
        "steps": training["steps"],
        "seconds": training["training_seconds"],
        "answer_seconds": _summary(run, "answers")["seconds"],
    }


def _counts(run: Run, arm: str) -> np.ndarray:
    """int [requests, 4]: see `train.stream.COUNTS`."""
    saves = (_directory(run, _name(arm)) / "progress").glob("progress-*")
    newest = max(saves, key=lambda path: int(path.name.rpartition("-")[2]))
    return np.array(json.loads((newest / "progress.json").read_text())["counts"])


def _ratio(counts: np.ndarray) -> dict[str, float]:
    found = ratio_of_totals(counts[:, 3], counts[:, 2])
    assert found is not None
    return found


def _row(counts: np.ndarray, summary: dict[str, Any], size: int) -> dict[str, Any]:
    """An arm's figures: acceptance in each domain and at its end, how fast it recovered, costs."""
    found: dict[str, Any] = {"acceptance": {}, "end": {}, "recovered_after": {}}
    for number, domain in enumerate(DOMAINS):
        own = counts[number * size : (number + 1) * size]
        found["acceptance"][domain] = _ratio(own)
        found["end"][domain] = _ratio(own[-END:])
        level = found["end"][domain]["value"] - WITHIN
        windows = [_ratio(own[i : i + BATCH])["value"] for i in range(0, size, BATCH)]
        reached = next((i for i, rate in enumerate(windows) if rate >= level), len(windows))
        found["recovered_after"][domain] = reached * BATCH
    seconds = summary["decoding_seconds"] + summary["learning_seconds"]
    return found | {
        "tokens_per_step": float(counts[:, 1].sum() / counts[:, 0].sum()),
        "net_tokens_per_second": summary["tokens"] / seconds,
        "learning_share": summary["learning_seconds"] / seconds,
        "learning_seconds": summary["learning_seconds"],
        "versions_kept": summary["versions_kept"],
        "versions_rolled_back": summary["versions_rolled_back"],
    }


def measure_ngram(run: Run, size: int, *, quick: bool, temperature: float) -> dict[str, float]:
    """Prompt lookup on the end of the first domain, at its best γ there by tokens per step."""
    kept = run.directory / "measured" / "ngram.json"
    if kept.exists():
        result: dict[str, float] = json.loads(kept.read_text())
        return result
    numbers = list(range(size - END, size))
    examples = run.read_data()["stream"]
    prompts = run.prompts([examples[i] for i in numbers])
    best: dict[str, float] = {}
    for gamma in (2, 4, 8):
        decoder = Decoder(
            run.target.model,
            open_drafter("ngram", run.target),
            eos_token_ids=run.target.eos_token_ids,
            gamma=gamma,
            sampling=Sampling(temperature),
        )
        counts = decoder.decode(prompts, 32 if quick else 96, row_ids=numbers).counts
        found = {
            "gamma": gamma,
            "acceptance_rate": counts.acceptance_rate,
            "tokens_per_step": counts.tokens_per_step,
        }
        best = max(best or found, found, key=lambda x: x["tokens_per_step"])
    write_json(kept, best)
    return best


def ratios(rows: dict[str, dict[str, Any]], ngram: dict[str, float]) -> dict[str, float]:
    """What is compared across versions of this project."""
    found = {}
    for domain in DOMAINS:
        end = {arm: row["end"][domain]["value"] for arm, row in rows.items()}
        found[f"acceptance_gain_{domain}"] = end[MAIN] - end["frozen"]
        found[f"acceptance_{domain}_vs_offline"] = end[MAIN] / end["offline, all"]
        for arm in ONLINE:
            found[f"acceptance_{domain}_{_name(arm)}_vs_frozen"] = end[arm] / end["frozen"]
    speed = {arm: row["net_tokens_per_second"] for arm, row in rows.items()}
    found["net_speed_vs_frozen"] = speed[MAIN] / speed["frozen"]
    return found


def table(
    rows: dict[str, dict[str, Any]],
    ngram: dict[str, float],
    training: dict[str, dict[str, float]],
) -> Table:
    shown = Table(
        title=f"acceptance rate at γ = {GAMMA}, last {END} requests of each domain",
        caption=f"ngram on {DOMAINS[0]}, its best γ of {ngram['gamma']:.0f}: acceptance "
        f"{ngram['acceptance_rate']:.3f}, {ngram['tokens_per_step']:.2f} tokens a step",
    )
    for column in ("arm", *DOMAINS):
        shown.add_column(column)
    for column in ("recovered after", "kept / undone", "learning", "offline", "net tokens/s"):
        shown.add_column(column, justify="right")
    for arm, row in rows.items():
        ends = [row["end"][domain] for domain in DOMAINS]
        recovered = [str(row["recovered_after"][domain]) for domain in DOMAINS[1:]]
        offline = training.get("offline, all" if arm == "offline, all" else "frozen", {})
        shown.add_row(
            arm,
            *(f"{x['value']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in ends),
            " / ".join(recovered) if arm in ONLINE else "–",
            f"{row['versions_kept']} / {row['versions_rolled_back']}" if arm in ONLINE else "–",
            f"{row['learning_seconds']:.0f} s ({row['learning_share']:.0%})",
            f"{offline['seconds']:.0f} s + {offline['answer_seconds']:.0f} s",
            f"{row['net_tokens_per_second']:.0f}",
        )
    return shown


def plot(counts: dict[str, np.ndarray], size: int, file: Path) -> None:
    """Acceptance over the stream by batches of requests, with the moments of change."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for (arm, rows), colour in zip(counts.items(), SERIES, strict=False):
        rates = [_ratio(rows[i : i + BATCH])["value"] for i in range(0, len(rows), BATCH)]
        middles = [i + BATCH / 2 for i in range(0, len(rows), BATCH)]
        axes.plot(middles, rates, "o-", color=colour, markersize=3, label=arm)
    for number, domain in enumerate(DOMAINS):
        if number:
            axes.axvline(number * size, color=LIGHT["muted"], linestyle=":")
        axes.text((number + 0.5) * size, 0.01, domain, ha="center", color=LIGHT["muted"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests served")
    axes.set_ylabel("acceptance rate α")
    axes.grid(color=LIGHT["grid"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    make_directory(file.parent)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_show_locals=False)
    app.command()(shows_errors(main))
    app()
