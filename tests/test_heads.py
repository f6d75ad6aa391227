"""Heads on a tiny target: what each learns from which token, and drafts from which state.

Shapes: B rows, T tokens, D heads, V vocabulary.
"""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.model.cache.cached_model import CachedLM
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from decode.opening.directory import open_drafter, save_drafter
from decode.shapes import SHAPES
from decode.shapes.structure import Structure
from distill.agreement import Bigrams, lookup_top1
from distill.choose_vocabulary import rows_of_tokens
from distill.losses import WeightedLoss
from distill.teacher.dev_features import dev_features
from distill.teacher.feature_sources import LiveFeatures
from heads.head_training import HeadTraining
from heads.heads_directory import new_heads, save_heads
from heads.heads_module import shift_left, trained_positions
from heads.options import HeadOptions
from tests.contract import check_stored, moved_heads
from tests.stages import (
    LOOP,
    make_stage,
    plan_stage,
    run_stage,
    stage_context,
)
from tests.tiny import VOCAB, plain_texts, tiny_target
from tests.training import assert_equal
from train.base.stage import StageInputs
from train.data.chat_tokens import prompt_tokens
from train.loop.trainer import Trainer
from train.run.config_checks import validate_config

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

MEDUSA = {"type": "medusa", "heads": 3}
BLOCKWISE = {"type": "blockwise", "k": 4, "hidden": 24, "sub_loss": "mean"}
KINDS: dict[str, dict[str, Any]] = {
    "medusa": MEDUSA,
    "medusa-deep-shared": MEDUSA | {"layers": 2, "output": "shared"},
    "medusa-target": MEDUSA | {"output": "target"},
    "medusa-low-rank": MEDUSA | {"output": "target", "output_rank": 8},
    "blockwise": BLOCKWISE,
    "blockwise-shared": BLOCKWISE | {"output": "shared"},
}
IDS = torch.arange(0, VOCAB, 2)


@functools.cache
def target() -> Target:
    return tiny_target()


def make(
    kind: str, ids: torch.Tensor | None = None, *, dtype: Any = torch.float32, moved: float = 0.0
) -> Any:
    """moved: how far the weights are from those of the start."""
    heads = moved_heads(KINDS[kind], target(), ids, moved)
    heads.borrow(target().model, dtype)
    return heads.to(dtype)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, attention and loss mask [4, 12]: one text ends early, one is learnt from its second
    token on, one has two answers, and one nothing to learn."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (4, 12), generator=g)
    attention = torch.ones_like(ids)
    attention[0, 8:] = 0
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[0, 5:8] = True
    mask[1, 1:] = True
    mask[2, 3:5] = mask[2, 8:11] = True
    return ids, attention, mask


def head_states(heads: Any, hidden: torch.Tensor, depth: int) -> torch.Tensor:
    """[n, H]: each kind's own formula, once more."""
    if heads.options.type == "medusa":
        for block in heads.blocks[depth - 1]:
            hidden = hidden + F.silu(F.linear(hidden, block.linear.weight, block.linear.bias))
        return hidden
    size = hidden.shape[-1]
    rows = slice((depth - 1) * size, depth * size)
    inner = F.relu(F.linear(hidden, heads.up.weight, heads.up.bias))
    return hidden + F.linear(inner, heads.down.weight[rows], heads.down.bias[rows])


