"""A small LM as a GGUF file for llama.cpp, with the tokenizer of the target's own GGUF file.

llama.cpp compares the two files' vocabularies, and where it finds a difference it drafts nothing
and says so in its log only. So the tokenizer's keys are copied byte for byte, never made again.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quantization
from gguf import GGUFValueType as Value

from decode.drafters import Drafter
from decode.embedded import EMBEDDED
from decode.errors import UserError
from decode.gguf_file import read_header
from decode.target import EMBEDDED_PREFIX, Target
from train.export.formats import EXPORT_FILE, FORMATS, ExportJob, Format
from train.export.schema import (
    FoundTensor,
    TensorSpec,
    key_problems,
    number,
    tensor_problems,
    whole,
)
from train.export.source import load_small_lm, read_small_lm

FILE = "drafter.gguf"
TYPES = {
    "float32": Quantization.F32,
    "bfloat16": Quantization.BF16,
    "float16": Quantization.F16,
}
FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
}
COPIED = "tokenizer."

# GGUF's name of each module, by transformers' name within its layer, and its own outside of layers.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp knows a model.

    rotates_pairs: it rotates neighbouring pairs where transformers rotates the halves of a head,
    so the rows of q and k are put in another order. extra: layer tensors beside the usual ones,
    transformers' name → GGUF's.
    """

    name: str
    rotates_pairs: bool
    extra: dict[str, str] = field(default_factory=dict)


_BIASES = {f"self_attn.{name}_proj.bias": f"attn_{name}.bias" for name in ("q", "k", "v")}
_NORMS = {f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in ("q", "k")}
# By transformers' model_type. Mistral is a llama to llama.cpp.
ARCHITECTURES = {
    "llama": Architecture("llama", True),
    "mistral": Architecture("llama", True),
    "qwen2": Architecture("qwen2", False, _BIASES),
    "qwen3": Architecture("qwen3", False, _NORMS),
}


