"""Causes in a training: none is found in a sound one, and each where it was planted."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import draftsmith
from draftsmith.cli.main import app as cli
from draftsmith.diagnosis.causes import CAUSES
from draftsmith.diagnosis.evidence import PLACES, Evidence
from draftsmith.diagnosis.mistakes import MISTAKES, with_method
from heads.heads_drafter import HeadsDrafter
from tests.first_run import make_first_run, settings
from tests.tiny import VOCAB, plain_texts
from tools.diagnosis_controls import GAMMA, TOKENS, target, taught_on
from train.base.exit_status import ExitStatus
from train.data.chat_tokens import Sample

BEGIN, END = [1, 9], [11, 1]  # what a template writes before a question and before its answer
ANSWER = 40


def asked(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*BEGIN, *rng.integers(20, VOCAB, 5).tolist(), *END] for _ in range(count)]


@functools.cache
def sound() -> Evidence:
    """A drafter that learnt the target's answers by heart, and is asked the same prompts."""
    prompts = asked(12, 0)
    answers = plain_texts(target().model, prompts, ANSWER)
    texts = [x + y for x, y in zip(prompts, answers, strict=True)]
    samples = [
        Sample(str(number), text, [False] * len(prompt) + [True] * len(answer))
        for number, (text, prompt, answer) in enumerate(zip(texts, prompts, answers, strict=True))
    ]
    drafter = taught_on(texts, "eagle3")
    return Evidence(target(), drafter, samples, prompts, GAMMA, 1024, 0.0)


def found(evidence: Evidence) -> list[str]:
    return [name for name in CAUSES if CAUSES[name]().measure(evidence).found]


def test_nothing_is_found_in_a_sound_training() -> None:
    assert found(sound()) == []
    assert CAUSES["length"]().measure(sound()).found is None


def changed(change: Callable[[Sample], Sample]) -> Evidence:
    return replace(sound(), samples=[change(sample) for sample in sound().samples])


def without_template(sample: Sample) -> Sample:
    return replace(sample, tokens=[5, 6, *sample.tokens[2:]])


def all_trained(sample: Sample) -> Sample:
    return replace(sample, mask=[False, *[True] * (len(sample.mask) - 1)])


def of_another(sample: Sample) -> Sample:
    """A text in which one token of three is another one."""
    rng = np.random.default_rng(int(sample.id))
    tokens = [
        int(rng.integers(20, VOCAB)) if trained and rng.random() < 1 / 3 else token
        for token, trained in zip(sample.tokens, sample.mask, strict=True)
    ]
    return replace(sample, tokens=tokens)


def cut_off() -> Evidence:
    """The drafter drafts something else where it was not trained."""
    drafter, longest = sound().drafter, len(sound().prompts[0]) + PLACES // 2
    assert isinstance(drafter, HeadsDrafter)
    draft = type(drafter).draft

    def worse(self: HeadsDrafter, contexts: Any, *rest: Any) -> Any:
        made = draft(self, contexts, *rest)
        made.tokens[np.asarray(contexts.lengths) > longest] = 0
        return made

    return replace(sound(), drafter=with_method(drafter, "draft", worse), max_length=longest)


def after_its_own_states() -> Evidence:
    drafter = MISTAKES["fed_state_norm"](TOKENS).make(sound().drafter, target())
    assert drafter is not None
    return replace(sound(), drafter=drafter)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: changed(without_template), ["other_template"]),
        (lambda: changed(all_trained), ["masks"]),
        (lambda: changed(of_another), ["old_target"]),
        (cut_off, ["length"]),
        (after_its_own_states, ["exposure"]),
        (lambda: replace(sound(), prompts=asked(12, 1)), ["other_prompts", "vocabulary"]),
    ],
)  # fmt: skip
def test_a_cause_is_found_where_it_was_planted(
    make: Callable[[], Evidence], names: list[str]
) -> None:
    said = found(make())
    assert {*names} <= {*said}
    # The loss on prompts, and texts of another, are also texts that the target would not write, and
    # that the drafter does not know.
    assert {*said} - {*names} <= {"old_target", "other_prompts", "exposure"}


def test_a_run_is_diagnosed_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(make_first_run(tmp_path, monkeypatch))
    run = draftsmith.train(config, overrides=["stages.heads.loop.max_steps=2"], quiet=True)

    def said(*more: str) -> tuple[int, str]:
        words = ["diagnose", "--run", str(run.directory), "--dtype", "float32", "--gamma", "2"]
        result = CliRunner().invoke(cli, [*words, *more])
        return result.exit_code, " ".join(result.output.split())

    served = ["--prompts", "rows.jsonl"]
    code, text = said("--target", "target", *served, "--json", "found.json")
    assert code == ExitStatus.FAILED
    assert "old_target: found." in text  # the data has texts that a tiny target does not write
    assert "other_template: no. 100% of the train texts begin with" in text
    assert "old_target" in json.loads((tmp_path / "found.json").read_text("utf-8"))["found"]
    # Before the target is loaded, which is not there.
    missing = ["--target", "./no-target"]
    assert "--run needs --prompts" in said(*missing)[1]
    for both in (["http://localhost:9"], ["--drafter", "target"]):
        assert "or --run DIRECTORY" in said(*missing, *served, *both)[1]
    assert "stages/00-heads" in said(*missing, *served, "--run", f"{run.directory}/stages/9-no")[1]
    assert "nowhere is no run" in said(*missing, *served, "--run", "nowhere")[1]
    assert "no-target" in said(*missing, *served)[1]
    (run.drafters["heads"] / "heads.safetensors").write_bytes(b"")
    code, text = said(*missing, *served)
    assert (code, "heads.safetensors" in text) == (ExitStatus.BAD_INPUT, True)
