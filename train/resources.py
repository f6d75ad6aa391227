"""What the parts of a run share: config, directory, processes, terminal, target, prompts."""

from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from decode.target.loading import Target, load_target
from train.config import RunConfig
from train.console import Reporter
from train.data.chat import prompt_tokens
from train.data.read import Example


@dataclass
class Resources:
    """The resources of one run in this process."""

    config: RunConfig
    accelerator: Accelerator
    reporter: Reporter
    _target: Target | None = field(default=None, init=False)

    @property
    def directory(self) -> Path:
        return self.config.run_dir

    def stage_directory(self, name: str) -> Path:
        """The directory of the stage with this name. It exists once the stage has begun."""
        index = next(i for i, stage in enumerate(self.config.stages) if stage.name == name)
        return self.directory / "stages" / f"{index:02d}-{name}"

    @property
    def target(self) -> Target:
        """The target, loaded on first use: a finished run does not need it."""
        if self._target is None:
            settings = self.config.target
            self.reporter.say(f"loading target {settings.model}")
            rank_device, device = self.accelerator.device, settings.device
            if device == "auto":
                # Under a launcher each rank has its own device.
                device = str(rank_device) if rank_device.type == "cuda" else rank_device.type
            self._target = load_target(
                settings.model,
                dtype=settings.dtype,
                device=device,
                revision=settings.revision,
                trust_remote_code=settings.trust_remote_code,
            )
        return self._target

    def prompts(self, examples: list[Example]) -> list[list[int]]:
        """Token ids of each example's prompt, written with the target's chat template."""
        return [
            prompt_tokens(example, self.target.tokenizer, self.config.data.system)
            for example in examples
        ]
