"""Sliding windows: texts longer than a window give the tokens of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop import Decoder
from decode.target.forward.lean_forward import LeanForward
from decode.target.forward.prepare_model import prepare
from decode.target.kinds.layer_kinds import layer_windows
from decode.target.loading import load_model_and_tokenizer
from decode.trees import SHAPES
from tests.tiny import tiny_model, tiny_tokenizer

NEW = 16
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "qwen2": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"head_dim": 8, "sliding_window": 7},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layers": 6},
    # It has sinks in its attention and experts in its MLPs, so it never runs lean.
    "gpt_oss": {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "layers": 4},
}
PROMPTS = [[5, 17, 250, 9] * 6, [7, 11, 13], list(range(20, 40))]


def reference(model: Any, prompt: list[int]) -> list[int]:
    """Greedy text by forwards over all of the text, without a cache."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(NEW):
            last = model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, last.argmax(-1)[:, None]], 1)
    text: list[int] = ids[0, len(prompt) :].tolist()
    return text


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_a_text_longer_than_the_window(family: str, lean: bool) -> None:
    model = tiny_model(family, **MODELS[family])
    if not lean:
        prepare(model, lean=False)
    assert any(layer_windows(model))
    expected = [reference(model, prompt) for prompt in PROMPTS]
    for shape in ("chain", "static:widths=[2,1,2,1]", "dynamic:width=2,nodes=9"):
        # Another window in the drafter, and enough agreement that drafts stay.
        small = tiny_model(family, **(MODELS[family] | {"sliding_window": 4}))
        if not lean:
            prepare(small, lean=False)
        drafter = SmallLMDrafter(small, shape=SHAPES.make(shape))
        run = Decoder(model, drafter, gamma=4, rule="exact").decode(PROMPTS, NEW)
        assert run.outputs == expected
        assert run.counts.accepted.sum() > 0
    decoder = Decoder(model, DRAFTERS["none"]())
    assert isinstance(decoder.lm.forward_pass, LeanForward) is (lean and family != "gpt_oss")
    assert decoder.decode(PROMPTS, NEW).outputs == expected


def test_a_window_counts() -> None:
    """The control: the window changes the text."""
    prompt = PROMPTS[0]
    assert reference(tiny_model("mistral", sliding_window=9), prompt) != reference(
        tiny_model("mistral"), prompt
    )


def test_a_window_that_is_not_used() -> None:
    assert not any(layer_windows(tiny_model("qwen2", sliding_window=8, use_sliding_window=False)))


def test_a_model_without_sdpa_loads_with_what_it_has(tmp_path: Path) -> None:
    tiny_model("gpt_oss", **MODELS["gpt_oss"]).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_model_and_tokenizer(str(tmp_path)).model
    assert loaded.config._attn_implementation == "eager"
    assert any(layer_windows(loaded))
