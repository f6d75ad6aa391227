"""Trees in the loop: token-identical to `generate()`, and models that cannot be fed trees."""

import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import SeveralDrafters
from decode.drafters.small_lm import SmallLMDrafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.sampling import Sampling
from decode.target.cache.cached_model import CachedLM, require_trees
from tests.test_loop import NEW, PROMPTS, answers, model
from tests.test_shapes import DRAWN, NAMES, drawn, shape
from tests.tiny import FAMILIES, PAD_ID, VOCAB, loud_model, tiny_model


@functools.cache
def nearly(family: str) -> Any:
    """`model(family)` with a little noise: its likeliest tokens are often the target's."""
    lm = tiny_model(family)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return lm


# --- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_with_trees_equals_generate(family: str, name: str) -> None:
    drafter = SmallLMDrafter(nearly(family), shape=shape(name))
    eos = (answers(family)[0][9],)
    for gamma, ends in ((3, ()), (2, eos)):
        run = Decoder(model(family), drafter, gamma=gamma, rule="exact", eos_token_ids=ends).decode(
            PROMPTS, NEW
        )
        assert run.outputs == answers(family, ends)
        assert run.counts.tokens_per_step > 1.2
        assert run.counts.nodes_per_step > gamma
        # And each alone, whatever is beside it.
        alone = Decoder(
            model(family), drafter, gamma=gamma, rule="exact", eos_token_ids=ends
        ).decode(PROMPTS[:1], NEW)
        assert alone.outputs == run.outputs[:1]
        assert alone.counts.to_dict() == run.tally.row(0).to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_with_several_drafters_equals_generate(family: str) -> None:
    drafter = SeveralDrafters(
        [
            SmallLMDrafter(nearly(family), shape=shape("dynamic")),
            NgramDrafter(),
            SmallLMDrafter(model("llama", seed=7, layers=1)),
        ]
    )
    run = Decoder(model(family), drafter, gamma=3, rule="exact").decode(PROMPTS, NEW)
    assert run.outputs == answers(family)
    assert run.counts.tokens_per_step > 1.2


# Other families than those that everything is tested with: (fields of the config, attention).
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"head_dim": 8, "sliding_window": 64}, "eager"),
    "gemma3_text": (
        {
            "head_dim": 8,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "sdpa",
    ),
    "phi3": ({}, "sdpa"),
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, "eager"),
}


@pytest.mark.parametrize("family", MORE)
def test_more_families(family: str) -> None:
    fields, attention = MORE[family]
    lm = tiny_model(family, **fields)
    lm.set_attn_implementation(attention)
    drafter = SmallLMDrafter(lm, shape=shape("static"))
    run = Decoder(lm, drafter, gamma=3, rule="exact").decode(PROMPTS, NEW)
    lm.generation_config.eos_token_id = None
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=PAD_ID)
    for prompt, output in zip(PROMPTS, run.outputs, strict=True):
        ids = torch.tensor([prompt])
        found = lm.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert output == found[0, len(prompt) :].tolist()
    assert run.counts.tokens_per_step > 1.3


# --- sampled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DRAWN, "dynamic", "several"])
def test_exact_match_says_the_same_whatever_is_drafted(name: str) -> None:
    """Its draws belong to places in the text, so that a wrong mask, position or commit shows."""
    sampling = Sampling(0.7, top_k=20, repetition_penalty=1.2)
    if name == "several":
        drafter: Drafter = SeveralDrafters(
            [SmallLMDrafter(nearly("llama"), shape=drawn("chains")), NgramDrafter()]
        )
    else:
        drafter = SmallLMDrafter(
            nearly("llama"), shape=shape(name) if name == "dynamic" else drawn(name)
        )
    run, plain = (
        Decoder(model("llama"), which, gamma=3, rule="exact", sampling=sampling).decode(
            PROMPTS, NEW
        )
        for which in (drafter, DRAFTERS["none"]())
    )
    assert run.outputs == plain.outputs
    assert run.counts.accepted.sum() > 5


# --- models that cannot be fed trees --------------------------------------------------------------


