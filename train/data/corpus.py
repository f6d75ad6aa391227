"""The texts that stages train on, from the data or from the answers of generate stages."""

import json
from pathlib import Path
from typing import Any

from decode.artifact import verify_directory
from train.data.chat import Sample, to_sample
from train.stage import StageContext


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
