"""Text that does not fit into memory: rows and samples in Arrow files, batches."""

import hashlib
import itertools
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train.data.answer_files
import train.data.corpus
import train.data.text_files
import train.stages
from benchmarks import data as benchmark
from decode.base.artifact import (
    CorruptArtifact,
    remove_directory,
    verify_directory,
    write_directory,
)
from decode.base.errors import UserError
from tests.stages import examples, make_stage, plan_stage, run_stage, stage_context
from tests.test_data import example, sample_of, write
from tests.tiny import VOCAB, tiny_target
from tests.training import Killed, before_call
from train.base.stage import StageInputs
from train.data.answer_files import AnswerFiles, read_answers
from train.data.batches import Batches, RankText, bucket_batches, permutation
from train.data.chat_tokens import Sample
from train.data.read import Example, Examples, read_examples
from train.data.splits import split_off
from train.data.stored_samples import StoredSamples, sample_ids, sizes, take
from train.data.text_files import Texts, require_kept, write_samples
from train.measure.ranks import Ranks
from train.stages.generate import GenerateStage


def test_the_table_has_the_rows_of_every_kind_of_source(tmp_path: Path) -> None:
    marked = b'\xef\xbb\xbf{"prompt": "\xc3\xbc"}'
    names = [
        write(tmp_path / "a.jsonl", marked, b"", {"messages": [{"role": "user", "content": "x"}]}),
        str(tmp_path / "b.txt"),
        str(tmp_path / "c.json"),
        str(tmp_path / "d.json"),
    ]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf\n\none\r\ntwo\n \n\xc3\xa4")
    (tmp_path / "c.json").write_text(
        json.dumps({"rows": [{"prompt": "p"}, {"text": "t"}]}), "utf-8"
    )
    write(tmp_path / "d.json", {"prompt": "l", "id": 5}, {"prompt": "m", "kind": "k"})
    read, report = read_examples(names)
    rows = list(read)
    assert [e.prompt or e.text for e in rows] == [*"üx", "one\r\ntwo", "ä", *"ptlm"]
    assert [e.source.rpartition("/")[2] for e in rows[2:4]] == ["b.txt:3", "b.txt:6"]
    assert report.kept == len(read) == len(rows) == 8
    assert [read[i] for i in range(-8, 8)] == rows + rows
    chosen = [5, 0, 6, 0, 2]
    assert list(read.select(chosen)) == [rows[i] for i in chosen]
    assert list(read[1:7:2].select([2, 0])) == [rows[5], rows[1]]
    with pytest.raises(IndexError):
        read[8]


def stored(directory: Path, *parts: list[Sample]) -> StoredSamples:
    for number, part in enumerate(parts):
        write_samples(directory, number, part)
    return StoredSamples(directory, len(parts))


def test_stored_samples_are_those_that_were_written(tmp_path: Path) -> None:
    first = [sample_of(5, 2, "a"), sample_of(9, 3, "b")]
    first.append(Sample("c", [7, 8], [False, True], source=[1, 2, 3]))
    last = [sample_of(4, 1, "d"), sample_of(3, 3, "without a response")]
    samples = stored(tmp_path, first, last[1:], last).fitting(8)
    expected = [first[0], sample_of(8, 3, "b"), first[2], last[0]]
    assert list(samples) == expected
    assert [samples[i] for i in range(-4, 4)] == 2 * expected
    assert samples[1:3] == expected[1:3]
    counts = {"read": 6, "kept": 4, "truncated": 1, "too long": 0, "no response tokens": 2}
    assert samples.counts == counts
    for numbers, again in zip(sizes(samples), sizes(expected), strict=True):
        assert numbers.tolist() == again.tolist()
    for rows in ([3, 0, 3], []):
        assert take(samples, rows) == take(expected, rows)
        assert sample_ids(samples, rows) == sample_ids(expected, rows)
    with pytest.raises(UserError, match=r"part-3.*does not exist"):
        StoredSamples(tmp_path, 4)
    file = tmp_path / "part-2" / "samples.arrow"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"part-2.*samples\.arrow"):
        StoredSamples(tmp_path, 3)
    with pytest.raises(UserError, match=r"4 read, 0 kept \(too long: 1, no response tokens: 3\)"):
        require_kept(Counter({"read": 4, "too long": 1, "no response tokens": 3}), 2)


