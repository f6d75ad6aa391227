"""A diagnosis of a run, without an engine: its text and its drafter beside the served prompts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.diagnosis.causes import CAUSES, Measurement
from draftsmith.diagnosis.entry import open_plain, require_positions
from draftsmith.diagnosis.evidence import PLACES, Evidence
from train.base.run_files import STAGES, TEXT, TEXTS, stage_directory
from train.data.read import spread
from train.data.stored_samples import PART, StoredSamples
from train.settings.text_settings import stages_of

MEASURED = 64  # texts of each kind


@dataclass(frozen=True)
class TrainedStage:
    """A finished stage of a run that trained a drafter on a text. text: its directory. temperature:
    at which a target wrote the text; None: it is the data's own."""

    name: str
    directory: Path
    text: Path
    max_length: int
    on_long: Literal["truncate", "drop"]
    temperature: float | None

    @classmethod
    def of_run(cls, path: Path) -> "TrainedStage":
        """The last such stage of a run, or the one with this directory. Raises UserError for what
        is no run, and for one without such a stage."""
        named = path.resolve().parent.name == STAGES
        run = path.resolve().parent.parent if named else path
        try:
            config = json.loads((run / "config.json").read_text(encoding="utf-8"))
            stages = {stage["name"]: stage for stage in config["stages"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{run} is no run ({error}); expected the directory that `train` made, with "
                "config.json"
            ) from error
        found = {}
        for number, (stage, settings) in enumerate(stages.items()):
            directory = stage_directory(run, stage, number)
            if (directory / "drafter").is_dir() and (directory / TEXT).exists():
                record = json.loads((directory / TEXT).read_text(encoding="utf-8"))
                texts = [stages[x] for x in stages_of(settings["text"])]
                found[directory.name] = cls(
                    stage,
                    directory,
                    run / TEXTS / record["text"],
                    settings["max_length"],
                    settings["on_long"],
                    max((x["sampling"]["temperature"] for x in texts), default=None),
                )
        name = path.resolve().name if named else next(reversed(found), "")
        if name not in found:
            raise UserError(
                f"{path} has no drafter of a finished stage that trained on a text; run {run} has "
                f"such in {', '.join(f'{STAGES}/{x}' for x in found) or 'no stage'}"
            )
        return found[name]

    def samples(self) -> StoredSamples:
        """The text that it trained on. Raises UserError for a damaged part."""
        samples = StoredSamples(self.text, len([*self.text.glob(f"{PART}*")]))
        return samples.fitting(self.max_length, self.on_long)


@dataclass(frozen=True)
class RunDiagnosis:
    """measured: by the name of the cause."""

    stage: str
    measured: dict[str, Measurement]

    @property
    def found(self) -> list[str]:
        """The names of the causes that were found."""
        return [name for name, one in self.measured.items() if one.found]

    @property
    def sound(self) -> bool:
        """Whether no cause was found."""
        return not self.found

    @property
    def lines(self) -> list[str]:
        """A line for each cause, those that were found first."""
        words = {True: "found", False: "no", None: "not judged"}
        lines = []
        for name, one in sorted(self.measured.items(), key=lambda item: not item[1].found):
            line = f"{name}: {words[one.found]}. {one.figures}"
            if one.found:
                line += f". It says: {CAUSES[name].says}. Remedy: {CAUSES[name].remedy}"
            lines.append(line)
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        measured = {name: asdict(one) for name, one in self.measured.items()}
        return {"stage": self.stage, "found": self.found, "measured": measured}


def diagnose_run(
    stage: TrainedStage,
    samples: StoredSamples,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    gamma: int,
    say: Callable[[str], None] = lambda line: None,
) -> RunDiagnosis:
    """Measure every cause. target: the served one. prompts: token ids, as they are served. Raises
    UserError for prompts that do not fit, and for a drafter of another target, as `open_plain`."""
    require_positions(target, prompts, PLACES + gamma + 1)
    evidence = Evidence(
        target,
        open_plain(stage.directory / "drafter", target),
        samples.take([int(x) for x in spread(range(len(samples)), MEASURED)]),
        spread(prompts, MEASURED),
        gamma,
        stage.max_length,
        stage.temperature,
    )
    say(
        f"measuring on {len(evidence.samples)} train texts of stage "
        f"{stage.name} and {len(evidence.prompts)} prompts"
    )
    return RunDiagnosis(stage.name, {name: CAUSES[name]().measure(evidence) for name in CAUSES})
