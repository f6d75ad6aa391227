"""Small models of each architecture that transformers reads from GGUF, written as llama.cpp's
converter writes them."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

from tests.tiny import VOCAB, finish_gguf, tiny_tokenizer_keys

# By architecture: the class of the config, and what keeps it small or is no default.
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCAB}
MIDDLE = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 256}
# No defaults, so that a value which was not read is seen.
RMS, LAYER, BASE = {"rms_norm_eps": 0.01}, 0.02, {"rope_type": "default", "rope_theta": 5000.0}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", MIDDLE | RMS | {"rope_parameters": BASE}),
    "qwen2": ("Qwen2Config", MIDDLE | RMS | {"rope_parameters": BASE}),
    "qwen3": ("Qwen3Config", MIDDLE | RMS | {"rope_parameters": BASE, "head_dim": 16}),
    "phi3": ("Phi3Config", MIDDLE | RMS | {"rope_parameters": BASE, "pad_token_id": 0}),
    "stablelm": (
        "StableLmConfig",
        MIDDLE
        | {"layer_norm_eps": LAYER, "rope_parameters": BASE | {"partial_rotary_factor": 0.5}},
    ),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": VOCAB, "n_positions": 256}
        | {"layer_norm_epsilon": LAYER, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "starcoder2": (
        "Starcoder2Config",
        MIDDLE | {"num_key_value_heads": 1, "norm_epsilon": LAYER, "rope_parameters": BASE},
    ),
    "nemotron": (
        "NemotronConfig",
        MIDDLE | {"norm_eps": LAYER, "rope_parameters": BASE | {"partial_rotary_factor": 0.25}},
    ),
    "gemma2": (
        "Gemma2Config",
        MIDDLE
        | RMS
        | {"head_dim": 16, "sliding_window": 3, "query_pre_attn_scalar": 16}
        | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        MIDDLE
        | RMS
        | {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 3}
        | {"query_pre_attn_scalar": 16},
    ),
    "falcon": (
        "FalconConfig",
        SMALL | {"layer_norm_epsilon": LAYER, "tie_word_embeddings": True},
    ),
    "bloom": (
        "BloomConfig",
        {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": VOCAB}
        | {"layer_norm_epsilon": LAYER},
    ),
    "qwen2moe": (
        "Qwen2MoeConfig",
        MIDDLE
        | RMS
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40, "rope_parameters": BASE},
    ),
    "qwen3moe": (
        "Qwen3MoeConfig",
        MIDDLE
        | RMS
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"rope_parameters": BASE, "head_dim": 16, "norm_topk_prob": True},
    ),
    "mamba": (
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 8}
        | {"layer_norm_epsilon": LAYER, "time_step_rank": 3},
    ),
    "lfm2": (
        "Lfm2Config",
        MIDDLE
        | {"norm_eps": LAYER, "rope_parameters": BASE, "conv_L_cache": 4}
        | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
}


def small_gguf_model(architecture: str, **fields: Any) -> Any:
    """A model in float32 and eval mode, with weights that are far from flat."""
    name, small = ARCHITECTURES[architecture]
    config = getattr(transformers, name)(**copy.deepcopy(small) | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or "ln_" in name:
                    weight.add_(0.3 * torch.randn(weight.shape))
                elif name.endswith("A_log"):
                    weight.add_(0.1 * torch.randn(weight.shape))
                else:
                    weight.copy_(torch.randn(weight.shape) * (3 / max(weight.shape[-1], 4)) ** 0.5)
    return model.eval()


def write_model(
    path: Path,
    architecture: str,
    model: Any,
    extra: Callable[[Any], None] = lambda writer: None,
    tensors: Mapping[str, Tensor] | None = None,
    vocabulary: bool = True,
) -> None:
    """extra: adds keys to the writer. tensors: more of them, by their names in the file.
    vocabulary: whether to write the tiny tokenizer's."""
    writer = gguf.GGUFWriter(path, architecture)
    _keys(writer, architecture, model.config)
    if vocabulary:
        tiny_tokenizer_keys(writer, model.config.vocab_size)
    extra(writer)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[architecture], model.config.num_hidden_layers)
    for name, tensor in _tensors(architecture, model).items():
        writer.add_tensor(table.get_name(name, (".weight", ".bias")) or name, tensor.numpy())
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    finish_gguf(writer)


