"""Which divergence and which text make the drafter that agrees best with SmolLM2-135M?

    python -m benchmarks.objectives [--quick] [--seeds N] [--arms NAME,…] [--json FILE]
        [--plots DIR] [--runs DIR]

Every arm starts from the same drafter: the target's first two layers after an epoch of
cross-entropy. All arms take the same number of optimizer steps on the same number of tokens. On the
shipped test prompts, the benchmark measures acceptance in the decoding loop, greedy and at
temperature 1. On texts that the target wrote for dev prompts, it measures the expected acceptance
1 − TV. Intervals are 95% intervals over prompts and seeds together. A ratio of two arms
is over the same prompts.

Texts: `greedy` and `sampled` are the target's answers (SeqKD's cross-entropy and DistillSpec's
divergences on target text). `λ = 0.5` and `λ = 1` are on-policy: the drafter itself writes half or
all of the text at temperature 1 during training (GKD, DistillSpec). Writing takes additional time,
which the table shows. `cache, k` is sampled text with the teacher's top k from an offline cache
instead of its full distribution. `pard` is sampled text for a drafter that drafts in one pass
(PARD), and `pard-dpace` the same with D-PACE's weights of places; their rates count all places of a
draft. --arms runs only the arms that it names by loss and text (`lk_hybrid-sampled`), and the one
that the ratios are over. For k = 8 … 128, a table shows how much of the full divergence and of its
gradient remains with k outcomes and a tail. Runs are kept and continue where they stopped.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.common import (
    TEMPERATURES,
    JsonOption,
    RunsOption,
    decoded_tallies,
    describe_machine,
    execute_run,
    format_interval,
    read_summary,
    rows_table,
    run_command,
    run_config,
    save_figure,
    start_benchmark,
    write_json,
)
from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import load_vocabulary
from decode.measure.intervals import ratio_of_totals
from decode.model.loading import load_model_and_tokenizer
from distill.losses import WeightedLoss
from distill.teacher.linear_logits import split_model
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.top_k_cache import bytes_per_token, top_k
from train.base.console import Reporter
from train.data.batches import collate, inputs
from train.data.chat_tokens import to_sample
from train.data.corpus import read_answers
from train.data.read import spread
from train.run.run import Run

# (loss, text): every loss on sampled text, then the other combinations that the papers recommend.
ARMS = [
    ("cross_entropy", "sampled"),
    ("forward_kl", "sampled"),
    ("reverse_kl", "sampled"),
    ("jsd", "sampled"),
    ("total_variation", "sampled"),
    ("negative_log_acceptance", "sampled"),
    ("lk_hybrid", "sampled"),
    ("cross_entropy", "greedy"),
    ("forward_kl", "greedy"),
    ("forward_kl", "λ = 0.5"),
    ("forward_kl", "λ = 1"),
    ("reverse_kl", "λ = 1"),
    ("total_variation", "λ = 1"),
    ("forward_kl", "cache, k = 8"),
    ("forward_kl", "cache, k = 32"),
    ("forward_kl", "cache, k = 128"),
    ("forward_kl", "pard"),
    ("forward_kl", "pard-dpace"),
]
CACHED = (8, 32, 128)
BASE = ("forward_kl", "sampled")
GAMMA = 4


def main(
    quick: Annotated[bool, typer.Option("--quick", help="few steps, one seed")] = False,
    seeds: Annotated[int | None, typer.Option(help="default 2, quick 1")] = None,
    only: Annotated[
        str | None, typer.Option("--arms", help="arms to train, as LOSS-TEXT; default: all")
    ] = None,
    json_file: JsonOption = None,
    plots: Annotated[Path | None, typer.Option(help="write objectives.png here")] = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Train every arm, measure it, print the table."""
    seeds = seeds or (1 if quick else 2)
    reporter = start_benchmark()
    chosen = choose_arms(only, quick=quick)
    arms = [(loss, text, seed) for seed in range(seeds) for loss, text in chosen]
    run, _ = execute_run(objectives_config(arms, quick=quick, runs=runs), reporter)
    figures = {
        _name(*arm): measure(run, arm, reporter, quick=quick) for arm in [("start", "", 0), *arms]
    }
    objectives = dict.fromkeys((loss, text) for loss, text, _ in arms)
    rows = {arm: [figures[_name(*arm, seed)] for seed in range(seeds)] for arm in objectives}
    start = figures["start"]
    reporter.table(arms_table(rows, start))
    errors = cache_errors(run)
    reporter.table(cache_table(errors))
    base = rows[BASE]
    ratios = {
        f"{metric}_{_name(loss, text)[:-2]}_vs_{'-'.join(BASE)}": float(
            _acceptance(rows[loss, text], metric)["value"] / _acceptance(base, metric)["value"]
        )
        for loss, text in rows
        for metric in TEMPERATURES
    }
    if plots:
        plot_arms(rows, start, plots / "objectives.png")
    if json_file:
        write_json(
            json_file,
            {
                "ratios": ratios,
                "arms": {
                    f"{loss}, {text}": {
                        metric: _acceptance(by_seed, metric) for metric in TEMPERATURES
                    }
                    | {"seeds": by_seed}
                    for (loss, text), by_seed in rows.items()
                },
                "start": start,
                "cache": errors,
                "settings": run.config.model_dump(mode="json"),
                "machine": describe_machine(),
            },
        )


