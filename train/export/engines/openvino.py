"""OpenVINO GenAI on the CPU, in a child process with a separate environment."""

import tempfile
from pathlib import Path

from train.export.engines import ENGINES, Counting, Engine, EngineRun, EngineTask
from train.export.engines.child import model_directory, python_of, run_child, version_of

PACKAGE = "openvino_genai"
SCRIPT = Path(__file__).with_name("openvino_child.py")


class OpenVINO(Engine):
    """Reads hf exports. The child converts drafter and target with optimum-intel; float32."""

    formats = ("hf",)
    install = "make engine-openvino"
    counting = Counting()
    # Its float32 kernels for one row and for several add in a different order.
    rounding = 1e-5

    def missing(self) -> str | None:
        found = python_of("openvino").exists() and version_of("openvino", PACKAGE)
        return None if found else "OpenVINO GenAI is not installed"

    def run(self, task: EngineTask) -> EngineRun:
        task.say("OpenVINO: converting, then without and with the drafter")
        with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as converted:
            job = {
                "target": str(model_directory(task, Path(place))),
                "drafter": str(task.export.resolve()),
                "place": converted,
                "prompts": [list(prompt) for prompt in task.prompts],
                "gamma": task.gamma,
                "max_new_tokens": task.max_new_tokens,
                "eos": list(task.target.eos_token_ids),
            }
            answer = run_child("openvino", SCRIPT, job, {"HF_HUB_OFFLINE": "1"})
        drafted, accepted = answer["drafted"]["counts"]
        return EngineRun(
            f"{version_of('openvino', PACKAGE)}",
            answer["plain"]["texts"],
            answer["drafted"]["texts"],
            drafted,
            accepted,
            answer["plain"]["seconds"],
            answer["drafted"]["seconds"],
        )


ENGINES.register("openvino")(OpenVINO())
