"""Students, the live teacher and the loss of a batch."""

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.base.errors import UserError
from decode.drafters.draft_vocabulary import load_vocabulary, reduce_output, save_with_vocabulary
from decode.model.pretrained import decoder_config
from distill.choose_vocabulary import coverage, most_frequent, rows_of_tokens, token_counts
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.teacher.linear_logits import linear_logits, require_linear_logits
from distill.teacher.live_teacher import LiveTeacher
from distill.teacher.teacher_signal import TeacherLogits
from distill.teacher.top_k_cache import top_k
from distill.untrained_student import student_from_config, student_from_layers
from tests.tiny import FAMILIES, padded, tiny_llama, tiny_model

ALL_TERMS = WeightedLoss({"forward_kl": 0.7, "cross_entropy": 0.3})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_of_all_layers_is_the_target(family: str):
    target = tiny_model(family, layers=3)
    student = student_from_layers(target, [0, 1, 2]).eval()
    ids = torch.arange(10)[None] + 5
    torch.testing.assert_close(student(ids).logits, target(ids).logits)


def test_a_student_of_some_layers_is_the_target_with_the_others_skipped():
    target = tiny_llama(layers=4)
    student = student_from_layers(target, [0, 3]).eval()
    ids = torch.arange(10)[None] + 5
    layers = target.model.layers
    target.model.layers = torch.nn.ModuleList([layers[0], layers[3]])
    target.config.num_hidden_layers = 2
    skipped = target(ids, use_cache=False).logits
    torch.testing.assert_close(student(ids, use_cache=False).logits, skipped)


def _gemma3(layers: int) -> Any:
    """A tiny Gemma 3 for images and text."""
    shape = tiny_model("gemma", layers=layers).config.to_dict()
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    text = {**shape, "model_type": "gemma3_text", "layer_types": kinds, "sliding_window": 8}
    vision = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


LLAMA4 = {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 16}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("make", "layers", "kept"),
    [
        pytest.param(partial(_gemma3, 4), [1, 2], {}, id="nested"),
        pytest.param(
            partial(tiny_model, "smollm3", layers=4, no_rope_layers=[1, 1, 1, 0]),
            [0, 3],
            {"no_rope_layers": [1, 0]},
            id="a list by layer",
        ),
        pytest.param(
            partial(tiny_model, "qwen3_moe", layers=4, mlp_only_layers=[1, 3], **EXPERTS),
            [0, 3],
            {"mlp_only_layers": [1]},
            id="layer numbers",
        ),
        pytest.param(
            partial(tiny_model, "glm4_moe", layers=3, first_k_dense_replace=2, **EXPERTS),
            [1, 2],
            {"first_k_dense_replace": 1},
            id="the first layers",
        ),
        pytest.param(
            partial(tiny_model, "llama4_text", layers=4, moe_layers=[0, 1, 2, 3], **LLAMA4),
            [1, 3],
            {"moe_layers": [0, 1], "no_rope_layers": [1, 0]},
            id="the numbers of all layers",
        ),
    ],
)
def test_chosen_layers_stay_what_they_are(make: Any, layers: list[int], kept: dict[str, Any]):
    target = make()
    student = student_from_layers(target, layers)
    assert student.config.num_hidden_layers == len(layers)
    assert {key: getattr(student.config, key) for key in kept} == kept
    # The only parts are those that write text.
    assert len(student.state_dict()) < len(target.state_dict())
    text = torch.arange(10)[None] + 5
    everything = student_from_layers(target, range(decoder_config(target).num_hidden_layers))
    torch.testing.assert_close(everything.eval()(text).logits, target(text).logits)


@pytest.mark.parametrize("with_weights", [True, False])
def test_layers_that_a_config_cannot_describe_are_refused(with_weights: bool):
    """Every second layer has experts, so layer 1 of the student would have some too."""
    with torch.device("cpu" if with_weights else "meta"):
        target = tiny_model("qwen3_moe", layers=4, decoder_sparse_step=2, **EXPERTS)
        assert student_from_layers(target, [0, 1]).config.num_hidden_layers == 2
        with pytest.raises(
            UserError, match=r"layers.2.mlp is Qwen3MoeMLP, and would be Qwen3MoeSp"
        ):
            student_from_layers(target, [0, 2])


