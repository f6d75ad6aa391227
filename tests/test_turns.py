"""Every turn of a finished chat can be answered anew, and learnt."""

import json
from pathlib import Path

import pytest

from decode.base.errors import UserError
from decode.model.loading import load_target
from tests.stages import make_stage, plan_stage, run_stage, stage_context, with_examples
from tests.tiny import save_tiny
from train.data.answer_files import read_answers
from train.data.read import Example, read_examples
from train.data.turns import TURN, Turns

CHATS = [
    ["user: the dog", "assistant: a fox", "user: the sea", "assistant: a shell"],
    ["system: two", "user: a fox", "assistant: it", "user: the token"],
    ["user: one question", "assistant: one answer"],
]


def chats(path: Path) -> Path:
    rows = [[line.split(": ") for line in chat] for chat in CHATS]
    messages = [[{"role": role, "content": text} for role, text in row] for row in rows]
    path.write_text(
        "".join(json.dumps({"id": str(i), "messages": m}) + "\n" for i, m in enumerate(messages)),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("turns", ["last", "every"])
def test_the_turns_of_chats_are_answered_and_learnt(turns: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "target")), dtype="float32", device="cpu")
    read, _ = read_examples(str(chats(tmp_path / "chats.jsonl")))
    context = with_examples(stage_context(tmp_path, target), train=read)
    stage = make_stage("generate", "answers", turns=turns, max_new_tokens=5, part_prompts=2)
    run_stage(context, stage)
    ids = [answer["id"] for answer in read_answers(tmp_path / "answers")]
    every = [f"0{TURN}1", "0", f"1{TURN}2", "1", "2"]
    assert ids == (every if turns == "every" else ["0", "1", "2"])
    assert plan_stage(context, stage).tokens == 5 * len(ids)
    samples = {sample.id: sample for sample in context.corpus.samples("answers")}
    assert len(samples) == len(ids)
    # What is learnt is the new answer alone, after the chat's own turns before it.
    for identity, sample in zip(ids, samples.values(), strict=True):
        prompt = sample.tokens[: sample.mask.index(True)]
        text = target.tokenizer.decode(prompt)
        chat, _, end = identity.partition(TURN)
        before = CHATS[int(chat)][: int(end)] if end else CHATS[int(chat)]
        if before[-1].startswith("assistant"):
            before = before[:-1]
        assert [line.split(": ")[1] in text for line in CHATS[int(chat)]] == [
            line in before for line in CHATS[int(chat)]
        ]
        assert sum(sample.mask) == len(sample.tokens) - len(prompt) <= 5


def test_an_id_that_names_a_turn_is_refused() -> None:
    example = Example(f"a{TURN}1", ({"role": "user", "content": "x"},), "x", None, None, "f:1")
    with pytest.raises(UserError, match="f:1: the id 'a#turn-1' has '#turn-', which names turns"):
        Turns.of([example])


def test_turns_are_read_by_slices_and_numbers(tmp_path: Path) -> None:
    read, _ = read_examples(str(chats(tmp_path / "chats.jsonl")))
    found = Turns.of(read)
    assert [example.id for example in found[1:3]] == [found[1].id, found[2].id] == ["0", "1#turn-2"]
