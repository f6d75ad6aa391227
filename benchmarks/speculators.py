"""Compares a step of our EAGLE-3 training with one of the library speculators, on a CPU.

    python -m benchmarks.speculators [--quick] [--json FILE] [--precision fp32|bf16] [--target T]
                                     [--length N …]

The same texts, hidden states and weights: our heads are exported, and the library loads the export.
Both train EAGLE-3 (2503.01840) with three steps of the training-time test, the forward KL and the
target's output layer, which the library never trains. One text a step, one thread. Both steps are
forward, backward, clipping and AdamW, measured by the same code (`benchmarks.shared.timed_steps`).

The library's model runs in its own environment (`make engine-speculators`), with both forms of
attention whose backward a CPU has, and with the loss that is no GPU kernel. A row shows what its
trainer ends with on a CPU. fp32: all in float32. bf16: autocast for both; our borrowed weights of
the target are bfloat16, as in a stage; the library keeps float32. Each row is measured in a process
of its own. The target's own pass is not measured: its states are read from a file.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import (
    MIB,
    PROMPTS,
    TARGET,
    JsonOption,
    TargetOption,
    describe_machine,
    in_fresh_process,
    rows_table,
    run_command,
    start_benchmark,
    start_process,
    write_json,
)
from benchmarks.shared.timed_steps import measure_steps
from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from decode.model.loading import Target, load_target
from distill.choose_vocabulary import most_frequent
from distill.float32_products import float32_products
from distill.losses import WeightedLoss
from distill.teacher.feature_sources import LiveFeatures
from draftsmith.cli.command import tokenized_prompts
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import export_drafter
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads, read_heads, save_heads
from heads.options import Eagle3Options
from tools.child_job import run_job
from train.data.read import read_examples
from train.engines.child_process import model_directory, package_version

LIBRARY = "speculators"
CHILD = Path(__file__).parent / "shared" / "speculators_child.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
OURS, ATTENTIONS = "ours", ("sdpa", "eager")
STEPS, DECAY = 3, 0.8
LENGTHS, REDUCED = (256, 512), 8000  # tokens of a text, of the reduced draft vocabulary
SPREAD = 0.1  # of what is added to the weights that training starts with: every weight counts
Figures = dict[str, Any]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="one length, 3 steps")] = False,
    json_file: JsonOption = None,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="bf16: autocast")] = "fp32",
    target: TargetOption = TARGET,
    length: Annotated[list[int] | None, typer.Option(min=8, help="tokens of a text")] = None,
) -> None:
    """Measure both and print a table."""
    reporter = start_benchmark()
    if missing := missing_library():
        raise UserError(f"{missing}; install it with: make engine-speculators")
    loaded = load_target(target, dtype="float32", device="cpu")
    with tempfile.TemporaryDirectory() as directory:
        results, error = compare(
            loaded,
            Path(directory),
            lengths=length or LENGTHS[: 1 if quick else None],
            vocabularies=(REDUCED, loaded.vocab_size),
            texts=3 if quick else 5,
            half=precision == "bf16",
            say=reporter.say,
        )
    title = f"EAGLE-3, {STEPS} steps, {precision}, one thread"
    rows = [_cells(case, name, x) for case, found in results.items() for name, x in found.items()]
    reporter.table(rows_table(title, rows, left=3))
    version = package_version(LIBRARY, LIBRARY)
    ending = f"ends with {error}" if error else "takes a step"
    reporter.say(f"the trainer of {LIBRARY} {version} on a CPU {ending}")
    if json_file is not None:
        figures = {
            "benchmark": "speculators",
            "quick": quick,
            "precision": precision,
            "version": version,
            "process": describe_machine(),
            "ratios": ratios(results),
            "results": results,
            "trainer_error": error,
        }
        write_json(json_file, figures)


def missing_library() -> str | None:
    """What is not installed; None if nothing is missing."""
    installed = package_version(LIBRARY, LIBRARY)
    return None if installed else "the library speculators is not installed"


def compare(
    target: Target,
    directory: Path,
    *,
    lengths: Sequence[int],
    vocabularies: Sequence[int],
    texts: int,
    half: bool,
    say: Any = lambda line: None,
) -> tuple[dict[str, dict[str, Figures]], str | None]:
    """Return the figures by case "TOKENS_VOCABULARY" and contestant, and the error of the library's
    trainer (None if it has none).

    target: in float32. directory: for files. lengths: tokens of a
    text. vocabularies: the tokens of the draft vocabulary, the target's own number for all. texts:
    the number of texts, which is that of steps.
    """
    model = model_directory(target, directory / "target")
    tokens = _text_tokens(target)
    for vocabulary in vocabularies:
        _make_drafter(target, tokens, directory, vocabulary, str(model))
    results: dict[str, dict[str, Figures]] = {}
    for length in lengths:
        states = directory / f"states_{length}.safetensors"
        _write_states(target, tokens, states, texts, length)
        for vocabulary in vocabularies:
            job = {
                "target": str(model),
                "drafter": str(directory / f"export_{vocabulary}"),
                "states": str(states),
                "steps": STEPS,
                "decay": DECAY,
                "texts": texts,
                "tokens": length,
                "half": half,
            }
            say(f"{length} tokens, {vocabulary:,} of the draft vocabulary: {OURS}")
            found = results[f"{length}_{vocabulary}"] = {
                OURS: in_fresh_process(
                    "benchmarks.speculators:measure_ours",
                    target=str(model),
                    drafter=str(directory / f"drafter_{vocabulary}"),
                    **{name: job[name] for name in ("states", "texts", "tokens", "half")},
                )
            }
            for attention in ATTENTIONS:
                name = f"{LIBRARY}_{attention}"
                say(f"{length} tokens, {vocabulary:,} of the draft vocabulary: {name}")
                job["attention"] = attention
                found[name] = run_job(LIBRARY, CHILD, job, ENVIRONMENT)
    job["trainer"] = str(directory / "trainer")
    error: str | None = run_job(LIBRARY, CHILD, job, ENVIRONMENT)["error"]
    return results, error


def ratios(results: Mapping[str, Mapping[str, Figures]]) -> dict[str, float]:
    """Return, flat by name, ours over theirs for each case: seconds and peak memory of a step, both
    below 1 where ours needs less. `loss_difference` and `gradient_difference`: the largest relative
    difference of a step's loss and of the norm of its gradient."""
    values: dict[str, float] = {}
    for case, found in results.items():
        ours = found[OURS]
        for name, theirs in found.items():
            if name == OURS:
                continue
            ending = f"{name}_{case}"
            for what, key in (("step", "seconds"), ("memory", "peak_bytes")):
                values[f"eagle3_{what}_vs_{ending}"] = ours[key] / theirs[key]
            for what, key in (("loss", "losses"), ("gradient", "gradient_norms")):
                pairs = zip(ours[key], theirs[key], strict=True)
                values[f"{what}_difference_{ending}"] = max(abs(a - b) / b for a, b in pairs)
    return values


