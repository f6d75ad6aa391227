"""Writes the README of an export, for its page on a model hub."""

import json
from typing import Any

from train.export.formats import ExportJob, Format
from train.export.trained_drafter import public_name, target_hub_id

UNSTATED = "not stated"


def drafter_card(
    layout: Format,
    job: ExportJob,
    facts: dict[str, Any],
    acceptance: list[dict[str, Any]],
    repository: str,
    data_licence: str | None,
    example: dict[str, str] | None = None,
) -> str:
    """Return the README.md of a drafter.

    acceptance: rows of figures, each {where, prompts, gamma, dtype, drafted, accepted,
    draft_efficiency, acceptance_rate, tokens_per_step}. repository: the future location of the
    export. example: {prompt, text} of the measurement; the model's page shows it.
    """
    target, provenance = job.description["target"], job.description.get("provenance") or {}
    name = public_name(target["name"])
    hub_id = job.backbone or target_hub_id(target["name"])
    lines = _front_matter(hub_id, data_licence, example)
    lines += [
        f"# Drafter for {hub_id or name}",
        "",
        f"A drafter (`{job.kind}`) for speculative decoding, written by draftsmith in "
        f"format `{layout.name}`: {_size(facts)}. Alone it is not a useful language model. "
        "Served with its target, it makes generation faster. The text is still the target's.",
        "",
        "## Target",
        "",
        f"- model: `{name}`" + (f" ({hub_id})" if hub_id else ""),
        f"- revision: `{target.get('revision') or UNSTATED}`",
        f"- vocabulary: {target['fingerprint']['vocab_size']} tokens, hash "
        f"`{target['fingerprint']['vocab_sha256'][:16]}`",
    ]
    if job.backbone:
        lines += [
            "- this target was trained together with the drafter; the drafter does not work "
            "with any other model",
            _drift(provenance),
        ]
    lines.append("")
    if facts.get("kept"):
        lines += ["## Vocabulary", "", _vocabulary(facts), ""]
    lines += _serving(layout, hub_id or "TARGET", repository, job.gamma)
    lines += ["## Measured acceptance", "", *_acceptance(acceptance), ""]
    lines += _training(provenance, data_licence)
    lines += [
        "",
        "`export.json` has the full description; `manifest.json` has a SHA-256 of every file.",
        "",
    ]
    return "\n".join(lines)


def target_card(
    layout: Format, job: ExportJob, drafter_repository: str, data_licence: str | None
) -> str:
    """Return the README.md of a target that was trained together with its drafter."""
    provenance = job.description["provenance"]
    original = provenance.get("original")
    base = target_hub_id(original) if original else None
    repository = job.backbone or ""
    lines = [
        *_front_matter(base, data_licence),
        f"# {repository}",
        "",
        f"{base or (public_name(original) if original else 'A model')}, trained together with the "
        f"{job.kind} heads in `{drafter_repository}` (Medusa-2, arXiv 2401.10774, section 2.2.2). "
        "It is not the original model any more, and generates different text. With those heads "
        "it generates this text faster.",
        "",
        "## Drift",
        "",
        _drift(provenance),
        "",
        *_serving(layout, repository, drafter_repository, job.gamma),
        *_training(provenance, data_licence),
        "",
    ]
    return "\n".join(lines)


def _drift(provenance: dict[str, Any]) -> str:
    """Describe how far training with the drafter moved a target from the original."""
    drift = provenance["drift"]
    original = provenance.get("original")
    return (
        f"- its drift from {public_name(original) if original else 'the original'}, on "
        f"{drift['tokens']} held-out tokens: KL(original‖new) {drift['kl']:.4f} nats per token, "
        f"perplexity {drift['perplexity_original']:.2f} → {drift['perplexity_new']:.2f}"
    )


def _serving(layout: Format, target: str, repository: str, gamma: int) -> list[str]:
    lines = ["## Serving", ""]
    for engine, language, snippet in layout.serving(target, repository, gamma):
        lines += [f"{engine}:", "", f"```{language}", snippet, "```", ""]
    return lines


def _training(provenance: dict[str, Any], data_licence: str | None) -> list[str]:
    lines = ["## Training", "", f"- licence of the training data: {data_licence or UNSTATED}"]
    return lines + [f"- {line}" for line in _provenance(provenance)]


def _front_matter(
    hub_id: str | None, data_licence: str | None, example: dict[str, str] | None = None
) -> list[str]:
    # JSON is YAML, and quotes whatever a prompt has in it.
    widget = [{"text": example["prompt"], "output": {"text": example["text"]}}] if example else None
    return [
        "---",
        "license: other",
        f"license_name: {json.dumps(data_licence or UNSTATED)}",
        *([f"base_model: {hub_id}"] if hub_id else []),
        "pipeline_tag: text-generation",
        "tags: [speculative-decoding, draft-model, draftsmith]",
        *([f"widget: {json.dumps(widget, ensure_ascii=False)}"] if widget else []),
        "---",
        "",
    ]


def _vocabulary(facts: dict[str, Any]) -> str:
    trained = f"It was trained to draft {facts['kept']} tokens of the vocabulary"
    if not facts["filled_from"]:
        return f"{trained}, and it drafts only these."
    return (
        f"{trained}. No engine that reads this format supports such a drafter, so here its output "
        f"layer has a row for every token. The other rows are from {facts['filled_from']}. "
        "The drafter was measured again with them (see below)."
    )


def _size(facts: dict[str, Any]) -> str:
    return f"{facts['size']}, {facts['parameters'] / 1e6:.1f}M parameters, {facts['dtype']}"


def _acceptance(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["Not measured."]
    lines = [
        "In draftsmith's loop, greedy. Acceptance rate: accepted / positions reached; draft "
        "efficiency: accepted / drafted, which engines print as acceptance.",
        "",
        "| drafter | prompts | dtype | γ | drafted | acceptance rate | draft efficiency "
        "| tokens/step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = " | ".join(
            "–" if row.get(key) is None else f"{row[key]:.3f}"
            for key in ("acceptance_rate", "draft_efficiency", "tokens_per_step")
        )
        lines.append(
            f"| {row['where']} | {row['prompts']} | {row['dtype']} | {row['gamma']} "
            f"| {row['drafted']} | {figures} |"
        )
    return lines


def _provenance(provenance: dict[str, Any]) -> list[str]:
    """The training data and settings, stage by stage, the last stage first."""
    lines = []
    stage: Any = provenance
    while isinstance(stage, dict) and "stage" in stage:
        settings = stage.get("settings") or {}
        start = stage.get("start") or {}
        parts = [f"stage `{stage['stage']}` of run `{stage.get('run', UNSTATED)}`"]
        if settings.get("losses"):
            parts.append("losses " + ", ".join(f"{k}: {v}" for k, v in settings["losses"].items()))
        if stage.get("steps") is not None:
            parts.append(f"{stage['steps']} steps on {stage.get('tokens', 0):,} tokens")
        if settings.get("lora"):
            parts.append("LoRA")
        if start:
            origin = "the stage below" if "stage" in start else json.dumps(start)
            parts.append(f"started from {origin}")
        lines.append("; ".join(parts))
        stage = start
    return lines or [json.dumps(provenance)]
