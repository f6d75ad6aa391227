"""Whether the parts that a config names fit together, as their own code says: rules, policies,
shapes, losses, heads. No model is loaded yet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from decode.loop.parts import make_rule
from decode.settings import EvaluationProtocol
from train.base.config_file import ConfigSource, Faults, read_config
from train.run.config import RunConfig
from train.run.parsed_config import parse_config
from train.settings.drafter_stages import heads_stage
from train.settings.schema import StageConfig
from train.stages import STAGES


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a config with `key.sub=value` overrides applied; see
    `train.base.config_file.read_config`."""
    return build_config(read_config(path, overrides))


def validate_config(raw: dict[str, Any], *, base_dir: Path) -> RunConfig:
    """Validate plain values. Data paths are relative to `base_dir` if such a file exists there.

    Raises UserError as `load_config` does.
    """
    return build_config(ConfigSource(raw, base_dir))


def build_config(source: ConfigSource) -> RunConfig:
    """The config with these values. Raises UserError with all values that are wrong or do not fit
    together, before any model is loaded."""
    config = parse_config(source)
    faults = Faults()
    for index, stage in enumerate(config.stages):
        with faults.collected(source.place(("stages", index))):
            STAGES[stage.kind].check(stage, config.stages[:index])
    try:
        protocol = config.evaluation.protocol()
    except UserError as error:
        faults.said.append(source.explain(("evaluation",), f"does not fit: {error}"))
    else:
        with faults.collected(source.place(("evaluation",))):
            _check_evaluation(config, protocol)
    faults.tell()
    return config


def _check_evaluation(config: RunConfig, protocol: EvaluationProtocol) -> None:
    """Raise UserError if a drafter could be trained but not evaluated."""
    settings, stages = config.evaluation, config.stages
    judged = [s for s in stages if settings.stages is None or s.name in settings.stages]
    for stage in judged:
        heads: Any = getattr(stage, "heads", None)
        if (
            stage.kind in ("distill", "heads", "layer_skip")
            and protocol.make_policy().reads_estimates
            and not getattr(heads, "confidence", False)
        ):
            raise UserError(
                f"evaluation.policy {settings.policy} reads the drafter's estimates of acceptance, "
                f"but the drafter of stage {stage.name} has none; set evaluation.policy: "
                "confidence, or train dspark heads"
            )
    if settings.shape is not None:
        # The protocol has already checked it against rule and policy.
        looked_up = [stage.name for stage in judged if stage.kind == "datastore"]
        if looked_up and protocol.branches:
            raise UserError(
                f"evaluation.shape is {settings.shape}, but the drafter of stage {looked_up[0]} "
                "looks its tokens up and has no distributions for a shape; leave "
                "evaluation.shape out, set it to chain, or leave the stage out of "
                "evaluation.stages"
            )
        return
    for stage in judged:
        if not _drafts_trees(stage, stages):
            continue
        name = f"the drafter of stage {stage.name}"
        make_rule(protocol.rule, protocol.sampling, name, True, "chosen")
        if protocol.make_policy().watches:
            raise UserError(
                f"evaluation.policy {settings.policy} works only on chains, but {name} drafts the "
                "tree that is stored with it; set evaluation.policy: fixed, or "
                "evaluation.shape: chain"
            )


def _drafts_trees(stage: StageConfig, stages: Sequence[StageConfig]) -> bool:
    """Whether a stage's drafter is stored with a tree, as far as its config tells."""
    settings: Any = stage
    if stage.kind == "online" and settings.drafter.stage is not None:
        stage = heads_stage(settings.drafter.stage, stages[: list(stages).index(stage)]) or stage
    return any(getattr(stage, name, None) is not None for name in ("tree", "tree_nodes"))
