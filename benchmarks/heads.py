"""Compares kinds of heads on SmolLM2-135M's hidden states with each other and with a small LM.

    python -m benchmarks.heads [--quick] [--arms NAME,…] [--minutes M] [--prompts N]
        [--timed N] [--more FILE] [--json FILE] [--runs DIR]

One run: the target answers the shipped training prompts, its hidden states are cached once, and
every arm learns from them: Medusa's heads, Blockwise's, Hydra's, EAGLE-1, EAGLE-3, Hydra++'s, and
a small LM of the target's first two layers. Each is stored with the tree that pays at this
machine's costs. Arms make the same number of passes over the text, or with --minutes train for the
same time. On a slow machine, answers and times take longest: --prompts has fewer answers, and with
--timed 0 no speed is measured, no prompt lookup, and all arms draft chains of 4. With --more, the
run also uses your own prompts for training. Some arms, most of which draft in one pass, run only if
--arms names them.

The measurements use the shipped test prompts: how often the first draft token is the target's,
compared with a bigram table of the same text and with prompt lookup; tokens per step, with 95%
bootstrap intervals over prompts; and the speed-up over plain decoding in the same loop, greedy, in
bfloat16. In float32 every arm's greedy text must equal plain decoding's, token by token, and the
benchmark checks that. From these texts it also takes the gain: an arm's tokens per step over the
first arm's on the same prompts, with its interval. Runs are kept and continue where they stopped.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    RunsOption,
    describe_machine,
    execute_run,
    format_figure,
    format_interval,
    rows_table,
    run_command,
    run_config,
    start_benchmark,
    with_interval,
    write_json,
)
from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter
from decode.settings import DecodeSettings
from train.base.console import Reporter
from train.data.read import spread
from train.measure.intervals import ratio_of_totals
from train.run.run import Run

TEXT = ["answers", "variants"]
# Block drafters read the layers that are cached for EAGLE-3.
TAPS = [1, 14, 26]
BLOCK: dict[str, Any] = {"layers": 2, "taps": TAPS}
DFLASH = BLOCK | {"type": "dflash", "block": 8, "decay": 4.0}
DSPARK = BLOCK | {"type": "dspark"}
# The options of the heads, and the loss weights of their stage. Most learn the target's
# distribution, since one pass of the target over the text is available anyway. EAGLE-1 adds it to
# its regression, with the weight from its paper.
HEADS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "medusa": ({"type": "medusa", "heads": 3, "output": "shared"}, {"forward_kl": 1.0}),
    "blockwise": ({"type": "blockwise", "k": 4}, {"forward_kl": 1.0}),
    "hydra": ({"type": "hydra", "heads": 3, "output": "shared"}, {"forward_kl": 1.0}),
    "eagle1": ({"type": "eagle1", "depth": 4}, {"forward_kl": 0.1}),
    "eagle3": ({"type": "eagle3", "steps": 3}, {"forward_kl": 1.0}),
    "eagle31": (
        {"type": "eagle3", "steps": 3, "fc_norm": True, "norm_output": True},
        {"forward_kl": 1.0},
    ),
    "p_eagle": ({"type": "p_eagle", "tokens": 4, "layers": 2}, {"forward_kl": 1.0}),
    "pass": ({"type": "pass", "tokens": 4}, {"forward_kl": 1.0}),
    "hydra_plus": ({"type": "hydra_plus", "heads": 3, "output": "shared"}, {"forward_kl": 1.0}),
    "kangaroo": ({"type": "kangaroo", "exit_layer": 2, "depth": 4}, {"forward_kl": 1.0}),
    "mtp": ({"type": "mtp", "depth": 3}, {"forward_kl": 1.0}),
    # Block drafters: DFlash by the text's tokens, DSpark by its paper's loss.
    "dflash": (DFLASH, {"cross_entropy": 1.0}),
    "dspark": (DSPARK, {"cross_entropy": 0.1, "total_variation": 1.8}),
    "dflash2": (BLOCK | {"type": "dflash2"}, {"forward_kl": 1.0}),
    "xpress": (BLOCK | {"type": "xpress"}, {"cross_entropy": 0.1, "total_variation": 1.8}),
    "domino": (BLOCK | {"type": "domino", "block": 8}, {"cross_entropy": 1.0}),
}
# Small LMs, of the target's first two layers. "pard" drafts all tokens in one pass.
SMALL_LM, PARD = "small_lm", "pard"
SMALL_LMS = (SMALL_LM, PARD)
KNOWN = (*SMALL_LMS, *HEADS)
# These run only if --arms names them.
EXTRA = (
    PARD,
    "pass",
    "p_eagle",
    "dflash",
    "dspark",
    "dflash2",
    "xpress",
    "domino",
    "kangaroo",
    "mtp",
    "eagle31",
)
ARMS = tuple(name for name in KNOWN if name not in EXTRA)


@dataclass(frozen=True)
class Settings:
    """arms: their names. minutes: of training for each arm; None: the same passes over the text for
    all. more: a file of prompts; its first more_prompts are used for training with
    the shipped ones. runs: the directory for runs. prompts: the training prompts that the target
    answers; None: all. timed: the test prompts whose speed is measured; 0: no speed is measured,
    prompt lookup has no row, and no tree is calibrated."""

    quick: bool
    arms: tuple[str, ...]
    minutes: float | None
    more: Path | None
    more_prompts: int
    runs: Path
    prompts: int | None = None
    timed: int = 12


def main(
    quick: Annotated[bool, typer.Option("--quick", help="little text, one epoch")] = False,
    arms: Annotated[str, typer.Option(help="arms to train, in order")] = ",".join(ARMS),
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="minutes of training for each arm")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="training prompts that the target answers")
    ] = None,
    timed: Annotated[int, typer.Option(min=0, help="test prompts whose speed is measured")] = 12,
    more: Annotated[Path | None, typer.Option(help="more prompts to train on")] = None,
    more_prompts: Annotated[int, typer.Option(help="number of prompts of --more")] = 4000,
    json_file: JsonOption = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Train every arm, measure it, print the table."""
    reporter = start_benchmark()
    names = tuple(arms.split(","))
    if unknown := [name for name in names if name not in KNOWN]:
        raise UserError(f"unknown arm {unknown[0]!r}; known arms: {', '.join(KNOWN)}")
    settings = Settings(quick, names, minutes, more, more_prompts, runs, prompts, timed)
    run, report = execute_run(heads_config(settings), reporter)
    figures = figures_by_arm(report)
    texts = float32_figures(run, reporter, prompts=6 if quick else 42)
    reporter.table(arms_table(figures, texts))
    if json_file:
        write_json(
            json_file,
            {
                "ratios": ratios(figures),
                "arms": figures,
                "float32_texts": texts,
                "settings": run.config.model_dump(mode="json"),
                "machine": describe_machine(),
            },
        )


