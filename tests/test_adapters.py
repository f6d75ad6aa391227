"""Adapters on a drafter: what they draft, what they share, and how stages train them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.model.forward import few_rows
from decode.model.forward.lean_parts import PackedLinear
from decode.model.loading import Target
from decode.opening.adapters import WEIGHTS
from decode.opening.directory import describe_drafter, open_drafter
from distill.adapter_directory import save_adapter
from distill.student_settings import DrafterLora, LoraConfig
from distill.trainable_model import Trainable, linear_sizes
from draftsmith.cli.main import app
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.merged import write_merged
from heads.heads_directory import save_heads
from heads.heads_module import HeadBatch
from tests.contract import HEAD_OPTIONS, moved_heads, options_for_tokens
from tests.stages import DRAFTER, LOOP, make_stage, plan_stage, run_stage, stage_context
from tests.tiny import VOCAB, finish, moved, plain_texts, shortened, tiny_target
from train.base.stage import StageInputs

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"  # peft's affair
)
PROMPTS = [[5, 17, 250, 9, 42], [7, 8], [11, 12, 13]]
LABELS = ["de", None, "fr"]
LORA = {"r": 2, "merge": False}
MEDUSA = {"type": "medusa", "heads": 2}


def drafts_of(drafter: Drafter, target: Target) -> list[Any]:
    """The tokens of all drafts while these prompts are answered, with the rows' lengths."""
    seen: list[Any] = []

    def keep(step: Any) -> None:
        seen.append((step.draft.tokens.tolist(), step.draft.sizes.tolist()))

    Decoder(target.model, drafter, gamma=3, observers=[keep]).decode(PROMPTS, 12)
    return seen


def logits_of(drafter: Any) -> torch.Tensor:
    """Of a short text through the forward that drafts."""
    lm = drafter.lm
    lm.reset(1, 16)
    ids = torch.arange(5, 13)[None]
    found: torch.Tensor = lm.forward(ids, torch.zeros(1, dtype=torch.long).numpy())
    return found


def randomise(trained: Trainable) -> dict[str, torch.Tensor]:
    """Adapters as a training might leave them: the weights by name."""
    moved(trained.model, 0.5, seed=1, which=lambda name, _: "lora_B" in name)
    return trained.weights()


def blocks(drafter: Any) -> set[int]:
    """The tensors of a drafter's weights, and of their packed form in the forward that runs."""
    forward = drafter.lm.forward_pass
    module = getattr(forward, "model", forward)
    packed = [x._packed for x in module.modules() if isinstance(x, PackedLinear)]
    return {id(x) for x in [*drafter.lm.model.parameters(), *packed]}


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_an_adapter_drafts_what_the_merged_drafter_drafts(family: str, tmp_path: Path) -> None:
    """Through the lean forward and through transformers'. Two adapters and their base are in
    memory with the weights of one drafter and two adapters."""
    target = tiny_target(family=family)
    context = stage_context(tmp_path, target)
    run_stage(context, make_stage("distill", "base", **DRAFTER))
    first: Any = make_stage("distill", "base", **DRAFTER)
    start = DRAFTER | {"drafter": {"stage": "base"}, "optimizer": {"lr": 0.1}}
    found = {}
    for name, lora in {
        "apart": LORA,
        "merged": LORA | {"merge": True},
        "other": LORA | {"alpha": 9.0},
    }.items():
        stage = make_stage("distill", name, first, **(start | {"lora": lora}))
        found[name] = run_stage(context, stage).drafter
    base, apart, merged, other = (
        open_drafter(str(path), target) for path in (tmp_path / "base" / "drafter", *found.values())
    )
    ours, whole, before = (logits_of(x) for x in (apart, merged, base))
    torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-4)
    assert (ours - before).abs().max() > 0.1
    assert drafts_of(apart, target) == drafts_of(merged, target) != drafts_of(base, target)
    # The model itself computes the same as the forward that drafts, and so does peft.
    ids = torch.arange(5, 13)[None]
    torch.testing.assert_close(apart.lm.model(ids).logits, ours, rtol=1e-4, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "drafter")
    size = DrafterLora(r=2).parameters(linear_sizes(plain))
    theirs = PeftModel.from_pretrained(plain, found["apart"]).eval()(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)

    # Merged later, as a drafter directory and in an export.
    apart_path, hf = found["apart"], tmp_path / "hf"
    assert apart_path is not None
    write_merged(apart_path, tmp_path / "later")
    later: Any = open_drafter(str(tmp_path / "later"), target)
    torch.testing.assert_close(logits_of(later), whole)
    assert describe_drafter(tmp_path / "later")["kind"] == "small_lm"
    if family == "llama":
        export_drafter(apart_path, "hf", hf)
        exported = AutoModelForCausalLM.from_pretrained(hf)
        torch.testing.assert_close(exported(ids).logits, whole, rtol=1e-4, atol=1e-4)
        assert check_export(hf)["kind"] == "small_lm"

    shared, own = blocks(base), blocks(apart)
    assert shared < own
    assert own & blocks(other) == shared
    adapter = sum(x.nbytes for x in apart.lm.model.parameters()) - sum(
        x.nbytes for x in base.lm.model.parameters()
    )
    assert adapter == 4 * size < 0.2 * sum(x.nbytes for x in base.lm.model.parameters())
    assert blocks(merged) & shared == set()
    # Also where one name opens them all, and a label chooses.
    names = json.dumps([str(tmp_path / "base" / "drafter"), str(apart_path)])
    routed: Any = open_drafter(f'routed:drafters={names},labels=["all","de"]', target)
    assert blocks(routed.drafters[0]) < blocks(routed.drafters[1])
    decoder = Decoder(target.model, routed, gamma=3)
    decoding = Decoding(decoder, PROMPTS, 12, settings=[RowSettings(label=x) for x in LABELS])
    assert routed.routes.tolist() == [1, 0, 0]
    finish(decoding)
    assert decoding.result().outputs == plain_texts(target.model, PROMPTS, 12)
    # The trees of `with_shape` keep the adapter and the memory.
    assert blocks(apart.with_shape(apart.shape)) == own


