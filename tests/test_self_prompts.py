"""Prompts that the target writes itself: usable, different, apart from held-out ones, kept."""

import dataclasses
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.memory import slot_bytes
from tests.stages import make_stage, plan_stage, run_stage, stage_context
from tests.tiny import tiny_target
from train.data import self_prompts
from train.data.chat_tokens import prompt_tokens, user_prefix
from train.data.corpus import SELF_PROMPTS
from train.data.read import Example
from train.data.self_prompts import SelfPrompts, read_self_prompts, save_self_prompts, write_prompts

DRAWN = Sampling(temperature=1.0)


def target(ends: int = 40) -> Any:
    """Of a vocabulary of 300 tokens so many end a text: a random model would rarely emit one."""
    return dataclasses.replace(tiny_target(), eos_token_ids=tuple(range(2, 2 + ends)))


def written(count: int = 6, held_out: tuple[str, ...] = (), **options: Any) -> SelfPrompts:
    settings: dict[str, Any] = {"max_tokens": 60, "batch_size": 4, "seed": 2} | options
    with TemporaryDirectory() as drawn:
        settings = {"directory": Path(drawn)} | settings
        return write_prompts(target(), None, held_out, count, DRAWN, **settings)


def test_a_message_stands_where_the_users_would() -> None:
    tokenizer = target().tokenizer
    prefix = user_prefix(tokenizer, "Be short.")
    text = tokenizer.decode(prefix)
    assert text.endswith("<|im_start|>user\n")
    assert "Be short." in text


def test_messages_are_different_and_the_same_at_every_call() -> None:
    first = written()
    assert len(set(first.texts)) == 6
    assert all(len(text) >= self_prompts.SHORTEST for text in first.texts)
    assert first.dropped["too short"] > 0
    assert written(batch_size=3).texts == first.texts
    assert written(count=3, seed=1).texts != first.texts


def test_what_was_drawn_is_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses one batch of draws, and other settings draw anew."""
    first = written(directory=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(self_prompts.Decoder, "decode", None)
        assert written(directory=tmp_path) == first
    assert written(count=3, directory=tmp_path, seed=1).texts != first.texts


def test_held_out_prompts_are_not_quoted() -> None:
    first = written()
    second = written(held_out=(first.texts[0],))
    assert second.dropped["held out"] == 1
    assert first.texts[0] not in second.texts


def test_a_target_that_writes_nothing_usable_is_told() -> None:
    with pytest.raises(UserError, match=r"wrote 0 usable prompts of .*'too long'"):
        written(max_tokens=1)


def test_they_come_back_as_examples(tmp_path: Path) -> None:
    save_self_prompts(
        tmp_path / "prompts", "answers", SelfPrompts(["What is a drafter?", "Why so?"])
    )
    examples = read_self_prompts(tmp_path / "prompts")
    assert [e.id for e in examples] == ["answers-0", "answers-1"]
    assert "What is a drafter?" in target().tokenizer.decode(
        prompt_tokens(examples[0], target().tokenizer)
    )


def test_a_stage_answers_them_and_a_training_reads_them(tmp_path: Path) -> None:
    settings = {"self_prompts": 5, "samples": 2, "max_new_tokens": 8, "part_prompts": 4}
    settings |= {"sampling": {"temperature": 1.0}, "max_prompt_tokens": 96}
    context = stage_context(tmp_path, target(12))
    stage = make_stage("generate", "own", **settings)
    outcome = run_stage(context, stage)
    assert outcome.summary["answers"] == 10
    assert outcome.summary["prompts"] == 5
    directory = context.directory / "own"
    before = (directory / SELF_PROMPTS / "prompts.jsonl").read_text("utf-8")
    context.corpus.stages = {"own": directory}
    samples = context.corpus.samples(["own"])
    assert len(samples) == 10
    first = json.loads(before.splitlines()[0])["prompt"]
    assert first in target().tokenizer.decode(samples[0].tokens)
    run_stage(context, stage)  # nothing is written again
    assert (directory / SELF_PROMPTS / "prompts.jsonl").read_text("utf-8") == before


def test_no_turn_of_a_held_out_conversation_is_quoted(tmp_path: Path) -> None:
    settings = {"self_prompts": 4, "max_new_tokens": 4, "max_prompt_tokens": 96}

    def prompts(name: str, *held_out: Example) -> list[str | None]:
        context = stage_context(tmp_path / name, target(12))
        context.corpus.examples["dev"] = list(held_out)
        run_stage(context, make_stage("generate", "own", **settings))
        return [e.prompt for e in read_self_prompts(context.directory / "own" / SELF_PROMPTS)]

    first, second, *_ = prompts("free")
    turns = [("user", first), ("assistant", "Yes."), ("user", second)]
    messages = tuple({"role": role, "content": text or ""} for role, text in turns)
    kept = prompts("held", Example("a", messages, None, None, None, "dev:1"))
    assert not {first, second} & set(kept)


def test_they_take_the_place_of_a_split() -> None:
    with pytest.raises(ValueError, match="self_prompts takes the place of a split's prompts"):
        make_stage("generate", "own", self_prompts=5, prompts=3)


def test_a_plan_counts_the_batch_that_writes_them_before_a_server_answers(tmp_path: Path) -> None:
    context = stage_context(tmp_path, target())
    settings: Any = {"server": {"url": "http://a"}, "max_prompt_tokens": 96, "batch_size": 4}
    own = plan_stage(context, make_stage("generate", "own", self_prompts=5, **settings)).memory
    assert own.states == 4 * 96 * slot_bytes(context.target.model)
    probes = plan_stage(context, make_stage("generate", "probes", **settings)).memory
    assert own.logits == 4 * probes.logits


def test_without_a_chat_template_there_is_no_message(tmp_path: Path) -> None:
    base = target()
    base.tokenizer.chat_template = None
    with pytest.raises(UserError, match="its tokenizer has no chat template"):
        self_prompts.require_template(base.tokenizer, "own")