def measure_ours(
    target: str, drafter: str, states: str, texts: int, tokens: int, half: bool
) -> Figures:
    """Return the figures of our steps. Call it in a fresh process."""
    start_process()
    loaded = load_target(target, dtype="bfloat16" if half else "float32", device="cpu")
    heads = read_heads(Path(drafter), loaded)
    heads.borrow(loaded.model)
    module = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), loaded.model).train()
    stored = load_file(states)
    read = stored["read"].chunk(len(heads.captured_layers), -1)
    features = dict(zip((*heads.captured_layers, FINAL), (*read, stored["normed"]), strict=True))

    def loss_of(text: int, count: int) -> Tensor:
        row, part = slice(text, text + 1), slice(count)
        ids = stored["input_ids"][row, part]
        # The library's loss is the mean over the tokens of each step: step d has count − d − 1.
        weights = {d: DECAY ** (d - 1) / (count - d - 1) for d in range(1, STEPS + 1)}
        states = {layer: x[row, part] for layer, x in features.items()}
        loss, _ = module(ids, torch.ones_like(ids, dtype=torch.bool), states, weights)
        return loss

    with float32_products(module):
        return measure_steps(heads.parameters(), loss_of, texts=texts, tokens=tokens, half=half)


def _text_tokens(target: Target) -> list[int]:
    """The prompts for training, one after the other."""
    examples, _ = read_examples(str(PROMPTS / "train.jsonl"))
    return [token for prompt in tokenized_prompts(examples, target, None) for token in prompt]


def _make_drafter(
    target: Target, tokens: Sequence[int], directory: Path, vocabulary: int, model: str
) -> None:
    """Write heads as `drafter_VOCABULARY`, and their export for the library as
    `export_VOCABULARY`."""
    is_reduced = vocabulary < target.vocab_size
    kept = most_frequent([tokens], vocabulary, target.vocab_size)[0] if is_reduced else None
    heads = new_heads(Eagle3Options(steps=STEPS, decay=DECAY, output="target"), target, kept)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(SPREAD * torch.randn_like(weight))
    drafter = directory / f"drafter_{vocabulary}"
    save_heads(drafter, heads, target=target, provenance={"stage": "heads"})
    options = ExportOptions(gamma=STEPS, target=model)
    export_drafter(drafter, "speculators", directory / f"export_{vocabulary}", options)


def _write_states(
    target: Target, tokens: Sequence[int], path: Path, texts: int, length: int
) -> None:
    """Write texts [texts, length] and the target's states for each token: `read` by the drafter,
    the `last` before the target's final norm, which the library applies itself, and `normed`."""
    heads = new_heads(Eagle3Options(steps=STEPS), target, None)
    last = target.model.config.get_text_config().num_hidden_layers - 1
    source = LiveFeatures(target.model, (*heads.captured_layers, last, FINAL))
    ids = torch.tensor(tokens[: texts * length]).view(texts, length)
    features = source.features(ids, torch.ones_like(ids), [])
    states = {
        "input_ids": ids,
        "read": torch.cat([features[layer] for layer in heads.captured_layers], -1),
        "last": features[last].contiguous(),
        "normed": features[FINAL].contiguous(),
    }
    save_file(states, path)


def _cells(case: str, name: str, figures: Figures) -> dict[str, str]:
    tokens, vocabulary = case.split("_")
    return {
        "tokens": tokens,
        "draft vocabulary": f"{int(vocabulary):,}",
        "contestant": name.replace("_", ", "),
        "s a step": f"{figures['seconds']:.2f}",
        "tokens/s": f"{figures['tokens_per_second']:,.0f}",
        "peak MiB": f"{figures['peak_bytes'] / MIB:,.0f}",
        "losses": f"{figures['losses'][0]:.6f} … {figures['losses'][-1]:.6f}",
    }


if __name__ == "__main__":
    run_command(main)