# --- what is learnt -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "losses", "reduced"),
    [
        ("medusa", {"forward_kl": 0.5, "jsd": 2.0}, False),
        ("medusa-deep-shared", {"cross_entropy": 1.0}, True),
        ("medusa-low-rank", {"forward_kl": 0.5, "jsd": 2.0}, True),
        ("blockwise", {"cross_entropy": 1.0}, False),
        ("blockwise-shared", {"cross_entropy": 1.0}, True),
    ],
)
def test_the_loss_is_that_of_each_token_by_hand(kind: str, losses: Any, reduced: bool) -> None:
    """Head k at position t against the token at t + k + 1 and the target's distribution there, one
    token at a time; gradients too. float64, so that nothing hides behind rounding."""
    model = copy.deepcopy(target().model).double()
    heads = make(kind, IDS if reduced else None, dtype=torch.float64, moved=0.3)
    heads.borrow(model, torch.float64)
    terms = WeightedLoss(losses)
    module = HeadTraining(heads, terms, model, chunk=5)
    ids, attention, mask = batch()
    found = LiveFeatures(model, module.captured_layers).features(ids, attention, [])
    weights = heads.loss_weights(0.0)
    if kind == "medusa":
        assert weights == {1: 0.8, 2: 0.8**2, 3: 0.8**3}
    elif kind == "blockwise":
        assert weights == dict.fromkeys((1, 2, 3), 1 / 3)
    loss, sums = module(ids, mask, found, weights)
    ours = torch.autograd.grad(loss, list(heads.parameters()))
    figures = dict(zip(module.sums, sums.tolist(), strict=True))

    hidden = model.base_model(ids, attention_mask=attention).last_hidden_state
    logits = model(ids, attention_mask=attention).logits
    rows = rows_of_tokens(IDS, VOCAB) if reduced else torch.arange(VOCAB)
    expected = torch.zeros((), dtype=torch.float64)
    counts = dict.fromkeys((1, 2, 3), 0)
    right: dict[tuple[int, int], list[bool]] = {}
    for b, t in np.ndindex(*ids.shape):
        for k in (1, 2, 3):
            place = t + k + 1
            if place >= ids.shape[1] or not mask[b, place]:
                continue
            own = F.linear(head_states(heads, hidden[b, t], k), *heads.output.of(k))[None]
            p = logits[b, place - 1, IDS] if reduced else logits[b, place - 1]
            label = rows[ids[b, place]][None]
            log_p = p.log_softmax(-1)[None]
            log_q = own.log_softmax(-1)
            if "cross_entropy" in losses:
                value = F.cross_entropy(own, label, ignore_index=-100, reduction="sum")
            else:
                value = 0.5 * (log_p.exp() * (log_p - log_q)).sum()
                middle = (0.5 * log_p.exp() + 0.5 * log_q.exp()).log()
                for one in (log_p, log_q):
                    value = value + 2.0 * 0.5 * (one.exp() * (one - middle)).sum()
            expected = expected + weights[k] * value
            counts[k] += 1
            right.setdefault((b, t), []).append(
                bool(label >= 0) and int(own.argmax()) == int(label)
            )
    torch.testing.assert_close(loss, expected)
    theirs = torch.autograd.grad(expected, list(heads.parameters()))
    torch.testing.assert_close(ours, theirs)
    for k, count in counts.items():
        assert figures[f"head{k}/tokens"] == count
    # From the first learnt token on all heads have something to say but those past the end.
    assert counts[1] == 3 + 10 + 5
    assert counts[3] == 3 + 8 + 4


