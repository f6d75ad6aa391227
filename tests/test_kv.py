"""The cached model: one column's logits, and rows that leave."""

from typing import Any

import numpy as np
import pytest
import torch

from decode.model.cache.cached_model import CachedLM
from decode.model.forward.lean_forward import LeanForward
from decode.model.hidden_states import FINAL
from tests.tiny import VOCAB, forbid_packing, tiny_model

IDS = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
START = np.zeros(4, dtype=np.int64)
COLUMNS = np.array([11, 3, 7, 3])


def fed(lm: CachedLM, columns: np.ndarray | None = None) -> torch.Tensor:
    lm.reset(4, 16)
    with torch.inference_mode():
        return lm.forward(IDS, START, columns=columns)


@pytest.mark.parametrize(
    ("family", "packed"), [("llama", True), ("gpt2", False), ("gemma2", True), ("gemma2", False)]
)
def test_one_column_is_what_all_columns_have_there(
    family: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what follows the output layer too: gemma2 caps its logits, softly."""
    fields = {"head_dim": 8, "sliding_window": 64} if family == "gemma2" else {}
    model = tiny_model(family, **fields)
    model.set_attn_implementation("eager" if family == "gemma2" else "sdpa")
    if not packed:
        forbid_packing(monkeypatch)
    lm = CachedLM(model, captured_layers=(0, FINAL))
    forward = lm.forward_pass
    if isinstance(forward, LeanForward):
        layer: Any = forward.output
    else:
        assert forward.model is not model  # it has our attention
        layer = forward.model.get_output_embeddings()
    whole = fed(lm)
    states = {number: x.clone() for number, x in lm.features.items()}
    shapes: list[torch.Size] = []
    hook = layer.register_forward_hook(lambda _, given, out: shapes.append(out.shape))
    one = fed(lm, COLUMNS[:, None])
    assert shapes == [(4, 1, VOCAB)]
    two = fed(lm, np.stack([COLUMNS, COLUMNS - 1], 1))
    hook.remove()
    before = torch.stack([whole[torch.arange(4), torch.as_tensor(COLUMNS - i)] for i in (0, 1)], 1)
    assert shapes[1:] == [(4, 2, VOCAB)]
    assert torch.equal(two, before)
    assert torch.equal(one[:, 0], whole[torch.arange(4), torch.as_tensor(COLUMNS)])
    # Every fed token's hidden states are there, as before, and no hook stays.
    assert all(torch.equal(lm.features[number], x) for number, x in states.items())
    assert not layer._forward_pre_hooks
    kept = torch.as_tensor(np.unique(COLUMNS))
    if not packed:
        with torch.inference_mode():
            asked = model(input_ids=IDS, logits_to_keep=kept).logits
        picked = np.searchsorted(kept.numpy(), COLUMNS)
        assert torch.equal(one[:, 0], asked[torch.arange(4), torch.as_tensor(picked)])


class Unnamed(torch.nn.Module):
    """A model whose output layer cannot be found."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm, self.config, self.device, self.dtype = lm, lm.config, lm.device, lm.dtype

    def forward(self, **inputs: Any) -> Any:
        return self.lm(**inputs)


def test_without_an_output_layer_a_column_is_taken_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_packing(monkeypatch)
    model = tiny_model("llama")
    unnamed: Any = Unnamed(model)
    each = COLUMNS[:, None]
    assert torch.equal(fed(CachedLM(unnamed), each), fed(CachedLM(model), each))
