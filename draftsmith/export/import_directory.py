"""An import: a published drafter becomes a drafter directory, and is measured beside its claim."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from decode.base.artifact import file_sha256
from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import open_drafter, save_drafter
from decode.settings import EvaluationProtocol
from draftsmith.export import LAYER_ID_MEANINGS, ImportOptions
from draftsmith.export.export_directory import DEFAULT_GAMMA, Say, vacant
from draftsmith.export.formats import EXPORT_FILE, FORMATS, Format, ImportJob
from draftsmith.export.formats.eagle3_layer import MODEL_TYPE
from draftsmith.export.published import CARD, Checkpoint
from draftsmith.export.published_gguf import GGUFCheckpoint
from train.measure.evaluation import evaluate

# Names that cards give to tokens per step. All count the token that the target adds to a draft.
CLAIM_NAMES = ("tokens_per_step", "acceptance_length", "mean_acceptance_length", "accept_length")


@dataclass(frozen=True)
class Imported:
    """What was imported. layout: the format's name. settings: the settings of the heads, to
    continue training; None for a small LM. claimed: tokens per step that the directory states in a
    machine-readable form, None if it states none."""

    layout: str
    kind: str
    depth: int | None
    dtype: str
    settings: dict[str, Any] | None
    notes: list[str]
    claimed: float | None


def import_drafter(
    source: str,
    target: Target,
    out: Path,
    options: ImportOptions = ImportOptions(),  # noqa: B008 (frozen)
) -> Imported:
    """Write a published drafter as a drafter directory to `out`, which must be missing or empty.

    source: a directory, a hub id, or a GGUF file of a block drafter. Weights keep their dtype, but
    those of a GGUF file get float32. Nothing that comes with the drafter runs. Raises UserError
    with everything in which the drafter differs from what its layout and the target need, and then
    writes nothing.
    """
    out = vacant(out, "--out")
    if options.layer_ids not in (None, *LAYER_ID_MEANINGS):
        raise UserError(
            f"layer_ids is {options.layer_ids!r}; expected {' or '.join(LAYER_ID_MEANINGS)}"
        )
    if options.depth is not None and options.depth < 1:
        raise UserError(f"depth is {options.depth}; expected at least 1")
    checkpoint = (
        GGUFCheckpoint.of_file(source, target)
        if source.endswith(".gguf")
        else Checkpoint.open(source, pickled=options.pickled, revision=options.revision)
    )
    layout = _layout_of(checkpoint, options.form)
    checkpoint.require_tokenizer_of(target)
    ignored = frozenset(filter(None, (options.ignore_keys or "").replace(" ", "").split(",")))
    job = ImportJob(checkpoint, target, options.depth, options.layer_ids, ignored)
    restored = layout.restored(job)
    notes = restored.notes + checkpoint.code_notes
    notes += [
        f"its config has {key}, which was not read (--ignore-keys)" for key in sorted(ignored)
    ]
    if restored.options is not None:  # A model is loaded with its tokenizer, which is compared.
        notes += checkpoint.tokenizer_notes
    imported = Imported(
        layout.name,
        restored.kind,
        restored.depth,
        checkpoint.dtype,
        restored.options,
        notes,
        claimed_tokens(checkpoint.directory),
    )
    provenance = {
        "imported": {
            "source": source,
            "revision": options.revision,
            "layout": layout.name,
            "dtype": checkpoint.dtype,
            "sha256": {file.name: file_sha256(file) for file in checkpoint.weight_files},
            "notes": notes,
        }
    }
    save_drafter(out, restored.kind, restored.write, target=target, provenance=provenance)
    return imported


def measure_import(
    drafter: Path,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    gamma: int | None = None,
    max_new_tokens: int = 64,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure an imported drafter in chains, as its publisher's engine drafts; return its figures.

    gamma: None is DEFAULT_GAMMA, or less if the drafter drafts less. Raises UserError if nothing
    was drafted.
    """
    opened = open_drafter(str(drafter), target)
    gamma = gamma or opened.max_depth(DEFAULT_GAMMA)
    protocol = EvaluationProtocol(
        gamma=gamma,
        shape="chain",
        max_new_tokens=max_new_tokens,
        timed_prompts=0,
        generate=False,
    )
    counts = evaluate(target, opened, prompts, protocol).counts
    if not counts.drafted.sum():
        raise UserError(
            f"nothing was drafted on {len(prompts)} prompts; give more prompts, or a larger "
            "--max-new-tokens"
        )
    say(f"measured: {counts.tokens_per_step:.2f} tokens per step at γ = {gamma}")
    return counts.to_dict() | {"gamma": gamma, "prompts": len(prompts)}


def claimed_tokens(directory: Path) -> float | None:
    """Return the tokens per step that a directory states: of the first such metric in its card's
    `model-index`, or of the measurement in our own export.json. None if it states none."""
    for metric in _card_metrics(directory / CARD):
        name = str(metric.get("type") or metric.get("name")).lower()
        value = metric.get("value")
        if name in CLAIM_NAMES and isinstance(value, (int, float)):
            return float(value)
    try:
        rows = json.loads((directory / EXPORT_FILE).read_text(encoding="utf-8"))["acceptance"]
        figures = [row["tokens_per_step"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((float(x) for x in reversed(figures) if x is not None), None)


def _card_metrics(card: Path) -> list[dict[str, Any]]:
    """Return the metrics of a card's front matter, in the hub's `model-index`."""
    try:
        front = yaml.safe_load(card.read_text(encoding="utf-8").split("---")[1])
        results = [result for model in front["model-index"] for result in model["results"]]
        return [metric for result in results for metric in result["metrics"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError, yaml.YAMLError):
        return []


def _layout_of(checkpoint: Checkpoint, form: str | None) -> Format:
    """Return the format with this name, None for the one that recognises the drafter."""
    if form is not None:
        return FORMATS[form]
    for name in FORMATS:
        if FORMATS[name].recognises(checkpoint):
            return FORMATS[name]
    reading = [name for name in FORMATS if type(FORMATS[name]).restored is not Format.restored]
    config = checkpoint.config
    kind = config.get(MODEL_TYPE)
    if kind is not None:
        raise UserError(
            f"{checkpoint.source} is a drafter of the library speculators of type {kind!r}; such "
            "heads are not known here"
        )
    stated = {
        key: config[key] for key in ("architectures", "model_type", "auto_map") if key in config
    }
    raise UserError(
        f"{checkpoint.source} is in no layout that can be imported (its config says {stated}); "
        f"these can: {', '.join(reading)}"
    )