def test_an_adapter_needs_the_base_that_it_was_trained_on(context: StageInputs) -> None:
    base: Any = make_stage("distill", "base", **DRAFTER)
    start = run_stage(context, base).drafter
    assert start is not None
    settings = DRAFTER | {"drafter": {"stage": "base"}, "lora": LORA}
    with pytest.raises(UserError, match="their base says how its weights are read"):
        make_stage("distill", "de", base, **settings, weights="int8")
    stage = make_stage("distill", "de", base, **settings)
    plans = {"base": plan_stage(context, base)}
    plan = plan_stage(context, stage, **plans)
    outcome = run_stage(context, stage)
    path = outcome.drafter
    assert path is not None
    assert plan.trained_parameters == outcome.summary["trained_parameters"]
    assert (
        plan.memory.optimizer == 12 * plan.trained_parameters < plans["base"].memory.optimizer / 4
    )
    assert {x.name for x in path.iterdir()} >= {WEIGHTS, "adapter_config.json", "drafter.json"}
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert "an adapter on the small_lm drafter ../../base/drafter" in shown.output
    out = context.directory / "whole"
    assert CliRunner().invoke(app, ["merge", str(path), "--out", str(out)]).exit_code == 0
    again = CliRunner().invoke(app, ["merge", str(out), "--out", str(context.directory / "two")])
    assert (again.exit_code, "is a small_lm drafter and no adapter" in again.output) == (2, True)
    named = describe_drafter(path)["base"]
    assert (named["kind"], named["path"]) == ("small_lm", "../../base/drafter")
    # Both can be moved together. A base with other weights is refused, with both hashes.
    new = context.directory / "moved"
    new.mkdir()
    for name in ("base", "de"):
        (context.directory / name).rename(new / name)
    there = str(new / "de" / "drafter")
    drafts_of(open_drafter(there, context.target), context.target)
    with pytest.raises(UserError, match=r"would change its base, .* merge it first"):
        open_drafter(f"{there}:weights=int8", context.target)
    if few_rows.library(torch.float32) is not None:
        whole: Any = open_drafter(str(new / "base" / "drafter"), context.target)
        adapter: Any = open_drafter(there, context.target)
        assert blocks(adapter) & blocks(whole)
        del adapter, whole
        in_bytes: Any = open_drafter(f"{new / 'base' / 'drafter'}:weights=int8", context.target)
        adapter = open_drafter(there, context.target)
        assert not blocks(adapter) & blocks(in_bytes)
        del adapter, in_bytes
    (new / "base" / "drafter").rename(new / "kept")
    with pytest.raises(UserError, match=r"belongs to the drafter .*base/drafter, which does not"):
        open_drafter(there, context.target)
    (new / "base" / "start").rename(new / "base" / "drafter")
    with pytest.raises(UserError, match=rf"hash {named['weights_sha256'][:12]}….* have \w+…; put"):
        open_drafter(there, context.target)


def test_a_stage_with_a_new_drafter_keeps_it_as_the_base(context: StageInputs) -> None:
    settings = DRAFTER | {"lora": LORA | {"targets": ["q_proj", "up_proj"]}, "draft_vocabulary": 90}
    stage = make_stage("distill", "own", **settings)
    plan, outcome = plan_stage(context, stage), run_stage(context, stage)
    assert plan.trained_parameters == outcome.summary["trained_parameters"]
    opened: Any = open_drafter(str(outcome.drafter), context.target)
    assert describe_drafter(outcome.drafter)["base"]["path"] == "../start"  # type: ignore[arg-type]
    assert len(opened.vocabulary) == 90
    drafts_of(opened, context.target)


