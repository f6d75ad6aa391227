"""The target trained together with its heads: the losses, the new target, and what is said of it.

Shapes: B rows, T tokens.
"""

import copy
import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from peft.tuners.tuners_utils import BaseTunerLayer
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.loading import Target, load_target
from decode.opening.directory import describe_drafter, open_drafter
from decode.shapes import Chain
from distill.drift import measure_drift
from distill.losses import WeightedLoss
from distill.teacher.live_teacher import LiveTeacher
from draftsmith.cli.main import app
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads
from heads.heads_module import shift_left, trained_positions
from heads.joint_training import JointTraining
from heads.options import HeadOptions
from tests.contract import moved_heads
from tests.stages import (
    LOOP,
    WORDS,
    drafter_weights,
    examples,
    make_stage,
    plan_stage,
    run_stage,
    stage_context,
)
from tests.tiny import VOCAB, save_tiny, tiny_target
from tests.training import assert_equal
from train.base.console import Reporter
from train.base.stage import StageInputs
from train.data.chat_tokens import prompt_tokens
from train.loop.optimizer import make_optimizer
from train.loop.trained_heads_target import TrainedHeadsTarget
from train.loop.trainer import TrainingClock
from train.measure import evaluation as measure
from train.report.report_files import render_page
from train.report.report_summary import footnotes, headline
from train.run.config_checks import load_config
from train.run.run import Run
from train.settings.optimizer_config import GroupConfig, OptimizerConfig
from train.settings.training import AdapterConfig, BackboneConfig

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's affair
]

MEDUSA = {"type": "medusa", "heads": 2}
BLOCKWISE = {"type": "blockwise", "k": 3, "hidden": 24, "sub_loss": "mean"}
KINDS: dict[str, dict[str, Any]] = {"medusa": MEDUSA, "blockwise": BLOCKWISE}
LORA = {"r": 4, "alpha": 8.0, "dropout": 0.0}
STAGE = {"loop": LOOP, "optimizer": {"lr": 1e-2, "warmup_steps": 2}}
IDS = torch.arange(0, VOCAB, 2)


@functools.cache
def target() -> Target:
    return tiny_target()


@pytest.fixture
def context(tmp_path: Path) -> StageInputs:
    made = stage_context(tmp_path, target())
    made.corpus.examples["test"] = examples("test", 3)
    return made


def trained_heads_target(config: BackboneConfig, context: StageInputs) -> TrainedHeadsTarget:
    clock = TrainingClock(torch.device("cpu"))
    return TrainedHeadsTarget(config, context.target, context.corpus, clock, stage="two")


def batch() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, 10), generator=g)
    attention = torch.ones_like(ids)
    attention[0, 7:] = 0
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[0, 4:7] = True
    mask[1, 1:] = True
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": mask}


