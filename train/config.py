"""Run configs: one YAML file, completely validated before anything expensive happens."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from decode.drafters import DRAFTERS
from decode.errors import UserError, nearest
from decode.measure.evaluation import EvaluationProtocol
from decode.rules import require_fitting
from decode.sampling import Sampling
from train.online.learners import heads_stage
from train.schema import StageConfig, Strict
from train.stages import STAGES

SPLITS = ("train", "dev", "test", "stream")


class TargetConfig(Strict):
    """The model to speed up; see `decode.target.loading.load_target`."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False


class DataConfig(Strict):
    """Where the splits come from: files (relative to the config), or data sets that `datasets`
    loads, written `org/name@split`.

    stream: the prompts that an `online` stage serves, in their order. Several files are read one
    after the other. system: a system message for every conversation that has none.
    on_bad: stop at the first row that cannot be read, or skip bad rows, up to a share of
    max_bad_rate.
    """

    train: str | list[str]
    dev: str | list[str] | None = None
    test: str | list[str]
    stream: str | list[str] | None = None
    limit: int | None = Field(None, ge=1)
    system: str | None = None
    on_bad: Literal["stop", "skip"] = "stop"
    max_bad_rate: float = Field(0.01, ge=0, le=1)


class EvaluationConfig(Strict):
    """How every drafter of the run is evaluated; see
    `decode.measure.evaluation.EvaluationProtocol`.

    stages: the stages whose drafters are evaluated. None: all stages that make a drafter.
    prompts: the number of prompts, spread evenly over the split. None: all.
    baselines: untrained drafters, each with its own row. If the policy is `fixed`, each uses the
    best of baseline_gammas.
    in_turn: untrained drafters that draft before the run's last trained drafter, which drafts where
    they propose nothing. Each adds one row, `ngram+STAGE`, on the same prompts.
    gamma: the depth of a draft. Ignored for trees, which have a fixed depth.
    rule, policy, shape: parts by name, as `NAME`, `NAME:option=value,…` or a mapping of name and
    options. rule None: `speculative`, or `multi_round` for trees. shape applies to trained drafters
    only; None: each drafter's default, a chain or the tree stored with it.
    draft_temperature: None: the target's temperature.
    timed_batch_size: how many of the timed prompts are decoded together. It divides timed_prompts.
    """

    split: Literal["dev", "test"] = "test"
    stages: list[str] | None = None
    prompts: int | None = Field(None, ge=1)
    baselines: list[str] = ["ngram"]
    baseline_gammas: list[int] = [2, 4, 8]
    in_turn: list[str] = ["ngram"]
    gamma: int = Field(4, ge=1)
    rule: str | dict[str, Any] | None = None
    policy: str | dict[str, Any] = "fixed"
    shape: str | dict[str, Any] | None = None
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    draft_temperature: float | None = Field(None, ge=0)
    max_new_tokens: int = Field(64, ge=2)
    batch_size: int = Field(16, ge=1)
    timed_prompts: int = Field(8, ge=0)
    timed_tokens: int = Field(64, ge=2)
    timed_batch_size: int = Field(1, ge=1)
    generate: bool = True
    seed: int = 0

    @model_validator(mode="after")
    def _known(self) -> "EvaluationConfig":
        self.protocol()
        for name in [*self.baselines, *self.in_turn]:
            DRAFTERS[name]
        return self

    def protocol(self, gamma: int | None = None, *, trained: bool = True) -> EvaluationProtocol:
        """The measuring protocol for a trained drafter or a baseline.

        gamma: None: the run's γ. Raises UserError for unknown parts and parts that do not fit
        together.
        """
        sampling = Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        )
        return EvaluationProtocol(
            gamma=gamma or self.gamma,
            sampling=sampling,
            rule=self.rule,
            policy=self.policy,
            shape=self.shape if trained else None,
            draft_temperature=self.draft_temperature,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            timed_prompts=self.timed_prompts,
            timed_tokens=self.timed_tokens,
            timed_batch_size=self.timed_batch_size,
            generate=self.generate,
            seed=self.seed,
        )


