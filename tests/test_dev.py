"""Figures about a drafter in training against the definition and against the loop; adapters."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.base.errors import UserError
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from distill.agreement import Agreement, agreement_sums
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.student_settings import LoraConfig
from distill.teacher.teacher_signal import TeacherLogits
from distill.trainable_model import Trainable
from distill.untrained_student import student_from_layers
from tests.stages import DRAFTER, drafter_weights, make_stage, plan_stage, run_stage
from tests.tiny import moved
from tests.training import assert_equal, tiny_trainer
from train.data.chat_tokens import prompt_tokens
from train.data.read import spread

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's affair
]


# --- agreement ------------------------------------------------------------------------------------


def agreement_of(p: list[list[float]], q: list[list[float]], ids: list[int] | None) -> Agreement:
    """Of distributions given as such: through an output layer that is nothing but the bias log q,
    one token at a time."""
    sums = torch.zeros(4, dtype=torch.float64)
    for row_p, row_q in zip(p, q, strict=True):
        sums += agreement_sums(
            torch.zeros(1, 2),
            torch.zeros(len(row_q), 2),
            torch.tensor(row_q).log(),
            lambda part, row=row_p: TeacherLogits(torch.tensor([row]).log()[part]),
            None if ids is None else torch.tensor(ids),
        )
    return Agreement.from_sums(sums)


def test_agreement_is_as_computed_by_hand():
    found = agreement_of(
        p=[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], q=[[0.2, 0.7, 0.1], [0.25, 0.25, 0.5]], ids=None
    )
    # Σ min: 0.2 + 0.3 + 0.1 = 0.6, and 0.1 + 0.1 + 0.5 = 0.7; the likeliest agree in the second.
    assert found.expected_acceptance == pytest.approx(0.65)
    assert found.top1 == 0.5
    assert found.lost_mass == pytest.approx(0, abs=1e-7)


def test_what_a_reduced_vocabulary_cannot_say_counts_as_lost():
    """Tokens 1 and 3 of four; p is not renormalised."""
    found = agreement_of(
        p=[[0.4, 0.3, 0.1, 0.2], [0.1, 0.2, 0.1, 0.6]], q=[[0.5, 0.5], [0.1, 0.9]], ids=[1, 3]
    )
    # min(0.3, 0.5) + min(0.2, 0.5) = 0.5; min(0.2, 0.1) + min(0.6, 0.9) = 0.7. The first likeliest
    # token, 0, cannot be drafted; the second, 3, is row 1 of the layer.
    assert found.expected_acceptance == pytest.approx(0.6)
    assert found.top1 == 0.5
    assert found.lost_mass == pytest.approx((0.5 + 0.2) / 2)


def test_chunks_change_nothing():
    g = torch.Generator().manual_seed(0)
    hidden, weight, logits = (torch.randn(s, generator=g) for s in ((23, 4), (9, 4), (23, 9)))
    whole = agreement_sums(hidden, weight, None, lambda part: TeacherLogits(logits[part]), None)
    parts = agreement_sums(
        hidden, weight, None, lambda part: TeacherLogits(logits[part]), None, chunk=7
    )
    torch.testing.assert_close(parts, whole)
    q, p = (hidden @ weight.t()).softmax(-1), logits.softmax(-1)
    assert whole[0].item() == pytest.approx(torch.minimum(p, q).sum().item(), rel=1e-5)
    assert whole[3] == 23


# --- the dev slice --------------------------------------------------------------------------------

DEV = {"every": 2, "samples": 3, "decode_prompts": 3, "gamma": 3, "max_new_tokens": 12}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"draft_vocabulary": 80, "output_rank": 20}, id="low-rank"),
        pytest.param({"optimizer": {"lr": 1e-2, "ema": 0.5}}, id="averaged"),
        pytest.param({"lora": {"r": 2}}, id="adapters"),
        pytest.param({}, id="whole", marks=pytest.mark.thorough),
        pytest.param({"draft_vocabulary": 80}, id="reduced", marks=pytest.mark.thorough),
    ],
)
def test_the_last_figures_are_those_of_the_drafter_that_is_saved(context, target, settings):
    stage = make_stage("distill", "distill", **(DRAFTER | {"dev": DEV} | settings))
    outcome = run_stage(context, stage)
    training = outcome.summary["training"]
    rows = training["dev"]
    expected_steps = sorted({*range(2, training["steps"] + 1, 2), training["steps"]})
    assert [row["step"] for row in rows] == expected_steps
    assert training["clock"]["dev"] > 0

    drafter = open_drafter(str(outcome.drafter), target)
    prompts = [
        prompt_tokens(e, target.tokenizer) for e in spread(context.corpus.examples["dev"], 3)
    ]
    done = Decoder(target.model, drafter, eos_token_ids=target.eos_token_ids, gamma=3).decode(
        prompts, 12
    )
    assert rows[-1]["acceptance_rate"] == done.counts.acceptance_rate
    assert len({row["expected_acceptance"] for row in rows}) > 1

    acceptance, top1, lost, count = 0.0, 0, 0.0, 0
    ids = drafter.vocabulary
    for sample in spread(context.corpus.samples("data", "dev"), 3):
        tokens = torch.tensor([sample.tokens])
        with torch.no_grad():
            p = target.model(tokens).logits[0].softmax(-1)
            small = drafter.lm.model(tokens).logits[0].softmax(-1)
        q = small if ids is None else torch.zeros_like(p).index_copy(1, ids, small)
        for place in (i - 1 for i in range(1, len(sample.tokens)) if sample.mask[i]):
            acceptance += torch.minimum(p[place], q[place]).sum().item()
            top1 += int(p[place].argmax() == q[place].argmax())
            lost += 0.0 if ids is None else 1 - p[place, ids].sum().item()
            count += 1
    # The same float32 sums, over rows of a batch of another shape; after adapters are merged.
    assert rows[-1]["expected_acceptance"] == pytest.approx(acceptance / count, rel=1e-4)
    assert rows[-1]["top1"] == pytest.approx(top1 / count)
    assert rows[-1]["lost_mass"] == pytest.approx(lost / count, abs=1e-5)
    assert (rows[-1]["lost_mass"] > 0.01) == (ids is not None)


def test_looking_at_the_dev_slice_changes_nothing(context):
    with_figures = make_stage("distill", "looked", **(DRAFTER | {"dev": DEV}))
    without = make_stage("distill", "not", **DRAFTER)
    found = [drafter_weights(run_stage(context, stage)) for stage in (with_figures, without)]
    assert_equal(*found)


def test_dev_figures_without_a_dev_split_are_refused(context):
    del context.corpus.examples["dev"]
    stage = make_stage("distill", "distill", **(DRAFTER | {"dev": DEV}))
    with pytest.raises(UserError, match="has dev figures, but data has no dev split"):
        plan_stage(context, stage)
    with pytest.raises(UserError, match="no earlier stage 'answers'"):
        make_stage("distill", "distill", **(DRAFTER | {"dev": {"text": "answers"}}))


@pytest.mark.parametrize("kind", [DRAFTER, {"heads": {"type": "medusa", "heads": 2}}])
def test_the_plan_refuses_a_dev_split_without_answers(context, kind):
    """A run would come to such a stage after hours."""
    first = context.corpus.examples["dev"][0]
    context.corpus.examples["dev"] = [replace(first, messages=first.messages[:1])]
    name = "heads" if "heads" in kind else "distill"
    with pytest.raises(UserError, match=r"stage mine: dev.text data has no response tokens"):
        plan_stage(context, make_stage(name, "mine", **(kind | {"dev": DEV})))


def test_dev_figures_are_of_the_dev_split():
    generate = make_stage("generate", "answers")
    with pytest.raises(UserError, match=r"dev.text answers answered the train split"):
        make_stage("distill", "mine", generate, **(DRAFTER | {"dev": {"text": "answers"}}))


def test_a_dev_prompt_that_does_not_fit_is_refused_by_the_plan(context):
    first = context.corpus.examples["dev"][0]
    long = {"role": "user", "content": "sea " * 300}
    context.corpus.examples["dev"] = [replace(first, messages=(long, *first.messages[1:]))]
    dev = DEV | {"decode_prompts": 1}
    settings = DRAFTER | {"dev": dev, "max_length": 1024}
    with pytest.raises(UserError, match=r"has \d+ tokens and the target's context holds"):
        plan_stage(context, make_stage("distill", "distill", **settings))


# --- adapters -------------------------------------------------------------------------------------


def adapted(target: Target, **settings: Any) -> Trainable:
    return Trainable(
        student_from_layers(target.model, [0, 1]), lora=LoraConfig(r=2, alpha=6.0, **settings)
    )


def test_merged_adapters_are_the_model_with_adapters(target):
    student = adapted(target)
    ids = torch.arange(12)[None] + 5
    before = student.model.eval()(ids).logits
    # Adapters begin as nothing.
    torch.testing.assert_close(before, target.model(ids).logits, rtol=1e-5, atol=1e-5)
    moved(student.model, 0.2, which=lambda name, _: "lora_" in name)
    whole = student.model(ids).logits
    merged, vocabulary = student.merged_model(student.weights())
    assert vocabulary is None
    assert not any("lora" in name for name in merged.state_dict())
    # x·(W + s·B·A) against x·W + s·(x·A)·B in float32, logits of about 5.
    torch.testing.assert_close(merged(ids).logits, whole, rtol=1e-4, atol=1e-4)
    assert (whole - before).abs().max() > 0.5
    # A copy can be had again, of other weights, and the first stays as it was.
    torch.testing.assert_close(
        student.merged_model(student.weights())[0](ids).logits, merged(ids).logits
    )


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        ("all-linear", [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
    ],
)
def test_training_moves_adapters_and_nothing_else(context, target, tmp_path, names, layers):
    model = student_from_layers(target.model, [0])
    wanted = sum(
        2 * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in layers
    )
    student = Trainable(model, lora=LoraConfig(r=2, targets=names))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = tiny_trainer(
        tmp_path / "alone",
        3,
        module=Distillation(student.model, WeightedLoss({"cross_entropy": 1.0})),
    )
    trainer.fit()
    assert trainer.trained_parameters == wanted
    for name, tensor in student.model.state_dict().items():
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name


def test_a_stage_with_adapters_saves_a_plain_drafter(context, target):
    stage = make_stage("distill", "distill", **(DRAFTER | {"lora": {"r": 2}}))
    outcome = run_stage(context, stage)
    weights = drafter_weights(outcome)
    assert not any("lora" in name for name in weights)
    start = AutoModelForCausalLM.from_pretrained(context.earlier["distill"] / "start")
    final = AutoModelForCausalLM.from_pretrained(outcome.drafter)
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(start.state_dict()[embeddings], final.state_dict()[embeddings])
    name = "model.layers.0.mlp.up_proj.weight"
    change = final.state_dict()[name] - start.state_dict()[name]
    assert 0 < torch.linalg.matrix_rank(change, rtol=1e-3) <= 2
    assert outcome.summary["parameters"] == start.num_parameters()
    assert outcome.summary["trained_parameters"] < start.num_parameters() / 4


def test_adapters_for_layers_that_are_not_there_are_refused(target):
    with pytest.raises(UserError, match=r"lora.targets \['qq_proj'\]: .*qq_proj"):
        adapted(target, targets=["qq_proj"])