# --- the losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "losses", "reduced"),
    [("medusa", {"forward_kl": 1.0}, True), ("blockwise", {"cross_entropy": 1.0}, False)],
)
def test_the_combined_loss_and_its_gradients_by_hand(kind: str, losses: Any, reduced: bool) -> None:
    """L_backbone + λ₀·Σ λᵏ·CE, gradients in the target's weights too, its output layer among them,
    through which Blockwise's heads read. float64, so that nothing hides behind rounding."""
    model = copy.deepcopy(target().model).double().requires_grad_(True)
    heads = moved_heads(KINDS[kind], target(), IDS if reduced else None).double()
    training = HeadTraining(heads, WeightedLoss({"cross_entropy": 1.0}), target().model, chunk=5)
    module = JointTraining(model, training, WeightedLoss(losses), chunk=4)
    given = batch()
    original = copy.deepcopy(target().model).double()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter *= 1.1  # or there would be no divergence
    teacher = LiveTeacher(original).signal(**given, ids=[])
    weights = heads.loss_weights(0.0)
    loss, sums = module(**given, losses=weights, weight=0.3, teacher=teacher)
    parameters = dict(module.named_parameters())
    ours = torch.autograd.grad(loss, list(parameters.values()))

    ids, mask = given["input_ids"], given["loss_mask"]
    hidden = model.base_model(ids, attention_mask=given["attention_mask"]).last_hidden_state
    logits = model.lm_head(hidden)
    predicted = mask[:, 1:]
    if "cross_entropy" in losses:
        own = F.cross_entropy(logits[:, :-1][predicted], ids[:, 1:][predicted], reduction="sum")
    else:
        told = original(ids, attention_mask=given["attention_mask"]).logits[:, :-1][predicted]
        q = logits[:, :-1][predicted].log_softmax(-1)
        own = F.kl_div(q, told.log_softmax(-1), log_target=True, reduction="sum")
    expected = own
    for k, weight in weights.items():
        places = trained_positions(mask, k)
        made = heads.states(hidden[places], [k])[:, 0]
        if kind == "medusa":
            layer = heads.output.layers[k - 1]
            said = F.linear(made, layer.weight, layer.bias)
        else:
            said = F.linear(made, model.lm_head.weight[IDS] if reduced else model.lm_head.weight)
        labels = shift_left(ids, k + 1)[places]
        if reduced:
            labels = torch.where(labels % 2 == 0, labels // 2, -100)
        value = F.cross_entropy(said, labels, reduction="sum", ignore_index=-100)
        expected = expected + 0.3 * weight * value
    torch.testing.assert_close(loss, expected.to(loss.dtype))
    theirs = torch.autograd.grad(expected, list(parameters.values()))
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    figures = dict(zip(module.sums, sums.tolist(), strict=True))
    assert figures["backbone/tokens"] == int(predicted.sum())
    assert module.figures(figures)[f"backbone/{next(iter(losses))}"] == pytest.approx(
        own.item() / int(predicted.sum())
    )
    # Outside a forward what is borrowed is nobody's: nothing of the graph is kept.
    assert heads.output._layer_in_use is None


def test_distilled_heads_learn_what_the_moving_target_says() -> None:
    """The heads' own teacher is the target as it is by now, and no gradient goes through it."""
    model = copy.deepcopy(target().model).requires_grad_(True)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    heads = new_heads(HeadOptions.of(MEDUSA), target(), None)
    training = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), target().model)
    module = JointTraining(model, training, WeightedLoss({"cross_entropy": 1.0}))
    given = batch()
    loss, _ = module(**given, losses={1: 1.0}, weight=1.0)
    alone, _ = module(**given, losses={1: 1.0}, weight=0.0)
    hidden = model.base_model(given["input_ids"], attention_mask=given["attention_mask"])
    hidden = hidden.last_hidden_state
    places = trained_positions(given["loss_mask"], 1)
    p = F.linear(shift_left(hidden, 1)[places], model.lm_head.weight).detach().log_softmax(-1)
    q = F.linear(hidden[places], heads.output.layers[0].weight).log_softmax(-1)  # type: ignore
    theirs = F.kl_div(q, p, log_target=True, reduction="sum")
    torch.testing.assert_close((loss - alone).float(), theirs, rtol=1e-4, atol=1e-4)


