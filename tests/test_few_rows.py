"""Products and whole layers in C++ for few rows: against float64, and against the eager forward."""

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.drafters.sparse import WatchedLM
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.slots import Slots
from decode.model.forward import few_rows
from decode.model.forward.attention_mask import AttentionMask, SlotAttention
from decode.model.forward.few_rows_layers import CHUNK, FewRowsLayer, FewRowsPass
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.lean_parts import PackedLinear, multiply
from decode.model.forward.packed_alone import keep_packed_alone
from decode.model.forward.prepare_model import prepare, refresh_packed
from decode.model.forward.quantised_rows import NAMES, unpacked
from decode.model.forward.weight_bytes import MOST, use_bytes
from decode.model.hidden_states import FINAL
from decode.model.identity import require_same_weights, sample_weights, sampled_weights_sha256
from heads.layers.llama_layer import DraftLayer, Rotary
from tests.export import needs_few_rows
from tests.tiny import VOCAB, tiny_model
from train.measure.machine import describe_kernels


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = getattr(torch, request.param)
    needs_few_rows(found)
    return found


SETTINGS = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=32
)
STARTS = np.array([7, 3])
# Each has layers that differ from llama's: biases, norms of heads, windows, one gate_up, layers
# without rotary positions.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 5},
    "phi3": {},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": False},
}


