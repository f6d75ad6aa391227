"""Tiny checkpoints in the layouts in which drafters are published, with the names and settings of
their authors' files, and a plain forward of EAGLE's layers to compare with.

The names are those of SafeAILab's EAGLE, SpecForge, NeMo, the library speculators, Medusa and
vLLM's loaders. H hidden size.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from decode.model.loading import Target
from tests.export import KEPT
from tests.tiny import VOCAB

HIDDEN, INNER = 64, 128


@dataclass
class Published:
    """config: of config.json. tensors: by their published names. file: the name of their file."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"
    texts: dict[str, str] = field(default_factory=dict)

    def save(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config), "utf-8")
        for name, text in self.texts.items():
            (directory / name).write_text(text, "utf-8")
        if self.file.endswith(".safetensors"):
            tensors = {name: x.contiguous() for name, x in self.tensors.items()}
            save_file(tensors, directory / self.file)
        else:
            torch.save(self.tensors, directory / self.file)
        return directory


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Norms are near 1, matrices small."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: (0.1 * torch.randn(shape, generator=generator) + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


def layer_shapes(
    layer: str, width: int, heads: int = 2, keys: int = 2, size: int = 32
) -> dict[str, tuple[int, ...]]:
    """width: of the input of attention."""
    return {
        f"{layer}.self_attn.q_proj.weight": (heads * size, width),
        f"{layer}.self_attn.k_proj.weight": (keys * size, width),
        f"{layer}.self_attn.v_proj.weight": (keys * size, width),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, heads * size),
        f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }


def llama_config(**changes: Any) -> dict[str, Any]:
    """The settings that all published layers have; what they leave out gets llama's values."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "transformers_version": "4.46.2",
        "torch_dtype": "float16",
        "vocab_size": VOCAB,
    }
    return config | changes


def eagle3_weights(
    layer: str,
    dtype: torch.dtype,
    taps: int = 3,
    rows: int = len(KEPT),
    extra: dict[str, tuple[int, ...]] | None = None,
    **heads: int,
) -> dict[str, Tensor]:
    shapes = layer_shapes(layer, 2 * HIDDEN, **heads) | {
        "fc.weight": (HIDDEN, taps * HIDDEN),
        f"{layer}.hidden_norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (rows, HIDDEN),
    }
    return random_tensors(shapes | (extra or {}), dtype)


def maps(ids: Tensor = KEPT, vocab: int = VOCAB) -> dict[str, Tensor]:
    has_row = torch.zeros(vocab, dtype=torch.bool)
    has_row[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": has_row}


def embeddings(target: Target, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    table = target.model.get_input_embeddings().weight.detach()
    return {"embed_tokens.weight": table.to(dtype, copy=True)}


def safeailab_eagle3(target: Target) -> Published:
    """EAGLE3-LLaMA3.1: LlamaForCausalLM, `midlayer`, the maps, no embeddings, half precision."""
    tensors = eagle3_weights("midlayer", torch.float16) | maps()
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(16, dtype=torch.float16)
    return Published(llama_config(draft_vocab_size=len(KEPT)), tensors)


def specforge_eagle3(target: Target) -> Published:
    """`eagle_config` with outputs (they begin with 1), another grouping, rotary base and ε."""
    heads = {"heads": 4, "keys": 1, "size": 16}
    config = llama_config(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(KEPT),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-3,
        rope_theta=500.0,
        torch_dtype="bfloat16",
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    )
    tensors = eagle3_weights("midlayer", torch.bfloat16, **heads) | maps()
    return Published(config, tensors | embeddings(target, torch.bfloat16))


def nemo_eagle3(target: Target) -> Published:
    """The prefix `model.`, only `d2t`, other layers (inputs of 2, 4 and 7) and norm_before_fc."""
    config = llama_config(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(KEPT),
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
            "use_aux_hidden_state": True,
            "norm_before_fc": True,
        },
    )
    extra = {"input_norm.weight": (3 * HIDDEN,)}
    weights = eagle3_weights("layers.0", torch.bfloat16, extra=extra)
    tensors = {n if n.startswith("lm_head") else f"model.{n}": x for n, x in weights.items()}
    return Published(config, tensors | {"d2t": maps()["d2t"]})


def speculators_eagle3(target: Target) -> Published:
    """Nested settings, `layers.0`, numbers of inputs, norm_before_residual, all tokens."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": llama_config(head_dim=32),
        "draft_vocab_size": VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
    }
    identity = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB).bool()}
    tensors = eagle3_weights("layers.0", torch.float32, rows=VOCAB)
    return Published(config, tensors | identity | embeddings(target))