class RunConfig(Strict):
    """A complete run. `stages` run in order. Each may name an earlier stage and read its results.

    precision: of the training's matrix products (weights stay float32). None: the precision given
    to `accelerate launch`. trackers: named as in accelerate. threads: threads per process on a CPU.
    None: the cores are shared evenly (`accelerate launch` alone would give each process just one).
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: str = "runs"
    seed: int = 0
    trackers: list[str] = ["tensorboard"]
    precision: Literal["no", "bf16", "fp16"] | None = None
    threads: int | None = Field(None, ge=1)
    target: TargetConfig
    data: DataConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    stages: list[Any] = Field(min_length=1)

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a config with `key.sub=value` overrides applied.

    Overrides name a stage by its name or number: `stages.distill.epochs=3`. Raises UserError with
    the key and the nearest known key, before any model is loaded.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the config {path}: {error}") from error
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds {type(raw).__name__}; expected keys such as target, stages")
    for override in overrides:
        _override(raw, override)
    return validate_config(raw, base_dir=path.parent)


def validate_config(raw: dict[str, Any], *, base_dir: Path) -> RunConfig:
    """Validate plain values. Data paths are relative to `base_dir` if such a file exists there.

    Raises UserError as `load_config` does.
    """
    config = _validate(RunConfig, raw, "")
    stages: list[StageConfig] = []
    for index, entry in enumerate(config.stages):
        where = f"stages.{index}"
        if not isinstance(entry, dict) or "kind" not in entry:
            raise UserError(f"{where} has no kind; known: {', '.join(STAGES)}")
        stage = STAGES[str(entry["kind"])]
        stages.append(_validate(stage.Config, entry, where))
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two stages are called {name!r}; give each a name of its own")
    for index, settings in enumerate(stages):
        STAGES[settings.kind].check(settings, stages[:index])
    for name in config.evaluation.stages or []:
        if name not in names:
            raise UserError(
                f"evaluation.stages names {name!r}; there are {', '.join(names)}."
                + nearest(name, names)
            )
    _check_evaluation(config, stages)
    data = config.data.model_copy(
        update={split: _resolve(getattr(config.data, split), base_dir) for split in SPLITS}
    )
    return config.model_copy(update={"stages": stages, "data": data})


def _check_evaluation(config: RunConfig, stages: Sequence[StageConfig]) -> None:
    """Raise UserError if a drafter could be trained but not evaluated."""
    settings = config.evaluation
    if getattr(config.data, settings.split) is None:
        raise UserError(
            f"evaluation.split is {settings.split}, which data lacks; set data.{settings.split}, "
            "or judge on split test"
        )
    if settings.shape is not None:
        return  # the protocol has already checked it against rule and policy
    protocol = settings.protocol()
    for stage in stages:
        judged = settings.stages is None or stage.name in settings.stages
        if not judged or not _drafts_trees(stage, stages):
            continue
        name = f"the drafter of stage {stage.name}"
        require_fitting(protocol.make_rule(True), name, True, "chosen")
        if protocol.make_policy().watches:
            raise UserError(
                f"evaluation.policy {settings.policy} watches a chain grow, and {name} drafts in "
                "the tree that it is stored with; set evaluation.policy: fixed, or "
                "evaluation.shape: chain"
            )


def _drafts_trees(stage: StageConfig, stages: Sequence[StageConfig]) -> bool:
    """Whether a stage's drafter is stored with a tree, as far as its config tells."""
    settings: Any = stage
    if stage.kind == "online" and settings.drafter.stage is not None:
        stage = heads_stage(settings.drafter.stage, stages[: list(stages).index(stage)]) or stage
    return getattr(stage, "tree", None) is not None