def test_figures_count_what_is_right_and_in_a_row() -> None:
    """A head that always says the same: nothing is left to chance."""
    heads = make("medusa")
    with torch.no_grad():
        for layer, token in zip(heads.output.layers, (7, 7, 9), strict=True):
            layer.weight.zero_()
            layer.weight[token] = 1.0
    module = HeadTraining(heads, WeightedLoss({"cross_entropy": 1.0}), target().model)
    ids = torch.tensor([[5, 5, 7, 7, 9, 7]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 0] = False
    features = {FINAL: torch.ones(1, 6, heads.hidden_size)}
    _, sums = module(ids, mask, features, heads.loss_weights(0.0))
    found = module.figures(dict(zip(module.sums, sums.tolist(), strict=True)))
    # t + 2 of t = 0 … 3 is 7, 7, 9, 7; t + 3 of t = 0 … 2 is 7, 9, 7; t + 4 of t = 0, 1 is 9, 7.
    assert found["head1/top1"] == 3 / 4
    assert found["head2/top1"] == 2 / 3
    assert found["head3/top1"] == 1 / 2
    # Ties with the second likeliest count for the token, as no other is likelier but one.
    assert found["head1/top5"] == 1.0
    # In a row: three at t = 0, one each at t = 1 and t = 3, none at t = 2.
    assert found["tokens_per_step"] == 1 + (3 + 1 + 0 + 1) / 4


@pytest.mark.parametrize(
    ("kind", "reduced"),
    [("medusa", True), ("medusa-target", False), ("blockwise", False), ("blockwise-shared", True)],
)
def test_at_the_start_every_head_is_the_target(kind: str, reduced: bool) -> None:
    """So the loss there is the cross-entropy of the target's own next-token distribution."""
    heads = make(kind, IDS if reduced else None)
    ids, attention, mask = batch()
    model = target().model
    hidden = model.base_model(ids, attention_mask=attention).last_hidden_state
    logits = model(ids, attention_mask=attention).logits
    if reduced:
        logits = logits[..., IDS]
    made = heads.output.logits(heads.states(hidden.flatten(0, 1), [1, 2, 3]))
    for head in range(3):
        # Not equal bit by bit only where a product is over other rows.
        torch.testing.assert_close(
            made[:, head].softmax(-1), logits.flatten(0, 1).softmax(-1), rtol=1e-5, atol=1e-7
        )
    module = HeadTraining(heads, WeightedLoss({"cross_entropy": 1.0}), model)
    features = LiveFeatures(model, module.captured_layers).features(ids, attention, [])
    for k in (1, 2, 3):
        loss, _ = module(ids, mask, features, {k: 1.0})
        places = trained_positions(mask, k)
        labels = shift_left(ids, k + 1)[places]
        if reduced:
            labels = rows_of_tokens(IDS, VOCAB)[labels]
        theory = F.cross_entropy(logits[places], labels, reduction="sum", ignore_index=-100)
        assert loss.item() == pytest.approx(theory.item(), rel=1e-5)


def test_a_random_sub_loss_trains_one_head_and_all_in_turn() -> None:
    heads = moved_heads(BLOCKWISE | {"sub_loss": "random"}, target(), by=0.3)
    heads.borrow(target().model)
    assert heads.depth == 3  # of a block of 4, whose first is the target itself
    assert [heads.loss_weights(u) for u in (0.0, 0.32, 0.34, 0.67, 0.999)] == [
        {1: 1.0},
        {1: 1.0},
        {2: 1.0},
        {3: 1.0},
        {3: 1.0},
    ]
    module = HeadTraining(heads, WeightedLoss({"cross_entropy": 1.0}), target().model)
    ids, attention, mask = batch()
    features = LiveFeatures(target().model, module.captured_layers).features(ids, attention, [])
    loss, sums = module(ids, mask, features, heads.loss_weights(0.5))
    loss.backward()
    moved_rows = heads.down.weight.grad.unflatten(0, (3, -1)).abs().amax((1, 2)) > 0
    assert moved_rows.tolist() == [False, True, False]
    found = module.figures(dict(zip(module.sums, sums.tolist(), strict=True)))
    assert {name.partition("/")[0] for name in found} == {"head2"}


def test_remembered_features_are_those_seen() -> None:
    ids, attention, _ = batch()
    captured_layers = (0, FINAL)
    source = dev_features(target().model, captured_layers)
    first = source.features(ids, attention, ["a", "b", "c", "d"])
    rows = [2, 0]
    again = source.features(ids[rows], attention[rows], ["c", "a"])
    for layer in captured_layers:
        for row, sample in enumerate(rows):
            length = int(attention[sample].sum())
            assert torch.equal(again[layer][row, :length], first[layer][sample, :length])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target().model.base_model, "forward", None)
        source.features(ids[rows], attention[rows], ["c", "a"])


def test_bigrams_are_counted_on_learnt_tokens() -> None:
    table = Bigrams(
        [([1, 2, 1, 3, 1, 3], [False, True, True, True, True, True]), ([1, 2], [True] * 2)]
    )
    # After 1: 2, 3, 3 and 2 again; the lower id wins a tie. After 2 and 3: 1.
    assert (
        table.top1([([1, 2, 1, 3, 1, 9, 5], [False, True, True, True, True, True, True])]) == 3 / 6
    )
    assert table.top1([]) == 0.0


def test_lookup_guesses_what_followed_the_same_tokens_before() -> None:
    learnt = [False, False, True, True, True, True]
    # After 1 2: nothing known; 1 again: 2 followed it; 1 2: 1; then 1 2 1, followed by 9.
    assert lookup_top1([([1, 2, 1, 2, 1, 9], learnt)]) == 2 / 4
    assert lookup_top1([]) == 0.0


# --- what is drafted ------------------------------------------------------------------------------


PROMPTS = [[5, 17, 250, 9, 42], [7], [11, 12, 13], [40, 41, 42, 43, 44, 45, 46, 47]]
NEW = 24