def linear(out: int, size: int, dtype: torch.dtype, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(size, out, bias=bias)
    return layer.to(dtype).requires_grad_(False)


def test_what_a_machine_can_do_at_most_is_really_done(dtype: torch.dtype) -> None:
    """Each word is read once, and each operation that is counted adds an eighth to a sum."""
    found = few_rows.library(dtype)
    assert found is not None
    words = torch.ones(4096)
    assert found.read_once(words.data_ptr(), words.nbytes) == words.sum()
    before, after = torch.zeros(1), torch.zeros(1)
    assert found.multiply_only(0, before.data_ptr()) == 0
    operations = found.multiply_only(100, after.data_ptr())
    assert after - before == operations / 8 > 0


@pytest.mark.parametrize(
    ("mode", "size", "stored"),
    [
        ("none", 2, "whole"),
        ("none", 576, "bytes"),
        ("none", 62, "rounded"),
        ("swish", 62, "whole"),
        ("swish", 576, "rounded"),
        ("gelu", 576, "whole"),
        ("gelu", 2, "rounded"),
        ("add", 62, "bytes"),
        ("add", 576, "rounded"),
        ("mul", 2, "bytes"),
        ("mul", 62, "whole"),
    ],
)
def test_a_product_is_that_of_float64_and_a_row_has_its_bits_alone(
    mode: str, size: int, stored: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    layers = linear(160, size, dtype, bias=True), linear(32, size, dtype, bias=True)
    if stored == "rounded":
        for layer in layers:
            layer.weight.data = layer.weight.bfloat16().to(dtype)
    product = PackedLinear(*layers)
    assert product.has_blocks
    # Weights that are numbers of bfloat16 are kept as such.
    form = dtype_name(torch.bfloat16 if stored == "rounded" else dtype)
    assert NAMES[product.blocks[0].form].startswith(form)
    weights = [layer.weight.double() for layer in layers]
    if stored == "bytes":
        assert use_bytes(product) == 1
        assert product.blocks[0].data.nbytes == 192 * (size + 4)
        floats = [layer.weight.float() for layer in layers]
        steps = [x.abs().amax(1, keepdim=True) / MOST[dtype] for x in floats]
        weights = [(x / y).round() * y.double() for x, y in zip(floats, steps, strict=True)]
    x, other = (torch.randn(2, 15, n).to(dtype) for n in (size, 192))

    def of(rows: slice) -> torch.Tensor:
        if mode in ("add", "mul"):
            return product.combined(x[:, rows], other[:, rows], mode)
        return product(x[:, rows], mode, "tanh" if mode == "gelu" else "")

    pairs = zip(weights, layers, strict=True)
    exact = torch.cat([x.double() @ y.T + layer.bias.double() for y, layer in pairs], -1)
    then = {
        "none": lambda y: y,
        "swish": nn.functional.silu,
        "gelu": lambda y: nn.functional.gelu(y, approximate="tanh"),
        "add": lambda y: y + other.double(),
        "mul": lambda y: y * other.double(),
    }
    bound = 0.01 if dtype == torch.bfloat16 else 2e-6
    found = of(slice(None)).double()
    torch.testing.assert_close(found, then[mode](exact), rtol=bound, atol=bound)
    alone = torch.cat([of(slice(row, row + 1)) for row in range(15)], 1)
    assert all(torch.equal(of(slice(n)), alone[:, :n]) for n in range(1, 16))


@pytest.mark.parametrize(
    ("size", "others"), [(64, 0.0), (576, 0.0), (576, 0.02), (576, 1.0), (62, 0.0), (36, 0.0)]
)
def test_weights_in_12_bits_have_the_bits_of_plain_ones(
    size: int, others: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """others: the share of weights of any bits: subnormal, not finite, with all high bytes."""
    torch.manual_seed(size)
    words = torch.randn(96, size).bfloat16().view(torch.int16)
    any_bits = torch.randint(-(2**15), 2**15, words.shape).to(torch.int16)
    words = torch.where(torch.rand(words.shape) < others, any_bits, words)
    weight = words.view(torch.bfloat16).to(dtype)
    if dtype == torch.float32:
        # Nothing is equal to a NaN, so float32 weights with one stay as they are.
        strange = few_rows.packed_blocks(torch.full((32, 64), torch.nan))
        assert strange.form == few_rows.FORMS[dtype]
        weight = weight.nan_to_num(torch.inf, torch.inf, -torch.inf)
    blocks = few_rows.packed_blocks(weight)
    can = hasattr(few_rows.library(dtype), "pack_twelve_bits")
    packs = others < 1 and size * few_rows.NUMBERS[dtype].outputs % 128 == 0
    assert (blocks.form == few_rows.TWELVE) == (can and packs)
    found = unpacked(blocks, dtype).contiguous()
    assert torch.equal(found.view(torch.uint8), weight.view(torch.uint8))
    monkeypatch.setattr(few_rows, "_in_twelve_bits", lambda *_: None)
    plain = few_rows.packed_blocks(found)
    assert plain.form == few_rows.FORMS[torch.bfloat16]
    assert plain.data.nbytes == words.nbytes
    if packs and can and size == 576 and not others:
        assert blocks.data.nbytes < 1.51 / 2 * words.nbytes
    x = torch.randn(30, size).to(dtype)
    for rows in range(1, 31):
        pair = [multiply(x[:rows], some, None, None, "none") for some in (blocks, plain)]
        assert torch.equal(*[y.view(torch.uint8) for y in pair])


@pytest.mark.parametrize("stored", ["whole", "rounded", "bytes"])
@pytest.mark.parametrize("size", [96, 832])
def test_of_many_rows_each_has_its_bits_alone(size: int, stored: str, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    layer, x = linear(96, size, dtype), torch.randn(225, size).to(dtype)
    if stored == "rounded":
        layer.weight.data = layer.weight.bfloat16().to(dtype)
    product = PackedLinear(layer)
    if stored == "bytes":
        use_bytes(product)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (31, 32, 33, 47, 64, 65, 96, 97, 225):
        assert torch.equal(product(x[:rows]), alone[:rows])


def test_changed_weights_are_used_after_a_refresh(dtype: torch.dtype) -> None:
    layer, x = linear(64, 32, torch.bfloat16).to(dtype), torch.randn(3, 32).to(dtype)
    product = PackedLinear(layer)
    with torch.no_grad():
        layer.weight.add_(1.001)  # float32 weights are no numbers of bfloat16 any more
    refresh_packed(product)
    torch.testing.assert_close(product(x), layer(x))


def target(family: str, dtype: torch.dtype, **fields: Any) -> Any:
    shape = {"hidden": 64, "heads": 2, "kv_heads": 1, "layers": 4, "seed": 3}
    return tiny_model(family, **shape, **FAMILIES[family], **fields).to(dtype)


def passes(lm: CachedLM, tree: bool) -> list[torch.Tensor]:
    """Logits of passes over two texts of other lengths: tokens one by one, several, a tree."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 12), generator=generator)
    lm.reset(2, 32)
    with torch.inference_mode():
        lm.read(ids, np.zeros(2, dtype=np.int64), STARTS)
        found = [lm.forward(ids[:, 7:8], STARTS), lm.forward(ids[:, 8:12], STARTS + 1)]
        if tree:
            sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
            depth = (sees.sum(1) - 1)[None]
            found.append(
                lm.forward(ids[:, 8:12], STARTS + 1, depth_BN=depth, ancestors_BNM=sees[None])
            )
        lm.keep_rows(np.array([1]))
        found.append(lm.forward(ids[1:, 10:12], STARTS[1:] + 5))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_compute_what_the_eager_forward_does(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target(family, dtype)
    ours = CachedLM(model)
    forward = ours.forward_pass
    assert isinstance(forward, LeanForward)
    assert all(isinstance(layer.few_rows, FewRowsLayer) for layer in forward.layers)
    found = passes(ours, tree=True)
    for layer in forward.layers:
        monkeypatch.setattr(layer, "few_rows", None)
    eager = passes(ours, tree=True)
    exact = passes(CachedLM(copy.deepcopy(model).double()), tree=True)
    assert not any(torch.equal(x, y) for x, y in zip(found, eager, strict=True))

    def error(some: list[torch.Tensor]) -> float:
        return sum(float((x - y).norm()) for x, y in zip(some, exact, strict=True))

    assert error(found) < 1.5 * error(eager)


def drafted(layer: DraftLayer, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """A layer of heads over a prompt of three tokens, then one token, then two siblings after it.
    x: [1, 6, H], the states. y: [1, 6, R], the input of attention."""
    slots, rotary = Slots(1, 1, 8, torch.device("cpu")), Rotary(SETTINGS)
    siblings = torch.tensor([[[1, 0], [0, 1]]]).bool()
    found = []
    for begin, count, tree in ((0, 3, None), (3, 1, None), (4, 2, siblings)):
        start = np.array([begin])
        slots.place(start, count, None, None if tree is None else start)
        seen = slots.mask(torch.tensor([[begin]]), count, tree)
        attend = SlotAttention(slots.layers[0], AttentionMask(seen, x.dtype))
        part = slice(begin, begin + count)
        positions = torch.arange(begin, begin + count)[None]
        with torch.inference_mode():
            found.append(layer(x[:, part], y[:, part], rotary(positions, x), attend))
    return found


def test_a_layer_of_heads_gets_the_input_of_attention(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = DraftLayer(SETTINGS, 128).requires_grad_(False).to(dtype)
    x, y = torch.randn(1, 6, 64, dtype=dtype), torch.randn(1, 6, 128, dtype=dtype)
    exact = drafted(copy.deepcopy(layer).double(), x.double(), y.double())
    layer.make_lean()
    (lean,), ran = layer._lean, []
    run = FewRowsPass.run
    monkeypatch.setattr(
        FewRowsPass, "run", lambda *a, **b: (ran.append(a[2].shape[1]), run(*a, **b))[1]
    )
    found = drafted(layer, x, y)
    assert ran == [1, 2]  # a prompt has no mask
    monkeypatch.setattr(lean, "few_rows", None)
    eager = drafted(layer, x, y)
    few, other = (
        sum(float((a - b).norm()) for a, b in zip(some[1:], exact[1:], strict=True))
        for some in (found, eager)
    )
    assert few < 1.3 * other


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)  # float32 promises no bits
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_token_has_the_same_bits_in_any_pass(family: str, dtype: torch.dtype) -> None:
    assert not CachedLM(target(family, dtype)).keeps_bits  # its output layer has no whole blocks
    lm = CachedLM(target(family, dtype, vocab=320))
    assert lm.keeps_bits
    ids = torch.randint(3, VOCAB, (2, 30), generator=torch.Generator().manual_seed(1))

    def fed(*widths: int) -> torch.Tensor:
        lm.reset(2, 64)
        start, found = STARTS, []
        with torch.inference_mode():
            lm.read(ids, np.zeros(2, dtype=np.int64), STARTS)
            for width in widths:
                begin = int(start[0])
                found.append(lm.forward(ids[:, begin : begin + width], start))
                start = start + width
        return torch.cat(found, 1)

    alone = fed(*[1] * 16)
    assert all(torch.equal(fed(*widths), alone) for widths in [(16,), (3, 13), (1, 5, 10)])


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
def test_drafts_after_a_prompt_of_one_token_have_the_bits_of_plain_decoding(
    dtype: torch.dtype,
) -> None:
    """Such a pass begins at the first slot, as that over a prompt does."""
    lm = CachedLM(target("llama", dtype, vocab=320))

    def verified(*lengths: int, drafted: int) -> torch.Tensor:
        texts = [[5, 7, 9, 6][:length] for length in lengths]
        draft = Draft.chosen([[7, 9, 6][: drafted + 1 - length] for length in lengths])
        with torch.inference_mode():
            found = lm.verify(Contexts.of(texts, 8), draft)
        return found if isinstance(found, torch.Tensor) else found.padded()

    lm.reset(2, 16)
    alone = torch.cat([verified(n, n, drafted=n - 1) for n in (1, 2, 3, 4)], 1)
    lm.reset(2, 16)
    assert torch.equal(verified(1, 1, drafted=3), alone)
    lm.reset(1, 16)
    assert torch.equal(verified(1, drafted=3), alone[:1])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logits_that_are_made_with_the_layers_are_those_of_the_output_layer(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all tokens are; those of chosen columns go through the output layer."""
    lm = CachedLM(target(family, dtype, vocab=320), captured_layers=(0, 3, FINAL))
    forward: Any = lm.forward_pass
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    columns, called = np.array([[0, 1, 2, 3, 4]] * 2), []
    forward.output.register_forward_hook(lambda *_: called.append(1))
    found = []
    for some in (None, columns):
        lm.reset(2, 32)
        with torch.inference_mode():
            lm.read(ids, np.zeros(2, dtype=np.int64), STARTS)
            called.clear()
            found.append(lm.forward(ids[:, 7:12], STARTS, columns=some))
            found += lm.features.values()
        assert len(called) == (some is not None)
    # Logits and the states of three layers each.
    assert all(map(torch.equal, found[:4], found[4:]))


def test_a_short_text_does_not_read_the_slots_of_a_long_one(dtype: torch.dtype) -> None:
    lm = CachedLM(target("llama", dtype))
    ids = torch.randint(3, VOCAB, (2, 80), generator=torch.Generator().manual_seed(2))
    ends = np.array([70, 3])

    def fed(nothing: float) -> torch.Tensor:
        lm.reset(2, 128)
        with torch.inference_mode():
            lm.read(ids, np.zeros(2, dtype=np.int64), ends)
            for layer in lm.slots.layers:
                layer.keys[1, :, 6:] = layer.values[1, :, 6:] = nothing
            return lm.forward(ids[:, 70:73], ends)

    found = fed(torch.nan)
    assert found.isfinite().all()
    assert torch.equal(found, fed(0.0))


def test_a_value_that_is_not_finite_reaches_those_tokens_alone_that_see_it(
    dtype: torch.dtype,
) -> None:
    """Tokens of one text attend together, and the first sees a slot that the others do not."""
    lm = CachedLM(target("mistral", dtype))
    window = FAMILIES["mistral"]["sliding_window"]
    ids = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(2))

    def fed(value: float) -> torch.Tensor:
        lm.reset(1, 32)
        with torch.inference_mode():
            lm.read(ids, np.zeros(1, dtype=np.int64), np.array([20]))
            lm.slots.layers[-1].values[:, :, 20 - window + 1] = value
            return lm.forward(ids[:, 20:24], np.array([20]))[0]

    found = fed(torch.inf)
    assert not found[0].isfinite().any()
    assert torch.equal(found[1:], fed(0.0)[1:])


def test_in_a_long_text_a_token_has_the_bits_that_it_has_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are several chunks, and the other text ends in the first one."""
    lm = CachedLM(target("llama", dtype, max_positions=2048))
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(2))
    starts = np.array([CHUNK * 2 + 30, 20])

    def fed(rows: slice, first: int, end: int) -> torch.Tensor:
        with torch.inference_mode():
            start = starts[rows] + first
            return lm.forward(ids[rows, first:end], start, first=rows.start)

    lm.reset(2, 1600)
    fed(slice(0, 2), 0, 6)
    torch.manual_seed(0)
    with torch.inference_mode():
        for layer in lm.slots.layers:
            layer.keys.normal_()
            layer.values.normal_()
    together = fed(slice(0, 2), 0, 6)
    for row in (0, 1):
        alone = [fed(slice(row, row + 1), token, token + 1) for token in range(6)]
        assert torch.equal(torch.cat(alone, 1)[0], together[row])
    for layer in lm.forward_pass.layers:
        monkeypatch.setattr(layer, "few_rows", None)
    refresh_packed(lm.forward_pass)
    eager = fed(slice(0, 2), 0, 6)
    bound = 0.05 if dtype == torch.bfloat16 else 1e-4
    assert (eager - together).norm() < bound * eager.norm()
    assert not torch.equal(eager, together)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("start", [20, CHUNK - 3, CHUNK + 40])
def test_a_node_of_a_tree_has_the_bits_of_its_branch_as_a_chain(
    family: str, start: int, dtype: torch.dtype
) -> None:
    """Two texts with another tree each, also over the end of a chunk."""
    lm = CachedLM(target(family, dtype, vocab=320, max_positions=1024))
    nodes, starts = 9, np.array([start, start + 5])
    generator = torch.Generator().manual_seed(start)
    ids = torch.randint(3, VOCAB, (2, nodes), generator=generator)
    sees = torch.eye(nodes, dtype=torch.bool).repeat(2, 1, 1)
    for row, node in itertools.product(range(2), range(1, nodes)):
        sees[row, node] |= sees[row, int(torch.randint(node, (1,), generator=generator))]
    lm.reset(2, 1024)
    with torch.inference_mode():
        lm.forward(ids, starts)  # there is memory from now on
        for layer in lm.slots.layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)
        tree = lm.forward(ids, starts, depth_BN=sees.sum(2) - 1, ancestors_BNM=sees)
        for row, node in itertools.product(range(2), range(nodes)):
            branch = ids[row, sees[row, node]]
            for depth, token in enumerate(branch):
                alone = lm.forward(token[None, None], starts[row : row + 1] + depth, first=row)
            assert torch.equal(alone[0, 0], tree[row, node]), (row, node)


def test_layers_without_a_part_and_copies_of_layers(dtype: torch.dtype) -> None:
    lm = CachedLM(target("llama", dtype))
    forward: Any = lm.forward_pass
    lm.forward_pass = forward.changed([1, 3], [1, 2])
    few = passes(lm, tree=False)
    copied = copy.deepcopy(forward.layers)
    addresses = {layer.few_rows.address for layer in forward.layers}
    assert not addresses & {layer.few_rows.address for layer in copied}
    lm.forward_pass.layers = copied
    assert all(torch.equal(x, y) for x, y in zip(few, passes(lm, tree=False), strict=True))
    for layer in copied:
        layer.few_rows = None
    eager = passes(lm, tree=False)
    assert all((x - y).norm() < 0.02 * y.norm() for x, y in zip(few, eager, strict=True))


def test_a_watch_gets_the_queries_of_each_layer(dtype: torch.dtype) -> None:
    model = target("llama", dtype)
    lm = WatchedLM(model)
    seen: list[tuple[int, torch.Size, torch.Size]] = []

    def watch(layer: int, query: Any, key: Any, value: Any, scale: float) -> None:
        seen.append((layer, query.shape, key.shape))

    lm.watch = watch
    found = passes(lm, tree=False)
    assert seen[4:8] == [(n, (2, 2, 1, 32), (2, 1, 16, 32)) for n in range(4)]
    unwatched = passes(CachedLM(model), tree=False)
    assert all(torch.equal(a, b) for a, b in zip(found, unwatched, strict=True))


@pytest.mark.parametrize(("family", "rounded"), [("llama", True), ("llama", False), ("phi3", True)])
def test_a_model_can_keep_only_the_packed_weights(
    family: str, rounded: bool, dtype: torch.dtype
) -> None:
    """Everything computes what it did, to the bit, and no weight of a layer is there twice."""
    model = target(family, torch.bfloat16 if rounded else dtype).to(dtype).requires_grad_(False)
    ids = torch.arange(3, 15)[None]
    forward, logits, found = prepare(model), model(ids).logits, passes(CachedLM(model), tree=True)
    names = ("proj.weight", "qkv_proj.weight")
    layers = {k: v.clone() for k, v in model.named_parameters() if k.endswith(names)}
    who = sampled_weights_sha256(model), sample_weights(model)
    freed = keep_packed_alone(model)
    require_same_weights(who[1], "float32", model, "the target")
    assert sampled_weights_sha256(model) == who[0]
    who[1][40] *= 1.02 if dtype == torch.bfloat16 else 1.001
    with pytest.raises(UserError, match="has other weights than the target"):
        require_same_weights(who[1], "float32", model, "the target")
    assert freed == sum(x.nbytes for x in layers.values()) > 0
    assert keep_packed_alone(model) == 0
    assert prepare(model) is forward
    refresh_packed(forward)  # type: ignore[arg-type]
    for name, weight in layers.items():
        assert torch.equal(model.get_submodule(name.removesuffix(".weight")).weight, weight)
    assert torch.equal(model(ids).logits, logits)
    assert all(map(torch.equal, passes(CachedLM(model), tree=True), found))
    packed = [x for x in forward.layers.modules() if isinstance(x, PackedLinear)]  # type: ignore[union-attr]
    held = {x.untyped_storage().data_ptr() for x in model.base_model.layers.parameters()}
    norms = {x.data_ptr() for x in model.base_model.layers.parameters() if x.ndim == 1}
    assert held - norms <= {x.blocks[0].data.untyped_storage().data_ptr() for x in packed}


def test_a_model_without_packed_products_keeps_its_weights() -> None:
    model = tiny_model("gpt2")
    before = list(map(id, model.parameters()))
    assert keep_packed_alone(model) == 0
    assert list(map(id, model.parameters())) == before


@pytest.mark.parametrize("why", ["switch", "compiler", "error"])
def test_pytorchs_products_stay_where_there_is_no_library(
    why: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if why == "switch":
        monkeypatch.setenv(few_rows.SWITCH, "0")
    elif why == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        script = "#!/bin/sh\necho it knows no -mavx2 >&2\nexit 1\n"
        (tmp_path / "c++").write_text(script, "utf-8")
        os.chmod(tmp_path / "c++", 0o755)
        monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    few_rows.library.cache_clear()
    try:
        layer, x = linear(64, 32, torch.float32), torch.randn(3, 32)
        product = PackedLinear(layer)
        assert few_rows.library(torch.float32) is None
        assert not product.has_blocks
        torch.testing.assert_close(product(x), layer(x))
        # The user is told once, unless it is their wish.
        said = [record for record in caplog.records if "layers in C++ are off" in record.message]
        assert len(said) == (why != "switch")
        kernels = describe_kernels(CachedLM(tiny_model("llama")))
        reason = {"switch": "=0 turns them off", "compiler": "there is no C++ compiler"}
        reason["error"] = "c++ ended with 1: it knows no -mavx2)"
        assert reason[why] in kernels["not_compiled_because"]
    finally:
        few_rows.library.cache_clear()


def test_what_was_compiled_before_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_few_rows(torch.float32)
    monkeypatch.setenv("CXX", "no-such-compiler")
    few_rows.library.cache_clear()
    try:
        assert few_rows.library(torch.float32) is not None
    finally:
        few_rows.library.cache_clear()


@pytest.mark.parametrize("cache", ["broken", "none"])
def test_a_library_that_is_of_no_use_is_compiled_again(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler here is a program with an argument, which gives what was compiled before."""
    needs_few_rows(torch.float32)
    few_rows.library.cache_clear()
    before = few_rows.library(torch.float32)
    assert before is not None
    compiler, kept = tmp_path / "compiler", tmp_path / "draftsmith" / Path(before._name).name
    compiler.write_text(f'for last; do :; done; cp "{before._name}" "$last"\n', "utf-8")
    monkeypatch.setenv("CXX", f"sh {compiler}")
    if cache == "broken":
        kept.parent.mkdir(0o700)
        kept.write_bytes(b"")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(compiler))  # no directory
    try:
        for _ in range(2):
            few_rows.library.cache_clear()
            assert few_rows.library(torch.float32) is not None
        said = [record.message for record in caplog.records]
        if cache == "broken":
            assert kept.read_bytes() == Path(before._name).read_bytes()
            assert not said
        else:
            assert len(said) == 2  # one for each start
            assert "compiled again at each start" in said[0]
    finally:
        few_rows.library.cache_clear()
