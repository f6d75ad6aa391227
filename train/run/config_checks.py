"""Which settings of a run fit together: what is refused before any model is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.base.errors import UserError, nearest
from decode.loop.parts import make_rule
from decode.model.loading import require_sound_map
from decode.settings import EvaluationProtocol
from train.base.config_file import ConfigSource, read_config
from train.base.drafter_stages import heads_stage
from train.data.sources import SourceName
from train.run.config import SPLITS, RunConfig, parse_config
from train.settings.schema import StageConfig
from train.stages import STAGES

# Words that stand where a stage's name could, the kinds of these stages, and what they mean there.
OTHER_MEANINGS = {
    "data": (["generate"], "the data's own responses (text: data)"),
    "live": (["teacher_cache", "feature_cache"], "the live target (teacher: live, features: live)"),
    "before": (list(STAGES), "the drafters that the report measures before the stages"),
    "evaluation": (list(STAGES), "the speed of evaluations (--speed)"),
}


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
    """The config with these values. Raises UserError for values that are wrong or do not fit
    together, before any model is loaded."""
    config = parse_config(source)
    names = [stage.name for stage in config.stages]
    for index, stage in enumerate(config.stages):
        try:
            kinds, meaning = OTHER_MEANINGS.get(stage.name, ([], ""))
            if stage.kind in kinds:
                raise UserError(
                    f"a {stage.kind} stage has the name {stage.name!r}, which means {meaning}; "
                    "give the stage another name"
                )
            if stage.name in names[:index]:
                raise UserError(
                    f"two stages have the name {stage.name!r}; give each stage a different name"
                )
            STAGES[stage.kind].check(stage, config.stages[:index])
        except UserError as error:
            raise UserError(f"{source.place(('stages', index))}{error}") from error
    for name in config.evaluation.stages or []:
        if name not in names:
            raise UserError(
                f"{source.place(('evaluation', 'stages'))}evaluation.stages names {name!r}, but no "
                f"stage has that name; expected one of {', '.join(names)}.{nearest(name, names)}"
            )
    if config.target.sharded:
        _check_sharded(config, source)
    _check_device_map(config, source)
    try:
        protocol = config.evaluation.protocol()
    except UserError as error:
        raise UserError(source.explain(("evaluation",), f"does not fit: {error}")) from error
    try:
        _check_evaluation(config, protocol)
    except UserError as error:
        raise UserError(f"{source.place(('evaluation',))}{error}") from error
    splits = {split: _resolve(getattr(config.data, split), source.base_dir) for split in SPLITS}
    return config.model_copy(update={"data": config.data.model_copy(update=splits)})


def _check_device_map(config: RunConfig, source: ConfigSource) -> None:
    """Raise UserError if the target is spread over devices and a stage needs it on one."""
    target = config.target
    try:
        require_sound_map(target.device_map, target.max_memory, target.device, target.sharded)
    except UserError as error:
        raise UserError(f"{source.place(('target',))}{error}") from error
    for index, stage in enumerate(config.stages):
        if target.device_map is not None and not STAGES[stage.kind].takes_device_map:
            raise UserError(
                f"{source.place(('stages', index))}stage {stage.name} (kind: {stage.kind}) needs "
                "the target on one device, but target.device_map is set; leave it out, shard the "
                "target (target.sharded), or do this stage in a run of its own"
            )


def _check_sharded(config: RunConfig, source: ConfigSource) -> None:
    """Raise UserError if the target is sharded and a part of the run needs all of it."""
    for index, stage in enumerate(config.stages):
        if part := STAGES[stage.kind].needs_complete_target(stage):
            raise UserError(
                f"{source.place(('stages', index))}stage {stage.name}: {part} needs the complete "
                "target in one process, but target.sharded is set; leave it out, or do it in a "
                "run whose target is not sharded"
            )
    if config.evaluation.stages != [] or config.evaluation.baselines:
        raise UserError(
            f"{source.place(('evaluation',))}evaluation decodes with the complete target in one "
            "process, but target.sharded is set; set evaluation: {stages: [], baselines: []}, and "
            "measure the drafter with `draftsmith evaluate` on a machine that holds the target"
        )


def _check_evaluation(config: RunConfig, protocol: EvaluationProtocol) -> None:
    """Raise UserError if a drafter could be trained but not evaluated."""
    settings, stages = config.evaluation, config.stages
    if getattr(config.data, settings.split) is None and settings.split not in config.data.split_off:
        raise UserError(
            f"evaluation.split is {settings.split}, but data has no such split; set "
            f"data.{settings.split}, or set evaluation.split: test"
        )
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


def _resolve(source: str | list[str] | None, base_dir: Path) -> str | list[str] | None:
    if source is None:
        return None
    if isinstance(source, list):
        return [str(_resolve(entry, base_dir)) for entry in source]
    name = SourceName.parse(source, base_dir)
    beside = base_dir / name.path
    return name.of(str(beside)) if beside.exists() else source