def test_an_adapter_switched_off_is_the_untouched_target(context: Any) -> None:
    """So self-distillation begins at 0, with a gradient of 0, and is towards the run's target."""
    torch.manual_seed(0)
    losses = {"forward_kl": 1.0}
    # With a ramp, the heads' loss has no weight at the beginning.
    config = BackboneConfig(lora=AdapterConfig(**LORA), losses=losses, ramp=1.0)
    heads_target = trained_heads_target(config, context)
    heads = new_heads(HeadOptions.of(MEDUSA), target(), None)
    training = HeadTraining(heads, WeightedLoss({"cross_entropy": 1.0}), target().model)
    module = heads_target.join(training, chunk=64)
    given: Any = batch()
    loss, _ = heads_target.forward(module, given, [], {1: 1.0}, 0.0)
    assert abs(loss.item()) < 1e-6
    adapters = {n: p for n, p in module.backbone.named_parameters() if p.requires_grad}
    assert adapters
    assert all("lora" in name for name in adapters)
    assert all(g.abs().max() < 1e-6 for g in torch.autograd.grad(loss, list(adapters.values())))
    ids = given["input_ids"]
    with torch.no_grad():
        for name, parameter in adapters.items():
            if "lora_B" in name:
                parameter.fill_(0.05)
        moved, wrapped = module.backbone(ids).logits, heads_target.trainable
        loss, _ = heads_target.forward(module, given, [], {1: 1.0}, 0.0)
        for layer in module.backbone.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(False)
        off = module.backbone(ids).logits
    assert loss.item() > 0.01
    assert wrapped.model is module.backbone
    assert torch.equal(off, target().model(ids).logits)
    assert not torch.allclose(moved, off)


def test_the_weight_of_the_heads_rises_with_the_ramp(context: Any) -> None:
    medusa, blockwise = (new_heads(HeadOptions.of(KINDS[k]), target(), None) for k in KINDS)

    def joined(heads: Any, **settings: Any) -> TrainedHeadsTarget:
        heads_target = trained_heads_target(BackboneConfig(**settings), context)
        loss = WeightedLoss({"cross_entropy": 1.0})
        heads_target.join(HeadTraining(heads, loss, target().model), chunk=64)
        return heads_target

    assert joined(medusa).weight(0.0) == 0.2
    assert joined(blockwise).weight(0.0) == 2.0  # the mean over three, times three
    ramp = joined(medusa, ramp=0.5, heads_weight=0.4)
    found = [ramp.weight(done) for done in (0.0, 0.25, 0.5, 1.0)]
    assert found == pytest.approx([0.0, 0.4 * math.sin(math.pi / 4), 0.4, 0.4])


def test_the_target_has_a_learning_rate_of_its_own(context: Any) -> None:
    config = BackboneConfig(lora=AdapterConfig(**LORA))
    module = trained_heads_target(config, context).join(
        HeadTraining(
            new_heads(HeadOptions.of(MEDUSA), target(), None),
            WeightedLoss({"cross_entropy": 1.0}),
            target().model,
        ),
        chunk=64,
    )
    settings = config.optimizer(OptimizerConfig(lr=4e-3))
    names = {id(p): name for name, p in module.named_parameters()}
    rates = {
        names[id(p)].partition(".")[0]: group["base_lr"]
        for group in make_optimizer(module, settings).param_groups
        for p in group["params"]
    }
    assert rates == {"backbone": 1e-3, "heads": 4e-3}  # a quarter: the heads' is 4 times as large
    named = OptimizerConfig(lr=4e-3, groups={"backbone.*layers.0.*": GroupConfig(lr=5e-4)})
    groups = make_optimizer(module, config.optimizer(named)).param_groups
    assert sorted(group["base_lr"] for group in groups) == [5e-4, 1e-3, 4e-3]


def test_drift_by_hand() -> None:
    model = copy.deepcopy(target().model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.2)
    given = batch()
    tensors = (given["input_ids"], given["attention_mask"], given["loss_mask"])
    same = measure_drift(target().model, target().model, [tensors])
    assert same.kl == 0.0
    assert same.perplexity_new == same.perplexity_original
    halves = [tuple(x[rows] for x in tensors) for rows in ([0, 2], [1])]
    found = measure_drift(target().model, model, halves, chunk=3)
    kl, before, after, count = 0.0, 0.0, 0.0, 0
    for row in range(3):
        length = int(given["attention_mask"][row].sum())
        ids = given["input_ids"][row, :length]
        p, q = (m(ids[None]).logits[0].log_softmax(-1) for m in (target().model, model))
        for t in range(1, length):
            if given["loss_mask"][row, t]:
                kl += float((p[t - 1].exp() * (p[t - 1] - q[t - 1])).sum())
                before -= float(p[t - 1, ids[t]])
                after -= float(q[t - 1, ids[t]])
                count += 1
    assert found.tokens == count
    assert found.kl == pytest.approx(kl / count, rel=1e-4)
    assert found.perplexity_original == pytest.approx(math.exp(before / count), rel=1e-4)
    assert found.perplexity_new == pytest.approx(math.exp(after / count), rel=1e-4)