def test_the_first_token_of_a_block_is_the_targets_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """p₁ is the base model: whatever the heads draft, each block begins with the target's token,
    which is never drafted; and as they start as p₁ itself, at first they draft it once more. One
    pass judges a block and yields the next (1811.03115, section 4)."""
    # The first decode of a target has passes that try it.
    plain = plain_texts(target().model, PROMPTS, NEW)
    passes, one_pass = [], CachedLM._feed
    monkeypatch.setattr(
        CachedLM, "_feed", lambda *args, **more: passes.append(1) or one_pass(*args, **more)
    )
    options = HeadOptions.of(BLOCKWISE)
    heads = new_heads(options, target(), None)
    assert heads.depth == options.k - 1  # type: ignore[attr-defined]
    heads.borrow(target().model)
    drafter: Any = DRAFTERS["blockwise"](heads, VOCAB)
    draft, drafted = drafter.draft, []

    def watched(contexts: Contexts, *args: Any) -> Any:
        made = draft(contexts, *args)
        ends = contexts.tokens[np.arange(len(contexts.lengths)), contexts.lengths - 1]
        drafted.append((ends, made.tokens, contexts.tokens.copy(), contexts.lengths.copy()))
        return made

    drafter.draft = watched
    run = Decoder(target().model, drafter, gamma=3).decode(PROMPTS, NEW)
    assert len(passes) == 1 + len(run.steps)
    assert run.outputs == plain
    for ends, tokens, texts, lengths in drafted:
        assert (tokens.numpy() == ends[:, None]).all()
        for row, length in enumerate(lengths):
            logits = target().model(torch.as_tensor(texts[row : row + 1, : length - 1])).logits
            assert int(logits[0, -1].argmax()) == ends[row]


def test_a_draft_is_no_deeper_than_there_are_heads() -> None:
    drafter = DRAFTERS["medusa"](make("medusa"), VOCAB)
    run = Decoder(target().model, drafter, gamma=7).decode(PROMPTS, NEW)
    assert max(int(step.drafted.max()) for step in run.steps) == 3
    with pytest.raises(UserError, match="the tree is 4 deep, but the heads draft 3 tokens"):
        drafter.with_shape(SHAPES["static"](widths=[1] * 4))


# --- directories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["medusa-target", "blockwise-shared"])
def test_what_is_borrowed_is_not_stored(kind: str, tmp_path: Path) -> None:
    heads = make(kind, IDS, moved=0.3)
    save_heads(tmp_path / "heads", heads, target=target(), provenance={})
    drafter: Any = open_drafter(str(tmp_path / "heads"), target())
    assert_equal(dict(drafter.heads.state_dict()), dict(heads.state_dict()))
    stored = load_file(tmp_path / "heads" / "heads.safetensors")
    has_output = heads.options.output != "target" or heads.options.output_rank is not None
    assert any(name.startswith("output.") for name in stored) == has_output
    own: Any = DRAFTERS[heads.options.type]
    check_stored(own(heads, VOCAB), drafter, target().model, PROMPTS)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden": 48}, "read hidden states of size 32, but the target tiny-llama has size 48"),
        ({"seed": 1}, "has other weights than the target in use"),
        ({"layers": 3}, "is another model"),
        ({"vocab": 310}, "has another vocabulary than the target"),
    ],
)
def test_heads_for_another_target_are_refused(
    other: dict[str, int], message: str, tmp_path: Path
) -> None:
    save_heads(tmp_path / "heads", make("medusa"), target=target(), provenance={})
    with pytest.raises(UserError, match=message):
        open_drafter(str(tmp_path / "heads"), tiny_target(**other))


