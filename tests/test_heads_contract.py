"""What every kind of heads promises, checked for each registered kind, in chains and in trees.

A new kind is under this contract when its options are in `tests/contract.py`. Without them the
tests fail with its name.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.cascade import HorizontalCascade
from decode.drafters.several.combined import CompositeDrafter
from decode.model.forward import few_rows
from decode.model.forward.packed_alone import keep_packed_alone
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.rules import RULES
from decode.shapes import SHAPES
from heads.heads_directory import save_heads
from heads.kinds import HEADS
from tests.contract import (
    HEAD_OPTIONS,
    check_greedy_texts_survive_everything,
    check_law,
    check_rows_are_their_own,
    check_stored,
    heads_drafter,
    moved_heads,
    options_for_tokens,
    static,
)
from tests.lossless import LONGER, decode_runs
from tests.stages import (
    LOOP,
    drafter_weights,
    make_stage,
    plan_stage,
    run_killed,
    run_stage,
    stage_context,
)
from tests.tiny import VOCAB, shortened, tiny_target
from tests.trained_heads import check_drafts_are_trained
from tests.training import assert_equal

kinds = pytest.mark.parametrize("kind", HEAD_OPTIONS)
# Those that draft through the target, and those that select among candidates.
DRAFT_OTHERWISE = ("pass", "kangaroo", "dflash2")
# One of each way to train: with noise, on drawn depths, on drawn anchors, through the target.
# `test_what_is_trained_is_what_is_drafted` has all kinds.
TRAINED = ("eagle1", "p_eagle", "dspark", "kangaroo")


@pytest.fixture(autouse=True)
def two_layers_for_three(request: pytest.FixtureRequest) -> Iterator[None]:
    """The targets of the contract have two layers, which stand for EAGLE-3's three."""
    with pytest.MonkeyPatch.context() as patch:
        if not {"stored", "stage"} & set(request.node.name.split("_")):
            patch.setattr("heads.layers.target_layers.auxiliary_layers", lambda layers: (0, 0, 1))
        yield


def test_every_kind_has_options() -> None:
    """Without them, nothing below tests it."""
    lacking = [name for name in HEADS if name not in HEAD_OPTIONS]
    assert not lacking, f"tests/contract.py lacks options of {lacking}: add them to HEAD_OPTIONS"


@pytest.mark.parametrize("kind", shortened(HEAD_OPTIONS, ("medusa", "dflash2", *TRAINED)))
def test_rows_are_their_own(kind: str) -> None:
    check_rows_are_their_own(lambda: heads_drafter(kind, static()))


@kinds
def test_greedy_texts_survive_everything(kind: str) -> None:
    """With trees whose structure depends on the text."""
    shape = SHAPES["dynamic"](width=2, nodes=6)
    check_greedy_texts_survive_everything(lambda: heads_drafter(kind, shape))


@pytest.mark.parametrize("kind", shortened(HEAD_OPTIONS, TRAINED))
def test_rounds_without_a_draft_are_made_up_for(kind: str) -> None:
    """Where another drafter drafts first, hidden states are read and steps taken later."""
    check_greedy_texts_survive_everything(
        lambda: CompositeDrafter([NgramDrafter(2, 3), heads_drafter(kind)])
    )


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", [kind for kind in HEAD_OPTIONS if kind not in DRAFT_OTHERWISE])
def test_what_is_trained_is_what_is_drafted(kind: str, tree: bool) -> None:
    target = tiny_target(vocab=VOCAB + 4, layers=7)
    heads = moved_heads(options_for_tokens(kind), target, torch.arange(0, VOCAB, 2))
    heads.borrow(target.model)
    check_drafts_are_trained(heads, target.model, tree=tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule", "draw"),
    [
        # One kind for each way to draft. `eagle1`, `dflash` and `dspark` have laws further below.
        ("eagle3", "traversal", "distinct"),
        ("pass", "block", None),
        ("dflash2", "multi_round", "distinct"),
        ("kangaroo", "traversal", "distinct"),
        *(
            pytest.param(*law, marks=pytest.mark.thorough)
            for law in (
                ("hydra_plus", "spectr", "independent"),
                ("medusa", "block", None),
                ("p_eagle", "block", None),
                ("xpress", "traversal", "distinct"),
                ("domino", "traversal", "distinct"),
                ("medusa, then lookup", "block", None),
                ("hydra", "multi_round", "distinct"),
                ("blockwise", "traversal", "distinct"),
                ("eagle1", "multi_round", "distinct"),
                ("pass", "traversal", "distinct"),
                ("dflash", "block", None),
                ("dspark", "speculative", None),
                ("mtp", "block", None),
            )
        ),
    ],
)
def test_ragged_texts_of_many_rounds(kind: str, rule: str, draw: Any) -> None:
    shape = None if draw is None else static(draw)
    if kind == "medusa, then lookup":
        first = heads_drafter("medusa")
        drafter: Drafter = HorizontalCascade(first, NgramDrafter(1, 1), depth=1)
    else:
        drafter = heads_drafter(kind, shape)
    check_law(drafter, rule, LONGER)


