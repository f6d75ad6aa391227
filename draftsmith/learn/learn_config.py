"""The config of `draftsmith learn`."""

from pathlib import Path

from pydantic import Field

from decode.base.paths import from_home
from decode.base.strict import Strict
from train.base.config_file import ConfigSource, read_mapping


class TriggerConfig(Strict):
    """When a cycle begins: at whichever comes first, once there are `held_out` records and more."""

    records: int = Field(1000, ge=1)
    """New records since the last cycle."""
    drop: float = Field(0.05, gt=0, lt=1)
    """A fall of accepted ÷ drafted tokens, from the best version's first window to the newest. A
    cycle for it needs `held_out` new records."""
    window: int = Field(20_000, ge=1)
    """Drafted tokens of a window."""


class RecorderConfig(Strict):
    """The recorder before the engine, which switches from one engine to the next."""

    url: str = "http://127.0.0.1:8080"
    """The recorder's address."""
    key_env: str
    """The environment variable with the key of its `--admin-key-env`."""


class EngineConfig(Strict):
    """How an engine is started."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments. `{drafter}`, `{gamma}` and `{port}` in them are replaced."""
    env: dict[str, str] = {}
    """Environment variables besides this process's own."""
    key_env: str | None = None
    """The environment variable with the key that all engines ask for. null: they ask for none."""
    health: str = "/health"
    """A path that answers with status 200 once the engine is ready."""
    ready_seconds: float = Field(900.0, gt=0)
    """The time that it has to get ready."""
    drain_seconds: float = Field(600.0, ge=0)
    """The time that an old engine's answers have to end after the switch."""


class WatchConfig(Strict):
    """The comparison after a swap."""

    drafted: int = Field(20_000, ge=1)
    """Drafted tokens of the new engine that are compared with those before the swap."""
    seconds: float = Field(86_400.0, gt=0)
    """The longest wait for them. The new drafter then stays."""
    silent_seconds: float = Field(60.0, gt=0)
    """The longest time that the new engine may be silent. The drafter before then comes back."""
    tolerance: float = Field(0.02, ge=0, lt=1)
    """How much lower accepted ÷ drafted may be than before the swap."""


class LearnConfig(Strict):
    """Learning beside an engine. Paths are relative to the config file."""

    records: str
    """The directory of one tenant's records."""
    directory: str
    """Where the state and the versions of the drafter are kept."""
    run: str
    """The run config that trains a new drafter. `data.train` and `data.test` are replaced by
    records, and `{serving}` in any value by the directory of the serving drafter."""
    drafter: str
    """The drafter directory that serves at first."""
    form: str
    """The layout of exports, or the name of its engine."""
    gamma: int = Field(4, ge=1)
    """Tokens per draft."""
    model: str | None = None
    """The target's name in answers. Records with another one are not learnt from: they may be of an
    adapter. null: the names that the engine lists at /v1/models, without those of adapters."""
    verify: str | None = None
    """The engine of `draftsmith export --verify`. null: the export is only measured in our loop."""
    trigger: TriggerConfig = TriggerConfig()
    """When a cycle begins."""
    max_records: int = Field(20_000, ge=2)
    """The newest records that a cycle uses."""
    held_out: int = Field(64, ge=1)
    """The number of newest records that judge and are not trained on."""
    max_new_tokens: int = Field(64, ge=2)
    """The length of answers that judge, in tokens."""
    min_gain: float = Field(0.0, ge=0, lt=1)
    """A new drafter is swapped in if its accepted ÷ drafted tokens on the held-out records are
    higher than the serving drafter's by more than this, with a certainty of 95%."""
    recorder: RecorderConfig
    """The recorder."""
    engine: EngineConfig
    """The engine."""
    watch: WatchConfig = WatchConfig()
    """The comparison after a swap."""
    poll_seconds: float = Field(10.0, gt=0)
    """The time between two looks at counters and records."""


def read_learn_config(path: Path) -> LearnConfig:
    """Read a config; its paths become absolute. Raises UserError with the key of a fault."""
    values, root = read_mapping(path, "records, run, engine")
    config = ConfigSource(values, path.parent, path, root).parsed(LearnConfig)
    base = Path(path).absolute().parent
    paths = ("records", "directory", "run", "drafter")
    return config.model_copy(
        update={name: str(base / from_home(getattr(config, name))) for name in paths}
    )