def test_a_student_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch):
    target = tiny_model("smollm3", layers=4, no_rope_layers=[1, 1, 1, 0])
    kept = "distill.untrained_student.kept_settings"
    with monkeypatch.context() as context:
        context.setattr(kept, lambda fields, *rest: fields | {"layer_types": None})
        with pytest.raises(
            UserError, match=r"use_rope of .*layers.3.self_attn is 0, and would be 1"
        ):
            student_from_layers(target, [0, 3])
        context.setattr("distill.chosen_layers.other_settings", lambda *args: None)
        with pytest.raises(UserError, match=r"logits would differ by \d+% of the largest"):
            student_from_layers(target, [0, 3])


@pytest.mark.parametrize("layers", [[], [4], [-1], [1, 0], [1, 1]])
def test_wrong_layers_are_refused(layers: list[int]):
    with pytest.raises(UserError, match="ascending numbers from 0 to 3"):
        student_from_layers(tiny_llama(layers=4), layers)


def test_a_fresh_student_has_the_changed_shape():
    student = student_from_config(tiny_llama(), {"num_hidden_layers": 1, "intermediate_size": 16})
    assert student.config.num_hidden_layers == 1
    assert student.model.layers[0].mlp.up_proj.out_features == 16
    with pytest.raises(UserError, match="cannot change 'vocab_size'"):
        student_from_config(tiny_llama(), {"vocab_size": 10})
    with pytest.raises(UserError, match="cannot change 'layrs'"):
        student_from_config(tiny_llama(), {"layrs": 10})


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"num_attention_heads": 3}, "num_attention_heads: 3 .*not a multiple of"),
        ("qwen3", {"num_attention_heads": 3}, "num_attention_heads: 3 cannot run .*must match"),
        ("llama", {"hidden_size": "big"}, "hidden_size: 'big' .*expected int"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_.*'factor'"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads: 0 .*ZeroDivisionError"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_values_that_make_no_model_are_named(family: str, changes: dict[str, Any], reason: str):
    with pytest.raises(UserError, match=f"model (can be made )?with {reason}"):
        student_from_config(tiny_model(family), changes)


@pytest.mark.parametrize("depth", [2, 6])
def test_a_fresh_student_of_a_nested_config_is_deeper_or_shallower(depth: int):
    student = student_from_config(_gemma3(4), {"num_hidden_layers": depth})
    assert len(student.model.layers) == len(student.config.layer_types) == depth


def test_a_model_that_does_more_than_a_linear_layer_is_refused():
    capped = tiny_model("llama")
    capped.lm_head.register_forward_hook(lambda module, inputs, output: output.tanh())
    linear_logits(capped)  # a hook on the layer itself is part of the layer
    model = tiny_model("llama")
    original = model.forward

    def scaled(*args, **kwargs):
        done = original(*args, **kwargs)
        done.logits = done.logits * 2
        return done

    model.forward = scaled
    with pytest.raises(UserError, match="more than a linear layer"):
        linear_logits(model)


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize(
    ("family", "key", "value", "plain"),
    [
        ("gemma2", "final_logit_softcapping", 30.0, None),
        ("cohere", "logit_scale", 0.5, 1.0),
        ("granite", "logits_scaling", 8.0, 1.0),
    ],
)
def test_scaled_logits_are_known_before_the_work(
    family: str, key: str, value: float, plain: Any, has_weights: bool
):
    with torch.device("cpu" if has_weights else "meta"):
        require_linear_logits(tiny_model(family, head_dim=8, **{key: plain}))
        with pytest.raises(UserError, match=f"more than a linear layer .*{key}: {value}"):
            require_linear_logits(tiny_model(family, head_dim=8, **{key: value}))


def batch_of(lengths: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Random right-padded rows; (prompt tokens, response tokens) each."""
    g = torch.Generator().manual_seed(1)
    width = max(a + b for a, b in lengths)
    ids = torch.randint(3, 300, (len(lengths), width), generator=g)
    attention, loss = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, response) in enumerate(lengths):
        attention[row, : prompt + response] = 1
        loss[row, prompt : prompt + response] = True
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": loss}


def test_distillation_loss_is_that_of_each_row_alone():
    """Right shift, right positions, and padding that changes nothing."""
    target, student = tiny_llama(seed=0), tiny_llama(seed=1, layers=1)
    lengths = [(4, 6), (9, 2), (3, 11)]
    batch = batch_of(lengths)
    module = Distillation(student, ALL_TERMS, chunk=5)
    teacher = LiveTeacher(target)
    loss, parts = module(**batch, teacher=teacher.signal(**batch, ids=["a", "b", "c"]))

    expected = 0.0
    for row, (prompt, response) in enumerate(lengths):
        ids = batch["input_ids"][row : row + 1, : prompt + response]
        q, p = student(ids).logits[0].double(), target(ids).logits[0].double()
        for place in range(prompt, prompt + response):
            before = slice(place - 1, place)
            label = ids[0, place : place + 1]
            values = ALL_TERMS.values(q[before], TeacherLogits(p[before]), label)
            expected += ALL_TERMS.weigh(values).item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert len(parts) == 2


def test_draft_vocabulary_keeps_the_most_frequent_tokens(monkeypatch):
    ids, coverage = most_frequent([[5, 5, 5, 7, 7, 9], [5, 9, 9, 9]], 2, 12)
    assert ids.tolist() == [5, 9]
    assert coverage == pytest.approx(0.8)
    monkeypatch.setattr("distill.choose_vocabulary.COUNTED", 4)  # across texts
    assert token_counts(iter([[5, 5, 5], [7], [], [7, 9, 5]]), 10).tolist() == [
        *[0] * 5,
        4,
        0,
        2,
        0,
        1,
    ]
    ids, _ = most_frequent([[5, 5, 7, 7]], 2, 12, always=[11])
    assert ids.tolist() == [5, 11]
    with pytest.raises(UserError, match="fewer than the target's 12"):
        most_frequent([[5]], 12, 12)


def test_coverage_of_unseen_text_is_of_one_half_chosen_from_the_other():
    texts = [[5, 5, 5, 7], [5, 7, 9, 9]]
    (one, two) = coverage(texts, [1, 2], 12)
    assert (one.size, two.size) == (1, 2)
    assert (one.of_text, two.of_text) == (4 / 8, 6 / 8)
    # Of one token: the first text's 5 is 1/4 of the second, the second's 9 is none of the first.
    assert one.of_unseen == pytest.approx((1 / 4 + 0) / 2)
    # Of two: 5 and 7 are 2/4 of the second; 9 and, as 5 and 7 are level, the lower 5: 3/4.
    assert two.of_unseen == pytest.approx((2 / 4 + 3 / 4) / 2)
    with pytest.raises(UserError, match="coverage needs at least two"):
        coverage(texts[:1], [1], 12)
    with pytest.raises(UserError, match="fewer than the target's 12"):
        coverage(texts, [12], 12)


def test_reduced_distillation_is_over_the_renormalised_target():
    target, student = tiny_llama(seed=0), tiny_llama(seed=1, layers=1)
    ids = torch.arange(0, 300, 3)
    batch = batch_of([(4, 6)])
    whole = student(batch["input_ids"]).logits[0, 3:9].double()
    against = target(batch["input_ids"]).logits[0, 3:9].double()
    rows = rows_of_tokens(ids, 300)[batch["input_ids"][0, 4:10]]
    expected = ALL_TERMS.values(whole[:, ids], TeacherLogits(against[:, ids]), rows).sum(-1)

    reduce_output(student, ids)
    teacher = LiveTeacher(target, vocabulary=ids)
    module = Distillation(student, ALL_TERMS, vocabulary=ids)
    _, parts = module(**batch, teacher=teacher.signal(**batch, ids=["a"]))
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("target_rows", "rows"), [(300, 320), (320, 300), (310, 285)])
def test_distillation_leaves_padding_out(target_rows, rows):
    """Losses, top-k outcomes and agreement are over the 280 tokens that both know, renormalised."""
    both = tiny_model("llama", vocab=280, layers=1)
    target = padded(tiny_model("llama", vocab=280), target_rows)
    student = padded(both, rows)
    batch = batch_of([(4, 6)])
    batch["input_ids"] = batch["input_ids"] % 280
    batch["input_ids"][0, 5] = target_rows - 1  # said by the target, padding to the student
    seen = batch["input_ids"].clamp(max=rows - 1)
    whole = student(seen).logits[0, 3:9].double()[:, :280]
    against = target(batch["input_ids"]).logits[0, 3:9].double()
    labels = batch["input_ids"][0, 4:10].clone()
    labels[1] = -100
    expected = ALL_TERMS.values(whole, TeacherLogits(against[:, :280]), labels).sum(-1)
    signal = LiveTeacher(target, tokens=280).signal(**batch, ids=["a"])
    module = Distillation(student, ALL_TERMS, tokens=280)
    loss, parts = module(**batch, teacher=signal)
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert student.get_output_embeddings().weight.grad[:280].abs().sum(-1).min() > 0

    few = WeightedLoss({"forward_kl": 1.0})
    kept = top_k(against[:, :280].float(), 9)
    found = Distillation(student, few, tokens=280)(**batch, teacher=kept.__getitem__)
    torch.testing.assert_close(
        found[1], few.values(whole, kept, labels).sum(-1), rtol=1e-4, atol=1e-5
    )

    whole_word = LiveTeacher(target).signal(**batch, ids=["a"])
    p = against.softmax(-1)
    sums = module(**batch, agreement_with=whole_word)[1]
    both_say = torch.minimum(p[:, :280], whole.softmax(-1)).sum()
    assert sums[0].item() == pytest.approx(both_say.item(), rel=1e-5)
    assert sums[2].item() == pytest.approx(p[:, 280:].sum().item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("tie", [True, False])
def test_a_reduced_student_survives_its_directory(tmp_path, tie: bool, rank: int | None):
    student = tiny_llama(layers=1, tie=tie)
    whole = student(torch.arange(9)[None]).logits
    vocabulary = reduce_output(student, torch.arange(0, 300, 7), rank)
    with torch.no_grad():
        for weight in student.get_output_embeddings().parameters():
            weight.mul_(1.5)
    expected = student(torch.arange(9)[None]).logits
    save_with_vocabulary(student, vocabulary, tmp_path)
    assert student(torch.arange(9)[None]).logits.shape[-1] == len(vocabulary.ids)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(torch.arange(9)[None]).logits, whole)
    found = load_vocabulary(tmp_path, loaded)
    assert found is not None
    assert torch.equal(found.ids, vocabulary.ids)
    torch.testing.assert_close(loaded(torch.arange(9)[None]).logits, expected)


def test_an_output_layer_of_low_rank_starts_near_the_full_one_and_learns_as_its_product():
    target, student = tiny_llama(seed=0), tiny_llama(seed=1, layers=1)
    ids = torch.arange(0, 300, 3)
    rows = student.get_output_embeddings().weight.detach()[ids]
    reduce_output(student, ids, 20)
    low: Any = student.get_output_embeddings()
    singular = torch.linalg.svdvals(rows)
    left_out = (rows - low.weight).detach().norm()
    torch.testing.assert_close(left_out, singular[20:].norm(), rtol=1e-3, atol=1e-4)

    batch = batch_of([(4, 6)])
    signal = LiveTeacher(target, vocabulary=ids).signal(**batch, ids=["a"])
    loss, parts = Distillation(student, ALL_TERMS, vocabulary=ids)(**batch, teacher=signal)
    factors = dict(low.named_parameters())
    found = torch.autograd.grad(loss, factors.values())
    # The gradient of the full layer of the same product gives those of the factors.
    full = torch.nn.Linear(low.in_features, low.out_features, bias=False)
    full.weight = torch.nn.Parameter(low.weight.detach())
    student.set_output_embeddings(full)
    loss, expected = Distillation(student, ALL_TERMS, vocabulary=ids)(**batch, teacher=signal)
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-6)
    (of_full,) = torch.autograd.grad(loss, [full.weight])
    up, down = factors["up.weight"], factors["down.weight"]
    by_name = dict(zip(factors, found, strict=True))
    torch.testing.assert_close(by_name["up.weight"], of_full @ down.t(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(by_name["down.weight"], up.t() @ of_full, rtol=1e-3, atol=1e-5)


def test_a_vocabulary_map_that_does_not_fit_is_refused(tmp_path):
    student = tiny_llama(layers=1)
    for bad in ([5, 3], [5, 300], [-1, 5]):
        save_file(
            {"ids": torch.tensor(bad), "weight": torch.zeros(2, 32)},
            tmp_path / "draft_vocabulary.safetensors",
        )
        with pytest.raises(UserError, match="expected one row for each id"):
            load_vocabulary(tmp_path, student)