@pytest.mark.slow
def test_a_stop_by_the_confidence_head_keeps_the_distribution() -> None:
    """The estimates differ from token to token, and drafts end at all lengths."""
    heads: Any = heads_drafter("dspark")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        heads.heads.confidence_head.proj.weight.normal_(generator=generator)
        heads.heads.confidence_head.proj.bias.fill_(1.0)
    policy = "reach:max_depth=3,threshold=0.4"
    found, runs = decode_runs(heads, RULES["speculative"](), rows=6_000, case=LONGER, policy=policy)
    assert found.passes, found
    assert found.df > 60
    drafted = np.concatenate([step.drafted for step in runs[0].steps])
    assert (np.bincount(drafted, minlength=4)[1:] / len(drafted) > 0.05).all()


PROMPTS = [[5, 17, 250, 9, 42], [7], [11, 12, 13]]


def saved_and_opened(kind: str, place: Path) -> tuple[Target, Any, Any]:
    """A target, heads for it, and the drafter that is opened from their directory."""
    target = tiny_target(vocab=VOCAB + 4, layers=7)  # the last ids are no tokens, as masks need
    heads = moved_heads(options_for_tokens(kind), target, torch.arange(0, VOCAB, 2))
    save_heads(place, heads, target=target, provenance={})
    return target, heads, open_drafter(str(place), target)


@pytest.mark.parametrize("kind", HEAD_OPTIONS)
def test_stored_heads_come_back(kind: str, tmp_path: Path) -> None:
    """With all weights and the draft vocabulary."""
    target, heads, stored = saved_and_opened(kind, tmp_path / "heads")
    assert_equal(dict(stored.heads.state_dict()), dict(heads.state_dict()))
    assert stored.heads.vocabulary is not None
    heads.borrow(target.model)
    own: Any = DRAFTERS[kind]
    check_stored(own(heads.eval(), target.vocab_size), stored, target.model, PROMPTS)


# One of each source of states: the last layer, several layers, the target's own layers.
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "kangaroo"])
def test_stored_heads_fit_other_forms_of_their_target(kind: str, tmp_path: Path) -> None:
    """In another dtype, and with its packed weights only."""
    target, _, stored = saved_and_opened(kind, tmp_path / "heads")
    halved = copy.copy(target)
    halved.model = copy.deepcopy(target.model).bfloat16()
    lower: Any = open_drafter(str(tmp_path / "heads"), halved)
    assert {parameter.dtype for parameter in lower.heads.parameters()} == {torch.bfloat16}
    alone = copy.copy(target)
    alone.model = copy.deepcopy(target.model)
    assert keep_packed_alone(alone.model) or few_rows.library(torch.float32) is None
    check_stored(stored, open_drafter(str(tmp_path / "heads"), alone), alone.model, PROMPTS)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("kind", shortened(HEAD_OPTIONS, TRAINED))
def test_a_stage_trains_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the target as it is. A killed stage ends with the same weights, because what is
    drawn in a training, such as noise and anchors, is drawn again where it was."""
    target = tiny_target(vocab=VOCAB + 4, layers=7)
    before = {name: x.clone() for name, x in target.model.state_dict().items()}
    context = stage_context(tmp_path, target)
    options = options_for_tokens(kind)
    if "block" in options:
        options["anchors"] = 2  # few, so that the same ones must be drawn again
    smoothed = {"place_smoothing": 0.5} if "block" in options else {}
    settings: dict[str, Any] = {
        "heads": options,
        "losses": {"forward_kl": 1.0, "total_variation": 1.0},
        "loop": LOOP | {"epochs": 4 if kind == "pass" else 2},  # it learns slowly
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "draft_vocabulary": 150,
        **smoothed,
        "dev": {"every": 8, "samples": 3, "decode_prompts": 2, "gamma": 3, "max_new_tokens": 8},
    }
    stage = make_stage("heads", "whole", **settings)
    plan, whole = plan_stage(context, stage), run_stage(context, stage)
    assert_equal(dict(target.model.state_dict()), before)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    drafter: Any = open_drafter(str(whole.drafter), target)
    own = sum(parameter.numel() for parameter in drafter.heads.parameters())
    assert plan.trained_parameters == whole.summary["trained_parameters"] == own
    assert drafter.heads.rows == whole.summary["draft_vocabulary"] == 150
    losses = [entry["loss"] for entry in whole.summary["training"]["history"]]
    assert sum(losses[-4:]) < sum(losses[:4])  # of an epoch
    last = whole.summary["training"]["dev"][-1]
    depths = drafter.heads.loss_weights(0.0)
    assert {f"head{depth}/top1" for depth in depths} | {"acceptance_rate"} <= set(last)
    assert last["tokens_per_step"] >= 1
    again = run_killed(context, make_stage("heads", "killed", **settings), monkeypatch, 4)
    assert_equal(drafter_weights(again), drafter_weights(whole))