def _keys(writer: Any, architecture: str, config: Any) -> None:
    said = config.to_dict()
    hidden, heads = config.hidden_size, getattr(config, "num_attention_heads", 0)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", 256))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(
        0 if architecture == "mamba" else said.get("intermediate_size") or 4 * hidden
    )
    writer.add_head_count(heads)
    if architecture == "lfm2":
        kv = [2 * (kind == "full_attention") for kind in config.layer_types]
        writer.add_head_count_kv(kv)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif architecture == "falcon":
        writer.add_head_count_kv(1)
        writer.add_tensor_data_layout("jploski")
    elif heads and architecture != "gpt2":
        writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    for field in (
        "rms_norm_eps",
        "norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
    ):
        if field in said:
            rms = field == "rms_norm_eps" or architecture in ("lfm2", "mamba")
            (writer.add_layer_norm_rms_eps if rms else writer.add_layer_norm_eps)(said[field])
    if said.get("head_dim") and architecture not in ("gpt2",):
        writer.add_key_length(said["head_dim"])
        writer.add_value_length(said["head_dim"])
    rope = said.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    if "rope_theta" in full and architecture not in ("falcon", "gemma2"):
        writer.add_rope_freq_base(full["rope_theta"])
    if "partial_rotary_factor" in full or architecture == "llama":
        part = full.get("partial_rotary_factor", 1)
        writer.add_rope_dimension_count(int(part * hidden // heads))
    if architecture in ("gemma2", "gemma3", "phi3"):
        within = architecture == "phi3" or "sliding_attention" in said["layer_types"]
        writer.add_sliding_window((said["sliding_window"] or 0) * within)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if said.get(field):
            getattr(writer, f"add_{field}")(said[field])
    if architecture == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if "shared_expert_intermediate_size" in said:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "mamba":
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_inner_size(config.intermediate_size)
        writer.add_ssm_state_size(config.state_size)
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(False)


def _tensors(architecture: str, model: Any) -> dict[str, Tensor]:
    """The weights, in the order and the sign that llama.cpp stores them."""
    config, tensors = model.config, {}
    tied = config.tie_word_embeddings
    heads = {
        "q_proj": getattr(config, "num_attention_heads", 0),
        "k_proj": getattr(config, "num_key_value_heads", 0),
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        module = name.split(".")[-2]
        if architecture == "llama" and module in heads:
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
            halves = tensor.unflatten(0, (heads[module], 2, -1))
            tensor = halves.transpose(1, 2).flatten(0, 2).contiguous()
        if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture == "nemotron" and "layernorm.weight" in name and "norm.weight" not in name:
            tensor = tensor + 1
        if architecture == "gpt2" and module in ("c_attn", "c_proj", "c_fc") and tensor.dim() == 2:
            tensor = tensor.T.contiguous()
        if architecture == "bloom" and "query_key_value" in name:
            split = tensor.unflatten(0, (config.n_head, 3, -1))
            tensor = split.transpose(0, 1).flatten(0, 2).contiguous()
        if name.endswith("A_log"):
            tensor, name = -tensor.exp(), name
        if "conv1d.weight" in name or name.endswith("conv.conv.weight"):
            tensor = tensor.squeeze(1)
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze(0)
        if ".experts.gate_up_proj" in name:
            layer = name.split(".")[2]
            gate, up = tensor.chunk(2, 1)
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = gate.contiguous()
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = up.contiguous()
        elif ".experts.down_proj" in name:
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = tensor
        elif architecture in ("gpt2", "bloom"):
            tensors[name.removeprefix("transformer.")] = tensor
        else:
            tensors[name] = tensor
    return tensors