def test_stages_share_a_text_whose_parts_outlive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.data.text_files, "PART_EXAMPLES", 4)
    context = stage_context(tmp_path, tiny_target())

    def stage(name: str, **settings: Any) -> Any:
        config = make_stage("feature_cache", name, **settings)
        texts = Texts(tmp_path / "texts")
        inputs = replace(context, corpus=replace(context.corpus, texts=texts))
        return train.stages.STAGES[config.kind](config, inputs)

    exact = list(context.corpus.samples("data"))
    written: list[int] = []
    original = write_samples

    def counted(directory: Path, number: int, *rest: Any) -> None:
        if len(written) == 2:
            raise UserError("the disk is full")
        written.append(number)
        original(directory, number, *rest)

    monkeypatch.setattr(train.data.text_files, "write_samples", counted)
    with pytest.raises(UserError, match="disk is full"):
        stage("cache").fitting_samples()
    del written[0]
    samples, counts = stage("cache").fitting_samples()
    assert written == [1, 2]
    assert list(samples) == exact
    assert (counts["read"], counts["kept"], len(samples)) == (10, 10, 10)
    # Another stage reads them there, however long its samples may be, and makes those that are
    # missing.
    del written[:]
    shutil.rmtree(samples.directory / "part-1")
    shorter = min(len(sample.tokens) for sample in samples) - 1
    cut, counts = stage("later", max_length=shorter).fitting_samples()
    assert written == [1]
    assert counts["truncated"] == len(cut) == 10
    assert [s.tokens for s in cut] == [s.tokens[:shorter] for s in samples]
    del context.corpus.examples["train"][4:]
    assert len(stage("fewer").fitting_samples()[0]) == 4


