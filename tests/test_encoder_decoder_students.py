"""Small models with an encoder: distilled from a target with an encoder, and drafting for it."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.hidden_states import FINAL
from decode.opening.directory import open_drafter
from decode.shapes.static import Static
from distill.losses import WeightedLoss
from distill.students.encoder_decoder_student import EncoderDecoderDistillation
from distill.teacher.decoder_states import padded_sources
from distill.teacher.feature_sources import LiveFeatures
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import TeacherLogits
from distill.untrained_student import student_from_config, student_from_layers
from tests.stages import LOOP, make_stage, plan_stage, run_stage, stage_context
from tests.test_encoder_decoder import (
    NEW,
    SOURCES,
    generated,
    model,
    target,
    with_start,
)
from tests.tiny import EOS_ID, PAD_ID, finish, moved, tiny_encoder_decoder, tiny_model
from train.data.batches import collate, inputs
from train.data.chat_tokens import Sample
from train.measure.check_lossless import FAR, distance

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
# Of the joint law: words of the vocabulary, and tokens of a text.
WORDS, SAMPLED = 5, 4
TERMS = WeightedLoss({"forward_kl": 0.7, "cross_entropy": 0.3})


def near(lm: Any, size: float = 0.05) -> Any:
    """A copy with other weights, near these."""
    student = student_from_layers(lm, range(lm.get_decoder().config.num_hidden_layers)).eval()
    return moved(student, size, seed=3)


def biased(family: str, **shape: Any) -> Any:
    """A model that adds a bias to its logits, if its kind does."""
    lm = tiny_encoder_decoder(family, **shape)
    if family != "t5":
        lm.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    return lm


def gradients(lm: Any) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in lm.named_parameters()
    }


# --- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "shape"),
    [("t5", Static(widths=[2, 2, 1], draw="distinct")), ("bart", None)],
)
def test_greedy_texts_are_those_of_generate(family: str, shape: Any) -> None:
    """Rows of different lengths leave and join, also beside lookup. The target itself as a drafter
    is always right, because its encoder read the right sources."""
    lm = model(family)
    expected = [generated(lm, source) for source in SOURCES]
    options = {"eos_token_ids": [EOS_ID], "gamma": 3}
    itself = SmallLMDrafter(near(lm, 0.0), shape=shape)
    decoded = Decoder(lm, itself, **options).decode(SOURCES, NEW, batch_size=2)
    assert decoded.outputs == expected
    if shape is None:
        assert decoded.counts.acceptance_rate == 1
    drafter = SmallLMDrafter(near(lm), shape=shape)
    decoding = Decoding(Decoder(lm, CompositeDrafter([NgramDrafter(1, 2), drafter]), **options))
    for count in (2, 1, 2):
        begin = len(decoding.outputs)
        decoding.admit(SOURCES[begin : begin + count], NEW)
        decoding.step()
    finish(decoding)
    assert decoding.result().outputs == expected
    assert decoding.result().counts.accepted.sum() > 5


def test_combinations_of_drafters_that_read_the_source() -> None:
    lm = model("t5")
    small, lookup = SmallLMDrafter(near(lm)), NgramDrafter(1, 2)
    expected = [generated(lm, source, 12) for source in SOURCES]
    for drafter in (
        VerticalCascade(small, lookup),
        HorizontalCascade(small, lookup),
        SeveralDrafters([lookup, small]),
    ):
        decoder = Decoder(lm, drafter, eos_token_ids=[EOS_ID], gamma=3)
        decoded = decoder.decode(SOURCES, 12, batch_size=3)
        assert decoded.outputs == expected
        assert decoded.counts.accepted.sum() > 3
    with pytest.raises(UserError, match="needs a decoder-only target"):
        Decoder(lm, HorizontalCascade(SkipDrafter("1"), lookup))


def joint_law(lm: Any, source: list[int]) -> np.ndarray:
    """The joint distribution of the first tokens, float64 [V, …, V], from one plain forward."""
    starts = list(itertools.product(range(WORDS), repeat=SAMPLED - 1))
    with torch.no_grad():
        logits = lm(
            input_ids=torch.tensor([source] * len(starts)),
            decoder_input_ids=torch.tensor([[PAD_ID, *start] for start in starts]),
        ).logits
    probs = logits.double().softmax(-1).numpy()
    law = np.ones((len(starts), WORDS))
    for position in range(SAMPLED - 1):
        chosen = [start[position] for start in starts]
        law *= probs[np.arange(len(starts)), position, chosen][:, None]
    law *= probs[:, -1]
    return law.reshape((WORDS,) * SAMPLED)


def test_sampled_texts_have_the_targets_distribution() -> None:
    """Of two sources in one batch, each against its exact joint distribution."""
    lm = model("t5", vocab=WORDS, hidden=16, heads=2, encoder_layers=1, layers=1)
    shape = Static(widths=[2, 2], draw="distinct")
    drafter = SmallLMDrafter(near(lm, 0.2), shape=shape)
    decoder = Decoder(lm, drafter, gamma=2, sampling=Sampling(1.0))
    sources, rows = [[1, 3, 2, 4, 1], [2, 4]], 4000
    decoded = decoder.decode(sources * rows, SAMPLED, batch_size=4000)
    assert 0.1 < decoded.counts.acceptance_rate < 0.99
    for number, source in enumerate(sources):
        texts = np.array(decoded.outputs[number::2])
        assert distance(texts, joint_law(lm, source)) < FAR
        assert distance(texts, joint_law(lm, sources[1 - number])) > FAR  # the test can tell


# --- students -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_a_student_of_decoder_layers_is_the_target_without_the_others(family: str) -> None:
    lm = biased(family, layers=3)
    source, text = torch.tensor([SOURCES[0]]), torch.tensor([[PAD_ID, 11, 12, 13]])
    complete = student_from_layers(lm, [0, 1, 2]).eval()
    torch.testing.assert_close(
        complete(input_ids=source, decoder_input_ids=text).logits,
        lm(input_ids=source, decoder_input_ids=text).logits,
    )
    student = student_from_layers(lm, [1, 2]).eval()
    assert student.get_decoder().config.num_hidden_layers == 2
    logits = student(input_ids=source, decoder_input_ids=text).logits
    decoder = lm.get_decoder()
    if family == "t5":
        # Its first layer has the positions of all layers, so it stays, as the identity.
        with torch.no_grad():
            for name, weight in decoder.block[0].named_parameters():
                weight.mul_(name.endswith("relative_attention_bias.weight"))
    else:
        decoder.layers = torch.nn.ModuleList(decoder.layers[1:])
    expected = lm(input_ids=source, decoder_input_ids=text, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    smaller = student_from_config(lm, {"encoder_layers" if family != "t5" else "num_layers": 1})
    assert len(smaller.get_encoder().state_dict()) < len(lm.get_encoder().state_dict())


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_loss_and_gradient_are_those_of_each_text_alone(family: str) -> None:
    """From all logits of the complete models, in float64, of one text after the other."""
    lm, student = biased(family), near(biased(family), 0.1)
    texts = [[PAD_ID, 11, 12, 13, EOS_ID], [PAD_ID, 15, 280], [PAD_ID, 7, 8, 9]]
    samples = [
        Sample(f"s{i}", text, [False, *[True] * (len(text) - 1)], source=SOURCES[i])
        for i, text in enumerate(texts)
    ]
    sources = {sample.id: sample.source for sample in samples}
    batch = collate(samples, PAD_ID)
    tensors, ids = inputs(batch, torch.device("cpu")), batch["ids"]
    live = LiveFeatures(lm, [FINAL], sources=sources)
    teacher = LiveTeacher(lm, live, tokens=290).signal(**tensors, ids=ids)
    module = EncoderDecoderDistillation(student, TERMS, chunk=3, tokens=290)
    read = padded_sources(sources, ids, torch.device("cpu"))
    loss, terms = module(**tensors, teacher=teacher, sources=read)
    loss.backward()
    grads = gradients(student)
    student.zero_grad()
    total = torch.zeros(2, dtype=torch.float64)
    for sample in samples:
        pair = {
            "input_ids": torch.tensor([sample.source]),
            "decoder_input_ids": torch.tensor([sample.tokens]),
        }
        q = student(**pair).logits[0, :-1, :290].double()
        with torch.no_grad():
            p = TeacherLogits(lm(**pair).logits[0, :-1, :290].double())
        total = total + TERMS.values(q, p, torch.tensor(sample.tokens[1:])).sum(-1)
    torch.testing.assert_close(terms, total.detach(), rtol=1e-4, atol=1e-4)
    TERMS.weigh(total).backward()
    for name, expected in gradients(student).items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-3, atol=1e-4, msg=name)
    figures = module.figures(module(**tensors, agreement_with=teacher, sources=read)[1])
    assert 0 < figures["expected_acceptance"] < 1


STARTS: dict[str, dict[str, Any]] = {
    "t5": {"layers": [1]},
    "bart": {"config": {"encoder_layers": 1, "decoder_layers": 1}},
}


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=pytest.mark.thorough)])
def test_a_student_learns_answers_of_the_target_and_drafts(family: str, tmp_path: Path) -> None:
    """Of layers of the decoder, and of random weights; a later stage goes on with the drafter."""
    teacher = target(family, dropout=0.0) if family != "t5" else target(family, dropout_rate=0.0)
    context = with_start(stage_context(tmp_path, teacher))
    answers = make_stage("generate", "answers", prompts=10, max_new_tokens=12, split="train")
    options = {
        "text": "answers",
        "loop": LOOP | {"epochs": 10},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    }
    first = make_stage(
        "distill",
        "first",
        answers,
        drafter=STARTS[family],
        gradient_checkpointing=family == "bart",
        **options,
    )
    dev = {"samples": 2, "every": 100, "decode_prompts": 2, "max_new_tokens": 4}
    second = make_stage(
        "distill",
        "second",
        answers,
        first,
        drafter={"stage": "first"},
        dev=dev,
        **options,
    )
    plan_stage(context, first, answers=plan_stage(context, answers))
    run_stage(context, answers)
    run_stage(context, first)
    outcome = run_stage(context, second)
    assert 0 <= outcome.summary["training"]["dev"][-1]["acceptance_rate"] <= 1
    prompts = context.corpus.prompts(context.corpus.examples["train"])
    texts = [sample.tokens[1:] for sample in context.corpus.samples("answers")]
    rates = []
    for path in (context.earlier["first"] / "start", outcome.drafter):
        drafter = open_drafter(str(path), teacher)
        decoder = Decoder(
            teacher.model,
            drafter,
            eos_token_ids=teacher.eos_token_ids,
            gamma=3,
        )
        decoded = decoder.decode(prompts, 12)
        assert decoded.outputs == texts
        rates.append(decoded.counts.acceptance_rate)
    assert rates[1] > rates[0] + 0.15, rates


# --- refusals -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    teacher = target()
    with pytest.raises(UserError, match="has an encoder, but the target has none"):
        Decoder(tiny_model("llama"), SmallLMDrafter(tiny_encoder_decoder("bart")))
    with pytest.raises(UserError, match=r"reads fewer than 33 tokens, but .* than 65"):
        Decoder(
            teacher.model,
            SmallLMDrafter(tiny_encoder_decoder("bart", max_positions=32)),
        )
    context = with_start(stage_context(tmp_path, teacher))
    for options in (
        {"parallel": {}},
        {"draft_vocabulary": 9},
        {"lora": {}},
    ):
        stage = make_stage("distill", "d", drafter={"layers": [0]}, **options)
        with pytest.raises(UserError, match="this target has an encoder; leave it out"):
            plan_stage(context, stage)
    tiny_model("llama").save_pretrained(tmp_path / "small")
    teacher.tokenizer.save_pretrained(tmp_path / "small")
    stage = make_stage("distill", "d", drafter={"model": str(tmp_path / "small")})
    with pytest.raises(UserError, match="has no encoder, but the target has one"):
        plan_stage(context, stage)
