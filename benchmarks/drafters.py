"""Compares all drafters on the same prompts: what they accept, what they cost, what they gain.

    python -m benchmarks.drafters [--quick] [--run DIR …] [--drafter NAME …] [--json FILE]
        [--plots DIR] [--target T] [--dtype D] [--gamma N] [--prompts FILE] [--runs DIR]

Without options: the drafters that need no training, and a datastore of the target's answers to the
shipped training prompts. --run adds every drafter that a run has trained (`runs/quickstart`, or a
run of `benchmarks.heads`), with the seconds of its training. --drafter adds any other, by the names
of `draftsmith evaluate`: `vertical:…`, `skip:file=…`, a directory. Each is decoded greedily in its
own shape, and timed in turns with plain decoding. The rows are sorted by the speed-up.

With --random-layers N the target is a llama with N layers of random weights, for the cost of drafts
from a target that is deep enough for them. It says nothing about acceptance: its tokens follow no
pattern, so only speeds of a draft step and of a pass (c and v) mean something there.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import (
    MIB,
    PROMPTS,
    TARGET,
    JsonOption,
    PromptsOption,
    RunsOption,
    TargetOption,
    describe_machine,
    execute_run,
    format_interval,
    rows_table,
    run_command,
    run_config,
    start_benchmark,
    write_json,
)
from benchmarks.heads import format_tokens_per_step, plot_arms
from decode.drafters.directory import DRAFTER_FILE, open_drafter
from decode.errors import UserError
from decode.measure.evaluation import evaluate
from decode.settings import EvaluationProtocol
from decode.target.loading import Target, load_target
from train.cli.command import tokenized_prompts
from train.console import Reporter
from train.data.read import read_examples, spread

# Untrained drafters, with options for a CPU where the paper's are for a GPU.
UNTRAINED = (
    "ngram",
    "store",
    "max_gram",
    "suffix",
    "lookahead:window=5,ngram=3,guesses=3",
    "skip:mlp=20",
    "swift",
)
DATASTORE_NODES = 8


@dataclass(frozen=True)
class Contestant:
    """name: for the table. spec: as `open_drafter` takes it. seconds: of its training. size: of
    its files in bytes."""

    name: str
    spec: str
    seconds: float | None = None
    size: int | None = None


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a few prompts")] = False,
    run: Annotated[list[Path] | None, typer.Option(help="a run whose drafters compete")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="another drafter, by name")] = None,
    json_file: JsonOption = None,
    plots: Annotated[Path | None, typer.Option(help="write drafters.png here")] = None,
    target: TargetOption = TARGET,
    dtype: Annotated[str, typer.Option(help="of the target and the drafters")] = "bfloat16",
    gamma: Annotated[int, typer.Option(min=1, help="tokens per draft; trees ignore it")] = 4,
    random_layers: Annotated[
        int | None, typer.Option(min=1, help="a target of random weights with so many layers")
    ] = None,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    runs: RunsOption = Path("runs"),
) -> None:
    """Measure every drafter, print the table, sorted by speed-up."""
    reporter = start_benchmark()
    loaded = load_target(target, dtype=dtype)
    contestants = [Contestant(name.partition(":")[0], name) for name in UNTRAINED]
    if random_layers is None:
        contestants.append(datastore(target, runs, quick, reporter))
    else:
        loaded = with_random_layers(loaded, random_layers)
    for path in run or ():
        contestants += trained_drafters(path)
    contestants += [Contestant(name, name) for name in drafter or ()]
    protocol = EvaluationProtocol(
        gamma=gamma,
        max_new_tokens=48 if quick else 64,
        timed_tokens=48 if quick else 64,
        timed_prompts=6 if quick else 12,
        generate=False,
    )
    examples, _ = read_examples(str(prompts))
    texts = tokenized_prompts(spread(examples, 12 if quick else 42), loaded, None)
    figures: dict[str, dict[str, Any]] = {}
    for contestant in contestants:
        reporter.say(f"measuring {contestant.name}")
        try:
            figures[contestant.name] = measure(contestant, loaded, texts, protocol)
        except UserError as error:
            reporter.say(f"  not measured: {error}")
    ordered = dict(sorted(figures.items(), key=lambda row: -row[1]["speedup"]["value"]))
    reporter.table(drafters_table(ordered, describe_target(loaded, random_layers), gamma))
    if plots:
        plot_arms(ordered, plots / "drafters.png")
    if json_file:
        write_json(
            json_file,
            {
                "ratios": {
                    f"speedup_{name}": row["speedup"]["value"] for name, row in ordered.items()
                },
                "drafters": ordered,
                "target": describe_target(loaded, random_layers),
                "machine": describe_machine(),
            },
        )


def describe_target(target: Target, random_layers: int | None) -> str:
    weights = sum(parameter.numel() for parameter in target.model.parameters())
    kind = "" if random_layers is None else f", {random_layers} layers of random weights"
    return f"{target.name}{kind}, {weights / 1e6:.0f}M"


def with_random_layers(target: Target, layers: int) -> Target:
    """The same tokenizer with a llama of random weights, 1,024 wide."""
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device(target.device):
        model = LlamaForCausalLM(config).to(target.dtype).eval()
    return replace(target, model=model, eos_token_ids=())


def datastore(target: str, runs: Path, quick: bool, reporter: Reporter) -> Contestant:
    """A datastore of the target's answers to the shipped training prompts, from a run that is
    kept."""
    stages: list[dict[str, Any]] = [
        {"name": "answers", "kind": "generate", "prompts": 96 if quick else None}
        | {"max_new_tokens": 80, "batch_size": 32, "part_prompts": 96},
        {"name": "datastore", "kind": "datastore", "text": "answers"}
        | {"tree_nodes": DATASTORE_NODES},
    ]
    config = run_config("drafters-quick" if quick else "drafters", runs, stages, target=target)
    made, _ = execute_run(config, reporter)
    directory = made.stage_directory("datastore")
    return Contestant("rest", str(directory / "drafter"), seconds_of(directory), size_of(directory))


def trained_drafters(run: Path) -> list[Contestant]:
    """The drafters of a run's stages, each alone and after prompt lookup, `pass` also in the passes
    that verify. Raises UserError if there is none."""
    files = sorted(run.glob(f"stages/*/drafter/{DRAFTER_FILE}"))
    if not files:
        raise UserError(
            f"--run {run} has no stages with a drafter; expected the directory of a run"
        )
    contestants = []
    for file in files:
        directory = file.parent
        stage = directory.parent
        kind = json.loads(file.read_text())["kind"]
        name = f"{kind} ({run.name}/{stage.name})"
        row = Contestant(name, str(directory), seconds_of(stage), size_of(stage))
        contestants += [row, replace(row, name=f"ngram+{name}", spec=f"ngram+{directory}")]
        if kind == "pass":
            spec = f"in_tree:drafter={directory}"
            contestants.append(replace(row, name=f"in_tree {name}", spec=spec))
    return contestants


def seconds_of(stage: Path) -> float | None:
    """The seconds of training of a finished stage, else of the complete stage."""
    summary = json.loads((stage / "done.json").read_text())["summary"]
    training = summary.get("training") or {}
    seconds: float | None = training.get("training_seconds", summary.get("seconds"))
    return seconds


def size_of(stage: Path) -> int:
    return sum(file.stat().st_size for file in (stage / "drafter").rglob("*") if file.is_file())


def measure(
    contestant: Contestant, target: Target, texts: list[list[int]], protocol: EvaluationProtocol
) -> dict[str, Any]:
    """The figures of one drafter."""
    drafter = open_drafter(contestant.spec, target)
    figures = evaluate(target, drafter, texts, protocol).to_dict()
    kept = (
        "tokens_per_step", "tokens_per_step_interval", "acceptance_rate", "draft_efficiency", "c",
        "v", "speedup", "drafts", "identical_to_plain", "identical_within_rounding",
    )  # fmt: skip
    return {name: figures[name] for name in kept} | {
        "training_seconds": contestant.seconds,
        "bytes": contestant.size,
    }


def drafters_table(figures: dict[str, dict[str, Any]], target: str, gamma: int) -> Any:
    """The table for the terminal."""

    def cell(value: float | None, form: str, scale: float = 1) -> str:
        return "–" if value is None else format(value / scale, form)

    rows = [
        {
            "drafter": name,
            "drafts": row["drafts"],
            "tokens/step": format_tokens_per_step(row),
            "α": cell(row["acceptance_rate"], ".2f"),
            "c": cell(row["c"], ".3f"),
            "v": cell(row["v"], ".2f"),
            "speed-up": format_interval(row["speedup"], 2),
            "training s": cell(row["training_seconds"], ".0f"),
            "MiB": cell(row["bytes"], ".1f", MIB),
            "same text": cell(row["identical_within_rounding"], ".0%"),
        }
        for name, row in figures.items()
    ]
    return rows_table(f"{target}; greedy, γ = {gamma}, batch 1", rows, left=2)


if __name__ == "__main__":
    run_command(main)
