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
    GGUFLayout,
    gguf_layer,
    metadata,
    rows_in_pairs,
    tokenizer_keys,
    write_gguf,
)
from draftsmith.export.formats.tensor_table import TensorRow
from draftsmith.export.trained_drafter import load_small_lm


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
        config = source.model.config
        copied = tokenizer_keys(target_gguf(job.target_spec), config.vocab_size)
        state = own_weights(source.model)
        facts = _facts(config, state)
        tensors = gguf_tensors(config, state)
        architecture = ARCHITECTURES[config.model_type].name
        described = metadata(config, architecture, dtype)
        write_gguf(directory / FILE, architecture, described, copied, tensors, dtype)
        return {
            "dtype": dtype,
            "kept": source.reduced_to,
            "filled_from": source.filled_from,
            "parameters": sum(tensor.numel() for tensor in tensors.values()),
            **facts,
        }

    def table(
        self, arch: str, keys: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> list[TensorRow]:
        hidden, vocab = keys[f"{arch}.embedding_length"], keys[f"{arch}.vocab_size"]
        table = [
            TensorRow("token_embd.weight", (vocab, hidden), "model.embed_tokens.weight"),
            TensorRow("output_norm.weight", (hidden,), "model.norm.weight"),
        ]
        if not facts["tied"]:
            table.append(TensorRow("output.weight", (vocab, hidden), "lm_head.weight"))
        for number in range(keys[f"{arch}.block_count"]):
            ours, extra = f"model.layers.{number}", BY_NAME[arch].extra
            table += gguf_layer(arch, keys, number, ours, hidden, extra)
        return table

    def reload(self, directory: Path, target: Target) -> Drafter:
        return load_small_lm(directory / FILE, target)


FORMATS.register("gguf")(GGUF())


def own_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a model by their names, without those that are tied to others."""
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
    return {name: x for name, x in model.state_dict().items() if name not in tied}


def gguf_tensors(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model of ARCHITECTURES by GGUF's names, as llama.cpp needs them."""
    architecture = ARCHITECTURES[config.model_type]
    described = metadata(config, architecture.name, "float32")
    keys = {key: value for key, (value, _) in described.items()}
    rows = GGUF().table(architecture.name, keys, _facts(config, state))
    names = {row.source: row.name for row in rows}
    return {
        names[name]: _reordered(name, tensor, config, architecture)
        for name, tensor in state.items()
    }


def _facts(config: Any, state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "layers": config.num_hidden_layers,
        "size": f"{config.model_type}, {config.num_hidden_layers} layers",
        "tied": "lm_head.weight" not in state,
    }


def _reordered(name: str, tensor: Tensor, config: Any, architecture: Architecture) -> Tensor:
    """Return the tensor with its rows in the order that llama.cpp's rotation needs."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for part, count in heads.items():
        if architecture.rotates_pairs and f".{part}_proj." in name:
            return rows_in_pairs(tensor, count)
    return tensor
