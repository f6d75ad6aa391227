"""A small LM as a GGUF file for llama.cpp."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import Target, target_gguf
from draftsmith.export.formats import FORMATS, ExportJob
from draftsmith.export.formats.gguf_layout import (
    FILE,
    LAYER,
    GGUFLayout,
    layer_shapes,
    metadata,
    rows_in_pairs,
    tokenizer_keys,
    write_gguf,
)
from draftsmith.export.trained_drafter import load_small_lm

# GGUF's name of each module outside the layers, by transformers' name.
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class Architecture:
    """A model architecture in llama.cpp.

    rotates_pairs: llama.cpp rotates neighbouring pairs, and transformers rotates the halves of a
    head, so the rows of q and k are reordered. extra: layer tensors besides the usual ones,
    transformers' name → GGUF's.
    """

    name: str
    rotates_pairs: bool
    extra: dict[str, str] = field(default_factory=dict)


_BIASES = {f"self_attn.{name}_proj.bias": f"attn_{name}.bias" for name in ("q", "k", "v")}
_NORMS = {f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in ("q", "k")}
# By transformers' model_type. llama.cpp treats Mistral as a llama.
ARCHITECTURES = {
    "llama": Architecture("llama", True),
    "mistral": Architecture("llama", True),
    "qwen2": Architecture("qwen2", False, _BIASES),
    "qwen3": Architecture("qwen3", False, _NORMS),
}
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES.values()}


class GGUF(GGUFLayout):
    """A complete model."""

    name = "gguf"
    kinds = ("small_lm",)
    architectures = tuple(BY_NAME)
    spec_type = "draft-simple"

    def refuse(self, job: ExportJob) -> None:
        target_gguf(job.target_spec)
        config = job.drafter.config
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise UserError(
                f"format gguf writes {', '.join(ARCHITECTURES)} models, but {job.drafter} is "
                f"{kind}; export it as hf and convert that with llama.cpp's own "
                "convert_hf_to_gguf.py"
            )
        rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
        unsupported = {
            f"rope_type {rope}": rope != "default",
            "biases": config.get("attention_bias") or config.get("mlp_bias"),
            f"a sliding window of {config.get('sliding_window')}": config.get("sliding_window")
            and config.get("use_sliding_window", True),
            f"the activation {config.get('hidden_act')}": config.get("hidden_act") != "silu",
        }
        for feature in (name for name, is_there in unsupported.items() if is_there):
            raise UserError(
                f"{job.drafter} has {feature}, which format gguf does not write for a {kind} "
                "model; export it as hf and convert that with llama.cpp's own convert_hf_to_gguf.py"
            )

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        source = job.drafter.small_lm(job.loaded_target)
        dtype = job.dtype or source.dtype
        config = source.config
        architecture = ARCHITECTURES[config.model_type]
        copied = tokenizer_keys(target_gguf(job.target_spec), config.vocab_size)
        tied = source.model.all_tied_weights_keys if config.tie_word_embeddings else {}
        tensors = {
            to_gguf_name(name, architecture): _reordered(name, tensor, config, architecture)
            for name, tensor in source.model.state_dict().items()
            if name not in tied
        }
        described = metadata(config, architecture.name, dtype)
        write_gguf(directory, architecture.name, described, copied, tensors, dtype)
        return {
            "dtype": dtype,
            "kept": source.kept,
            "filled_from": source.filled_from,
            "parameters": sum(tensor.numel() for tensor in tensors.values()),
            "layers": config.num_hidden_layers,
            "size": f"{config.model_type}, {config.num_hidden_layers} layers",
            "tied": "output.weight" not in tensors,
        }

    def shapes(
        self, arch: str, keys: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        hidden, vocab = keys[f"{arch}.embedding_length"], keys[f"{arch}.vocab_size"]
        head = keys[f"{arch}.attention.key_length"]
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (vocab, hidden),
            "output_norm.weight": (hidden,),
        }
        if not facts["tied"]:
            shapes["output.weight"] = (vocab, hidden)
        layer_parts = layer_shapes(arch, keys, hidden)
        for name in BY_NAME[arch].extra.values():
            # A bias has one number per row of its matrix; a norm has the size of one head.
            matrix = layer_parts.get(name.replace(".bias", ".weight"))
            layer_parts[name] = (head,) if matrix is None else matrix[:1]
        for layer in range(keys[f"{arch}.block_count"]):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_parts.items()}
        return shapes

    def reload(self, directory: Path, target: Target) -> Drafter:
        return load_small_lm(directory / FILE, target)


FORMATS.register("gguf")(GGUF())


def to_gguf_name(name: str, architecture: Architecture) -> str:
    """Return GGUF's name of a tensor.

    >>> to_gguf_name("model.layers.3.mlp.up_proj.weight", ARCHITECTURES["llama"])
    'blk.3.ffn_up.weight'
    """
    prefix = "model.layers."
    if not name.startswith(prefix):
        module, _, parameter = name.rpartition(".")
        return f"{OUTSIDE[module]}.{parameter}"
    layer, _, rest = name.removeprefix(prefix).partition(".")
    if rest in architecture.extra:
        return f"blk.{layer}.{architecture.extra[rest]}"
    module, _, parameter = rest.rpartition(".")
    return f"blk.{layer}.{LAYER[module]}.{parameter}"


def _reordered(name: str, tensor: Tensor, config: Any, architecture: Architecture) -> Tensor:
    """Return the tensor with its rows in the order that llama.cpp's rotation needs."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for part, count in heads.items():
        if architecture.rotates_pairs and f".{part}_proj." in name:
            return rows_in_pairs(tensor, count)
    return tensor
