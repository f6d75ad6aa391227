"""Reads the settings of a run, and says all that is wrong in them at once: values, settings that do
not fit together, missing files. It takes less than a second. Only options of losses, and a rule, a
policy or a shape other than the default, take longer: their code imports torch.
`train.run.config_checks` then asks whether the parts fit each other."""

from pathlib import Path
from typing import Any

from decode.base.errors import UserError, nearest
from decode.base.registry import Registry
from decode.base.strict import kinds_of
from decode.model.device_maps import require_sound_map
from decode.model.model_names import require_model_name
from train.base.config_file import ConfigSource, Faults
from train.data.sources import SourceName, require_sources
from train.run.config import SPLITS, EvaluationConfig, RunConfig
from train.settings.schema import StageConfig

_KINDS = [*kinds_of(StageConfig, "kind")]
# Words that stand where a stage's name could, the kinds of these stages, and what they mean there.
OTHER_MEANINGS = {
    "data": (["generate"], "the data's own responses (text: data)"),
    "live": (["teacher_cache", "feature_cache"], "the live target (teacher: live, features: live)"),
    "before": (_KINDS, "the drafters that the report measures before the stages"),
    "evaluation": (_KINDS, "the speed of evaluations (--speed)"),
}


def parse_config(source: ConfigSource, *, files: bool = False) -> RunConfig:
    """The config with these values, its data found beside the config. Raises UserError with all
    values that are wrong; if none is, with all that do not fit together.

    files: data and models that are named by a path, where there is nothing, are wrong too.
    """
    config = source.parsed(RunConfig)
    splits = {split: _resolve(getattr(config.data, split), source.base_dir) for split in SPLITS}
    config = config.model_copy(update={"data": config.data.model_copy(update=splits)})
    faults = Faults()
    _check_stages(config, source, faults)
    _check_target(config, source, faults)
    with faults.collected(source.place(("evaluation",))):
        _check_split(config)
    _check_options(config.evaluation, source, faults)
    if files:
        _check_files(config, source, faults)
    faults.tell()
    return config


def _check_stages(config: RunConfig, source: ConfigSource, faults: Faults) -> None:
    names = [stage.name for stage in config.stages]
    for index, stage in enumerate(config.stages):
        place = source.place(("stages", index))
        kinds, meaning = OTHER_MEANINGS.get(stage.name, ([], ""))
        with faults.collected(place):
            if stage.kind in kinds:
                raise UserError(
                    f"a {stage.kind} stage has the name {stage.name!r}, which means {meaning}; "
                    "give the stage another name"
                )
        with faults.collected(place):
            if stage.name in names[:index]:
                raise UserError(
                    f"two stages have the name {stage.name!r}; give each stage a different name"
                )
        for check in stage.checks(config.stages[:index]):
            with faults.collected(place):
                check()
    for name in config.evaluation.stages or []:
        with faults.collected(source.place(("evaluation", "stages"))):
            if name not in names:
                raise UserError(
                    f"evaluation.stages names {name!r}, but no stage has that name; expected one "
                    f"of {', '.join(names)}.{nearest(name, names)}"
                )


def _check_target(config: RunConfig, source: ConfigSource, faults: Faults) -> None:
    """What the target is spread over, and whether a stage needs it on one device, or whole."""
    target = config.target
    with faults.collected(source.place(("target",))):
        require_sound_map(target.device_map, target.max_memory, target.device, target.sharded)
    for index, stage in enumerate(config.stages):
        with faults.collected(source.place(("stages", index))):
            if target.device_map is not None and not stage.takes_device_map:
                raise UserError(
                    f"stage {stage.name} (kind: {stage.kind}) needs the target on one device, but "
                    "target.device_map is set; leave it out, shard the target (target.sharded), or "
                    "do this stage in a run of its own"
                )
        with faults.collected(source.place(("stages", index))):
            if target.sharded and (part := stage.needs_complete_target()):
                raise UserError(
                    f"stage {stage.name}: {part} needs the complete target in one process, but "
                    "target.sharded is set; leave it out, or do it in a run whose target is not "
                    "sharded"
                )
    evaluated = config.evaluation.stages != [] or config.evaluation.baselines
    with faults.collected(source.place(("evaluation",))):
        if target.sharded and evaluated:
            raise UserError(
                "evaluation decodes with the complete target in one process, but target.sharded is "
                "set; set evaluation: {stages: [], baselines: []}, and measure the drafter with "
                "`draftsmith evaluate` on a machine that holds the target"
            )


def _check_split(config: RunConfig) -> None:
    split = config.evaluation.split
    if getattr(config.data, split) is None and split not in config.data.split_off:
        raise UserError(
            f"evaluation.split is {split}, but data has no such split; set data.{split}, or set "
            "evaluation.split: test"
        )


def _check_options(settings: EvaluationConfig, source: ConfigSource, faults: Faults) -> None:
    default, keys = EvaluationConfig(), ("rule", "policy", "shape")
    chosen = [key for key in keys if getattr(settings, key) != getattr(default, key)]
    if not chosen:
        return

    from decode.lengths import POLICIES
    from decode.rules import RULES
    from decode.shapes import SHAPES

    registries: dict[str, Registry[Any]] = {"rule": RULES, "policy": POLICIES, "shape": SHAPES}
    for key in chosen:
        with faults.collected(source.explain(("evaluation", key), "does not fit: ")):
            part = getattr(settings, key)
            registries[key].make(part, max_depth=settings.gamma, depth=settings.gamma)


def _check_files(config: RunConfig, source: ConfigSource, faults: Faults) -> None:
    with faults.collected(source.place(("target", "model"))):
        require_model_name(config.target.model)
    for index, stage in enumerate(config.stages):
        drafter: Any = getattr(stage, "drafter", None)
        models = {
            ("drafter", "model"): None if drafter is None else drafter.model,
            ("shared_with",): getattr(stage, "shared_with", None),
        }
        for key, model in models.items():
            if model is not None:
                with faults.collected(source.place(("stages", index, *key))):
                    require_model_name(model)
    for split in SPLITS:
        written = getattr(config.data, split)
        if written is not None:
            names = [written] if isinstance(written, str) else list(written)
            # Each alone, so that all are told, and together: one may be named twice.
            for some in (*([name] for name in names), names):
                with faults.collected(source.place(("data", split))):
                    require_sources(some, Path())


def _resolve(source: str | list[str] | None, base_dir: Path) -> str | list[str] | None:
    if source is None:
        return None
    if isinstance(source, list):
        return [str(_resolve(entry, base_dir)) for entry in source]
    name = SourceName.parse(source, base_dir)
    beside = base_dir / name.path
    return name.of(str(beside)) if beside.exists() else source