# --- the stage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "backbone"),
    [
        ("medusa", {"lora": LORA, "losses": {"forward_kl": 1.0}, "ramp": 0.5}),
        ("blockwise", {"lora": None}),
    ],
)
def test_a_stage_makes_a_new_target_and_leaves_the_old_one(
    context: Any, kind: str, backbone: Any
) -> None:
    before = {name: x.clone() for name, x in target().model.state_dict().items()}
    dev = {"every": 3, "samples": 2, "decode_prompts": 2, "gamma": 2, "max_new_tokens": 8}
    stage = make_stage(
        "heads",
        "two",
        heads=KINDS[kind],
        backbone=backbone,
        dev=dev,
        draft_vocabulary=150,
        tree={"nodes": 4, "width": 3, "prompts": 2, "max_new_tokens": 8},
        **(STAGE | {"loop": LOOP | {"epochs": 4}}),
    )
    plan = plan_stage(context, stage)
    outcome = run_stage(context, stage)
    assert_equal(dict(target().model.state_dict()), before)
    assert not any(p.requires_grad for p in target().model.parameters())
    assert plan.trained_parameters == outcome.summary["trained_parameters"]
    assert plan.trained_parameters > sum(
        p.numel() for p in new_heads(HeadOptions.of(KINDS[kind]), target(), IDS[:150]).parameters()
    )

    # Beside the drafter lies a plain model; the drafter is for that one, and for no other.
    assert outcome.target == outcome.drafter.parent / "target"  # type: ignore[union-attr]
    new = load_target(str(outcome.target), dtype="float32", device="cpu")
    moved = [not torch.equal(x, before[n]) for n, x in new.model.state_dict().items()]
    assert any(moved)
    assert not any("lora" in name for name in new.model.state_dict())
    drafter = open_drafter(str(outcome.drafter), new)
    with pytest.raises(UserError, match="its hidden states are different"):
        open_drafter(str(outcome.drafter), target())
    description = describe_drafter(outcome.drafter)  # type: ignore[arg-type]
    assert description["target"]["name"] == str(outcome.target)
    drift = description["provenance"]["drift"]
    assert drift == outcome.summary["drift"]
    assert drift["kl"] > 0
    held_out = context.corpus.samples("data", "test")
    assert drift["tokens"] == sum(sum(sample.mask[1:]) for sample in held_out)
    prompts = [[5, 17, 250], [7]]
    plain = Decoder(new.model, DRAFTERS["none"]()).decode(prompts, 10)
    assert Decoder(new.model, drafter).decode(prompts, 10).outputs == plain.outputs

    history = outcome.summary["training"]["history"]
    name = f"backbone/{next(iter(backbone.get('losses', {'cross_entropy': 1})))}"
    assert all(name in entry for entry in history)
    # The acceptance while it trained is that of the new target too.
    last = outcome.summary["training"]["dev"][-1]
    assert last[name] >= 0
    chosen = [context.corpus.examples["dev"][i] for i in (0, 3)]
    tokens = [prompt_tokens(e, target().tokenizer) for e in chosen]
    eos = target().eos_token_ids
    run = Decoder(new.model, drafter.with_shape(Chain()), gamma=2, eos_token_ids=eos)
    assert last["acceptance_rate"] == run.decode(tokens, 8).counts.acceptance_rate


