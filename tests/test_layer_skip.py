"""LayerSkip: the losses after early layers, layers left out, and the new target with its drafter.

Shapes: M layers, B rows, T tokens.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.skip import SkipDrafter
from decode.loop.decoding import Decoder
from decode.model.forward.sublayers import Sublayers
from decode.model.loading import load_target
from decode.opening.directory import describe_drafter, open_drafter
from distill.early_exit import EarlyExitTraining, dropout_rates, exit_weights, final_norm
from distill.losses import WeightedLoss
from distill.teacher.live_teacher import LiveTeacher
from tests.stages import (
    LOOP,
    examples,
    make_stage,
    plan_stage,
    run_stage,
    stage_context,
)
from tests.tiny import shortened, tiny_model, tiny_target
from tests.training import assert_equal

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's affair
]

LAYERS = 4
TARGET = tiny_target(layers=LAYERS)
PROMPTS = [[5, 17, 250, 9, 42], [7, 8], [30] * 9]
STAGE: dict[str, Any] = {
    "exit_layer": 2,
    "rotation": 1,
    "loop": LOOP | {"epochs": 8},
    "optimizer": {"lr": 5e-3, "warmup_steps": 2},
}


def context(directory: Path) -> Any:
    made = stage_context(directory, TARGET)
    made.corpus.examples["test"] = examples("test", 3)
    return made


def test_rates_and_weights_are_the_papers() -> None:
    assert dropout_rates(5, 0.2).tolist() == pytest.approx(
        [0.2 * (2 ** (layer / 4) - 1) for layer in range(5)]
    )
    early = {1: 0.5, 2: 1.5, 3: 3.0}  # e_s · (1, 1 + 2, 1 + 2 + 3); the last: 4 + e_s · (1 + 2 + 3)
    for step, counted in ((0, (3,)), (1, (1,)), (2, (2,)), (4, (1,))):
        expected = {layer: early[layer] for layer in counted} | {4: 7.0}
        found = exit_weights(5, 0.5, step=step, done=0.5, rotation=3)
        assert found == pytest.approx({k: e / sum(expected.values()) for k, e in expected.items()})
    numbers = [
        sorted(exit_weights(5, 0.5, step=0, done=done, rotation=None))
        for done in (0.0, 0.09, 0.1, 0.25, 1.0)
    ]
    assert numbers == [[4], [4], [3, 4], [2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("losses", [{"cross_entropy": 1.0}, {"forward_kl": 1.0}])
def test_the_loss_by_hand_with_layers_left_out(family: str, losses: Any) -> None:
    """Each row alone, through a model that has only the layers that the row runs. Gradients too."""
    model = tiny_model(family, layers=LAYERS)
    original = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter *= 1.1  # or there would be no divergence
    ids = torch.randint(3, 300, (3, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[0, 3:] = mask[1, 1:5] = mask[2, 6:] = True
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask}
    left_out = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 1], [1, 0, 1]], dtype=torch.bool)
    exits = {1: 0.2, 2: 0.3, 3: 0.5}
    module = EarlyExitTraining(model, WeightedLoss(losses), chunk=4)
    teacher = LiveTeacher(original).signal(**batch, ids=[])
    loss, sums = module(**batch, exits=exits, left_out=left_out, teacher=teacher)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(loss, parameters)

    name = "model.layers" if family == "llama" else "transformer.h"
    layers, norm = model.get_submodule(name), final_norm(model)
    told = original(ids).logits.log_softmax(-1)
    expected = torch.zeros(())
    for layer, weight in exits.items():
        for row in range(3):
            kept = [i for i in range(layer + 1) if not left_out[i, row]]
            short = copy.copy(model.base_model)
            short._modules = dict(model.base_model._modules)
            short._modules[name.rpartition(".")[2]] = torch.nn.ModuleList(layers[i] for i in kept)
            short.config = copy.copy(model.config)
            short.config.num_hidden_layers = len(kept)
            logits = model.lm_head(short(ids[row : row + 1], use_cache=False)[0])[0]
            q = logits.log_softmax(-1)[:-1][mask[row, 1:]]
            if "forward_kl" in losses:
                p = told[row, :-1][mask[row, 1:]]
                value = F.kl_div(q, p, log_target=True, reduction="sum")
            else:
                value = F.nll_loss(q, ids[row, 1:][mask[row, 1:]], reduction="sum")
            expected = expected + weight * value
    assert norm is model.base_model.get_submodule("norm" if family == "llama" else "ln_f")
    torch.testing.assert_close(loss.float(), expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    figures = module.figures(dict(zip(module.sums, sums.tolist(), strict=True)))
    (term,) = losses
    mixed = 0.5 * figures[f"last/{term}"] * int(mask.sum())
    assert 0 < mixed < loss.item()
    # All hooks are gone.
    assert torch.equal(model(ids).logits, tiny_model(family, layers=LAYERS)(ids).logits)


@pytest.mark.parametrize(
    "settings",
    shortened(
        [{}, {"lora": {"r": 4}, "losses": {"forward_kl": 1.0}}],
        [{"lora": {"r": 4}, "losses": {"forward_kl": 1.0}}],
    ),
)
def test_a_stage_makes_a_target_whose_first_layers_draft(tmp_path: Path, settings: Any) -> None:
    before = {name: x.clone() for name, x in TARGET.model.state_dict().items()}
    made, stage = context(tmp_path), make_stage("layer_skip", "skipping", **STAGE | settings)
    plan, outcome = plan_stage(made, stage), run_stage(made, stage)
    assert_equal(dict(TARGET.model.state_dict()), before)
    assert not any(p.requires_grad for p in TARGET.model.parameters())
    assert plan.trained_parameters == outcome.summary["trained_parameters"]
    history = outcome.summary["training"]["history"]
    (term,) = settings.get("losses", ["cross_entropy"])
    assert history[-1][f"early/{term}"] < 0.98 * history[0][f"early/{term}"]

    new = load_target(str(outcome.target), dtype="float32", device="cpu")
    drift = outcome.summary["drift"]
    assert drift["kl"] > 0
    assert describe_drafter(outcome.drafter)["provenance"]["drift"] == drift  # type: ignore[arg-type]
    drafter: Any = open_drafter(str(outcome.drafter), new)
    assert drafter.skipped == Sublayers.of("2-3", "2-3")
    with pytest.raises(UserError, match="has other weights than the target in use"):
        open_drafter(str(outcome.drafter), TARGET)
    plain = Decoder(new.model, DRAFTERS["none"]()).decode(PROMPTS, 20)
    named: Any = open_drafter("skip:exit=2", new)
    rates = []
    for other in (drafter, named, SkipDrafter("2-3", "2-3")):
        run = Decoder(new.model, other, gamma=3).decode(PROMPTS, 20)
        assert run.outputs == plain.outputs
        rates.append(run.counts.acceptance_rate)
    assert len(set(rates)) == 1


def test_what_cannot_work_is_refused_before_the_training(tmp_path: Path) -> None:
    made = context(tmp_path)
    with pytest.raises(UserError, match="runs the first 4 layers, but the target has 4"):
        plan_stage(made, make_stage("layer_skip", "s", exit_layer=4))
    answers = make_stage("generate", "answers")
    with pytest.raises(UserError, match="held_out answers answered the train split"):
        make_stage("layer_skip", "s", answers, held_out="answers")
    with pytest.raises(UserError, match="no loss reads the teacher"):
        make_stage("layer_skip", "s", teacher_temperature=2.0)
    with pytest.raises(UserError, match="tokens_per_pass cannot be set here"):
        make_stage("layer_skip", "s", tokens_per_pass=64)