def heads_config(settings: Settings) -> dict[str, Any]:
    """Return the config of the run: the texts, their hidden states, and a stage for every arm."""
    quick = settings.quick
    train, limit = ["train.jsonl"], None
    if settings.more is not None:
        shipped = len((PROMPTS / train[0]).read_text("utf-8").splitlines())
        train, limit = [*train, str(settings.more.absolute())], shipped + settings.more_prompts
    answer = {"kind": "generate", "max_new_tokens": 80, "batch_size": 32, "part_prompts": 96}
    loop: dict[str, Any] = {"epochs": 1 if quick else 3, "tokens_per_batch": 1024, "log_every": 40}
    start_loop = loop | {"max_steps": 30}
    if settings.minutes is not None:
        loop |= {"epochs": 1000, "max_minutes": settings.minutes}
    training: dict[str, Any] = {"text": TEXT, "loop": loop, "optimizer": {"lr": 2e-3}}
    reads_layers = any(
        HEADS[name][0]["type"]
        in ("eagle3", "p_eagle", "dflash", "dspark", "dflash2", "xpress", "domino", "kangaroo")
        for name in settings.arms
        if name in HEADS
    )
    # These figures are not used to choose anything, so they may use test text.
    dev = {"text": "test-answers", "samples": 42, "every": 10**6}
    stages: list[dict[str, Any]] = [
        answer | {"name": "answers", "prompts": 64 if quick else settings.prompts},
        answer
        | {"name": "variants", "prompts": 32 if quick else min(240, settings.prompts or 240)}
        | {"sampling": {"temperature": 0.8, "top_k": 50}, "samples": 3},
        answer | {"name": "test-answers", "split": "test", "prompts": 42, "max_new_tokens": 64},
        {
            "name": "states",
            "kind": "feature_cache",
            "text": TEXT,
            # -1 is the output layer's input. Heads that read several layers need the others, for a
            # target with 30 layers.
            "captured_layers": [-1, *TAPS] if reads_layers else [-1],
        },
    ]
    small_lm: dict[str, Any] = {"kind": "distill", "train_embeddings": False, **training}
    words = {"drafter": {"layers": [0, 1]}, "losses": {"cross_entropy": 1.0}, "loop": start_loop}
    if {SMALL_LM, PARD} & {*settings.arms}:
        stages.append(small_lm | words | {"name": "words", "draft_vocabulary": 8000})
    for name in settings.arms:
        if name in SMALL_LMS:
            distilled = {"name": name, "drafter": {"stage": "words"}, "teacher": "states"}
            distilled |= {"losses": {"forward_kl": 1.0}, "dev": dev}
            if name == PARD:
                distilled["parallel"] = {"tokens": 4, "mask_token": "<reponame>"}
            stages.append(small_lm | distilled)
            continue
        heads, losses = HEADS[name]
        stage: dict[str, Any] = {
            "name": name,
            "kind": "heads",
            "heads": heads,
            "losses": losses,
            "features": "states",
            "draft_vocabulary": 8000,
            "dev": dev,
            "tree": {"width": 6, "prompts": 12} if settings.timed else None,
            **training,
        }
        stages.append(stage)
    parts = ["heads"]
    if settings.arms != ARMS:
        parts += settings.arms
    if settings.minutes is not None:
        parts.append(f"{settings.minutes:g}min")
    if settings.more is not None:
        parts.append(f"more{settings.more_prompts}")
    if settings.prompts is not None:
        parts.append(f"{settings.prompts}prompts")
    if settings.timed != Settings.timed:
        parts.append(f"{settings.timed}timed")
    return run_config(
        "-".join([*parts, "quick"] if quick else parts),
        settings.runs,
        stages,
        data={"train": train, "limit": limit, "dev": "dev.jsonl", "test": "test.jsonl"},
        evaluation={
            "stages": list(settings.arms),
            "in_turn": [],
            "prompts": 6 if quick else 42,
            "gamma": 4,
            "max_new_tokens": 24 if quick else 64,
            "timed_prompts": min(settings.timed, 3) if quick else settings.timed,
            "baselines": ["ngram"] if settings.timed else [],
            "timed_tokens": 24 if quick else 48,
        },
    )