def test_adapters_that_cannot_be_kept_or_continued_are_refused(context: StageInputs) -> None:
    settings = DRAFTER | {"lora": LORA | {"targets": ["lm_head"]}}
    with pytest.raises(
        UserError, match=r"lora\.targets gives the output layer lm_head an adapter, but losses"
    ):
        plan_stage(context, make_stage("distill", "one", **settings))
    base = make_stage("distill", "base", **DRAFTER)
    stage = make_stage(
        "distill", "de", base, **(DRAFTER | {"drafter": {"stage": "base"}, "lora": LORA})
    )
    for kind in ("distill", "online"):
        with pytest.raises(UserError, match=f"{kind} cannot read the drafter of de, which is"):
            make_stage(kind, kind, base, stage, drafter={"stage": "de"})
    with pytest.raises(UserError, match="lora trains adapters on heads that exist; set start"):
        make_stage("heads", "heads", heads=MEDUSA, lora=LORA)


def test_a_heads_stage_trains_an_adapter(context: StageInputs) -> None:
    loop = {"heads": MEDUSA, "loop": LOOP | {"epochs": 1}, "optimizer": {"lr": 0.05}}
    base = make_stage("heads", "base", **loop)
    run_stage(context, base)
    found = {}
    for name, merge in (("apart", False), ("merged", True)):
        stage = make_stage("heads", name, base, start="base", lora=LORA | {"merge": merge}, **loop)
        plan = plan_stage(context, stage, base=plan_stage(context, base))
        outcome = run_stage(context, stage)
        assert plan.trained_parameters == outcome.summary["trained_parameters"]
        found[name] = outcome.drafter
    apart, merged = (
        drafts_of(open_drafter(str(x), context.target), context.target) for x in found.values()
    )
    assert apart == merged
    assert describe_drafter(found["apart"])["base"]["kind"] == "medusa"  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"next cannot continue .*drafter, which is an adapter"):
        make_stage("heads", "next", start=str(found["apart"]), **loop)


@pytest.mark.parametrize(
    "kind",
    shortened([kind for kind in HEAD_OPTIONS if kind != "pass"], ["medusa", "eagle3", "kangaroo"]),
)
def test_adapted_heads_of_every_kind_are_the_merged_heads(kind: str, tmp_path: Path) -> None:
    """In training and while they draft."""
    target = tiny_target(vocab=VOCAB + 4, layers=7)
    heads = moved_heads(options_for_tokens(kind), target)
    save_heads(tmp_path / "base", heads, target=target, provenance={})
    lora = DrafterLora(r=2, alpha=4.0, merge=False)
    layers = lora.layers(linear_sizes(heads, heads.read_directly))
    trained = Trainable(heads, lora=lora, layers=layers)
    weights = randomise(trained)
    merged, _ = trained.merged_model(trained.weights())

    ids = torch.arange(20)[None] + 5
    passes = copy.deepcopy(target.model)(ids, output_hidden_states=True)  # it leaves hooks
    states = {layer: passes.hidden_states[layer + 1] for layer in range(7)}
    states |= {
        layer: passes.hidden_states[-1] for layer in heads.captured_layers if layer not in states
    }
    batch = HeadBatch(ids, torch.ones_like(ids, dtype=torch.bool), states)
    found = []
    for made in (heads.eval(), merged):
        made.borrow(target.model)
        torch.manual_seed(0)
        depths = sorted(made.loss_weights(0.0))
        found.append([x.states for x in made.predictions(batch, depths)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)

    save_adapter(
        tmp_path / "apart", trained, weights, tmp_path / "base", target=target, provenance={}
    )
    save_heads(tmp_path / "merged", merged, target=target, provenance={})
    write_merged(tmp_path / "apart", tmp_path / "later")
    ours, theirs = (load_file(tmp_path / x / "heads.safetensors") for x in ("later", "merged"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    base, apart, whole = (
        drafts_of(open_drafter(str(tmp_path / x), target), target)
        for x in ("base", "apart", "merged")
    )
    assert apart == whole != base


class ReadsAWeight(torch.nn.Module):
    """A part of a model that multiplies by a layer's weight, and does not call the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down_proj(x @ self.up_proj.weight.T)
        return hidden


@pytest.mark.parametrize("is_called", [True, False])
def test_merging_is_refused_where_a_weight_is_read_without_its_layer(is_called: bool) -> None:
    """Such a part of a model does not see the adapter in training, and sees it merged."""
    model = copy.deepcopy(tiny_target("llama").model)
    if not is_called:
        model.get_submodule("model.layers.0.mlp").__class__ = ReadsAWeight
    trained = Trainable(model, lora=LoraConfig(r=2, targets=["up_proj"]))
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "lora_B" in part:
                parameter.add_(0.3)
    if is_called:
        plain, _ = trained.merged_model(trained.weights())
        ids = torch.arange(5, 13)[None]
        assert torch.allclose(plain(ids).logits, model.eval()(ids).logits, atol=1e-4)
        return
    with pytest.raises(UserError, match="merged, it computes other numbers than in training"):
        trained.merged_model(trained.weights())
