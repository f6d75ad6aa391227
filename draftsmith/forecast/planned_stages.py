"""Stages for kinds of drafters that a config has no stage of: a forecast compares them with its
own. Each has the defaults of its kind, and learns from the same text for as long as the config's
last training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from decode.base.errors import UserError, nearest
from decode.base.strict import kinds_of
from heads.options import HeadOptions
from train.base.config_file import ConfigSource, read_config
from train.run.config import RunConfig, TargetConfig
from train.run.parsed_config import parse_config

SMALL_LM = "small_lm"  # as its drafter is registered
# Of the stage that is copied: what the other kinds learn from.
SHARED = ("text", "max_length", "on_long", "draft_vocabulary")


def read_with_kinds(
    file: Path, overrides: Sequence[str], kinds: Sequence[str]
) -> tuple[ConfigSource, list[str]]:
    """The config with a stage for each kind that it has none of, named as the kind, and what the
    user should know. Overrides may set keys of these stages. Raises UserError for an unknown kind.
    """
    of_kinds = tuple(f"stages.{kind}." for kind in kinds)
    source = read_config(file, [x for x in overrides if not x.startswith(of_kinds)])
    config = parse_config(source)
    known = [*kinds_of(HeadOptions, "type"), SMALL_LM]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UserError(
            f"--kinds has {unknown[0]!r}; expected of {', '.join(known)}."
            f"{nearest(unknown[0], known)}"
        )
    have, said = {kind_of(stage): stage.name for stage in config.stages}, list[str]()
    added = list[str]()
    for kind in known:  # in one order, so that a forecast that goes on has the same stages
        if kind in kinds and kind in have:
            said.append(f"{kind}: the config has it already, as its stage {have[kind]}")
        elif kind in kinds:
            source.values["stages"].append(_stage(kind, config))
            added.append(kind)
    if config.evaluation.stages is not None:
        source.values["evaluation"]["stages"] += added
    source.apply([x for x in overrides if x.startswith(of_kinds)])
    for stage in source.values["stages"][len(config.stages) :]:
        text = yaml.safe_dump(stage, default_flow_style=True, sort_keys=False, width=10_000)
        said.append(f"{stage['name']}: to train it, add this stage to the config: {text.strip()}")
    return source, said


def kind_of(stage: Any) -> str:
    """The kind of drafter that a stage of a config makes, "" if it is none of those here."""
    if stage.kind == "heads":
        return str(stage.heads.type)
    return SMALL_LM if stage.kind == "distill" else ""


def _stage(kind: str, config: RunConfig) -> dict[str, Any]:
    stage: dict[str, Any] = {"name": kind, "kind": "heads", "heads": {"type": kind}}
    if kind == SMALL_LM:
        stage = {"name": kind, "kind": "distill", "drafter": {"layers": _layers(config.target)}}
    trained = [x for x in config.stages if kind_of(x)]
    if trained:
        last: Any = trained[-1].model_dump(mode="json", exclude_unset=True)
        stage |= {key: last[key] for key in SHARED if key in last}
        # Whatever else the loop has, such as the best version, may need figures on dev text.
        steps = ("epochs", "max_steps", "max_minutes", "tokens_per_batch", "accumulation")
        stage["loop"] = {key: last["loop"][key] for key in steps if key in last.get("loop", {})}
    return stage


def _layers(target: TargetConfig) -> list[int]:
    """Those of the target that a small language model starts from."""
    from decode.model.without_weights import load_model_config  # imports torch
    from draftsmith.starter_config import first_layers

    config, _ = load_model_config(
        target.model, revision=target.revision, trust_remote_code=target.trust_remote_code
    )
    return first_layers(int(config.get_text_config().num_hidden_layers))