def test_a_target_trained_a_little_is_another_one(tmp_path: Path) -> None:
    save_heads(tmp_path / "heads", make("medusa"), target=target(), provenance={})
    tuned = copy.copy(target())
    tuned.model = copy.deepcopy(target().model)
    with torch.no_grad():
        for parameter in tuned.model.model.layers[1].parameters():
            parameter *= 1.001
    with pytest.raises(UserError, match="its hidden states are different"):
        open_drafter(str(tmp_path / "heads"), tuned)


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    def write(directory: Path, **changed: Any) -> None:
        save_heads(directory, make("medusa"), target=target(), provenance={})
        stored = {file.name: file.read_bytes() for file in directory.iterdir()}
        config = json.loads(stored["config.json"]) | changed

        def fill(path: Path) -> None:
            (path / "heads.safetensors").write_bytes(stored["heads.safetensors"])
            (path / "config.json").write_text(json.dumps(config), "utf-8")

        save_drafter(directory, "medusa", fill, target=target(), provenance={})

    write(tmp_path / "four", options=MEDUSA | {"heads": 4})
    with pytest.raises(UserError, match=r"'heads.safetensors' does not hold these heads"):
        open_drafter(str(tmp_path / "four"), target())
    write(tmp_path / "none", options={})
    with pytest.raises(UserError, match="expected their type and its options"):
        open_drafter(str(tmp_path / "none"), target())
    write(tmp_path / "size", hidden_size="many")
    with pytest.raises(UserError, match=r"'config.json' does not describe heads"):
        open_drafter(str(tmp_path / "size"), target())


def test_a_kind_is_no_drafter() -> None:
    with pytest.raises(UserError, match="'medusa' is a kind of trained drafter"):
        open_drafter("medusa", target())


