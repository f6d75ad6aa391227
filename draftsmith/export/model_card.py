"""Writes the README of an export, for its page on a model hub."""

import json
import shlex
from typing import Any

from draftsmith.export.formats import FORMATS, Format
from draftsmith.export.trained_drafter import public_name, target_hub_id
from train.report.format_figures import format_ratio

UNSTATED = "not stated"
# The licences that a hub knows by name. Another one is `other`, with its name beside it.
KNOWN_LICENCES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigcode-openrail-m afl-3.0
artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-permissive-2.0
wtfpl epl-2.0 etalab-2.0 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc ms-pl
mpl-2.0 odc-by odbl osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl llama2 llama3 llama3.1
llama3.2 llama3.3 llama4 gemma
"""


def drafter_card(record: dict[str, Any]) -> str:
    """Return the README.md of a drafter. record: its `export.json`.

    Its `acceptance` are rows of figures, each {where, prompts, gamma, dtype, drafted,
    draft_efficiency, acceptance_rate, tokens_per_step, timed_prompts, speedup}. `training`: see
    `draftsmith.export.trained_in_run.training_in_run`. `repository`: the future location of the
    export. `example`: {prompt, text} of the measurement; the model's page shows it.
    """
    layout, description, backbone = FORMATS[record["layout"]], record["drafter"], record["backbone"]
    target, provenance = description["target"], description.get("provenance") or {}
    facts, name = record["facts"], public_name(target["name"])
    size = f"{facts['size']}, {facts['parameters'] / 1e6:.1f}M parameters, {facts['dtype']}"
    hub_id = backbone or target_hub_id(target["name"])
    # Our own heads are refused for other weights than those that they were trained on.
    served = name if layout.is_ours and hub_id else hub_id or "TARGET"
    lines = _front_matter(hub_id, record["licence"], record["example"])
    lines += [
        f"# Drafter for {hub_id or name}",
        "",
        f"A drafter (`{record['kind']}`) for speculative decoding, written by draftsmith in "
        f"format `{layout.name}`: {size}. Alone it is not a useful language "
        "model. Served with its target, it makes generation faster. The text is still the "
        "target's.",
        "",
        "## Target",
        "",
        f"- model: `{name}`" + (f" ({hub_id})" if hub_id else ""),
        f"- revision: `{target.get('revision') or UNSTATED}`",
        f"- vocabulary: {target['fingerprint']['vocab_size']} tokens, hash "
        f"`{target['fingerprint']['vocab_sha256'][:16]}`",
    ]
    if backbone:
        lines += [
            "- this target was trained together with the drafter; the drafter does not work "
            "with any other model",
            _drift(provenance),
        ]
    lines.append("")
    if facts.get("kept"):
        lines += ["## Vocabulary", "", _vocabulary(facts), ""]
    lines += _serving(layout, served, record["repository"], record["gamma"])
    lines += ["## Measurements", "", *_acceptance(record["acceptance"]), ""]
    lines += _training(record)
    lines += [
        "",
        "`export.json` has the full description; `manifest.json` has a SHA-256 of every file.",
        "",
    ]
    return "\n".join(lines)


def target_card(record: dict[str, Any]) -> str:
    """Return the README.md of a target that was trained together with its drafter. record: the
    `export.json` of the drafter."""
    provenance = record["drafter"]["provenance"]
    original = provenance.get("original")
    base = target_hub_id(original) if original else None
    repository = record["backbone"] or ""
    lines = [
        *_front_matter(base, record["licence"], None),
        f"# {repository}",
        "",
        f"{base or (public_name(original) if original else 'A model')}, trained together with the "
        f"{record['kind']} heads in `{record['repository']}` (Medusa-2, arXiv 2401.10774, section "
        "2.2.2). It is not the original model any more, and generates different text. With those "
        "heads it generates this text faster.",
        "",
        "## Drift",
        "",
        _drift(provenance),
        "",
        *_serving(FORMATS[record["layout"]], repository, record["repository"], record["gamma"]),
        *_training(record),
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


def _training(record: dict[str, Any]) -> list[str]:
    training = record["training"] or {}
    provenance = record["drafter"].get("provenance") or {}
    lines = [f"licence of the training data: {record['data_licence'] or UNSTATED}"]
    lines += [f"{split} rows: `{name}`" for split, name in training.get("data", {}).items()]
    lines += [_text(text) for text in training.get("texts", ())]
    lines += _provenance(provenance)
    if command := training.get("command"):
        lines.append(f"the command that trained it: `{shlex.join(command)}`")
    return ["## Training", "", *(f"- {line}" for line in lines)]


def _text(text: dict[str, Any]) -> str:
    """A text that it learnt from, in words."""
    if "answers" not in text:
        return f"text `{text['name']}`: the rows as they are"
    prompts = "that the target wrote itself" if text["self_prompts"] else "of the train rows"
    drawn = f"temperature {text['temperature']}" if text["temperature"] else "greedy"
    return (
        f"text `{text['name']}`: {text['answers']:,} answers that the target wrote to "
        f"{text['prompts']:,} prompts {prompts} ({drawn}; {text['tokens']:,} tokens)"
    )


def _front_matter(
    hub_id: str | None, licence: str | None, example: dict[str, str] | None
) -> list[str]:
    # JSON is YAML, and quotes whatever a prompt has in it.
    widget = [{"text": example["prompt"], "output": {"text": example["text"]}}] if example else None
    return [
        "---",
        *_licence(licence),
        *([f"base_model: {hub_id}"] if hub_id else []),
        "pipeline_tag: text-generation",
        "tags: [speculative-decoding, draft-model, draftsmith]",
        *([f"widget: {json.dumps(widget, ensure_ascii=False)}"] if widget else []),
        "---",
        "",
    ]


def _licence(licence: str | None) -> list[str]:
    """The lines for the licence of the weights. None: none, which a hub shows as unknown."""
    if licence is None:
        return []
    if licence.lower() in KNOWN_LICENCES.split():
        return [f"license: {licence.lower()}"]
    return ["license: other", f"license_name: {json.dumps(licence)}"]


def _vocabulary(facts: dict[str, Any]) -> str:
    trained = f"It was trained to draft {facts['kept']} tokens of the vocabulary"
    if not facts["filled_from"]:
        return f"{trained}, and it drafts only these."
    return (
        f"{trained}. No engine that reads this format supports such a drafter, so here its output "
        f"layer has a row for every token. The other rows are from {facts['filled_from']}. "
        "The drafter was measured again with them (see below)."
    )


def _acceptance(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["Not measured."]
    lines = [
        "In draftsmith's loop, greedy. Acceptance rate: accepted / positions reached; draft "
        "efficiency: accepted / drafted, which engines print as acceptance. Speed-up: over plain "
        "decoding in the same loop, with its 95% interval.",
        "",
        "| drafter | prompts | dtype | γ | drafted | acceptance rate | draft efficiency "
        "| tokens/step | speed-up | timed prompts |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        figures = " | ".join(
            "–" if row.get(key) is None else f"{round(row[key], 3):g}"
            for key in ("acceptance_rate", "draft_efficiency", "tokens_per_step")
        )
        faster, drafted = format_ratio(row.get("speedup")), row.get("drafted")
        lines.append(
            f"| {row['where']} | {row['prompts']} | {row['dtype']} | {row['gamma']} "
            f"| {'–' if drafted is None else drafted} | {figures} | {faster} "
            f"| {row.get('timed_prompts') or '–'} |"
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