def test_each_text_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its rows are checked, for all plans, stages and starts."""
    context = stage_context(tmp_path, tiny_target())
    context.corpus.examples["train"] = examples("train", 40)
    exact = list(context.corpus.samples("data"))
    made: list[str] = []

    def count(name: str) -> None:
        original = getattr(train.data.corpus, name)

        def counted(example: Example, *rest: Any, **options: Any) -> Any:
            made.append(example.id)
            return original(example, *rest, **options)

        monkeypatch.setattr(train.data.corpus, name, counted)

    count("to_samples")
    count("prompt_tokens")
    context = usable(context, directory=tmp_path / "texts")
    for name in ("one", "two"):
        plan = plan_stage(context, make_stage("feature_cache", name))
        assert plan.tokens == sum(len(s.tokens) for s in exact)
    cut = plan_stage(context, make_stage("feature_cache", "cut", max_length=9)).tokens
    assert cut == sum(min(len(s.tokens), 9) for s in exact)
    ids = sorted(example.id for example in context.corpus.examples["train"])
    assert sorted(made) == ids
    # The prompts, for their check, the answers and the texts with these.
    del made[:]
    generate = make_stage("generate", "answers", max_new_tokens=2, batch_size=40)
    plan_stage(context, generate)
    run_stage(context, generate)
    run_stage(context, make_stage("feature_cache", "cache", generate, text="answers"))
    assert sorted(made) == ids
    # At the next start.
    again = usable(context, directory=tmp_path / "texts")
    assert list(again.corpus.samples("data")) == exact
    again.corpus.prompts(again.corpus.asked("train"))
    assert sorted(made) == ids


def test_answers_find_their_prompts_also_those_of_another_split(tmp_path: Path) -> None:
    context = stage_context(tmp_path, tiny_target())
    generate = make_stage("generate", "answers", split="dev", max_new_tokens=3, part_prompts=3)
    run_stage(context, generate)
    # Ids are unique in one split only: files of the same name have the same ones.
    for split in ("train", "test"):
        same = [replace(e, id=f"dev-{i}") for i, e in enumerate(examples(split, 6))]
        context.corpus.examples[split] = same
    prompts = context.corpus.prompts(context.corpus.examples["dev"])
    samples = context.corpus.samples("answers")
    assert [s.id for s in samples] == [f"dev-{i}#answers-0" for i in range(4)]
    for sample, prompt in zip(samples, prompts, strict=True):
        assert sample.tokens[: len(prompt)] == prompt
    # Of an earlier version, it is not known which split was asked.
    in_old_form(context.directory / "answers", size=3)
    with pytest.raises(
        UserError, match=r"part-0 answers the prompt 'dev-0', which is in 3 of train"
    ):
        context.corpus.samples("answers")


def in_old_form(directory: Path, size: int, meta: Any = None) -> None:
    """Write a stage's answers as earlier versions did: in parts of `size`."""
    answers = list(read_answers(directory))
    remove_directory(directory / "part-0")
    for first in range(0, len(answers), size):
        lines = "".join(json.dumps(x) + "\n" for x in answers[first : first + size])
        write_directory(
            directory / f"part-{first // size}",
            lambda path, lines=lines: (path / "answers.jsonl").write_text(lines, "utf-8"),
            meta=meta,
        )


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts were answered at a time."""
    decoded: list[int] = []
    answer = GenerateStage._answer

    def counted(self: Any, prompts: list[list[int]], *rest: Any) -> Any:
        decoded.append(len(prompts))
        return answer(self, prompts, *rest)

    monkeypatch.setattr(GenerateStage, "_answer", counted)
    return decoded


SAMPLED = {"max_new_tokens": 3, "sampling": {"temperature": 1.0}, "samples": 2, "part_prompts": 5}


def answers_of(context: StageInputs, **settings: Any) -> dict[tuple[str, int], list[int]]:
    run_stage(context, make_stage("generate", "answers", **(SAMPLED | settings)))
    directory = context.directory / "answers"
    found = list(read_answers(directory))
    assert [path.name for path in directory.iterdir()] == ["part-0"]
    rows = {(e["id"], e["sample"]): e["tokens"] for e in found}
    assert len(rows) == len(found)
    return rows


def test_a_kill_loses_the_answers_that_were_not_saved(
    tmp_path: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in the middle of a line, and at the end, before and after the part of all."""
    context = stage_context(tmp_path, tiny_target())
    first = answers_of(context)
    assert decoded == [5] * 4
    for owner, name, call, lines, again in (
        (AnswerFiles, "add", 3, 11, [5, 5]),
        (train.data.answer_files, "write_directory", 1, 21, []),
        (Path, "unlink", 1, 21, []),
    ):
        remove_directory(context.directory / "answers")
        with monkeypatch.context() as patch:
            before_call(patch, owner, name, call)
            with pytest.raises(Killed):
                answers_of(context)
        file = context.directory / "answers" / "answers-0.jsonl"
        assert len(file.read_text("utf-8").splitlines()) == lines
        with file.open("a", encoding="utf-8") as cut:
            cut.write('{"key": "')
        del decoded[:]
        assert answers_of(context) == first
        assert decoded == again


def test_answers_of_earlier_versions_are_read_and_gone_on_with(
    tmp_path: Path, decoded: list[int]
) -> None:
    context = stage_context(tmp_path, tiny_target())
    first = answers_of(context)
    samples = [(s.id, s.tokens) for s in context.corpus.samples("answers")]
    directory = context.directory / "answers"
    manifest = json.loads((directory / "part-0" / "manifest.json").read_text("utf-8"))["meta"]
    meta = {name: manifest[name] for name in ("made_by", "split")}
    in_old_form(directory, 6, meta)
    assert [(s.id, s.tokens) for s in usable(context).corpus.samples("answers")] == samples
    # One that was killed: a part is not there, and one was half answered by a server.
    last = list(read_answers(directory))[18:]
    remove_directory(directory / "part-1")
    remove_directory(directory / "part-3")
    rest = {"finish_reason": "length", "left_out": "", "retokenized": False}
    lines = [{"row": 18, "key": last[0]["key"], "tokens": last[0]["tokens"]} | rest]
    lines += [{"row": 19, "key": last[1]["key"], "tokens": []} | rest | {"left_out": "empty"}]
    journal = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "open-part-3.jsonl").write_text(journal, "utf-8")
    del decoded[:]
    assert answers_of(context) == first
    assert decoded == [5, 2]
    in_old_form(directory, 6)
    with pytest.raises(UserError, match=r"part-0 is of an earlier version.*delete .*answers to"):
        answers_of(context)


