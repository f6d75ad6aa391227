"""Engines that are Python libraries: a small server of ours (`library_server.py`) asks them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from draftsmith.export.compare_acceptance import Counting
from draftsmith.export.engine_kinds import ENGINES, Engine, EngineTask
from train.engines.child_process import model_directory, package_version, python_of, serving

SERVER = Path(__file__).with_name("library_server.py")
READY_SECONDS = 600.0  # OpenVINO converts both models first


@contextmanager
def library_serving(
    library: str,
    python: str,
    target: Path,
    drafter: str,
    gamma: int,
    ends: list[int],
    log_file: Path | None = None,
) -> Iterator[str]:
    """The address of a server over `library`. target, drafter, ends: as `library_server.py` takes
    them."""
    command = [
        python, "-I", str(SERVER), library, str(target), drafter, str(gamma), str(ends), "{port}",
    ]  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    with serving(
        library, command, "/health", env, log_file=log_file, ready_seconds=READY_SECONDS
    ) as server:
        yield f"http://127.0.0.1:{server.port}"


class Transformers(Engine):
    """Assisted generation, one text at a time. Every draft has γ tokens; stopping by confidence is
    off. float32."""

    install = "make install"
    counting = Counting(first_drafted=True, stops_at_eos=True)
    name = "transformers"

    def version(self, python: str | None = None) -> str | None:
        return metadata.version("transformers")

    def python(self) -> str:
        """The Python that has the library."""
        return sys.executable

    @contextmanager
    def serving(self, task: EngineTask, drafts: bool, directory: Path) -> Iterator[str]:
        target = model_directory(task.target, directory / "target")
        drafter = str(task.export.resolve()) if drafts else "none"
        ends = list(task.target.eos_token_ids)
        log_file = directory / f"{self.name}.log"
        with library_serving(
            self.name, self.python(), target, drafter, task.gamma, ends, log_file
        ) as url:
            yield url


class OpenVINO(Transformers):
    """OpenVINO GenAI on the CPU. The server converts drafter and target with optimum-intel;
    float32."""

    install = "make engine-openvino"
    counting = Counting()
    name = "openvino"

    def version(self, python: str | None = None) -> str | None:
        return package_version(self.name, "openvino_genai")

    def python(self) -> str:
        return str(python_of(self.name))


ENGINES.register("transformers")(Transformers())
ENGINES.register("openvino")(OpenVINO())