class GGUF(Format):
    """One file, drafter.gguf: metadata, the target's tokenizer, weights."""

    name = "gguf"
    kinds = ("small_lm",)
    engines = ("llama-server", "llama.cpp")
    instead = {
        "medusa": "llama.cpp has no Medusa heads; serve them with vLLM or TGI",
        "eagle1": "llama.cpp has no EAGLE-1; serve it with vLLM",
    }
    needs_target = True

    def refuse(self, job: ExportJob) -> None:
        target_gguf(job.target_spec)
        config = json.loads((job.drafter / "config.json").read_text())
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            raise UserError(
                f"format gguf writes {', '.join(ARCHITECTURES)} models, and {job.drafter} is "
                f"{kind}; export it as hf and convert that with llama.cpp's own "
                "convert_hf_to_gguf.py"
            )
        rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
        odd = {
            f"rope_type {rope}": rope != "default",
            "biases": config.get("attention_bias") or config.get("mlp_bias"),
            f"a sliding window of {config.get('sliding_window')}": config.get("sliding_window")
            and config.get("use_sliding_window", True),
            f"the activation {config.get('hidden_act')}": config.get("hidden_act") != "silu",
        }
        for what in (what for what, is_so in odd.items() if is_so):
            raise UserError(
                f"{job.drafter} has {what}, which format gguf does not write for a {kind} model; "
                "export it as hf and convert that with llama.cpp's own convert_hf_to_gguf.py"
            )

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        source = read_small_lm(job.drafter, job.target)
        dtype = job.dtype or source.dtype
        config = source.config
        architecture = ARCHITECTURES[config.model_type]
        copied = tokenizer_fields(target_gguf(job.target_spec))
        if len(copied["tokenizer.ggml.tokens"].contents()) != config.vocab_size:
            raise UserError(
                f"the target's GGUF file has {len(copied['tokenizer.ggml.tokens'].contents())} "
                f"tokens and the drafter {config.vocab_size} output rows; llama.cpp asks for equal "
                "numbers. Name the GGUF file that was made from the drafter's target"
            )
        writer = gguf.GGUFWriter(directory / FILE, architecture.name)
        for key, (value, kind) in metadata(config, architecture, dtype).items():
            writer.add_key_value(key, value, kind)
        for name, kept in copied.items():
            sub_type = kept.types[-1] if kept.types[0] == Value.ARRAY else None
            writer.add_key_value(name, kept.contents(), kept.types[0], sub_type)
        tied = source.model.all_tied_weights_keys if config.tie_word_embeddings else {}
        tensors = {
            to_gguf_name(name, architecture): (name, tensor)
            for name, tensor in source.model.state_dict().items()
            if name not in tied
        }
        for name, (theirs, tensor) in tensors.items():
            rows = tensor.float()
            if architecture.rotates_pairs and ".q_proj." in theirs:
                rows = in_pairs(rows, config.num_attention_heads)
            elif architecture.rotates_pairs and ".k_proj." in theirs:
                rows = in_pairs(rows, config.num_key_value_heads)
            # llama.cpp adds and multiplies vectors in float32 only.
            of = TYPES[dtype] if rows.dim() > 1 else Quantization.F32
            data = gguf.quants.quantize(np.ascontiguousarray(rows.numpy()), of)
            writer.add_tensor(name, data, raw_dtype=of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return {
            "dtype": dtype,
            "kept": source.kept,
            "filled_from": source.filled_from,
            "parameters": sum(tensor.numel() for _, tensor in tensors.values()),
            "layers": config.num_hidden_layers,
            "size": f"{config.model_type}, {config.num_hidden_layers} layers",
            "tied": "output.weight" not in tensors,
        }

    def problems(self, directory: Path) -> list[str]:
        try:
            read_header(directory / FILE)  # Our reader, which finds what was cut short.
            reader = gguf.GGUFReader(directory / FILE)
            facts = json.loads((directory / EXPORT_FILE).read_text())["facts"]
        except (UserError, OSError, ValueError, KeyError) as error:
            return [str(error)]
        keys = {name: found.contents() for name, found in reader.fields.items()}
        by_type = {a.name: a for a in ARCHITECTURES.values()}
        architecture = by_type.get(keys.get("general.architecture", ""))
        if architecture is None:
            found = keys.get("general.architecture")
            return [f"general.architecture is {found!r}, expected one of {', '.join(by_type)}"]
        problems = key_problems(_expected_keys(keys, architecture, facts), keys, FILE)
        if problems:
            return problems
        expected = expected_tensors(keys, architecture, facts)
        return tensor_problems(expected, {t.name: _found(t) for t in reader.tensors})

    def reload(self, directory: Path, target: Target) -> Drafter:
        return load_small_lm(directory / FILE, target)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        served = Path(target).name if target.endswith(".gguf") else "TARGET.gguf"
        return [
            (
                "llama-server",
                "",
                f"llama-server -m {served} -md {FILE} --spec-type draft-simple \\\n"
                f"  --spec-draft-n-max {gamma} --spec-draft-p-min 0",
            )
        ]


FORMATS.register("gguf")(GGUF())


def target_gguf(spec: str) -> Path:
    """The GGUF file of a target. Raises UserError where it is none."""
    if spec.startswith(EMBEDDED_PREFIX):
        embedded = EMBEDDED[spec.removeprefix(EMBEDDED_PREFIX)]
        found = embedded.find()
        if found is None:
            raise UserError(f"{spec} is not installed. Install it with: {embedded.install}")
        return found
    path = Path(spec).expanduser()
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise UserError(
            f"format gguf takes the tokenizer from the target's GGUF file, and the target {spec} "
            "is none; name the file that llama.cpp will serve with --target FILE.gguf"
        )
    return path


def tokenizer_fields(path: Path) -> dict[str, gguf.ReaderField]:
    """All `tokenizer.*` keys of a GGUF file. Raises UserError where it has no tokens."""
    read_header(path)
    fields = gguf.GGUFReader(path).fields
    copied = {name: kept for name, kept in fields.items() if name.startswith(COPIED)}
    if "tokenizer.ggml.tokens" not in copied:
        raise UserError(f"{path} has no tokenizer (tokenizer.ggml.tokens); name a complete model")
    return copied


def metadata(config: Any, architecture: Architecture, dtype: str) -> dict[str, tuple[Any, Value]]:
    """The keys that describe a model, with their types."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of = architecture.name
    return {
        "general.type": ("model", Value.STRING),
        "general.name": ("drafter", Value.STRING),
        "general.file_type": (int(FILE_TYPES[dtype]), Value.UINT32),
        f"{of}.block_count": (config.num_hidden_layers, Value.UINT32),
        f"{of}.context_length": (config.max_position_embeddings, Value.UINT32),
        f"{of}.embedding_length": (config.hidden_size, Value.UINT32),
        f"{of}.feed_forward_length": (config.intermediate_size, Value.UINT32),
        f"{of}.attention.head_count": (config.num_attention_heads, Value.UINT32),
        f"{of}.attention.head_count_kv": (config.num_key_value_heads, Value.UINT32),
        f"{of}.attention.key_length": (head, Value.UINT32),
        f"{of}.attention.value_length": (head, Value.UINT32),
        f"{of}.attention.layer_norm_rms_epsilon": (config.rms_norm_eps, Value.FLOAT32),
        f"{of}.rope.dimension_count": (head, Value.UINT32),
        f"{of}.rope.freq_base": (float(config.rope_parameters["rope_theta"]), Value.FLOAT32),
        f"{of}.vocab_size": (config.vocab_size, Value.UINT32),
    }


def to_gguf_name(name: str, architecture: Architecture) -> str:
    """GGUF's name of a tensor.

    >>> to_gguf_name("model.layers.3.mlp.up_proj.weight", ARCHITECTURES["llama"])
    'blk.3.ffn_up.weight'
    """
    prefix = "model.layers."
    if not name.startswith(prefix):
        module, _, what = name.rpartition(".")
        return f"{OUTSIDE[module]}.{what}"
    layer, _, rest = name.removeprefix(prefix).partition(".")
    if rest in architecture.extra:
        return f"blk.{layer}.{architecture.extra[rest]}"
    module, _, what = rest.rpartition(".")
    return f"blk.{layer}.{LAYER[module]}.{what}"


def in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads·d, …] with each head's rows 0, d/2, 1, d/2 + 1, … for a rotation of neighbours."""
    halves = rows.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def _expected_keys(
    keys: dict[str, Any], architecture: Architecture, facts: dict[str, Any]
) -> dict[str, Any]:
    of = architecture.name
    tokens = keys.get("tokenizer.ggml.tokens") or []
    expected: dict[str, Any] = {
        f"{of}.{key}": whole
        for key in (
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "rope.dimension_count",
        )
    }
    return expected | {
        "general.type": "model",
        "general.file_type": int(FILE_TYPES[facts["dtype"]]),
        f"{of}.block_count": facts["layers"],
        f"{of}.vocab_size": len(tokens),
        f"{of}.attention.layer_norm_rms_epsilon": number,
        f"{of}.rope.freq_base": number,
        "tokenizer.ggml.model": lambda x: isinstance(x, str) and x != "",
        "tokenizer.ggml.tokens": lambda x: len(x) > 0,
    }


def expected_tensors(
    keys: dict[str, Any], architecture: Architecture, facts: dict[str, Any]
) -> dict[str, TensorSpec]:
    """The tensors that a file's own metadata asks for, shapes as PyTorch has them."""
    of = architecture.name
    hidden, inner = keys[f"{of}.embedding_length"], keys[f"{of}.feed_forward_length"]
    head = keys[f"{of}.attention.key_length"]
    q = keys[f"{of}.attention.head_count"] * head
    kv = keys[f"{of}.attention.head_count_kv"] * head
    vocab = keys[f"{of}.vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    if not facts["tied"]:
        shapes["output.weight"] = (vocab, hidden)
    within: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    sizes = {"attn_q.bias": q, "attn_k.bias": kv, "attn_v.bias": kv}
    within |= {name: (sizes.get(name, head),) for name in architecture.extra.values()}
    for layer in range(keys[f"{of}.block_count"]):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in within.items()}
    matrix = TYPES[facts["dtype"]].name
    return {
        name: TensorSpec(shape, (matrix if len(shape) > 1 else "F32",))
        for name, shape in shapes.items()
    }


def _found(tensor: gguf.ReaderTensor) -> FoundTensor:
    # GGUF lists dimensions from the innermost out.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    known = tensor.tensor_type in TYPES.values()
    finite = known and bool(
        np.isfinite(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).all()
    )
    return FoundTensor(shape, tensor.tensor_type.name, finite or not known)
