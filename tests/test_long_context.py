"""Training on long texts: attention without T × T scores, and gradient checkpointing.

Shapes: B rows, T tokens, N heads, G key heads, D head size.
"""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decode.base.errors import UserError
from decode.model.loading import Target
from distill.early_exit import EarlyExitTraining
from distill.losses import WeightedLoss
from heads.head_training import HeadTraining
from heads.heads_module import HeadBatch
from heads.layers import unrolled_attention
from heads.layers.unrolled_attention import merged_attention
from tests.contract import moved_heads
from tests.dense_attention import dense_attention
from tests.stages import LOOP, drafter_weights, make_stage, plan_stage, run_stage, stage_context
from tests.tiny import tiny_target
from tests.trained_heads import features_of
from train.loop.estimates import heads_bytes, loss_bytes

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

VOCAB = 304  # the last ids are no tokens, as DFlash needs
EAGLE3 = {"type": "eagle3", "steps": 4}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": EAGLE3,
    "p_eagle": {"type": "p_eagle", "tokens": 3, "layers": 2},
    "dflash": {"type": "dflash", "layers": 2, "block": 3, "taps": [0, 2]},
    "hydra_plus": {"type": "hydra_plus", "heads": 2, "layers": 2},
    "medusa": {"type": "medusa", "heads": 2},
}
STEPS = 3


@pytest.fixture(params=["kernel", "blocks"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel for CPUs, and the form for devices without one."""
    if request.param == "blocks":
        monkeypatch.setattr(unrolled_attention, "BLOCK", 7)
        monkeypatch.setattr(unrolled_attention, "_has_kernel", lambda *_: False)


def heads_of(kind: str) -> tuple[Any, Target]:
    target = tiny_target(vocab=VOCAB, layers=7)
    heads = moved_heads(KINDS[kind], target)
    heads.borrow(target.model, torch.float32)
    return heads, target


def ragged(rows: int = 3, length: int = 19) -> tuple[Tensor, Tensor]:
    """Ids, and which of them are trained on: rows end at different places, then padding."""
    ids = torch.randint(3, 299, (rows, length), generator=torch.Generator().manual_seed(1))
    lengths = length - 6 * torch.arange(rows)[:, None]
    inside = torch.arange(length) < lengths
    return ids * inside, inside & (torch.arange(length) > 1)


def drawn(
    heads: int, key_heads: int, dtype: torch.dtype, length: int = 23, scale: float = 1.0
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Queries, and the keys and values of `STEPS` steps, laid out as a layer computes them."""
    generator = torch.Generator().manual_seed(5)

    def one(count: int, scale: float = 1.0) -> Tensor:
        x = scale * torch.randn(2, length, count, 8, generator=generator, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2).requires_grad_()

    keys, values = ([one(key_heads) for _ in range(STEPS)] for _ in range(2))
    return one(heads, scale), keys, values


def gradients(attend: Any, queries: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """The outputs and all gradients. The loss weighs each number differently."""
    outputs = attend(queries, keys, values)
    weights = torch.arange(outputs.numel()).reshape(outputs.shape).double().sin().to(outputs.dtype)
    return [outputs, *torch.autograd.grad((outputs * weights).sum(), [queries, *keys, *values])]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-4) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 40.0])  # of the scores: with the second, they overflow exp
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merged_attention_is_that_of_all_scores(
    dtype: torch.dtype, heads: int, key_heads: int, scale: float, attention: None
) -> None:
    given = drawn(heads, key_heads, dtype, scale=scale)
    exact = drawn(heads, key_heads, torch.float64, scale=scale)
    for steps in range(2, STEPS + 1):
        ours = gradients(merged_attention, given[0], given[1][:steps], given[2][:steps])
        theirs = gradients(dense_attention, exact[0], exact[1][:steps], exact[2][:steps])
        assert_close(ours, theirs, 1e-4 if dtype == torch.float32 else 1e-12)


