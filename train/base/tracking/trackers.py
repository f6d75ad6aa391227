"""What trackers such as wandb and tensorboard get from a run, through accelerate."""

import json
import uuid
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.base.strict import Strict
from train.base.config_file import dotted

if TYPE_CHECKING:
    from accelerate import Accelerator

ID_FILE = "tracking.json"
ID_LENGTH = 21  # what swanlab takes; wandb takes up to 64
# Packages that write for a tracker, by its name. Others have their name.
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}

Tracker = Literal[
    "all",
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
]


class TrackingConfig(Strict):
    """How the run appears in trackers."""

    project: str = Field("draftsmith", pattern=r"\S", title="a name")
    """The project of the run (mlflow: experiment). tensorboard: the name of its directory in the
    run's `logs`."""
    run_name: str | None = Field(None, pattern=r"\S", title="a name")
    """The name of the run in wandb, mlflow, swanlab and trackio. None: the name of the run."""
    tags: list[str] = []
    """Tags of the run in wandb, mlflow and swanlab."""


def chosen_trackers(names: Sequence[str] | None) -> list[str]:
    """The trackers of a run. names: the names of the setting; None: tensorboard, if it is
    installed.

    Raises UserError for a tracker that is not installed: accelerate would leave it out without a
    word.
    """
    if names is None:
        return ["tensorboard"] if _is_installed("tensorboard") else []
    for name in names:
        if name != "all" and not _is_installed(name):
            raise UserError(
                f"trackers names {name}, which is not installed; run pip install {name}, or leave "
                "it out"
            )
    return list(names)


def _is_installed(name: str) -> bool:
    return any(find_spec(package) for package in PACKAGES.get(name, (name,)))


def start_trackers(
    accelerator: "Accelerator",
    settings: TrackingConfig,
    name: str,
    logs: Path,
    config: dict[str, Any],
) -> None:
    """Begin to log, or go on in the record of this run's earlier starts. Every rank must call this.

    name: the name of the run. logs: its directory for logs, which exists. config: the run's
    settings.
    """
    title = settings.run_name or name
    run_id = _run_id(logs / ID_FILE) if accelerator.is_main_process else None
    same = {"id": run_id, "resume": "allow", "tags": settings.tags}
    accelerator.init_trackers(
        settings.project,
        config={k: json.dumps(v) if isinstance(v, list) else v for k, v in dotted(config)},
        init_kwargs={
            "wandb": {"name": title, "dir": str(logs), **same},
            "swanlab": {"experiment_name": title, **same},
            "trackio": {"name": title, "resume": "allow"},
            "mlflow": {"run_name": title, "tags": dict.fromkeys(settings.tags, "")},
        },
    )


def _run_id(path: Path) -> str:
    """The run's id in trackers. It is chosen at the first start and kept in the run's directory, so
    a run that continues is the same one there."""
    if not path.is_file():
        write_file(path, json.dumps({"id": uuid.uuid4().hex[:ID_LENGTH]}))
    return str(json.loads(path.read_text(encoding="utf-8"))["id"])