def choose_arms(names: str | None, *, quick: bool) -> list[tuple[str, str]]:
    """The arms of these names, with BASE; None: all, or the first with `quick`. Raises UserError
    for an unknown name."""
    if names is None:
        return ARMS[:4] if quick else ARMS
    known = {_name(*arm)[:-2]: arm for arm in ARMS}
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"unknown arm {unknown[0]!r}; known arms: {', '.join(known)}")
    return [arm for name, arm in known.items() if arm == BASE or name in wanted]


def objectives_config(
    arms: list[tuple[str, str, int]], *, quick: bool, runs: Path
) -> dict[str, Any]:
    """Return the config of one run: the texts, the common start, and a distill stage per arm and
    seed."""
    answer = {"kind": "generate", "max_new_tokens": 80, "batch_size": 32, "part_prompts": 96}
    sampled = {"sampling": {"temperature": 1.0}, "samples": 1 if quick else 2}
    dev = answer | {"split": "dev", "sampling": {"temperature": 1.0}}
    stages: list[dict[str, Any]] = [
        answer | {"name": "greedy"},
        answer | {"name": "sampled"} | sampled,
        dev | {"name": "dev"},
    ]
    for k in CACHED:
        cache = {"name": f"cache-{k}", "kind": "teacher_cache", "text": "sampled", "k": k}
        stages.append(cache | {"draft_vocabulary": 8000})
    steps = 10 if quick else 40
    stages.append(
        {
            "name": "start",
            "kind": "distill",
            "text": "sampled",
            "teacher": f"cache-{CACHED[0]}",  # for its draft vocabulary
            "drafter": {"layers": [0, 1]},
            "losses": {"cross_entropy": 1.0},
            "train_embeddings": False,
            "loop": {"epochs": 100, "max_steps": steps, "tokens_per_batch": 1024},
            "optimizer": {"lr": 2e-3},
        }
    )
    for loss, text, seed in arms:
        stage: dict[str, Any] = {
            "name": _name(loss, text, seed),
            "kind": "distill",
            "text": text if text in ("greedy", "sampled") else "sampled",
            "drafter": {"stage": "start"},
            "losses": {loss: 1.0},
            "train_embeddings": False,
            "dev": {"text": "dev", "samples": 48, "every": 10**6},
            "loop": {"epochs": 100, "max_steps": steps, "tokens_per_batch": 1024, "seed": seed},
            "optimizer": {"lr": 1e-3},
        }
        if text.startswith("cache"):
            stage["teacher"] = f"cache-{text.rpartition(' ')[2]}"
        if text.startswith("pard"):
            stage["parallel"] = {"tokens": GAMMA, "mask_token": "<reponame>"}
        if text == "pard-dpace":
            stage["parallel"]["place_smoothing"] = 0.5
        if text.startswith("λ"):
            stage["on_policy"] = {
                "fraction": float(text.removeprefix("λ = ")),
                "samples": 128,
                "max_new_tokens": 80,
            }
        stages.append(stage)
    parts = ["objectives"]
    chosen = list(dict.fromkeys((loss, text) for loss, text, _ in arms))
    if chosen != choose_arms(None, quick=quick):
        parts += [_name(*arm)[:-2] for arm in chosen]
    return run_config("-".join([*parts, "quick"] if quick else parts), runs, stages)


