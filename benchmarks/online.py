"""Does a drafter that learns from its rejections keep up when the requests change?

    python -m benchmarks.online --data DIR [--quick] [--json FILE] [--plots DIR] [--runs DIR]

A stream of prompts changes its domain twice: maths, then code, then general. DIR holds maths.jsonl,
code.jsonl and general.jsonl, with one prompt per line in the format of training data. --maths,
--code and --general name other files. In each domain, some prompts are for offline distillation and
others are served. The target is SmolLM2-135M. All arms use the same γ, and decoding is greedy by
default. There are two kinds of drafter: a small language model (the target's first two layers) and
Medusa heads. Every arm serves the same requests:

    frozen          distilled offline on maths, then never changed
    online (…)      starts like `frozen` and learns while it serves: from rejected positions only,
                    from a mix (rejected positions and a quarter of the others), or from all
    offline on all  distilled offline on all three domains, with as many tokens of text as `frozen`
                    and the mixed online arm took in all their steps, kept or not

A quick run serves about 100 requests of each domain, with answers of at most 20 tokens. In a quick
run, the only online arm with heads is the mix.

Before offline distillation, the target must answer the prompts. Online arms learn from the answers
that they serve. The table has the time of both. Acceptance at a domain's end is that of its last 40
requests, with 95% bootstrap intervals over requests. An arm has recovered at the first 20 requests
of a domain whose acceptance is at most 0.02 lower than that. Net tokens per second include
learning, but not the saving of versions. Arms are kept and continue where they stopped.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import Accelerator

from benchmarks.common import describe_machine, write_json
from benchmarks.online_runs import (
    DOMAINS,
    FAMILIES,
    MAIN,
    START,
    Arm,
    Settings,
    first_config,
    offline_steps,
    second_config,
)
from benchmarks.online_tables import END, plot, ratios, row, table
from decode.artifact import write_file
from decode.drafters.directory import open_drafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.sampling import Sampling
from train.cli.shared import cores, quieten, shows_errors
from train.config import validate_config
from train.console import Reporter
from train.data.read import Example, read_examples
from train.run import Run


def main(
    data: Annotated[Path | None, typer.Option(help="holds maths, code and general.jsonl")] = None,
    maths: Annotated[Path | None, typer.Option(help="prompts of the first domain")] = None,
    code: Annotated[Path | None, typer.Option(help="of the second")] = None,
    general: Annotated[Path | None, typer.Option(help="of the third")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="short answers, fewer requests")] = False,
    requests: Annotated[int | None, typer.Option(help="of each domain; default 400, 100")] = None,
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
    size = requests or (100 if quick else 400)
    place = runs / ("online-quick-data" if quick else "online-data") / str(size)
    settings = Settings(quick, runs, place.absolute(), size, temperature)
    reporter.say(f"expected to take about {'17 minutes' if quick else '3 hours'} on two cores")
    prepare(files, place, {"train": size, "stream": size})
    begin = time.perf_counter()
    first = _run(first_config(settings), reporter)
    taken = {
        family: offline_steps(len(_summary(first, Arm(family, MAIN).stage)["rounds"]))
        for family in FAMILIES
    }
    second = _run(second_config(taken, settings), reporter)
    of = {arm: second if arm.offline else first for arm in settings.arms}
    summaries = {arm: _summary(run, arm.stage) for arm, run in of.items()}
    counts = {arm: _counts(run, arm.stage) for arm, run in of.items()}
    ngram = measure_ngram(first, settings)
    rows = {arm: row(counts[arm], summaries[arm], size) for arm in of}
    training = {arm: _training(run, START[arm.family]) for arm, run in of.items()}
    reporter.table(table(rows, ngram, training))
    if plots:
        plot(counts, size, plots / "online.png")
    if json_file:
        write_json(
            json_file,
            {
                "ratios": ratios(rows),
                "arms": {arm.name: found for arm, found in rows.items()},
                "ngram": ngram,
                "offline_training": {arm.name: found for arm, found in training.items()},
                "summaries": {arm.name: found for arm, found in summaries.items()},
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
    """Write each domain's prompts for offline distillation and for serving, if they do not exist.

    Raises UserError if an input file is missing, broken or too short.
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
    # Leave out the answers in the data: all arms learn from the target's own answers.
    assert example.messages is not None
    turns = list(example.messages)
    while turns[-1]["role"] == "assistant":
        turns.pop()
    return json.dumps({"id": f"{domain} {example.id}", "messages": turns, "kind": domain}) + "\n"


def _run(raw: dict[str, Any], reporter: Reporter) -> Run:
    run = Run(validate_config(raw, base_dir=Path()), Accelerator(cpu=True), reporter)
    run.execute()
    return run


def _summary(run: Run, stage: str) -> dict[str, Any]:
    done = json.loads((run.stage_directory(stage) / "done.json").read_text())
    summary: dict[str, Any] = done["summary"]
    return summary


def _training(run: Run, name: str) -> dict[str, float]:
    """Return the cost of offline distillation: steps, seconds of training and of the target's
    answers."""
    training = _summary(run, name)["training"]
    return {
        "steps": training["steps"],
        "seconds": training["training_seconds"],
        "answer_seconds": _summary(run, "answers")["seconds"],
    }


def _counts(run: Run, stage: str) -> np.ndarray:
    """Return the counts, int [requests, 4]; see `train.online.stream_progress.COUNTS`."""
    saves = (run.stage_directory(stage) / "progress").glob("progress-*")
    newest = max(saves, key=lambda path: int(path.name.rpartition("-")[2]))
    return np.array(json.loads((newest / "progress.json").read_text())["counts"])


def measure_ngram(run: Run, settings: Settings) -> dict[str, float]:
    """Measure prompt lookup at the end of the first domain, with the γ that gives the most tokens
    per step there."""
    kept = run.directory / "measured" / "ngram.json"
    if kept.exists():
        result: dict[str, float] = json.loads(kept.read_text())
        return result
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
        found = {
            "gamma": gamma,
            "acceptance_rate": counts.acceptance_rate,
            "tokens_per_step": counts.tokens_per_step,
        }
        best = max(best or found, found, key=lambda x: x["tokens_per_step"])
    write_json(kept, best)
    return best


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_show_locals=False)
    app.command()(shows_errors(main))
    app()