class Deaf(torch.nn.Module):
    """A model that drops some of what it is told."""

    def __init__(self, lm: Any, *drops: str) -> None:
        super().__init__()
        self.lm, self.drops, self.config = lm, drops, lm.config
        self.device, self.dtype = lm.device, lm.dtype

    def forward(self, **inputs: Any) -> Any:
        return self.lm(**{name: x for name, x in inputs.items() if name not in self.drops})


@pytest.mark.parametrize("drops", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_that_do_not_honour_what_a_tree_needs(family: str, drops: str) -> None:
    deaf: Any = Deaf(model(family), drops)
    tree = SmallLMDrafter(nearly(family), shape=shape("static"))
    found = "different logits" if drops == "attention_mask" else "the same logits"
    message = rf"Deaf does not honour 4-D attention masks and position_ids, .* gives {found}"
    with pytest.raises(UserError, match=message):
        Decoder(deaf, tree, rule="exact").decode(PROMPTS[:1], NEW)
    # As a drafter too, and every time.
    drafter = SmallLMDrafter(deaf, shape=shape("dynamic"))
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            Decoder(model(family), drafter, rule="exact").decode(PROMPTS[:1], NEW)
    chain = SmallLMDrafter(nearly(family))
    run = Decoder(deaf, chain, rule="exact").decode(PROMPTS[:1], NEW)
    assert run.outputs == answers(family)[:1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_no_reason_to_refuse(family: str, dtype: torch.dtype) -> None:
    whole = tiny_model(family, layers=6).to(dtype)
    tree = SmallLMDrafter(whole, shape=shape("static"))
    run = Decoder(whole, tree, gamma=3, rule="exact").decode(PROMPTS, 8)
    assert run.counts.tokens_per_step > 1.3
    deaf: Any = Deaf(whole, "attention_mask")
    with pytest.raises(UserError, match="does not honour"):
        Decoder(deaf, tree, rule="exact").decode(PROMPTS[:1], NEW)


# Every family that `CachedLM` names: (fields of the config, what its hidden states carry).
NAMED: dict[str, tuple[dict[str, Any], float]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gpt2", "mistral", "phi3"), ({}, 128.0)),
    "opt": ({"ffn_dim": 256, "word_embed_proj_dim": 128}, 128.0),
    # They scale their embeddings, and norm what a layer adds.
    "gemma": ({}, 16.0),
    "gemma2": ({"head_dim": 64, "sliding_window": 64}, 4.0),
    "gemma3_text": (
        {
            "head_dim": 64,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        4.0,
    ),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", NAMED)
def test_large_activations_are_no_reason_to_refuse(family: str, attention: str) -> None:
    fields, size = NAMED[family]
    for dtype in (torch.float32, torch.bfloat16):
        lm = loud_model(family, size=size, layers=4, **fields).to(dtype)
        if attention == "sdpa" and not lm._supports_sdpa:
            pytest.skip(f"{family} has no sdpa attention")
        lm.set_attn_implementation(attention)
        require_trees(lm)
        for drops in ("attention_mask", "position_ids"):
            deaf: Any = Deaf(lm, drops)
            with pytest.raises(UserError, match="does not honour"):
                require_trees(deaf)


def test_a_model_whose_logits_hang_on_the_order_of_sums_is_not_refused() -> None:
    """In bfloat16 rounding alone changes this one's logits by a seventh of what seeing all siblings
    would change."""
    lm = loud_model("qwen2").to(torch.bfloat16)
    require_trees(lm)
    drafter = SmallLMDrafter(lm, shape=shape("static"))
    run = Decoder(lm, drafter, gamma=3, rule="exact").decode(PROMPTS, 8)
    assert run.counts.tokens_per_step > 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_deaf_layer_is_enough_to_be_refused(dtype: torch.dtype) -> None:
    """It makes a causal mask of its own, and stands above others that take the given one."""
    lm = loud_model("qwen2").to(dtype)

    def causal(_: Any, args: Any, given: dict[str, Any]) -> Any:
        mask = given["attention_mask"]
        if mask is not None:
            fed, slots = mask.shape[-2:]
            mask = torch.ones(fed, slots, dtype=torch.bool).tril(slots - fed)[None, None]
        return args, given | {"attention_mask": mask}

    lm.model.layers[7].register_forward_pre_hook(causal, with_kwargs=True)
    with pytest.raises(UserError, match="different logits for a token when a sibling comes before"):
        require_trees(lm)


class Slanted(torch.nn.Module):
    """A model that honours masks and positions, and prefers keys in slots nearby as well."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm, self.config, self.device, self.dtype = lm, lm.config, lm.device, lm.dtype

    def forward(self, attention_mask: torch.Tensor | None, **inputs: Any) -> Any:
        if attention_mask is not None:
            fed, slots = attention_mask.shape[-2:]
            apart = torch.arange(slots - fed, slots)[:, None] - torch.arange(slots)
            bias = -0.5 * apart.to(self.dtype).expand(attention_mask.shape)
            blocked = torch.finfo(self.dtype).min
            attention_mask = bias.masked_fill(~attention_mask, blocked)
        return self.lm(attention_mask=attention_mask, **inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_model_that_looks_at_slots_is_refused(family: str, dtype: torch.dtype) -> None:
    lm = tiny_model(family).to(dtype)
    require_trees(lm)
    slanted: Any = Slanted(lm)
    with pytest.raises(UserError, match="different logits for a token in another slot"):
        require_trees(slanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_may_round_by_what_else_is_fed(dtype: torch.dtype) -> None:
    """Their products are of as many rows as chose them, so that a stranger's token can change the
    last bits of another's. A mask that is not honoured changes them too, and is refused."""
    for honoured in (True, False):
        lm = tiny_model("llama").to(dtype)
        fed: list[torch.Tensor] = []
        lm.register_forward_pre_hook(
            lambda _, args, given, fed=fed: fed.append(given["input_ids"]), with_kwargs=True
        )

        def jitter(_: Any, args: Any, output: Any, fed: Any = fed) -> Any:
            places = torch.arange(fed[-1].shape[1])
            generator = torch.Generator().manual_seed(int((fed[-1] * places).sum()))
            rng = torch.randn(output.shape, generator=generator) * torch.finfo(dtype).eps
            return (output.float() * (1 + rng)).to(dtype)

        lm.model.layers[0].mlp.register_forward_hook(jitter)
        which: Any = lm if honoured else Deaf(lm, "attention_mask")
        if honoured:
            require_trees(which)
        else:
            with pytest.raises(UserError, match="when a sibling comes before"):
                require_trees(which)


def test_overflow_is_named() -> None:
    lm = loud_model("llama", size=1000.0).half()
    with pytest.raises(UserError, match="logits that are not finite in float16"):
        require_trees(lm)


def test_a_model_is_tried_once() -> None:
    lm = tiny_model("llama")
    calls: list[int] = []
    lm.register_forward_pre_hook(lambda *args: calls.append(1))
    require_trees(lm)
    assert 0 < len(calls) <= 5
    calls.clear()
    require_trees(lm)
    assert not calls
    # With another attention it is another model.
    lm.set_attn_implementation("eager")
    require_trees(lm)
    assert calls


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_alibi_is_refused(family: str) -> None:
    lm = tiny_model(family)
    with pytest.raises(UserError, match=r"ForCausalLM does not honour 4-D attention masks"):
        Decoder(lm, SmallLMDrafter(lm, shape=shape("static")), rule="exact").decode(PROMPTS, NEW)


@pytest.mark.parametrize("attention", ["flash_attention_2", "kernels-community/flash-attn3"])
def test_flash_attention_is_refused(attention: str) -> None:
    lm = tiny_model("llama")
    lm.config._attn_implementation_internal = attention
    with pytest.raises(UserError, match=rf"with {attention}, which takes no mask .*'sdpa' or 'ea"):
        CachedLM(lm).reset(1, 8)


@pytest.mark.parametrize("family", ["jamba", "recurrent_gemma", "mamba", "llama4_text"])
def test_states_that_cannot_be_rolled_back_are_refused(family: str) -> None:
    fields = {"mamba_d_state": 4} if family == "jamba" else {}
    if family == "mamba":
        config = transformers.MambaConfig(
            vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1
        )
        lm: Any = transformers.MambaForCausalLM(config).eval()
    else:
        lm = tiny_model(family, **fields)
    tree = SmallLMDrafter(model("llama"), shape=shape("static"))
    with pytest.raises(UserError, match="keeps a running state"):
        Decoder(lm, tree, rule="exact").decode(PROMPTS, NEW)
