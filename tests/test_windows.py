"""Sliding windows: texts longer than a window give the tokens of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.prepare_model import prepare
from decode.model.kinds.layer_kinds import layer_windows
from decode.model.loading import load_model_and_tokenizer
from decode.shapes import SHAPES
from tests.tiny import own_text, save_tiny, tiny_model

NEW = 12
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "qwen2": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layers": 6},
    # It has sinks in its attention and experts in its MLPs, so it never runs lean.
    "gpt_oss": {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "layers": 4},
}
PROMPTS = [[5, 17, 250, 9] * 6, [7, 11, 13], list(range(20, 40))]


@pytest.mark.parametrize(
    ("family", "lean"),
    [
        *((family, True) for family in MODELS),
        ("mistral", False),
    ],
)
def test_a_text_longer_than_the_window(family: str, lean: bool) -> None:
    model = tiny_model(family, **MODELS[family])
    if not lean:
        prepare(model, lean=False)
    assert any(layer_windows(model))
    expected = [own_text(model, prompt, NEW) for prompt in PROMPTS]
    for shape in ("chain", "dynamic:width=2,nodes=9"):
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
    assert own_text(tiny_model("mistral", sliding_window=9), prompt, NEW) != own_text(
        tiny_model("mistral"), prompt, NEW
    )


def test_a_window_that_is_not_used() -> None:
    assert not any(layer_windows(tiny_model("qwen2", sliding_window=8, use_sliding_window=False)))


def test_a_model_without_sdpa_loads_with_what_it_has(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "gpt_oss", **MODELS["gpt_oss"])
    loaded = load_model_and_tokenizer(str(path)).model
    assert loaded.config._attn_implementation == "eager"
    assert any(layer_windows(loaded))


def test_a_window_that_the_kind_of_model_ignores_is_ignored() -> None:
    """Checkpoints can have settings that their model never reads."""
    model = tiny_model("llama", sliding_window=8)
    assert layer_windows(model) == [None] * len(layer_windows(model))
    decoder = Decoder(model, DRAFTERS["none"]())
    assert isinstance(decoder.lm.forward_pass, LeanForward)
    assert decoder.decode(PROMPTS, NEW).outputs == [own_text(model, x, NEW) for x in PROMPTS]


@pytest.mark.parametrize("lean", [True, False])
def test_texts_end_where_longrope_turns_all_tokens_by_other_angles(lean: bool) -> None:
    """Phi-3 with a long context. The text of a row is the same beside longer rows."""
    switch, halves = 32, 4
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0}
    rope |= {"short_factor": [1.0] * halves, "long_factor": [3.0] * halves}
    model = tiny_model(
        "phi3",
        max_positions=4 * switch,
        original_max_position_embeddings=switch,
        rope_parameters=rope | {"original_max_position_embeddings": switch},
    )
    prepare(model, lean=lean)
    ids = torch.arange(5, 5 + switch + 1)[None]
    with torch.inference_mode():  # the short factors hold up to the switch, and not beyond
        first, longer = (model(ids[:, :end]).logits[:, 8] for end in (switch, switch + 1))
    assert (first - longer).abs().max() > 0.01
    prompts = [list(range(20, 46)), [7, 11, 13]]
    decoder = Decoder(model, DRAFTERS["ngram"](), gamma=5)
    assert decoder.lm.max_positions == switch
    run = decoder.decode(prompts, 2 * switch)
    for prompt, output in zip(prompts, run.outputs, strict=True):
        assert len(prompt) + len(output) == switch
        assert output[:NEW] == own_text(model, prompt, NEW)[: len(output)]
    with pytest.raises(UserError, match=f"{switch}"):
        decoder.decode([list(range(5, 5 + switch))], 4)