def dump_config(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain values; `validate_config` reads it back."""
    values = config.model_dump(mode="json")
    values["stages"] = [stage.model_dump(mode="json") for stage in config.stages]
    return values


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """'key: old → new' for every value that differs between two dumped configs. List entries with
    names, such as stages, are matched by name, not by position."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in dict.fromkeys([*old, *new])
            for line in differences(
                old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key
            )
        ]
    before, after = _by_name(old), _by_name(new)
    if before is not None and after is not None:
        common = [name for name in before if name in after]
        moved = common != [name for name in after if name in before]
        return [
            *([f"{prefix}: {', '.join(before)} → {', '.join(after)}"] if moved else []),
            *(f"{prefix}.{name} is gone" for name in before if name not in after),
            *(f"{prefix}.{name} is new" for name in after if name not in before),
            *(
                line
                for name in common
                for line in differences(before[name], after[name], f"{prefix}.{name}")
            ),
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for index, pair in enumerate(zip(old, new, strict=True))
            for line in differences(*pair, f"{prefix}.{index}")
        ]
    return [] if old == new else [f"{prefix}: {old!r} → {new!r}"]


def _by_name(entries: Any) -> dict[str, Any] | None:
    """The entries of a list by name; None unless every entry has a unique name."""
    if not isinstance(entries, list) or not entries:
        return None
    if not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        return None
    named = {entry["name"]: entry for entry in entries}
    return named if len(named) == len(entries) else None


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses duplicate keys and reads 1e-3 as a number."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise UserError(f"key {key!r} stands twice in the config (again in line {line})")
        seen.add(key)
    return loader.construct_mapping(node)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
# YAML 1.1 reads 1e-3 as a string, because it has no decimal point.
_Loader.add_constructor("!exponent", _number)
_Loader.add_implicit_resolver(
    "!exponent", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _override(raw: dict[str, Any], override: str) -> None:
    path, separator, value = override.partition("=")
    if not separator or not path:
        raise UserError(f"override {override!r}; expected key.sub=value")
    *parents, last = path.split(".")
    place: Any = raw
    for key in parents:
        if isinstance(place, list):
            place = place[_index(place, key, override)]
        elif isinstance(place, dict):
            place = place.setdefault(key, {})
        else:
            raise UserError(f"override {override!r}: {key!r} is inside a plain value")
    parsed = yaml.load(value, Loader=_Loader) if value else None
    if isinstance(place, list):
        place[_index(place, last, override)] = parsed
    elif isinstance(place, dict):
        place[last] = parsed
    else:
        raise UserError(f"override {override!r}: {last!r} is inside a plain value")


def _index(entries: list[Any], key: str, override: str) -> int:
    names = [str(e.get("name")) if isinstance(e, dict) else "" for e in entries]
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(entries):
        return int(key)
    raise UserError(
        f"override {override!r}: no entry {key!r}; expected one of "
        f"{', '.join(filter(None, names))} or a number below {len(entries)}.{nearest(key, names)}"
    )


def _validate(model: type[BaseModel], raw: Any, where: str) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise UserError(
            "\n".join(_explain(model, item, where) for item in error.errors())
        ) from None


def _explain(model: type[BaseModel], item: Any, where: str) -> str:
    key = ".".join([where] * bool(where) + [str(part) for part in item["loc"]])
    if item["type"] == "extra_forbidden":
        known = _known_keys(model, item["loc"][:-1])
        return f"unknown config key {key!r}.{nearest(str(item['loc'][-1]), known)}"
    if item["type"] == "missing":
        return f"config key {key!r} is missing"
    return f"config key {key!r} is {item['input']!r}: {item['msg']}"


def _known_keys(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The keys allowed at the location `loc` in a model."""
    found: Any = model
    for part in loc:
        field = getattr(found, "model_fields", {}).get(part)
        if field is None:
            return []
        found = field.annotation
        options = getattr(found, "__args__", (found,))
        found = next((o for o in options if hasattr(o, "model_fields")), found)
    return list(getattr(found, "model_fields", {}))


def _resolve(source: str | list[str] | None, base_dir: Path) -> str | list[str] | None:
    if source is None:
        return None
    if isinstance(source, list):
        return [str(_resolve(entry, base_dir)) for entry in source]
    beside = base_dir / source
    return str(beside) if beside.exists() else source