def test_merged_weights_are_those_that_were_trained(context: Any) -> None:
    torch.manual_seed(0)
    heads_target = trained_heads_target(BackboneConfig(lora=AdapterConfig(**LORA)), context)
    model = heads_target.trainable.model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    weights = {f"backbone.{n}": x for n, x in heads_target.trainable.weights().items()}
    made, drift = heads_target.save(weights, context.directory / "target")
    ids = batch()["input_ids"]
    torch.testing.assert_close(made.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert drift.kl > 0
    # In the dtype of the run's target, and the same in a run of that dtype.
    half = replace(target(), model=copy.deepcopy(target().model).bfloat16())
    other = trained_heads_target(
        BackboneConfig(lora=AdapterConfig(**LORA)), replace(context, target=half)
    )
    weights = {f"backbone.{n}": x for n, x in other.trainable.weights().items()}
    made, _ = other.save(weights, context.directory / "half")
    assert made.dtype == torch.bfloat16


def test_heads_alone_first_and_then_both(context: Any) -> None:
    """Two stages: the second begins with the first one's heads, and its draft vocabulary."""
    first = make_stage("heads", "one", heads=MEDUSA, draft_vocabulary=150, **STAGE)
    run_stage(context, first)
    settings: Any = {"heads": MEDUSA, "start": "one", "backbone": {"lora": LORA}}
    tiny = {"loop": LOOP | {"max_steps": 1}, "optimizer": {"lr": 1e-9, "warmup_steps": 0}}
    second = make_stage("heads", "two", first, **settings, **tiny)
    plan = plan_stage(context, second, one=plan_stage(context, first))
    outcome = run_stage(context, second)
    assert plan.trained_parameters == outcome.summary["trained_parameters"]
    assert outcome.summary["draft_vocabulary"] == 150
    one = drafter_weights(replace(outcome, drafter=context.earlier["one"] / "drafter"))
    two = drafter_weights(outcome)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)
    begun = describe_drafter(outcome.drafter)["provenance"]["start"]  # type: ignore[arg-type]
    assert begun["stage"] == "one"
    # Without a backbone it is simply a longer training of the same heads.
    longer = make_stage("heads", "three", first, heads=MEDUSA, start="one", **STAGE)
    assert run_stage(context, longer).target is None


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")
def test_a_stage_refuses_what_does_not_go_together(context: Any) -> None:
    first = make_stage("heads", "one", heads=MEDUSA, **STAGE)
    both = make_stage("heads", "two", first, heads=MEDUSA, backbone={}, start="one", **STAGE)
    text = make_stage("generate", "text")
    for message, settings in (
        ("no earlier stage 'zero' of kind heads", {"start": "zero"}),
        ("two also trained the target", {"start": "two"}),
        ("set the same type and options", {"start": "one", "heads": MEDUSA | {"heads": 3}}),
        ("draft_vocabulary cannot be set here", {"start": "one", "draft_vocabulary": 99}),
        ("features cannot be set here", {"backbone": {}, "features": str(context.directory)}),
        ("answered the train split, which is not held out", {"backbone": {"held_out": "text"}}),
    ):
        with pytest.raises(UserError, match=message):
            make_stage("heads", "new", first, both, text, **({"heads": MEDUSA} | settings))
    adapter = {"lora": LORA | {"targets": ["lm_head"]}}
    with pytest.raises(UserError, match="gives the output layer lm_head an adapter"):
        run_stage(context, make_stage("heads", "a", heads=MEDUSA, backbone=adapter, **STAGE))
    nothing = {"lora": LORA | {"targets": ["none"]}}
    with pytest.raises(UserError, match=r"lora.targets \['none'\]"):
        run_stage(context, make_stage("heads", "b", heads=MEDUSA, backbone=nothing, **STAGE))
    context.corpus.examples["test"] = [
        replace(e, messages=e.messages[:1]) for e in context.corpus.examples["test"]
    ]
    with pytest.raises(UserError, match="has no response tokens to measure the drift on"):
        run_stage(context, make_stage("heads", "c", heads=MEDUSA, backbone={}, **STAGE))
    frozen_only = make_stage("heads", "d", heads=MEDUSA, backbone={}, **STAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heads.parallel_heads.MedusaHeads.joint_weight", None)
        with pytest.raises(UserError, match="medusa cannot be trained together with the target"):
            plan_stage(context, frozen_only)


# --- the run --------------------------------------------------------------------------------------


CONFIG = """
name: moved
output_dir: {base}/runs
trackers: []
threads: 1
target: {{model: {base}/target, dtype: float32, device: cpu}}
data: {{train: train.jsonl, dev: dev.jsonl, test: dev.jsonl, duplicates: keep}}
evaluation:
  {{prompts: 2, gamma: 2, max_new_tokens: 6, batch_size: 4, timed_prompts: 1, timed_tokens: 6,
    generate: false, baselines: [ngram], baseline_gammas: [2]}}
stages:
  - name: alone
    kind: heads
    heads: {{type: medusa, heads: 2}}
    loop: {{epochs: 2, tokens_per_batch: 120, log_every: 1}}
  - name: both
    kind: heads
    heads: {{type: medusa, heads: 2}}
    start: alone
    backbone: {{lora: {{r: 4}}}}
    loop: {{epochs: 3, tokens_per_batch: 120, log_every: 1}}
    optimizer: {{lr: 2e-2, warmup_steps: 1}}
"""


def test_a_run_judges_the_drafter_on_its_new_target_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "target")
    rows = [
        json.dumps({"prompt": " ".join(WORDS[i : i + 3]), "response": " ".join(WORDS[i:])}) + "\n"
        for i in range(6)
    ]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("".join(rows), "utf-8")
    (tmp_path / "config.yaml").write_text(CONFIG.format(base=tmp_path), "utf-8")
    config = load_config(tmp_path / "config.yaml")
    judged = []
    evaluate = measure.evaluate

    def watched(target: Target, *args: Any) -> Any:
        judged.append(target.name)
        return evaluate(target, *args)

    monkeypatch.setattr("train.run.run_evaluation.evaluate", watched)
    report = Run(config, Accelerator(cpu=True), Reporter(silent=True)).execute()
    stages = config.run_dir / "stages"
    new = str(stages / "01-both" / "target")
    assert judged == [*[str(tmp_path / "target")] * 2, new, new]
    ngram, alone, both, in_turn = (row["evaluation"] for row in report["rows"])
    assert ngram["drift"] is None
    assert alone["drift"] is None
    assert both["drift"]["kl"] > 0
    assert in_turn["drift"] == both["drift"]
    assert both["identical_to_plain"] == 1.0
    notes = " ".join(footnotes(report))
    said = "both: the target was trained too; speed-up and losslessness refer to the new target"
    assert said in notes
    assert f"KL(original‖new) is {both['drift']['kl']:.4f} nats per token" in notes
    best = headline(report)
    assert best is not None
    page = render_page(report, {})
    assert "medusa (new target)" in page
    assert "perplexity of held-out text, original → new target" in page
    # The command says the same of it, and refuses it for the target that it no longer fits.
    made = stages / "01-both"
    words = [
        "evaluate",
        "--drafter",
        str(made / "drafter"),
        "--prompts",
        str(tmp_path / "dev.jsonl"),
    ]
    words += ["--max-new-tokens", "6", "--timed-prompts", "1", "--device", "cpu", "--target"]
    found = CliRunner().invoke(app, [*words, str(made / "target")])
    assert found.exit_code == 0, found.output
    assert "losslessness refer to the new target" in " ".join(found.output.split())
    refused = CliRunner().invoke(app, [*words, str(tmp_path / "target")])
    assert refused.exit_code == 2
    assert "has other weights than the target in use" in " ".join(refused.stderr.split())
    # Done is done, and it is found again with its target.
    again = Run(config, Accelerator(cpu=True), Reporter(silent=True)).execute()
    assert again["rows"] == report["rows"]
    assert len(judged) == 4
