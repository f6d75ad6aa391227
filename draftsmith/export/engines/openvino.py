"""OpenVINO GenAI on the CPU, in a child process with a separate environment."""

from pathlib import Path
from typing import Any

from draftsmith.export.engines import ENGINES, Counting, EngineTask
from draftsmith.export.engines.library_engine import LibraryEngine


class OpenVINO(LibraryEngine):
    """Reads hf exports. The child converts drafter and target with optimum-intel; float32."""

    formats = ("hf",)
    install = "make engine-openvino"
    counting = Counting()
    name, title, package = "openvino", "OpenVINO GenAI", "openvino_genai"
    work = "converts both models, then runs without and with the drafter"

    def job(self, task: EngineTask, target: Path, directory: Path) -> dict[str, Any]:
        return {
            "target": str(target),
            "drafter": str(task.export.resolve()),
            "converted": str(directory / "converted"),
            "gamma": task.gamma,
        }


ENGINES.register("openvino")(OpenVINO())