def test_more_heads_than_the_context_are_refused() -> None:
    with pytest.raises(UserError, match="255 heads draft beyond the target's context of 256"):
        new_heads(
            HeadOptions.of({"type": "medusa", "heads": 255, "output": "target"}), target(), None
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "medusae"}, r"is 'medusae'.*Did you mean \"medusa\""),
        ({"heads": 3}, r"heads.type. is missing; expected one of .*medusa"),
        ("medusa", r"Did you mean {type: medusa}"),
        ({"type": "medusa", "head": 3}, r"heads.head. is unknown.*Did you mean \"heads\""),
        ({"type": "blockwise", "k": 1}, "heads.k. is 1"),
        ({"type": "blockwise", "output": "own"}, "heads.output. is .own."),
        ({"type": "medusa", "decay": "much"}, "decay. is 'much'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(given: Any, message: str) -> None:
    config = {
        "name": "run",
        "target": {"model": "none"},
        "data": {"train": "a", "test": "b"},
        "stages": [{"name": "heads", "kind": "heads", "heads": given}],
    }
    with pytest.raises(UserError, match=message):
        validate_config(config, base_dir=Path())


# --- the stage ------------------------------------------------------------------------------------

STAGE = {"loop": LOOP, "optimizer": {"lr": 1e-2, "warmup_steps": 2}}


@pytest.fixture
def context(tmp_path: Path) -> StageInputs:
    return stage_context(tmp_path, target())


DEV = {"every": 2, "samples": 3, "decode_prompts": 3, "gamma": 3, "max_new_tokens": 12}


def test_the_last_figures_are_those_of_the_drafter_that_is_saved(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bigram table is counted on a part of a long text, before the training."""
    lengths: list[int] = []

    def counted(texts: Any) -> Bigrams:
        texts = list(texts)
        lengths.extend(len(tokens) for tokens, _ in texts)
        assert not list(context.directory.glob("*/checkpoints/*"))
        return Bigrams(texts)

    monkeypatch.setattr("train.stages.heads.Bigrams", counted)
    monkeypatch.setattr("train.stages.heads.BIGRAM_TOKENS", 100)
    settings = STAGE | {"dev": DEV, "loop": LOOP | {"epochs": 4}}
    stage = make_stage("heads", "heads", heads=MEDUSA, losses={"forward_kl": 1.0}, **settings)
    outcome = run_stage(context, stage)
    last = outcome.summary["training"]["dev"][-1]
    drafter: Any = open_drafter(str(outcome.drafter), target())
    prompts = [prompt_tokens(e, target().tokenizer) for e in context.corpus.examples["dev"][:2]]
    prompts.append(prompt_tokens(context.corpus.examples["dev"][3], target().tokenizer))
    decoder = Decoder(target().model, drafter, eos_token_ids=target().eos_token_ids, gamma=3)
    done = decoder.decode(prompts, 12)
    assert last["acceptance_rate"] == done.counts.acceptance_rate

    samples = context.corpus.samples("data", "dev")
    hits: dict[int, list[bool]] = {1: [], 2: [], 3: []}
    for sample in (samples[0], samples[1], samples[3]):
        ids = torch.tensor([sample.tokens])
        hidden = target().model.base_model(ids).last_hidden_state[0]
        logits = drafter.heads.output.logits(drafter.heads.states(hidden, [1, 2, 3]))
        for k, found in hits.items():
            for t in range(len(sample.tokens) - k - 1):
                if sample.mask[t + k + 1]:
                    found.append(int(logits[t, k - 1].argmax()) == sample.tokens[t + k + 1])
    for k, found in hits.items():
        assert last[f"head{k}/top1"] == pytest.approx(np.mean(found))
    assert outcome.summary["bigram_top1"] > 0
    assert 50 < sum(lengths) < 150


TREE = {"nodes": 5, "width": 4, "prompts": 4, "max_new_tokens": 16}


def test_a_tree_that_cannot_be_planned_is_refused_before_the_training(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_optimizer_step", None)
    stage = make_stage("heads", "heads", heads=MEDUSA, tree=TREE, **STAGE)
    long = dataclasses.replace(
        context.corpus.examples["dev"][0], messages=({"role": "user", "content": "sea " * 300},)
    )
    examples = context.corpus.examples["dev"]
    context.corpus.examples["dev"] = [*examples, long]
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens and the target"):
        run_stage(context, stage)
    context.corpus.examples["dev"] = examples
    # This one's positions are its own.
    alibi = stage_context(tmp_path / "alibi", tiny_target("bloom"))
    for refused in (plan_stage, run_stage):
        with pytest.raises(UserError, match="BloomForCausalLM cannot be decoded here"):
            refused(alibi, stage)
    monkeypatch.undo()
    # As chains its heads are trained like any others.
    outcome = run_stage(alibi, make_stage("heads", "chains", heads=MEDUSA, **STAGE))
    assert outcome.summary["tree"] is None


def test_what_was_trained_outlives_a_tree_that_fails(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage("heads", "heads", heads=MEDUSA, tree=TREE, **STAGE)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise UserError("the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("train.loop.head_tree.calibrate_tree", full)
        with pytest.raises(UserError, match=r"no tree .* disk is full\. The trained drafter is in"):
            run_stage(context, stage)
    path = context.directory / "heads" / "drafter"
    drafter: Any = open_drafter(str(path), target())
    assert not drafter.branches
    weights = load_file(path / "heads.safetensors")
    context.accelerator.free_memory()
    # Another start plans the tree, and trains nothing. What so few steps have taught is not enough
    # for a tree, so it is given one.
    monkeypatch.setattr(Trainer, "_optimizer_step", None)
    monkeypatch.setattr("train.stages.heads.calibrated_tree", lambda *args: Calibrated())
    outcome = run_stage(context, stage)
    again: Any = open_drafter(str(outcome.drafter), target())
    assert again.shape.structure.paths == [(0,), (1,), (0, 0)]
    assert outcome.summary["tree"]["paths"] == [(0,), (1,), (0, 0)]
    assert_equal(load_file(path / "heads.safetensors"), weights)


class Calibrated:
    """As much of a `TreeCalibration` as a stage reads."""

    structure = Structure([(0,), (1,), (0, 0)])

    def to_dict(self) -> dict[str, Any]:
        return {"nodes": 3}


def test_a_stage_refuses_what_it_cannot_do(context: Any) -> None:
    with pytest.raises(UserError, match="no earlier stage 'answers'"):
        make_stage("heads", "heads", heads=MEDUSA, text="answers")
    with pytest.raises(UserError, match="no loss reads the teacher"):
        make_stage("heads", "heads", heads=MEDUSA, teacher_temperature=2.0)
    with pytest.raises(UserError, match="draft_vocabulary is 300"):
        plan_stage(context, make_stage("heads", "heads", heads=MEDUSA, draft_vocabulary=300))
    one_place = make_stage("heads", "heads", heads={"type": "eagle1"}, place_smoothing=0.5)
    with pytest.raises(UserError, match="a batch trains one place of these eagle1 heads"):
        plan_stage(context, one_place)
    del context.corpus.examples["dev"]
    with pytest.raises(UserError, match="calibrates a tree, but data has no dev split"):
        run_stage(context, make_stage("heads", "heads", heads=MEDUSA, tree={}))
    with pytest.raises(UserError, match="has dev figures, but data has no dev split"):
        run_stage(context, make_stage("heads", "other", heads=MEDUSA, dev={}))
