"""Engines that are Python libraries, each in an environment of its own."""

import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from draftsmith.export.engines import Engine, EngineRun, EngineTask, LoadSpeed
from train.engines.child_process import model_directory, package_version, python_of, run_job


class LibraryEngine(Engine):
    """An engine that is a Python library. The script `NAME_child.py` beside this file runs its
    jobs.

    name: the name of its environment. title: its name in messages. package: its distribution, as
    site-packages spells it. work: what one job does, for progress messages. env: additions to our
    environment.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str]
    work: ClassVar[str]
    env: ClassVar[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1"}
    # Float32 kernels for one row and for several add in a different order.
    rounding = 1e-5

    @abstractmethod
    def job(self, task: EngineTask, target: Path, directory: Path) -> dict[str, Any]:
        """Return what the script needs besides the prompts, their length limit and the
        end-of-text tokens. target: a model directory. directory: for files of the job."""

    def place(self, python: str | None) -> tuple[Path, str] | None:
        """The Python that runs the jobs, and the version of the engine there; None: nowhere."""
        version = package_version(self.name, self.package)
        return (python_of(self.name), version) if version else None

    def missing(self, python: str | None = None) -> str | None:
        return None if self.place(python) else f"{self.title} is not installed"

    def run(self, task: EngineTask) -> EngineRun:
        place = self.place(task.python)
        assert place is not None, "engine_for found it"
        python, version = place
        task.say(f"{self.title} {version} ({python}) {self.work}")
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            target = model_directory(task.target, directory / "target")
            job = self.job(task, target, directory) | {
                "prompts": [list(prompt) for prompt in task.prompts],
                "max_new_tokens": task.max_new_tokens,
                "eos": list(task.target.eos_token_ids),
                "loads": list(task.loads),
            }
            script = Path(__file__).with_name(f"{self.name}_child.py")
            answer = run_job(self.name, script, job, self.env, python)
        return EngineRun(
            version,
            answer["plain"]["texts"],
            answer["drafted"]["texts"],
            answer["drafted_tokens"],
            answer["accepted_tokens"],
            answer["plain"]["seconds"],
            answer["drafted"]["seconds"],
            [
                LoadSpeed(requests, *(answer[how]["speeds"][place] for how in ("plain", "drafted")))
                for place, requests in enumerate(task.loads)
            ],
        )
