"""A run begun in this process: what `draftsmith train` and Python programs have in common.

>>> import draftsmith                                                  # doctest: +SKIP
>>> run = draftsmith.train("my.yaml", overrides=["name=first"])        # doctest: +SKIP
>>> run.report["rows"][-1]["evaluation"]["speedup"], run.drafters      # doctest: +SKIP
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState, is_initialized

from decode.base.errors import UserError
from decode.model.loading import resolve_device
from train.base.config_file import ConfigSource, plain_values, read_config
from train.base.console import Reporter, quieten
from train.base.launcher import cores, end_with_launcher, local_processes
from train.base.tracking.trackers import chosen_trackers
from train.loop.accelerator import launched_accelerator
from train.measure.time_passes import trains_in_bfloat16
from train.run.config import RunConfig, dump_config
from train.run.config_checks import build_config
from train.run.run import Run

ConfigLike = str | Path | Mapping[str, Any] | RunConfig


def train(
    config: ConfigLike,
    *,
    overrides: Sequence[str] = (),
    allow_changes: bool = False,
    quiet: bool = False,
) -> Run:
    """Run the stages of a config, as `draftsmith train` does, and return the finished run.

    An existing run continues where it stopped; one that is finished computes nothing. `run.report`
    has all figures, `run.drafters` the drafters' directories by stage, and `run.target` the loaded
    target. It may be called several times in a process. Under `accelerate launch` it is called
    once, by every rank.

    config: the path of a YAML file; or a mapping of the same keys, whose paths are relative to the
    current directory; or a `RunConfig`.
    overrides: `key.sub=value`, as on the command line.
    allow_changes: continue a run although its settings or its number of ranks changed.
    quiet: print nothing. The lines are in the run's logs/log.txt in any case.

    Raises UserError for everything that the caller can put right, before expensive work wherever
    that is possible. Raises Stopped after SIGTERM or Ctrl-C, once a checkpoint is written; the same
    call continues. Any other exception is a bug.
    """
    settings = resolve(config, overrides)
    with begun_run(settings, quiet=quiet, allow_changes=allow_changes) as run:
        run.execute()
    return run


def resolve(config: ConfigLike, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated config with its overrides applied. Raises UserError."""
    if isinstance(config, str | Path):
        return build_config(read_config(Path(config), overrides))
    if isinstance(config, RunConfig):
        config = dump_config(config)
    if not isinstance(config, Mapping):
        raise UserError(
            f"the config is a {type(config).__name__}; expected a path, a mapping or a RunConfig"
        )
    source = ConfigSource(plain_values(config), Path())
    source.apply(overrides)
    return build_config(source)


@contextmanager
def begun_run(
    settings: RunConfig, *, quiet: bool = False, allow_changes: bool = False
) -> Iterator[Run]:
    """A run of this process, or of this rank, with its accelerator. Raises UserError.

    quiet: print nothing. An accelerator that this function started is gone afterwards, so that
    another run may use another precision.
    """
    quieten()
    borrowed = is_initialized()
    precision = mixed_precision(settings)
    if borrowed and precision not in (None, AcceleratorState().mixed_precision):
        raise UserError(
            f"precision is {precision}, but this process has an accelerator whose "
            f"precision is {AcceleratorState().mixed_precision}; train in a process of its own, or "
            "leave precision out"
        )
    accelerator = start_accelerator(settings)
    reporter = Reporter(silent=quiet or not accelerator.is_main_process)
    try:
        yield Run(settings, accelerator, reporter, allow_changes)
    finally:
        alone = accelerator.num_processes == 1
        accelerator.end_training()
        if alone and not borrowed:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


def mixed_precision(settings: RunConfig) -> str | None:
    """accelerate's name of the run's precision. None: as its launcher says."""
    if settings.precision != "fastest":
        return settings.precision
    return "bf16" if trains_in_bfloat16(resolve_device(settings.target.device)) else "no"


def start_accelerator(settings: RunConfig) -> Accelerator:
    """This process's part of the launched engine, with its threads set. It ends with its
    launcher. Raises UserError for a tracker that is not installed."""
    trackers = chosen_trackers(settings.trackers)
    end_with_launcher()
    accelerator = launched_accelerator(
        # accelerate would choose Apple's mps, which targets do not use (`decode.model.loading`).
        cpu=settings.target.device == "cpu" or torch.backends.mps.is_available(),
        mixed_precision=mixed_precision(settings),
        log_with=trackers or None,
        project_dir=str(settings.run_dir / "logs"),
    )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UserError(
            f"the launcher's mixed precision is {accelerator.mixed_precision}, in which trainings "
            "here are not scaled; launch with --mixed_precision bf16 or no"
        )
    if accelerator.device.type == "cpu":
        share = max(1, cores() // local_processes())
        torch.set_num_threads(settings.threads or share)
    return accelerator