def test_in_bfloat16_it_is_as_close_as_its_inputs(attention: None) -> None:
    """The queries and keys of autocast may be float32."""
    exact = gradients(dense_attention, *drawn(6, 2, torch.float64))
    queries, keys, values = drawn(6, 2, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(merged_attention, queries.float(), [x.float() for x in keys], values)
    assert_close(ours, exact, 0.03)


def test_the_kernel_for_gpus_is_called_as_its_signature_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes only: on fake tensors of a CUDA device, which compute nothing."""
    monkeypatch.setattr(unrolled_attention, "_has_kernel", lambda *_: True)
    saved: list[Any] = []
    context = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
    with FakeTensorMode():
        queries = torch.empty(2, 6, 40, 8, dtype=torch.bfloat16, device="cuda")
        pairs = [torch.empty(2, 2, 40, 8, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
        function: Any = unrolled_attention._MergedAttention
        outputs = function.forward(context, None, queries, *pairs)
        context.saved_tensors = saved
        _, *results = function.backward(context, torch.empty_like(outputs))
        assert len(context.rest) == 6  # of the kernel, not of blocks
    assert [x.shape for x in results] == [queries.shape, *(x.shape for x in pairs)]
    assert {x.dtype for x in (outputs, *results)} == {torch.bfloat16}


# --- heads ----------------------------------------------------------------------------------------


def loss_and_gradients(
    kind: str, *, checkpointing: bool = False, chunk: int = 5
) -> tuple[Tensor, list[Tensor]]:
    heads, target = heads_of(kind)
    heads.gradient_checkpointing = checkpointing
    module = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), target.model, chunk=chunk)
    ids, mask = ragged()
    torch.manual_seed(0)  # P-EAGLE and DFlash draw places
    loss, _ = module(ids, mask, features_of(target.model, heads, ids), heads.loss_weights(0.0))
    return loss, list(torch.autograd.grad(loss, list(heads.parameters())))


def test_a_training_step_is_that_of_all_scores(
    attention: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, ours = loss_and_gradients("eagle3")
    monkeypatch.setattr(unrolled_attention, "merged_attention", dense_attention)
    expected, theirs = loss_and_gradients("eagle3")
    torch.testing.assert_close(loss, expected)
    assert_close(ours, theirs)


def test_padding_changes_no_row(attention: None) -> None:
    heads, target = heads_of("eagle3")
    ids, mask = ragged()
    features = features_of(target.model, heads, ids)
    depths = range(1, 5)

    def states(rows: slice, length: int) -> list[Tensor]:
        read = {layer: x[rows, :length] for layer, x in features.items()}
        batch = HeadBatch(ids[rows, :length], mask[rows, :length], read)
        return [prediction.states for prediction in heads.predictions(batch, depths)]

    together = states(slice(3), 19)
    alone = [states(slice(row, row + 1), int(mask[row].nonzero().max()) + 1) for row in range(3)]
    for depth, rows in enumerate(zip(*alone, strict=True)):
        torch.testing.assert_close(together[depth], torch.cat(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_no_gradient(kind: str) -> None:
    loss, ours = loss_and_gradients(kind)
    again, theirs = loss_and_gradients(kind, checkpointing=True)
    assert torch.equal(loss, again)
    assert_close(ours, theirs)


class _Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as they exist. Views of tensors
    from before are none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._known |= {x.untyped_storage() for x in tree_leaves(args) if isinstance(x, Tensor)}
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage not in self._known:
                self._known.add(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return results

    def _free(self, size: int) -> None:
        self.bytes -= size


def peak_bytes(length: int, *, checkpointing: bool = False) -> tuple[int, int]:
    """The most bytes of tensors during a training step on one text, without the weights and their
    gradients; and what the plan says."""
    heads, target = heads_of("eagle3")
    heads.gradient_checkpointing = checkpointing
    module = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), target.model, chunk=4)
    ids = torch.randint(3, 299, (1, length), generator=torch.Generator().manual_seed(1))
    features = features_of(target.model, heads, ids)
    torch.autograd.backward([p.sum() for p in heads.parameters()])  # makes the gradients
    with _Live() as live:
        loss, _ = module(ids, torch.ones_like(ids, dtype=torch.bool), features, {4: 1.0})
        loss.backward()
    return live.peak, heads_bytes(heads, target.model, length, 4, recompute=checkpointing)


def test_memory_grows_with_the_text_and_is_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all scores, a text of twice the length takes nearly four times as much."""
    for checkpointing in (False, True):
        short, planned = peak_bytes(256, checkpointing=checkpointing)
        long, _ = peak_bytes(512, checkpointing=checkpointing)
        assert long < 2.1 * short
        assert 0.7 * short < planned < 1.4 * short, checkpointing
    kept, _ = peak_bytes(256)
    assert short < 0.6 * kept
    monkeypatch.setattr(unrolled_attention, "merged_attention", dense_attention)
    assert peak_bytes(512)[0] > 3 * peak_bytes(256)[0]


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "hydra_plus"])
def test_all_depths_share_one_gradient_of_the_output_layer(kind: str, batches: int) -> None:
    """Of a vocabulary so large that this layer is most of the memory, as the plan says. The second
    batch of a step has its own gradient."""
    chunk, target = 1, tiny_target(vocab=20 * VOCAB, layers=7, hidden=128)
    heads = moved_heads(KINDS[kind] | {"output": "shared"}, target)
    heads.borrow(target.model, torch.float32)
    module = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), target.model, chunk=chunk)
    ids, mask = ragged()
    features = features_of(target.model, heads, ids)
    with _Live() as live:
        for _ in range(batches):
            module(ids, mask, features, heads.loss_weights(0.0))[0].backward()
    layer = sum(p.numel() for p in heads.output.parameters())
    planned = 4 * sum(p.numel() for p in heads.parameters())
    planned += loss_bytes(layer, 4, gradients=batches) + 2 * 4 * chunk * heads.rows
    planned += heads_bytes(heads, target.model, ids.numel(), 4)
    assert 0.6 * planned < live.peak < 1.2 * planned