def measure(
    run: Run, arm: tuple[str, str, int], reporter: Reporter, *, quick: bool
) -> dict[str, Any]:
    """Return accepted and reached positions by prompt, greedy and at T = 1, and figures of the
    training.

    The result is stored beside the run's stages, because decoding for all arms takes as long as
    training them.
    """
    name = _name(*arm)
    file = run.directory / "measured" / f"{name}.json"
    if file.exists():
        measured: dict[str, Any] = json.loads(file.read_text())
        return measured
    drafter = str(run.stage_directory(name) / "drafter")
    prompts = run.prompts(spread(run.read_data()["test"], 12 if quick else 42))
    figures: dict[str, Any] = {}
    tallies = decoded_tallies(run.target, drafter, prompts, 32 if quick else 64, GAMMA)
    for metric, tally in tallies:
        figures[metric] = {
            "accepted": tally.accepted.sum(1).tolist(),
            "reached": tally.reached.sum(1).tolist(),
            "tokens_per_step": tally.pooled().tokens_per_step,
        }
        reporter.say(f"{name}, {metric}: {tally.pooled().acceptance_rate:.3f}")
    training = read_summary(run, name)["training"]
    dev = training["dev"]
    figures |= {
        "expected_acceptance": dev[-1]["expected_acceptance"] if dev else None,
        "tokens": training["tokens"],
        "seconds": training["training_seconds"],
        "writing_seconds": training["clock"].get("text", 0.0),
    }
    write_json(file, figures)
    return figures


@torch.no_grad()
def cache_errors(run: Run) -> list[dict[str, float]]:
    """Measure how much of the forward KL from the target to the start remains with k outcomes and a
    tail, on dev texts.

    bytes: per cached token. tail: the mean mass of the tail. divergence: the mean over k + 1
    outcomes, as a share of the mean over the draft vocabulary. gradient: the norm of the error in
    the logits' gradient, relative to the gradient's norm.
    """
    target = run.target
    drafter = run.stage_directory("start") / "drafter"
    student = load_model_and_tokenizer(str(drafter), dtype="float32", device="cpu").model
    vocabulary = load_vocabulary(drafter, student)
    assert vocabulary is not None
    teacher = LiveTeacher(split_model(target.model), vocabulary=vocabulary.ids)
    answers = spread(list(read_answers(run.stage_directory("dev"))), 16)
    examples = {example.id: example for example in run.read_data()["dev"]}
    terms = WeightedLoss({"forward_kl": 1.0})
    sums = {k: np.zeros(3) for k in (8, 16, 32, 64, 128)}
    full_divergence, tokens = 0.0, 0
    for answer in answers:
        sample = to_sample(examples[answer["id"]], target.tokenizer, answer["tokens"])
        batch = inputs(collate([sample], 0), target.device)
        predicted = batch["loss_mask"][0, 1:]
        full = teacher.signal(**batch, ids=[])(slice(0, int(predicted.sum())))
        logits = student(batch["input_ids"]).logits[0, :-1][predicted]
        labels = torch.zeros(len(logits), dtype=torch.int64)
        values, gradient = terms.fused(logits, full, labels)
        full_divergence += float(values.sum())
        tokens += len(logits)
        for k, totals in sums.items():
            cached = top_k(full.logits, k)
            cached_values, cached_gradient = terms.fused(logits, cached, labels)
            error = (cached_gradient - gradient).norm(dim=-1) / gradient.norm(dim=-1)
            totals += [
                float(cached.log_tail.exp().sum()),
                float(cached_values.sum()),
                float(error.sum()),
            ]
    return [
        {
            "k": k,
            "bytes": bytes_per_token(k, len(vocabulary.ids)),
            "tail": totals[0] / tokens,
            "divergence": totals[1] / full_divergence,
            "gradient": totals[2] / tokens,
        }
        for k, totals in sums.items()
    ]