def eagle31(target: Target) -> Published:
    """EAGLE-3.1 in vLLM's layout: a norm for each captured layer, and the normed output."""
    extra = {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(3)}
    config = llama_config(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(KEPT), fc_norm=True
    )
    tensors = eagle3_weights("midlayer", torch.float32, extra=extra) | maps()
    return Published(config | {"norm_output": True}, tensors)


def p_eagle_weights(dtype: torch.dtype, rows: int, vocab: int) -> dict[str, Tensor]:
    """Two layers, of which only the first reads 2H, and trained embeddings."""
    extra = layer_shapes("layers.1", HIDDEN) | {
        "layers.1.input_layernorm.weight": (HIDDEN,),
        "mask_hidden": (1, 1, 3 * HIDDEN),
        "embed_tokens.weight": (vocab, HIDDEN),
    }
    return eagle3_weights("layers.0", dtype, rows=rows, extra=extra)


def p_eagle(target: Target) -> Published:
    """P-EAGLE as vLLM reads it: some tokens, and the token of the stand-in by its usual name. The
    target needs a row of the embeddings that is no token."""
    config = llama_config(
        architectures=["PEagleDraftModel"],
        num_hidden_layers=2,
        draft_vocab_size=len(KEPT),
        pard_token=VOCAB + 1,
        torch_dtype="bfloat16",
        vocab_size=target.vocab_size,
    )
    weights = p_eagle_weights(torch.bfloat16, len(KEPT), target.vocab_size)
    return Published(config, weights | maps(vocab=target.vocab_size))


def speculators_p_eagle(target: Target) -> Published:
    """Nested settings, another name of the stand-in's token, all tokens, and a normed residual."""
    stated, vocab = speculators_eagle3(target).config, target.vocab_size
    layers = llama_config(head_dim=32, num_hidden_layers=2, vocab_size=vocab)
    config = stated | {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": layers,
        "draft_vocab_size": vocab,
        "mask_token_id": VOCAB + 1,
    }
    return Published(config, p_eagle_weights(torch.float32, vocab, vocab))


