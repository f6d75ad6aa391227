"""Text that the drafter writes itself: how much, whose words, and going on with the same."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode.base.artifact import CorruptArtifact
from decode.base.errors import UserError
from decode.drafters import NoDrafter
from decode.drafters.draft_vocabulary import reduce_output
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from distill.trainable_model import Trainable
from distill.untrained_student import student_from_layers
from tests.stages import (
    DRAFTER,
    drafter_weights,
    kill_at_step,
    make_stage,
    run_stage,
    with_examples,
)
from tests.tiny import padded
from tests.training import Killed, assert_equal, scramble
from train.base.stage import StageInputs
from train.data import training_text
from train.data.batches import permutation
from train.data.chat_tokens import Sample, prompt_tokens
from train.data.training_text import OnPolicyText
from train.settings.training import OnPolicyConfig

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
SETTINGS: dict[str, Any] = {"samples": 6, "max_new_tokens": 6, "batch_size": 4, "drafter": "none"}
GREEDY = {"temperature": 0}


class Student:
    """A student of one layer, trained by adding noise to it."""

    def __init__(self, target: Target, vocabulary: torch.Tensor | None = None) -> None:
        self.model = student_from_layers(target.model, [0])
        reduced = None if vocabulary is None else reduce_output(self.model, vocabulary)
        self.trainable = Trainable(self.model, reduced)

    def weights(self, prefix: str) -> dict[str, torch.Tensor]:
        assert prefix == "student."
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def train(self) -> None:
        g = torch.Generator().manual_seed(0)
        for parameter in self.model.model.layers.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=g)


def text_of(
    context: StageInputs, student: Student, max_length: int = 256, **settings: Any
) -> OnPolicyText:
    return OnPolicyText(
        OnPolicyConfig(**(SETTINGS | settings)),
        student.trainable,
        context.target,
        context.corpus,
        context.corpus.examples["train"],
        context.corpus.samples("data"),
        context.accelerator,
        context.directory / "rounds",
        max_length=max_length,
        seed=3,
    )


def own(samples: Any) -> list[Sample]:
    return [sample for sample in samples if "#round-" in sample.id]


def answer(sample: Sample) -> list[int]:
    """The masked tokens, which must be the end."""
    start = sample.mask.index(True)
    assert all(sample.mask[start:])
    return sample.tokens[start:]


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "written"), [(0.5, 3), (0.34, 2), (1.0, 6), (0.01, 1)])
def test_a_round_has_the_share_of_own_text_that_was_asked_for(context, target, fraction, written):
    student = Student(target)
    text = text_of(context, student, fraction=fraction)
    given = {sample.id: sample for sample in context.corpus.samples("data")}
    for number in range(2):
        samples = text.round(number, student.weights)
        assert len(samples) == 6
        assert len(own(samples)) == written
        assert all(given[s.id] == s for s in samples if s not in own(samples))


def test_prompts_and_given_text_are_dealt_out_evenly_over_the_rounds(context, target, monkeypatch):
    """Ten of each; five rounds of four prompts and of two samples. An order is made once."""
    orders = []

    def counted(count: int, key: str) -> list[int]:
        orders.append(key)
        return permutation(count, key)

    training_text._order.cache_clear()
    monkeypatch.setattr(training_text, "permutation", counted)
    student = Student(target)
    text = text_of(context, student, fraction=4 / 6, max_new_tokens=1)
    rounds = [text.round(number, student.weights) for number in range(5)]
    names = [sample.id for samples in rounds for sample in samples]
    written = Counter(name.partition("#")[0] for name in names if "#" in name)
    given = Counter(name for name in names if "#" not in name)
    ids = [example.id for example in context.corpus.examples["train"]]
    assert written == dict.fromkeys(ids, 2)
    assert given == dict.fromkeys(ids, 1)
    assert len(set(orders)) == len(orders) == 3
    assert len(set(names)) == len(names)  # a remembering teacher would mix up what has one name


def test_own_text_has_the_maximum_length_too(context, target):
    """A prompt that leaves no room for an answer is not asked; given samples take its place."""
    lengths = sorted(
        len(prompt) for prompt in context.corpus.prompts(context.corpus.examples["train"])
    )
    longest = lengths[-1]
    student = Student(target)
    text = text_of(context, student, longest, samples=10, fraction=1.0)
    samples = text.round(0, student.weights)
    written = own(samples)
    assert len(samples) == 10
    assert len(written) == sum(length < longest for length in lengths) < 10
    assert max(len(sample.tokens) for sample in written) == longest
    assert all(any(sample.mask) for sample in written)
    # A round that other settings made is made again; one of an earlier version is kept.
    longer = text_of(context, student, longest + 2, samples=10, fraction=1.0)
    again = longer.round(0, student.weights)
    assert max(len(sample.tokens) for sample in own(again)) == longest + 2
    assert longer.round(0, student.weights) == again


def test_the_text_is_what_the_student_says_by_then(context, target):
    """Greedy against `generate()`, sampled against the loop given all prompts at once."""
    student = Student(target)
    greedy = text_of(context, student, sampling=GREEDY, fraction=1.0)
    sampled = text_of(
        replace(context, directory=context.directory / "sampled"), student, fraction=1.0
    )
    by_id = {e.id: e for e in context.corpus.examples["train"]}
    said: list[list[list[int]]] = []
    for number in range(2):
        model, _ = student.trainable.merged_model(student.weights("student."))
        answers = []
        for sample in greedy.round(number, student.weights):
            prompt = prompt_tokens(by_id[sample.id.partition("#")[0]], target.tokenizer)
            wanted = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=6,
                do_sample=False,
            )[0, len(prompt) :]
            assert sample.tokens[: len(prompt)] == prompt
            assert answer(sample) == wanted.tolist()
            answers.append(answer(sample))
        samples = sampled.round(number, student.weights)
        prompts = [prompt_tokens(by_id[s.id.partition("#")[0]], target.tokenizer) for s in samples]
        decoder = Decoder(
            model,
            NoDrafter(),
            eos_token_ids=target.eos_token_ids,
            rule="exact",
            sampling=Sampling(temperature=1.0),
        )
        rows = [6 * number + i for i in range(6)]
        found = decoder.decode(prompts, 6, seed=3, row_ids=rows).outputs
        assert [answer(sample) for sample in samples] == found
        said.append(answers)
        before = model(torch.tensor([prompt])).logits
        student.train()
        assert not torch.allclose(
            student.trainable.merged_model(student.weights("student."))[0](
                torch.tensor([prompt])
            ).logits,
            before,
            atol=0.1,
        )
    assert said[0] != said[1]


def test_a_reduced_vocabulary_says_its_own_tokens_only_and_in_its_own_shares(context, target):
    ids = torch.tensor([2, *range(5, 300, 11)])
    student = Student(target, ids)
    samples = text_of(context, student, fraction=1.0, max_new_tokens=20).round(0, student.weights)
    spoken = {token for sample in samples for token in answer(sample)}
    assert spoken <= set(ids.tolist())
    assert len(spoken) > 5
    greedy = text_of(
        replace(context, directory=context.directory / "greedy"), student, sampling=GREEDY
    )
    model, _ = student.trainable.merged_model(student.weights("student."))
    for sample in own(greedy.round(0, student.weights)):
        tokens = sample.tokens[: sample.mask.index(True)]
        for token in answer(sample):
            assert token == ids[model(torch.tensor([tokens])).logits[0, -1].argmax()]
            tokens = [*tokens, token]


def test_padding_is_never_written(context, target):
    """The target may have no embedding for it."""
    student = Student(replace(target, model=padded(target.model, 340)))
    bare, _ = student.trainable.merged_model(student.trainable.weights())
    assert bare(torch.arange(3, 9)[None]).logits.argmax(-1).max() >= 300
    samples = text_of(context, student, fraction=1.0).round(0, student.weights)
    assert max(token for sample in own(samples) for token in sample.tokens) < 300


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.thorough), 0.5])
def test_the_text_is_the_same_however_it_is_made_faster(context, target, monkeypatch, temperature):
    """Which way `auto` takes hangs on the clock, so training would not be reproducible else."""
    student = Student(target)
    accepted: dict[str, int] = {}
    original = Decoder.decode

    def decode(self: Any, *arguments: Any, **settings: Any) -> Any:
        done = original(self, *arguments, **settings)
        name = type(self.drafter).__name__
        accepted[name] = accepted.get(name, 0) + int(done.counts.accepted.sum())
        return done

    monkeypatch.setattr(Decoder, "decode", decode)
    found = [
        text_of(
            replace(context, directory=context.directory / drafter),
            student,
            drafter=drafter,
            fraction=1.0,
            max_new_tokens=40,
            samples=10,
            sampling={"temperature": temperature},
        ).round(0, student.weights)
        for drafter in ("none", "ngram", "auto")
    ]
    assert found[0] == found[1] == found[2]
    assert accepted["NgramDrafter"] > 5


def test_a_round_that_was_written_is_read_and_a_damaged_one_named(context, target):
    student = Student(target)
    first = text_of(context, student).round(0, student.weights)
    student.train()
    text = text_of(context, student)
    assert text.round(0, student.weights) == first
    path = text.directory / "round-0" / "samples.jsonl"
    path.write_text(path.read_text("utf-8").replace("true", "false", 1), "utf-8")
    with pytest.raises(CorruptArtifact, match=r"round-0.*samples\.jsonl"):
        text_of(context, student).round(0, student.weights)


# --- the stage ------------------------------------------------------------------------------------

LOOP = {"max_steps": 7, "tokens_per_batch": 130, "save_every": 2, "log_every": 1, "seed": 3}


def on_policy_stage(name: str, **settings: Any) -> Any:
    given = DRAFTER | {"loop": LOOP, "on_policy": SETTINGS} | settings
    return make_stage("distill", name, **given)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's affair
@pytest.mark.parametrize("size", [None, pytest.param(80, marks=pytest.mark.thorough)])
def test_killed_within_a_round_it_ends_with_the_same_weights(context, monkeypatch, size):
    """Before a checkpoint, within a round, at the beginning of one, and before the last step."""
    settings = {"draft_vocabulary": size, "lora": None if size else {"r": 2}}
    torch.manual_seed(1)
    whole = run_stage(context, on_policy_stage("whole", **settings))
    history = whole.summary["training"]["history"]
    rounds = [row["epoch"] for row in history]
    assert 2 <= rounds[-1] < 6
    assert rounds[3] == rounds[2]  # step 4, before which it is killed, is within a round
    torch.manual_seed(1)
    for step in (2, 4, 5, 7):
        with monkeypatch.context() as patch:
            kill_at_step(patch, step)
            with pytest.raises(Killed):
                run_stage(context, on_policy_stage("killed", **settings))
            context.accelerator.free_memory()  # as the end of the process would
        if step > 2:  # before the first checkpoint there is nothing that goes on
            scramble()
        else:
            torch.manual_seed(1)
    killed = run_stage(context, on_policy_stage("killed", **settings))
    assert_equal(drafter_weights(killed), drafter_weights(whole))
    assert killed.summary["training"]["history"] == history
    for number in range(rounds[-1] + 1):
        texts = [
            json.dumps((d / "rounds" / f"round-{number}" / "samples.jsonl").read_text("utf-8"))
            for d in (context.earlier["whole"], context.earlier["killed"])
        ]
        assert texts[0] == texts[1]


def test_the_first_round_is_of_the_start_and_later_ones_are_not(context, target):
    """And the summary says how much of the time writing took."""
    settings = SETTINGS | {"sampling": GREEDY, "fraction": 1.0}
    outcome = run_stage(context, on_policy_stage("own", on_policy=settings))
    start = Student(target)
    elsewhere = replace(context, directory=context.directory / "elsewhere")
    text = text_of(elsewhere, start, sampling=GREEDY, fraction=1.0)
    last = outcome.summary["training"]["history"][-1]["epoch"]
    same = []
    for number in (0, last):
        text.round(number, start.weights)
        files = [
            directory / "rounds" / f"round-{number}" / "samples.jsonl"
            for directory in (context.earlier["own"], elsewhere.directory)
        ]
        same.append(files[0].read_text("utf-8") == files[1].read_text("utf-8"))
    assert same == [True, False]
    clock = outcome.summary["training"]["clock"]
    assert {"text", "teacher", "drafter", "data"} <= clock.keys()
    assert clock["text"] > 0.1 * sum(clock.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loop": LOOP | {"max_steps": None}}, "it has no epochs; set loop.max_steps"),
        (
            {"losses": {"cross_entropy": 1.0}},
            "cross_entropy would only teach the drafter to repeat",
        ),
        ({"losses": {"forward_kl": 1.0, "cross_entropy": 0.1}}, "cross_entropy would only teach"),
        ({"on_policy": {"fraction": 0.0}}, "greater than 0"),
        ({"on_policy": {"fraction": 1.5}}, "less than or equal to 1"),
        ({"on_policy": {"samples": 0}}, "greater than or equal to 1"),
        ({"on_policy": {"drafter": "small_lm"}}, "'auto', 'none' or 'ngram'"),
    ],
)
def test_what_does_not_go_with_own_text_is_refused(settings, said):
    with pytest.raises((UserError, ValueError), match=said):
        on_policy_stage("own", **settings)


def test_a_cache_has_no_word_on_own_text():
    cache = make_stage("teacher_cache", "cache", k=8)
    given = DRAFTER | {"loop": LOOP, "on_policy": SETTINGS, "teacher": "cache"}
    with pytest.raises(UserError, match="on_policy cannot be set here: the cache has no results"):
        make_stage("distill", "own", cache, **given)


def test_text_without_prompts_is_refused(context):
    bare = [replace(e, messages=None, text=e.prompt) for e in context.corpus.examples["train"]]
    context = with_examples(context, train=bare)
    with pytest.raises(UserError, match="the train split has no prompts to answer"):
        run_stage(context, on_policy_stage("own"))
