"""Single stages on a tiny target, without the run around them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from decode.base.strict import kinds_of
from decode.model.loading import Target
from tests.training import Killed, Lines
from train.base.stage import StageInputs, StagePlan, StageResult
from train.data.corpus import Corpus
from train.data.read import Example
from train.data.text_files import Texts
from train.loop.trainer import Trainer
from train.settings.schema import StageConfig
from train.stages import STAGES

WORDS = ("the", "a", "dog", "fox", "sea", "shell", "token", "sells", "jumps", "of", "it", "two")
LOOP = {"epochs": 2, "tokens_per_batch": 150, "save_every": 2, "log_every": 1}
DRAFTER = {"drafter": {"layers": [0]}, "optimizer": {"lr": 1e-2, "warmup_steps": 2}, "loop": LOOP}


def examples(split: str, count: int) -> list[Example]:
    """Prompts of a few words with answers of a few more."""
    g = torch.Generator().manual_seed(len(split))
    found = []
    for i in range(count):
        words = [WORDS[w] for w in torch.randint(len(WORDS), (9 + i % 4,), generator=g).tolist()]
        prompt, answer = " ".join(words[:4]), " ".join(words[4:])
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
        found.append(Example(f"{split}-{i}", turns, prompt, None, None, f"{split}.jsonl:{i + 1}"))
    return found


def stage_context(directory: Path, target: Target) -> StageInputs:
    """As a run makes it; `run_stage` gives it the directory of each stage."""
    earlier: dict[str, Path] = {}
    splits = {"train": examples("train", 10), "dev": examples("dev", 4)}
    texts = Texts(positions=target.max_positions, vocab_size=target.vocab_size)
    return StageInputs(
        target,
        Accelerator(cpu=True),
        Lines(),
        directory,
        earlier,
        Corpus(splits, target.tokenizer, system=None, stages=earlier, texts=texts),
        run_name="tiny",
    )


def with_examples(context: StageInputs, **splits: list[Example]) -> StageInputs:
    """The same with other examples of these splits."""
    corpus = replace(context.corpus, examples=context.corpus.examples | splits)
    return replace(context, corpus=corpus)


def make_stage(kind: str, name: str, *earlier: Any, **settings: Any) -> Any:
    """A stage's config, checked as in a run. Raises UserError."""
    config = kinds_of(StageConfig, "kind")[kind].model_validate(
        {"name": name, "kind": kind} | settings
    )
    for check in config.checks(earlier):
        check()
    STAGES[kind].check(config, earlier)
    return config


def plan_stage(context: StageInputs, stage: Any, **plans: StagePlan) -> StagePlan:
    """plans: of earlier stages."""
    return STAGES[stage.kind](stage, context).plan(plans)


def run_stage(context: StageInputs, stage: Any) -> StageResult:
    """Run it in a directory of its own, where later stages find it."""
    directory = context.directory / stage.name
    directory.mkdir(parents=True, exist_ok=True)
    inputs = replace(context, directory=directory, earlier=dict(context.earlier))
    outcome = STAGES[stage.kind](stage, inputs).run()
    context.earlier[stage.name] = directory
    return outcome


def drafter_weights(outcome: StageResult) -> dict[str, torch.Tensor]:
    """All files of weights of a drafter, whole and reduced layers alike."""
    assert outcome.drafter is not None
    return {
        f"{path.name} {name}": tensor
        for path in sorted(outcome.drafter.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def kill_at_step(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Die before the optimizer step of this number."""
    original = Trainer._optimizer_step

    def step(self: Any, at: Any, *args: Any) -> Any:
        if at.step + 1 == count:
            raise Killed
        return original(self, at, *args)

    monkeypatch.setattr(Trainer, "_optimizer_step", step)


def run_killed(
    context: StageInputs, stage: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> StageResult:
    """What a stage ends with that died before the optimizer step of this number and was begun
    again."""
    with monkeypatch.context() as patch:
        kill_at_step(patch, count)
        with pytest.raises(Killed):
            run_stage(context, stage)
    context.accelerator.free_memory()  # as the end of the process would
    return run_stage(context, stage)