def eagle1(target: Target) -> Published:
    """EAGLE-LLaMA: `layers.0` without a first norm, the target's embeddings, no bias."""
    shapes = layer_shapes("layers.0", HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    tensors = random_tensors(shapes, torch.float16)
    return Published(llama_config(bias=False), tensors | embeddings(target, torch.float16))


def eagle1_bias(target: Target) -> Published:
    """EAGLE-Vicuna: as above, with a bias in fc."""
    shapes = layer_shapes("layers.0", HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    tensors = random_tensors(shapes | {"fc.bias": (HIDDEN,)}, torch.float32)
    return Published(llama_config(bias=True), tensors | embeddings(target))


def medusa(target: Target) -> Published:
    """The paper's code: no model_type, and a wrong number of heads in the config."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        for block in range(2):
            shapes |= {f"{head}.{block}.linear.weight": (HIDDEN, HIDDEN)}
            shapes |= {f"{head}.{block}.linear.bias": (HIDDEN,)}
        shapes[f"{head}.2.weight"] = (VOCAB, HIDDEN)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "target"}
    return Published(config, random_tensors(shapes, torch.float16), "medusa_lm_head.safetensors")


def medusa_vllm(target: Target) -> Published:
    """vLLM's names, without biases, and one output layer for all heads."""
    shapes: dict[str, tuple[int, ...]] = {
        f"blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN) for head in range(2)
    }
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    config = {
        "model_type": "medusa",
        "num_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "original_lm_head": True,
    }
    return Published(config, random_tensors(shapes, torch.bfloat16))


LAYOUTS = {
    layout.__name__: layout
    for layout in (
        safeailab_eagle3,
        specforge_eagle3,
        nemo_eagle3,
        speculators_eagle3,
        eagle31,
        p_eagle,
        speculators_p_eagle,
        eagle1,
        eagle1_bias,
        medusa,
        medusa_vllm,
    )
}


@torch.no_grad()
def first_logits(
    published: Published, target: Target, ids: Tensor, taps: list[int], stand_ins: int = 0
) -> Tensor:
    """[T − 1 + M, V']: what EAGLE's layers say after each pair of a hidden state and the next token
    of a text, and then at each of M stand-ins, computed from the published tensors alone.

    ids: int64 [T]. taps: the indices into transformers' hidden_states that are read (index i is the
    input of layer i, counted from 0), or [-1] for EAGLE-1. stand_ins: M, of P-EAGLE.
    """
    config = published.config.get("transformer_layer_config", published.config)
    switches = published.config | (published.config.get("eagle_config") or {})
    x = {name.removeprefix("model."): t.float() for name, t in published.tensors.items()}
    layer = "midlayer" if "midlayer.mlp.up_proj.weight" in x else "layers.0"
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = config.get("head_dim") or HIDDEN // heads, config["rms_norm_eps"]

    def norm(values: Tensor, name: str) -> Tensor:
        scale = (values.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return values * scale * x[f"{name}.weight"]

    def product(values: Tensor, name: str) -> Tensor:
        return linear(values, x[f"{name}.weight"], x.get(f"{name}.bias"))

    outputs = target.model(ids[None], output_hidden_states=True)
    states = [outputs.hidden_states[tap][0, :-1] for tap in taps]
    if switches.get("fc_norm"):
        states = [norm(values, f"fc_norm.{number}") for number, values in enumerate(states)]
    features = torch.cat(states, -1)
    table = target.model.get_input_embeddings().weight
    if "mask_hidden" in x:
        table = x["embed_tokens.weight"]
    embedded = embedding(ids[1:], table)
    if taps == [-1]:
        residual = read = product(torch.cat([embedded, features], -1), "fc")
    else:
        if switches.get("norm_before_fc"):
            features = norm(features, "input_norm")
        state = product(features, "fc")
        if stand_ins:
            token = config.get("pard_token") or switches["mask_token_id"]
            unknown = product(x["mask_hidden"].flatten()[None], "fc")
            state = torch.cat([state, unknown.expand(stand_ins, -1)])
            embedded = torch.cat([embedded, table[token].expand(stand_ins, -1)])
        normed = norm(state, f"{layer}.hidden_norm")
        residual = normed if switches.get("norm_before_residual") else state
        read = torch.cat([norm(embedded, f"{layer}.input_layernorm"), normed], -1)
    length = len(read)
    theta = config.get("rope_theta", 10000.0)
    angles = torch.arange(length)[:, None] * theta ** -(torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotated(values: Tensor) -> Tensor:
        first, second = values.chunk(2, -1)
        return values * cos + torch.cat([-second, first], -1) * sin

    def layered(residual: Tensor, read: Tensor, layer: str) -> Tensor:
        q, k, v = (
            product(read, f"{layer}.self_attn.{part}_proj")
            .unflatten(-1, (-1, size))
            .transpose(0, 1)
            for part in "qkv"
        )
        k, v = (values.repeat_interleave(heads // keys, 0) for values in (k, v))
        scores = rotated(q) @ rotated(k).transpose(1, 2) * size**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        residual = residual + product(mixed, f"{layer}.self_attn.o_proj")
        inner = norm(residual, f"{layer}.post_attention_layernorm")
        gate = silu(product(inner, f"{layer}.mlp.gate_proj"))
        gated = gate * product(inner, f"{layer}.mlp.up_proj")
        return residual + product(gated, f"{layer}.mlp.down_proj")

    residual = layered(residual, read, layer)
    for number in range(1, config["num_hidden_layers"]):
        name = f"layers.{number}"
        residual = layered(residual, norm(residual, f"{name}.input_layernorm"), name)
    if taps == [-1]:
        return target.model.get_output_embeddings()(residual)
    return product(norm(residual, "norm"), "lm_head")
