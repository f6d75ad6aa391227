"""The texts that stages train on, from the data or from the answers of generate stages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from decode.artifact import verify_directory
from decode.errors import UserError
from train.data.batches import fit
from train.data.chat import Sample, to_sample
from train.schema import StageConfig, closest_stage
from train.stage import StageContext


class TextConfig(StageConfig):
    """text: a generate stage's name, or several, or `data` for the responses in the training data.

    max_length: of a sample in tokens, prompt included. on_long: longer samples are cut from the
    right, or dropped.
    """

    text: str | list[str] = "data"
    max_length: int = Field(1024, ge=2)
    on_long: Literal["truncate", "drop"] = "truncate"

    @property
    def text_stages(self) -> list[str]:
        """The generate stages whose answers are the text. Empty for the data's own responses."""
        return stages_of(self.text)


def check_text(settings: TextConfig, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError if a stage of the text is not an earlier generate stage, or if it answered
    test prompts. No stage may train on these."""
    for name in settings.text_stages:
        answers: Any = closest_stage(name, earlier, "generate")
        if answers.split == "test":
            raise UserError(
                f"stage {settings.name} would train on the answers of {name} to the test split, on "
                "which drafters are judged; name a stage that answers train or dev prompts"
            )


def stages_of(text: str | list[str]) -> list[str]:
    return [] if text == "data" else [text] if isinstance(text, str) else text


def read_samples(
    context: StageContext, text: str | list[str], split: str = "train"
) -> list[Sample]:
    """All samples of a text. Raises UserError if a part of a stage's answers is damaged."""
    tokenizer, system = context.target.tokenizer, context.system
    if text == "data":
        return [to_sample(e, tokenizer, system=system) for e in context.examples[split]]
    by_id = {e.id: e for examples in context.examples.values() for e in examples}
    samples = []
    for stage in stages_of(text):
        for answer in read_answers(context.outcomes[stage]):
            sample = to_sample(by_id[answer["id"]], tokenizer, answer["tokens"], system)
            name = f"{sample.id}#{stage}-{answer['sample']}"
            samples.append(Sample(name, sample.tokens, sample.mask))
    return samples


def fitting_samples(
    context: StageContext, settings: TextConfig
) -> tuple[list[Sample], dict[str, int]]:
    """The samples that can be trained on, and the counts of `fit`. Also prints the counts."""
    samples, counts = fit(
        read_samples(context, settings.text), settings.max_length, settings.on_long
    )
    context.reporter.say("  text: " + ", ".join(f"{n} {what}" for what, n in counts.items() if n))
    return samples, counts


def planned_tokens(context: StageContext, settings: TextConfig) -> int:
    """The number of response tokens of the text, before it exists. For a stage's answers this is
    the maximum."""
    if settings.text == "data":
        return sum(sum(sample.mask) for sample in read_samples(context, "data"))
    return sum(context.plans[name].tokens for name in settings.text_stages)


PART = "part-"


def read_answers(directory: Path) -> list[dict[str, Any]]:
    """All answers of a generate stage: {"id", "sample", "tokens"}, in order.

    Raises UserError (CorruptArtifact) with the name of a damaged part.
    """
    parts = sorted(directory.glob(f"{PART}*"), key=lambda path: int(path.name.removeprefix(PART)))
    answers = []
    for part in parts:
        verify_directory(part)
        lines = (part / "answers.jsonl").read_text().splitlines()
        answers += [json.loads(line) for line in lines]
    return answers