def cache_table(errors: list[dict[str, float]]) -> Table:
    rows = [
        {
            "k": f"{row['k']:.0f}",
            "bytes a token": f"{row['bytes']:.0f}",
            "mass in the tail": f"{row['tail']:.2%}",
            "divergence kept": f"{row['divergence']:.1%}",
            "gradient error": f"{row['gradient']:.1%}",
        }
        for row in errors
    ]
    return rows_table("the teacher's top k and a tail, against its full distribution", rows, left=0)


def _name(loss: str, text: str, seed: int = 0) -> str:
    """Return a stage's name: letters, digits, hyphens."""
    if loss == "start":
        return "start"
    plain = text.replace("λ = ", "lambda").replace(", k = ", "").replace(".", "_")
    return f"{loss}-{plain}-{seed}"


def _acceptance(seeds: list[dict[str, Any]], metric: str) -> dict[str, float]:
    accepted, reached = (
        np.array([x for seed in seeds for x in seed[metric][key]])
        for key in ("accepted", "reached")
    )
    ratio = ratio_of_totals(accepted, reached)
    assert ratio is not None
    return ratio


def arms_table(rows: dict[tuple[str, str], list[dict[str, Any]]], start: dict[str, Any]) -> Table:
    """Return a table: the common start, then arms by acceptance at temperature 1, best first."""
    best_first = sorted(rows.items(), key=lambda item: -_acceptance(item[1], "sampled")["value"])
    table_rows = []
    for (loss, text), seeds in [(("(start)", ""), [start]), *best_first]:
        expected = [s["expected_acceptance"] for s in seeds if s["expected_acceptance"] is not None]
        tokens, seconds, writing = (
            float(np.mean([s[key] for s in seeds]))
            for key in ("tokens", "seconds", "writing_seconds")
        )
        cells = {
            "loss": loss,
            "text": text,
            "greedy": format_interval(_acceptance(seeds, "greedy"), 3),
            "T = 1": format_interval(_acceptance(seeds, "sampled"), 3),
            "expected, T = 1": f"{np.mean(expected):.3f}" if expected else "–",
            "tokens": f"{tokens:,.0f}",
            "seconds": f"{seconds:.0f}",
            "writing": f"{writing / seconds:.0%}",
        }
        table_rows.append(cells)
    return rows_table(f"acceptance rate at γ = {GAMMA}", table_rows, left=len(table_rows[0]))


def plot_arms(
    rows: dict[tuple[str, str], list[dict[str, Any]]], start: dict[str, Any], file: Path
) -> None:
    """Plot each arm's two acceptance rates with their intervals."""
    from matplotlib.figure import Figure

    names = [f"{loss}, {text}" for loss, text in rows]
    figure = Figure(figsize=(8, 0.36 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for side, (metric, title) in zip(
        axes, (("greedy", "greedy"), ("sampled", "temperature 1")), strict=True
    ):
        ratios = [_acceptance(seeds, metric) for seeds in rows.values()]
        values, low, high = (np.array([r[key] for r in ratios]) for key in ("value", "low", "high"))
        errors = np.array([values - low, high - values])
        ys = np.arange(len(names))[::-1]
        side.errorbar(values, ys, xerr=errors, fmt="o", color="#0067a5", capsize=2)
        side.axvline(_acceptance([start], metric)["value"], color="#5a6674", linestyle=":")
        side.set_title(title, fontsize=9)
        side.set_xlabel("acceptance rate (dotted: the start)", fontsize=9)
        side.set_yticks(ys, names, fontsize=9)
        side.grid(axis="x", alpha=0.3)
    save_figure(figure, file)


if __name__ == "__main__":
    run_command(main)