def test_the_exits_of_a_model_share_one_gradient_of_its_output_layer() -> None:
    """Its embeddings have another one."""
    target = tiny_target(vocab=20 * VOCAB, layers=7, hidden=128)
    model = target.model.requires_grad_(True)
    module = EarlyExitTraining(model, WeightedLoss({"cross_entropy": 1.0}), chunk=1)
    ids, mask = ragged()
    with _Live() as live:
        module(ids, torch.ones_like(ids), mask, {2: 0.2, 4: 0.3, 6: 0.5})[0].backward()
    assert live.peak < 2.2 * 4 * model.num_parameters()


def test_a_plan_counts_the_masks_over_all_pairs_of_tokens(tmp_path: Path) -> None:
    """Two plans for the same batch, of rows of 64 and of 128 tokens. A text has 3.37 times its
    tokens with the mask tokens of 8 copies."""
    target = tiny_target(vocab=VOCAB + 8, layers=7)
    context = stage_context(tmp_path, target)
    copies = 1 + 0.7 + 0.7**2 + 0.7**3 + 0.7**4 + 3 * 0.2
    kept = copies - 0.2  # of 6 look-ahead tokens, and the text
    pard = {"drafter": {"layers": [0, 1]}, "parallel": {}}
    kinds: dict[str, tuple[str, dict[str, Any], float, int]] = {
        # The entries for each pair of the text's tokens, and how often attention keeps them.
        "pard": ("distill", pard, copies**2, 2),
        "again": ("distill", pard | {"gradient_checkpointing": True}, copies**2, 1),
        "p_eagle": ("heads", {"heads": {"type": "p_eagle", "tokens": 8}}, copies**2, 1),
        "pass": ("heads", {"heads": {"type": "pass", "tokens": 6}}, kept * (kept - 1), 7),
        "eagle3": ("heads", {"heads": {"type": "eagle3"}}, 0, 0),
    }
    for name, (kind, settings, pairs, masks) in kinds.items():
        short, long = (
            plan_stage(
                context,
                make_stage(
                    kind, name, **settings, max_length=length, loop={"tokens_per_batch": 1024}
                ),
            ).memory.activations
            for length in (64, 128)
        )
        expected = 1024 * 64 * pairs * (2 + 4 * masks)
        assert long - short == pytest.approx(expected, abs=1000), name


# --- the stage ------------------------------------------------------------------------------------


def test_a_stage_with_checkpointing_trains_the_same_drafter(tmp_path: Path) -> None:
    target = tiny_target(layers=7)
    context = stage_context(tmp_path, target)
    settings: dict[str, Any] = {
        "heads": EAGLE3,
        "losses": {"forward_kl": 1.0},
        "loop": LOOP | {"max_steps": 2},
    }
    plain = make_stage("heads", "plain", **settings)
    saving = make_stage("heads", "saving", **settings, gradient_checkpointing=True)
    assert plan_stage(context, saving).memory.total < plan_stage(context, plain).memory.total
    weights = drafter_weights(run_stage(context, plain))
    context.accelerator.free_memory()
    for name, weight in drafter_weights(run_stage(context, saving)).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [{"type": "eagle1"}, {"type": "blockwise"}])
def test_checkpointing_that_would_save_nothing_is_refused(
    heads: dict[str, Any], tmp_path: Path
) -> None:
    context = stage_context(tmp_path, tiny_target())
    stage = make_stage("heads", "one", heads=heads, gradient_checkpointing=True)
    with pytest.raises(UserError, match="heads train one only; leave it out"):
        plan_stage(context, stage)


def test_plain_causal_attention_is_the_first_step(attention: None) -> None:
    queries, keys, values = drawn(6, 2, torch.float32)
    unrolled = unrolled_attention.UnrolledAttention()
    first = unrolled.at(1)(queries, keys[0], values[0])
    weights = torch.randn(first.shape)
    inputs = [queries, keys[0], values[0]]
    expected = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    ours, theirs = (
        [x, *torch.autograd.grad((x * weights).sum(), inputs)] for x in (first, expected)
    )
    assert_close(ours, theirs)
    # A step that runs again sees the first runs of the others, and itself as it is now.
    unrolled.at(2)(queries, keys[1], values[1])
    again = unrolled.at(2)(queries, keys[2], values[2])
    expected = merged_attention(queries, [keys[0], keys[2]], [values[0], values[2]])
    assert torch.equal(again, expected)


# --- the benchmark --------------------------------------------------------------------------------
