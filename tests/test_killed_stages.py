"""A training that is killed and begun again ends with the weights of one that is not: one suite for
the stages that train. Each kind of heads is in `test_heads_contract`; stages that serve, cache or
write text have other things to lose, and kills of their own."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.stages import (
    DRAFTER,
    LOOP,
    drafter_weights,
    examples,
    make_stage,
    run_killed,
    run_stage,
    stage_context,
)
from tests.tiny import VOCAB, shortened, tiny_target
from tests.training import assert_near

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's affair
]
ADAPTER = {"r": 4, "alpha": 8.0, "dropout": 0.2}
OPTIMIZER = {"optimizer": {"lr": 1e-2, "warmup_steps": 2}}
# What each has beside the weights of a module: numbers that are drawn, a ramp.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pard": ("distill", DRAFTER | {"parallel": {"tokens": 4, "keep": 0.7}}),
    "layer_skip": (
        "layer_skip",
        {"exit_layer": 2, "layer_dropout": 0.5, "loop": LOOP} | OPTIMIZER,
    ),
    "joint": (
        "heads",
        {
            "heads": {"type": "medusa", "heads": 2},
            "backbone": {"lora": ADAPTER, "ramp": 0.7, "losses": {"forward_kl": 1.0}},
            "loop": LOOP,
        }
        | OPTIMIZER,
    ),
}


def weights(outcome: Any) -> dict[str, Any]:
    """Of the drafter and of the new target, as far as a stage makes them."""
    found = {} if outcome.drafter is None else drafter_weights(outcome)
    return found | (load_file(outcome.target / "model.safetensors") if outcome.target else {})


@pytest.mark.parametrize("name", shortened(KINDS, ["layer_skip", "joint"]))
def test_a_killed_training_ends_with_the_same_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = KINDS[name]
    stage = make_stage(kind, name, **settings)
    ended = []
    for place in ("whole", "killed"):
        context = stage_context(tmp_path / place, tiny_target(vocab=VOCAB + 8, layers=4))
        context.corpus.examples["test"] = examples("test", 3)
        once = run_stage(context, stage) if place == "whole" else None
        ended.append(once or run_killed(context, stage, monkeypatch, 4))
    whole, killed = map(weights, ended)
    assert len(whole) > 2
    assert_near(killed, whole)