def test_answers_are_counted_as_they_are_written(tmp_path: Path, decoded: list[int]) -> None:
    """An earlier version did not count, so its whole part is written anew."""
    ends = tuple(range(VOCAB // 5))  # some answers end, some are cut
    context = stage_context(tmp_path, replace(tiny_target(), eos_token_ids=ends))
    settings = SAMPLED | {"prompts": 4}
    summary = run_stage(context, make_stage("generate", "answers", **settings)).summary
    found = [answer["tokens"] for answer in read_answers(context.directory / "answers")]
    cut = sum(tokens[-1] not in ends for tokens in found)
    assert 0 < cut < len(found)
    counts = {"prompts": 4, "answers": 8, "tokens": sum(map(len, found)), "cut_at_limit": cut}
    assert summary.items() >= counts.items()
    part = context.directory / "answers" / "part-0"
    lines = (part / "0.jsonl").read_bytes()
    meta = {k: v for k, v in verify_directory(part).items() if k not in counts}
    write_directory(part, lambda path: (path / "0.jsonl").write_bytes(lines), meta=meta)
    del decoded[:]
    again = run_stage(context, make_stage("generate", "answers", **settings)).summary
    assert again.items() >= counts.items()
    assert not decoded


def test_an_answer_stays_with_its_prompt_where_ids_move(tmp_path: Path) -> None:
    """The id of a row may be its line in a file, and a row is put in front."""
    context = stage_context(tmp_path, tiny_target())
    first = answers_of(context)
    rows = context.corpus.examples["train"]
    moved = [replace(row, id=above.id) for row, above in itertools.pairwise(rows)]
    new = replace(rows[0], messages=examples("dev", 1)[0].messages)
    context.corpus.examples["train"] = [new, *moved]
    second = answers_of(context)
    for row, above in itertools.pairwise(rows):
        assert [second[above.id, n] for n in range(2)] == [first[row.id, n] for n in range(2)]


def test_finished_answers_survive_a_mended_file(tmp_path: Path, decoded: list[int]) -> None:
    """An answer is known by its prompt and the settings, not by its row."""
    context = stage_context(tmp_path, tiny_target())
    first = answers_of(context)
    rows = context.corpus.examples["train"]
    mended = replace(rows[5], messages=examples("dev", 1)[0].messages)
    context.corpus.examples["train"] = [*rows[:3], *rows[4:5], mended, *rows[6:]]
    del decoded[:]
    second = answers_of(context, part_prompts=4)
    assert sum(decoded) == 2
    assert {key: first[key] for key in second if key[0] != "train-5"} == {
        key: tokens for key, tokens in second.items() if key[0] != "train-5"
    }
    assert len(second) == 18
    del decoded[:]
    # An equal prompt has answers of its own.
    more = [*context.corpus.examples["train"], replace(rows[0], id="again")]
    context.corpus.examples["train"] = more
    third = answers_of(context)
    assert decoded == [2]
    assert second.items() < third.items()
    assert [third["again", n] for n in range(2)] != [third["train-0", n] for n in range(2)]
    del decoded[:]
    assert len(answers_of(context, prompts=2)) == 4
    assert not decoded
    with pytest.raises(
        UserError, match="part-0 were made with another max_new_tokens; set it back"
    ):
        answers_of(context, prompts=2, max_new_tokens=4)
    file = context.directory / "answers" / "part-0" / "0.jsonl"
    file.write_text(file.read_text("utf-8")[:-20], "utf-8")
    with pytest.raises(CorruptArtifact, match=r"part-0.*0\.jsonl"):
        list(read_answers(context.directory / "answers"))


def usable(context: StageInputs, **settings: Any) -> StageInputs:
    """With the target's limits, as in a run."""
    target = context.target
    texts = Texts(positions=target.max_positions, vocab_size=target.vocab_size, **settings)
    return replace(context, corpus=replace(context.corpus, texts=texts))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("sea " * 300, r"the prompt has \d+ tokens and the target's context holds 256"),
        ("<new>", r"the prompt has token ids from \d+ to \d+; expected ids from 0 to"),
        (None, "message to answer is from assistant"),
    ],
    ids=["long", "no embedding", "nobody asks"],
)
def test_a_row_that_cannot_be_asked_is_known_before_the_first_part(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    context = stage_context(tmp_path, tiny_target())
    context.target.tokenizer.add_tokens(["<new>"])
    train = [replace(e, source=f"a.jsonl:{i}") for i, e in enumerate(examples("train", 70))]
    train[67] = example(content or "a", *([] if content else ["b"] * 3))
    if content is None:
        turns = ({"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"})
        train[67] = replace(train[67], messages=(*(train[67].messages or ())[:1], *turns))
    train[67] = replace(train[67], source="a.jsonl:67")
    context.corpus.examples["train"] = train
    stage = make_stage("generate", "answers", max_new_tokens=1, batch_size=70)
    with pytest.raises(UserError, match=rf"a\.jsonl:67: .*{problem}.*data\.on_bad: skip"):
        plan_stage(usable(context), stage)
    with pytest.raises(UserError, match=r"1 of 70 rows cannot be used for the prompts of train"):
        plan_stage(usable(context, on_bad="skip"), stage)
    said: list[str] = []
    skipping = usable(context, on_bad="skip", max_bad_rate=0.02, say=said.append)
    assert plan_stage(skipping, stage).what.startswith("69 answers")
    assert run_stage(skipping, stage).summary["answers"] == 69
    [line] = said
    assert "1 of 70 rows. The first: a.jsonl:67: " in line


def test_a_row_that_cannot_be_trained_on_is_known_at_the_plan(tmp_path: Path) -> None:
    context = stage_context(tmp_path, tiny_target())
    context.target.tokenizer.add_tokens(["<new>"])
    rows = context.corpus.examples["train"]
    rows[8] = replace(example("a", "b <new>"), source="a.jsonl:8")
    stage = make_stage("feature_cache", "cache")
    with pytest.raises(UserError, match=r"a\.jsonl:8: has the token id \d+; expected ids from 0"):
        plan_stage(usable(context), stage)
    skipping = usable(context, on_bad="skip", max_bad_rate=0.1)
    plan_stage(skipping, stage)
    assert run_stage(skipping, stage).summary["samples"]["kept"] == 9


def test_samples_fit_into_the_context(tmp_path: Path) -> None:
    longest = max(
        len(s.tokens) for s in stage_context(tmp_path, tiny_target()).corpus.samples("data")
    )
    context = stage_context(tmp_path, tiny_target(max_positions=longest - 1))
    plan = plan_stage(context, make_stage("feature_cache", "cache", max_length=1024))
    assert "max_length is 1024, but the target has" in str(context.reporter)
    outcome = run_stage(context, make_stage("feature_cache", "cache", max_length=1024))
    assert outcome.summary["samples"]["truncated"] > 0
    assert outcome.summary["tokens"] == plan.tokens


# --- batches -------------------------------------------------------------------------------------


def batches_by_lists(lengths: list[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The order of batches, written down in the plainest way. It must never change: a run that was
    interrupted continues in the middle of an epoch."""

    def shuffled(what: str, number: int) -> bytes:
        key = f"{seed} {epoch} {what} {number}"
        return hashlib.blake2b(key.encode(), digest_size=8).digest()

    def bucket(length: int) -> int:
        step = 1 << max(length.bit_length() - 5, 0)
        return length - length % step

    order = sorted(range(len(lengths)), key=lambda i: (bucket(lengths[i]), shuffled("row", i)))
    batches: list[list[int]] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return sorted(batches, key=lambda batch: shuffled("batch", batch[0]))


def test_the_order_of_batches_has_not_changed() -> None:
    draw = random.Random(1)
    for tokens in (1, 300, 4000):
        lengths = [round(draw.lognormvariate(5, 1)) for _ in range(400)] + [0, 1, 31, 32, 33]
        made = bucket_batches(lengths, tokens_per_batch=tokens, seed=3, epoch=2)
        assert made == batches_by_lists(lengths, tokens, 3, 2)
    assert bucket_batches([], tokens_per_batch=5, seed=0, epoch=0) == []
    hashes = [hashlib.blake2b(f"k {i}".encode(), digest_size=8).digest() for i in range(99)]
    assert permutation(99, "k") == sorted(range(99), key=lambda i: hashes[i])


def test_what_is_split_off_has_not_changed() -> None:
    rows = [replace(example(f"prompt {i % 70}"), id=str(i)) for i in range(80)]
    keys = [hashlib.blake2b(f"5 prompt {i % 70}".encode()).digest() for i in range(80)]
    order = sorted(set(keys))
    parts = split_off(rows, ["dev", "test"], count=3, seed=5)
    for place, name in enumerate(("dev", "test")):
        chosen = order[3 * place : 3 * place + 3]
        assert list(parts[name]) == [r for r, k in zip(rows, keys, strict=True) if k in chosen]
    assert sum(map(len, parts.values())) == 80


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_get_the_same_tokens_up_to_a_row(world: int) -> None:
    draw = random.Random(0)
    lengths = np.array([min(900, round(draw.lognormvariate(4.5, 0.8))) + 1 for _ in range(3000)])
    batches = Batches(lengths, tokens_per_batch=16_000, seed=0, epoch=0)
    for number in range(len(batches)):
        rows = [lengths[batches.batch(number)[rank::world]] for rank in range(world)]
        longest = max(part.max(initial=0) for part in rows)
        positions = [len(part) * part.max(initial=0) for part in rows]
        spread = longest - min(part.min(initial=longest) for part in rows)
        assert max(positions) - min(positions) <= longest + spread * max(map(len, rows))
    assert benchmark.imbalance(batches, lengths, world) < 1.2


def test_a_rank_reads_only_the_rows_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = stored(tmp_path, [sample_of(4 + i % 3, 2, str(i)) for i in range(20)])
    arrays = [(name, list(tokens), list(mask)) for name, tokens, mask in samples.texts(3, 19)]
    assert arrays == [(sample.id, sample.tokens, sample.mask) for sample in samples[3:19]]
    batches = Batches(samples.lengths, tokens_per_batch=24, seed=0, epoch=0)
    taken: list[int] = []
    original = StoredSamples.take
    monkeypatch.setattr(
        StoredSamples, "take", lambda self, rows: taken.extend(rows) or original(self, rows)
    )
    text = RankText(0, samples, batches, 1, 2)
    ids = [sample.id for number in range(len(text)) for sample in text.batch(number)]
    assert ids == [str(row) for row in taken]
    assert ids == [name for number in range(len(text)) for name in text.ids(number)]
    assert len(taken) < 20


# --- ranks ---------------------------------------------------------------------------------------


def test_ranks_with_an_error_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(0, 2)
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, "no such file"])
    with pytest.raises(UserError, match="rank 1: no such file"):
        ranks.together(lambda: 1)

    def fail() -> None:
        raise UserError("rows.jsonl:3: broken")

    with pytest.raises(UserError, match=r"^rows\.jsonl:3: broken"):
        ranks.together(fail)
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, None])
    assert ranks.together(lambda: 1) == 1


def test_the_benchmark_reads_what_it_makes(tmp_path: Path) -> None:
    text, samples = str(tmp_path / "text.jsonl"), str(tmp_path / "samples")
    benchmark.make_text(text, samples, 120)
    read, _ = read_examples(text)
    assert isinstance(read, Examples)
    assert len(read) == len(benchmark.open_samples(samples)) == 120
    for lists in (True, False):
        figures = benchmark.hold_text(text, samples, 4096, 2, lists)
        assert figures["rows"] == 120
        assert figures["peak_bytes"] >= figures["private_bytes"] > 0
    assert [row["ranks"] for row in benchmark.batch_figures(samples, 3)] == [3, 3, 3]
