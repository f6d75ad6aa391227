"""Tiny targets with a module of multi-token prediction in their checkpoints, made from the configs
of the families that have one."""

from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from decode.model.loading import load_target
from heads.heads_directory import new_heads
from heads.mtp_checkpoint import named_as_stored
from heads.options import HeadOptions
from tests.tiny import finish_gguf, gguf_writer, save_tiny

_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "tie": False,
}
_ROUTED = _EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "kv_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie": False,
}
_SHARED = _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
# The settings of each family, for `tiny_model`.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": _ROUTED | {"head_dim": 8},
    "deepseek_v3": _ROUTED | _LATENT,
    "mellum": _EXPERTS
    | {
        "head_dim": 8,
        "num_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
    },
    "qwen3_next": _DELTA | _SHARED,
    "qwen3_5_text": _DELTA | {"mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": _DELTA | _SHARED | {"mtp_num_hidden_layers": 1},
}
AFTER = ("glm4_moe", "deepseek_v3")  # the module's layers are numbered after the target's


def save_mtp_target(directory: Path, family: str, layers: int = 1, **changes: Any) -> Path:
    """The checkpoint of a tiny target with a module of random weights. Few tokens are likely, so
    that drafts are often right. changes: other settings for `tiny_model`."""
    settings = FAMILIES[family] | changes
    if family in (*AFTER, "mellum"):
        settings["num_nextn_predict_layers"] = layers
    save_tiny(directory, family, **settings)
    target = load_target(str(directory))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        target.model.get_output_embeddings().weight[20:] = 0
        target.model.save_pretrained(directory)
        options = HeadOptions.of({"type": "mtp", "layers": layers, "depth": layers})
        heads: Any = new_heads(options, target, None)
        with torch.no_grad():
            for weight in heads.parameters():
                weight += 0.3 * torch.randn(weight.shape)
    change_tensors(directory, named_as_stored(heads, target.model, heads.state_dict()))
    return directory


def write_qwen_gguf(target: Any, path: Path) -> Path:
    """A tiny Qwen3.5 and its tokenizer as a float32 GGUF file, written as llama.cpp does."""
    config = target.model.config
    rope = config.rope_parameters
    turns = int(config.head_dim * rope["partial_rotary_factor"]) // 2
    writer = gguf_writer(path, "qwen35", config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(2 * turns)
    sections = [turns - turns // 3 * 2, turns // 3, turns // 3, 0]
    writer.add_array("qwen35.rope.dimension_sections", sections)
    writer.add_uint32("qwen35.full_attention_interval", 2)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config.num_hidden_layers)
    for name, x in target.model.state_dict().items():
        if name.endswith("A_log"):
            x = -x.exp()
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            x = x + 1
        name = name.replace("dt_bias", "dt_proj.bias")
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(known, x.squeeze(1).contiguous().numpy() if x.dim() > 2 else x.numpy())
    finish_gguf(writer)
    return path


def change_tensors(directory: Path, added: dict[str, Any], without: str = "no tensor") -> None:
    """Write a checkpoint of one file again, with other tensors, and without those whose names begin
    with `without`."""
    file = directory / "model.safetensors"
    weights = load_file(file) | added
    kept = {name: x.contiguous() for name, x in weights.items() if not name.startswith(without)}
    save_file(kept, file, {"format": "pt"})