def figures_by_arm(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each arm and of prompt lookup, from evaluations and stages."""
    rows = {
        "ngram" if row["stage"] == "before" else row["stage"]: row["evaluation"]
        for row in report["rows"]
    }
    summaries = {stage["name"]: stage["summary"] for stage in report["stages"]}
    figures = {}
    for name, evaluation in rows.items():
        summary = summaries.get(name, {})
        training = summary.get("training") or {}
        last = (training.get("dev") or [{}])[-1]
        figures[name] = {
            **{
                key: evaluation[key]
                for key in ("tokens_per_step", "acceptance_rate", "c", "v", "speedup", "drafts")
            },
            "tokens_per_step_interval": evaluation.get("tokens_per_step_interval"),
            "c_interval": evaluation.get("c_interval"),
            # A small LM has no heads; its figure is that of the first token too.
            "top1": last.get("head1/top1", last.get("top1")),
            "top5": last.get("head1/top5"),
            "bigram_top1": summary.get("bigram_top1"),
            "lookup_top1": summary.get("lookup_top1"),
            "trained_parameters": summary.get("trained_parameters"),
            "seconds": training.get("training_seconds"),
        }
    return figures


@torch.inference_mode()
def float32_figures(run: Run, reporter: Reporter, *, prompts: int) -> dict[str, dict[str, Any]]:
    """Return by arm, of greedy float32 texts of this number of test prompts: `identical`, the share
    that equals plain decoding's, and `gain`, the tokens per step over the first arm's with the
    interval over prompts."""
    target = load_target(TARGET, dtype="float32", device="cpu")
    texts = run.prompts(spread(run.read_data()["test"], prompts))
    plain = _decode(target, "none", texts).outputs
    figures: dict[str, dict[str, Any]] = {}
    first: Decoded | None = None
    for stage in run.config.stages:
        if stage.name in KNOWN:
            drafted = _decode(target, str(run.stage_directory(stage.name) / "drafter"), texts)
            first = first or drafted
            equal = [ours == theirs for ours, theirs in zip(drafted.outputs, plain, strict=True)]
            ours, theirs = drafted.tally, first.tally
            gain = ratio_of_totals(ours.emitted, theirs.emitted, per=(ours.steps, theirs.steps))
            share = sum(equal) / len(equal)
            figures[stage.name] = {"identical": share, "gain": gain}
            reporter.say(f"{stage.name}: {share:.0%} of float32 texts identical")
    return figures


def _decode(target: Target, spec: str, texts: list[list[int]]) -> Decoded:
    drafter = DRAFTERS[spec]() if spec == "none" else open_drafter(spec, target)
    decoder: Decoder = DecodeSettings().decoder(target, drafter)[0]
    return decoder.decode(texts, 48)


def ratios(figures: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the ratios. speedup_…: over plain decoding. top1_gain_…: the first head's share of
    correct predictions minus a bigram table's. tokens_per_step_…_vs_small_lm: over the small LM's.
    """
    values = {}
    for name, row in figures.items():
        if row["speedup"] is not None:
            values[f"speedup_{name}"] = row["speedup"]["value"]
        if row["bigram_top1"] is not None:
            values[f"top1_gain_{name}"] = row["top1"] - row["bigram_top1"]
        if name != SMALL_LM and SMALL_LM in figures:
            values[f"tokens_per_step_{name}_vs_small_lm"] = (
                row["tokens_per_step"] / figures[SMALL_LM]["tokens_per_step"]
            )
    return values


def arms_table(figures: dict[str, dict[str, Any]], texts: dict[str, dict[str, Any]]) -> Table:
    """Return the table of all arms. texts: what `float32_figures` returns."""
    title = "heads on the target's hidden states"
    if heads := next((row for row in figures.values() if row["bigram_top1"] is not None), None):
        title += (
            f"; a bigram table guesses {heads['bigram_top1']:.1%} of the test text, prompt lookup "
            f"{heads['lookup_top1']:.1%}"
        )

    rows = []
    first = next(iter(texts), "")
    for name, row in figures.items():
        of_texts = texts.get(name, {"gain": None, "identical": None})
        cells = {
            "drafter": name,
            "trained": format_figure(row["trained_parameters"], ",d"),
            "seconds": format_figure(row["seconds"], ".0f"),
            "first token: top-1": format_figure(row["top1"], ".1%"),
            "top-5": format_figure(row["top5"], ".1%"),
            "drafts": row["drafts"],
            "tokens/step": with_interval(row, "tokens_per_step", 2),
            f"over {first}": format_interval(None if name == first else of_texts["gain"], 2),
            "c": with_interval(row, "c", 3),
            "v": format_figure(row["v"], ".2f"),
            "speed-up": format_interval(row["speedup"], 2),
            "same text, float32": format_figure(of_texts["identical"], ".0%"),
        }
        rows.append(cells)
    return rows_table(title, rows, left=len(rows[0]) if rows else 1)


if __name__ == "__main__":
    run_command(main)
