"""Distillation into a student with another tokenizer, over the tokens that both have."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters.draft_vocabulary import reduce_output
from decode.drafters.tokenizers.retokenised import RetokenisedDrafter
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from decode.loop.decoding import Decoder
from decode.opening.directory import describe_drafter, open_drafter
from distill.losses import WeightedLoss
from distill.students.shared_vocabulary_student import (
    SharedVocabulary,
    SharedVocabularyDistillation,
)
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import TeacherLogits
from tests.other_tokenizers import byte_level, sentencepiece, shuffled, with_rows, words
from tests.stages import LOOP, drafter_weights, make_stage, plan_stage, run_stage, stage_context
from tests.tiny import as_target, padded, tiny_model, tiny_target, tiny_tokenizer
from train.data.batches import collate, inputs
from train.data.chat_tokens import Sample

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
OTHERS: dict[str, Callable[[], Any]] = {"byte level": byte_level, "sentencepiece": sentencepiece}
TERMS = WeightedLoss({"forward_kl": 0.7, "reverse_kl": 0.5, "cross_entropy": 0.3})
TEXTS = [
    "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox, naïve and 日本語 🙂 too.\n\nA new  line",
    "42 shells",
]


def samples() -> list[Sample]:
    """The second text begins with the token that begins texts, and the first one has no prompt."""
    tokenizer = tiny_tokenizer()
    texts = []
    for number, text in enumerate(TEXTS):
        tokens = [tokenizer.bos_token_id] * (number == 1) + tokenizer.encode(text)
        mask = [place > 2 * number for place in range(len(tokens))]
        texts.append(Sample(f"s{number}", tokens, mask))
    return texts


def other_student(other: str) -> tuple[Any, Any]:
    """A model whose output layer has padding, and its tokenizer."""
    tokenizer = OTHERS[other]()
    return tiny_model("llama", vocab=len(tokenizer) + 6, seed=7, tie=False), tokenizer


@pytest.mark.parametrize("other", OTHERS)
def test_loss_and_gradient_are_those_of_each_prediction_alone(other: str) -> None:
    """The oracle reads each text as the drafter reads it when it decodes, one prediction after the
    other, and takes the shared tokens of all logits in float64."""
    target = tiny_target()
    target.model = padded(target.model, 307)
    target = as_target(target.model, target.tokenizer)
    dense, tokenizer = other_student(other)
    shared = SharedVocabulary.of(target, tokenizer, dense.config.vocab_size, "it")
    drafter = SharedVocabularyDrafter.of_models(copy.deepcopy(dense), tokenizer, target)
    student = copy.deepcopy(dense)
    reduce_output(student, shared.drafter_ids)

    texts = samples()
    batch = collate(texts, 0)
    tensors = inputs(batch, torch.device("cpu"))
    live = LiveTeacher(target.model, vocabulary=shared.target_ids)
    module = SharedVocabularyDistillation(student, TERMS, shared, chunk=5)
    loss, terms = module(**tensors, teacher=live.signal(**tensors, ids=batch["ids"]))
    loss.backward()

    values, unknown = [], 0
    columns = {int(token): place for place, token in enumerate(shared.target_ids)}
    for text in texts:
        for place in range(1, len(text.tokens)):
            if not text.mask[place]:
                continue
            drafter.start(Contexts.of([], 0))
            read = drafter.read(Contexts.of([text.tokens[:place]], place))
            ids = torch.tensor(read.tokens[:1, : read.lengths[0]])
            q = dense(ids).logits[0, -1:, shared.drafter_ids].double()
            before = torch.tensor([text.tokens[:place]])
            with torch.no_grad():
                p = target.model(before).logits[0, -1:, shared.target_ids].double()
            label = torch.tensor([columns.get(text.tokens[place], -100)])
            unknown += label.item() < 0
            values.append(TERMS.values(q, TeacherLogits(p), label)[:, 0])
    assert 0 < unknown < len(values)
    expected = torch.stack(values, 1).sum(1)
    torch.testing.assert_close(terms, expected.detach(), rtol=1e-4, atol=1e-4)
    TERMS.weigh(expected).backward()
    of_output = dense.get_output_embeddings().weight.grad[shared.drafter_ids]
    grad = student.get_output_embeddings().weight.grad
    torch.testing.assert_close(grad, of_output, rtol=1e-3, atol=1e-4)
    expected_grads = dict(dense.base_model.named_parameters())
    for name, parameter in student.base_model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected_grads[name].grad, rtol=1e-3, atol=1e-4, msg=name
        )


def saved(path: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def settings(model: str, **others: Any) -> dict[str, Any]:
    """Of a distill stage. `model`: its student."""
    return {
        "drafter": {"model": model, "vocabulary": "shared"},
        "loop": LOOP | {"epochs": 1},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    } | others


def test_the_target_with_its_ids_in_another_order_has_nothing_to_learn(tmp_path: Path) -> None:
    """All tokens are shared, so both distributions are the same, and its drafts are all accepted,
    also from the directory that the stage writes before it trains."""
    target = tiny_target()
    context = stage_context(tmp_path, target)
    tokenizer, order = shuffled()
    model = saved(tmp_path / "model", with_rows(target.model, order), tokenizer)
    stage = make_stage("distill", "distill", **settings(model, loop=LOOP | {"max_steps": 1}))
    outcome = run_stage(context, stage)
    (first, *_) = outcome.summary["training"]["history"]
    assert first["forward_kl"] == pytest.approx(0, abs=1e-5)
    assert outcome.summary["draft_vocabulary"] == len(tokenizer)
    start = context.earlier["distill"] / "start"
    drafter = open_drafter(str(start), target)
    decoder = Decoder(target.model, drafter, eos_token_ids=target.eos_token_ids, gamma=3)
    assert decoder.decode([[5, 6], [7]], 16).counts.acceptance_rate == 1


def test_a_student_with_another_tokenizer_gains_acceptance(tmp_path: Path) -> None:
    """A stage goes on with the drafter of another one, and dev figures come from real drafts."""
    target = tiny_target()
    context = stage_context(tmp_path, target)
    model = saved(tmp_path / "model", *other_student("sentencepiece"))
    answers = make_stage("generate", "answers", prompts=10, max_new_tokens=16, split="train")
    run_stage(context, answers)
    first = make_stage(
        "distill", "first", answers, **settings(model, text="answers", loop=LOOP | {"epochs": 8})
    )
    second = make_stage(
        "distill",
        "second",
        answers,
        first,
        **settings(
            model,
            drafter={"stage": "first", "vocabulary": "shared"},
            text="answers",
            loop=LOOP | {"epochs": 8},
            dev={"samples": 2, "every": 100, "decode_prompts": 2, "max_new_tokens": 4},
        ),
    )
    assert "shared tokens" in plan_stage(context, first, answers=plan_stage(context, answers)).what
    run_stage(context, first)
    outcome = run_stage(context, second)
    assert outcome.drafter is not None
    assert describe_drafter(outcome.drafter)["kind"] == "shared_vocabulary"
    assert 0 <= outcome.summary["training"]["dev"][-1]["acceptance_rate"] <= 1
    prompts = context.corpus.prompts(context.corpus.examples["train"])
    rates = []
    for spec in (str(context.earlier["first"] / "start"), str(outcome.drafter)):
        drafter = open_drafter(spec, target)
        assert isinstance(drafter, SharedVocabularyDrafter)
        decoder = Decoder(target.model, drafter, eos_token_ids=target.eos_token_ids, gamma=3)
        decoded = decoder.decode(prompts, 16)
        starts, samples_of = [len(prompt) for prompt in prompts], context.corpus.samples("answers")
        texts = [sample.tokens[n:] for sample, n in zip(samples_of, starts, strict=True)]
        assert decoded.outputs == texts
        rates.append(decoded.counts.acceptance_rate)
    assert rates[1] > rates[0] + 0.2, rates
    text = open_drafter(f"{outcome.drafter}:vocabulary=text", target)
    assert isinstance(text, RetokenisedDrafter)


@pytest.mark.parametrize("kind", ["teacher_cache", "feature_cache"])
def test_a_cache_teaches_what_the_live_target_does(kind: str, tmp_path: Path) -> None:
    """The cache holds all shared tokens, so only float16 is between the two."""
    target = tiny_target()
    context = stage_context(tmp_path, target)
    student, tokenizer = other_student("byte level")
    model = saved(tmp_path / "model", student, tokenizer)
    count = len(SharedVocabulary.of(target, tokenizer, len(tokenizer), "it").target_ids)
    options = {"k": count, "shared_with": model} if kind == "teacher_cache" else {}
    cache = make_stage(kind, "cache", **options)
    plan_stage(context, cache)
    run_stage(context, cache)
    live = run_stage(context, make_stage("distill", "live", **settings(model)))
    cached = make_stage("distill", "cached", cache, **settings(model, teacher="cache"))
    outcomes = live, run_stage(context, cached)
    curves = [[row["loss"] for row in x.summary["training"]["history"]] for x in outcomes]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)
    assert curves[0][-1] < curves[0][0]
    ids = [drafter_weights(x)["draft_vocabulary.safetensors ids"] for x in outcomes]
    assert torch.equal(*ids)
    complete = make_stage("teacher_cache", "complete", k=8)
    run_stage(context, complete)
    if kind == "teacher_cache":
        with pytest.raises(UserError, match="not over the tokens of both; set shared_with"):
            make_stage("distill", "wrong", complete, **settings(model, teacher="complete"))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    context = stage_context(tmp_path, target)
    model = saved(tmp_path / "model", *other_student("byte level"))
    with pytest.raises(UserError, match=r"another vocabulary .*set `vocabulary: shared`"):
        run_stage(context, make_stage("distill", "d", **settings(model, drafter={"model": model})))
    for options in ({"on_policy": {}}, {"parallel": {}}, {"draft_vocabulary": 9}):
        with pytest.raises(UserError, match="cannot be set here: the drafter has another token"):
            make_stage("distill", "d", **settings(model), **options)
    first = make_stage("distill", "first", **settings(model))
    plain = make_stage("distill", "plain", **settings(model, drafter={"layers": [0]}))
    for drafter, said in (
        ({"stage": "first"}, "another tokenizer than the target; set drafter.vocabulary"),
        ({"stage": "plain", "vocabulary": "shared"}, "the target's tokenizer; leave drafter.voc"),
    ):
        with pytest.raises(UserError, match=said):
            make_stage("distill", "d", first, plain, **settings(model, drafter=drafter))
    with pytest.raises(UserError, match="has another tokenizer than the target, and rejected"):
        make_stage("online", "o", first, drafter={"stage": "first"})
    with pytest.raises(UserError, match="shared_with and draft_vocabulary"):
        make_stage("teacher_cache", "c", k=4, shared_with=model, draft_vocabulary=9)
    with pytest.raises(ValueError, match="starts from layers, which has the target's tokenizer"):
        make_stage(
            "distill", "d", **settings(model, drafter={"layers": [0], "vocabulary": "shared"})
        )


def test_too_few_shared_tokens_and_too_little_room_are_refused(tmp_path: Path) -> None:
    context = stage_context(tmp_path, tiny_target())
    short = tiny_model("llama", vocab=len(byte_level()), max_positions=12)
    model = saved(tmp_path / "short", short, byte_level())
    with pytest.raises(UserError, match=r"longest sample has \d+ tokens as the drafter reads it"):
        run_stage(context, make_stage("distill", "d", **settings(model)))
    of = as_target(tiny_model("llama", vocab=4), words("a", "b", "c", "d"))
    with pytest.raises(UserError, match="it shares 1 token with the target"):
        SharedVocabulary.of(of, words("a", "x"), 2, "it")
    two = SharedVocabulary.of(of, words("a", "b"), 2, "it")
    assert two.coverage([([0, 1, 2], [False, True, True])]) == 0.5
    with pytest.raises(UserError, match=r"shares 2 tokens with the target, but .* 0.0% of"):
        two.coverage([([0, 2, 3], [False, True, True])])
