"""The common base of all GGUF exports: one file of metadata, weights and the target's tokenizer.

llama.cpp compares a drafter's vocabulary with the target's. If they differ, it may draft nothing
and report that only in its log. So the tokenizer's keys are copied byte for byte from the target's
own GGUF file and never regenerated.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.model.gguf_file import read_header, require_gguf
from decode.model.loading import target_gguf
from draftsmith.export.file_schema import (
    DTYPE_NAMES,
    StoredTensor,
    TensorSpec,
    is_count,
    is_positive,
    key_problems,
    tensor_problems,
)
from draftsmith.export.formats import ExportJob, Format, export_facts
from draftsmith.export.formats.readers import up_to
from draftsmith.export.formats.tensor_table import TensorRow, layer_rows

if TYPE_CHECKING:
    import gguf

FILE = "drafter.gguf"
# Weights of 8 and 4 bits, in blocks of this many numbers that share a scale, by GGUF's names.
QUANTISED = {"q8_0": "Q8_0", "q4_0": "Q4_0"}
SHARING = 32
# GGUF's names of the dtypes of weights.
TYPES = DTYPE_NAMES | QUANTISED
# The names of members of LlamaFileType, in the optional package gguf.
FILE_TYPES = {"float32": "ALL_F32", "bfloat16": "MOSTLY_BF16", "float16": "MOSTLY_F16"}
FILE_TYPES |= {dtype: f"MOSTLY_{name}" for dtype, name in QUANTISED.items()}
COPIED = "tokenizer."
# The sizes in a file's metadata, with their names in a model's config.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
# Those that are the size of a head.
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
# The parts of a decoder layer.
PARTS = {
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
# The only tensor that is not a weight: the token ids of a reduced draft vocabulary.
D2T = "d2t"


class GGUFLayout(Format):
    """Base of the GGUF layouts. A layout defines its llama.cpp architectures and the contents of
    its file.

    spec_type: the value of llama-server's `--spec-type`.
    """

    instead = {
        "medusa": f"llama.cpp has no Medusa heads; vLLM has them{up_to('medusa', 'vllm')}, TGI "
        "too; train EAGLE-3 heads for it",
        "eagle1": "llama.cpp has no EAGLE-1; serve it with vLLM",
    }
    needs_target = True
    dtypes = tuple(TYPES)
    architectures: ClassVar[tuple[str, ...]]
    spec_type: ClassVar[str]

    @staticmethod
    def models(directory: Path) -> dict[str, str]:
        """The options of llama-server for an export, beside those for its target."""
        return {"model_draft": str(directory / FILE)}

    @abstractmethod
    def table(
        self, arch: str, keys: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> list[TensorRow]:
        """Return the tensors that a file's metadata requires, with shapes in PyTorch's order."""

    def extra_expected_keys(self, arch: str) -> dict[str, Any]:
        """Return the expected values of keys that only this layout has, for `key_problems`."""
        return {}

    def value_problems(self, weights: Mapping[str, Tensor], keys: Mapping[str, Any]) -> list[str]:
        """Return problems with values, which a check of shapes cannot find."""
        return []

    def refuse_target(self, job: ExportJob) -> None:
        target_gguf(job.target_spec)

    def problems(self, directory: Path) -> list[str]:
        require_gguf()
        try:
            reader, keys, facts = read_export(directory / FILE, self.architectures)
        except UserError as error:
            return [str(error)]
        arch = keys["general.architecture"]
        expected = _expected_keys(arch, keys, facts) | self.extra_expected_keys(arch)
        problems = key_problems(expected, keys, FILE)
        if problems:
            return problems
        specs = {
            row.name: TensorSpec(row.shape, (tensor_type(row.name, row.shape, facts["dtype"]),))
            for row in self.table(arch, keys, facts)
        }
        problems = tensor_problems(specs, {t.name: stored_tensor(t) for t in reader.tensors})
        return problems or self.value_problems(read_weights(reader), keys)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        target_file = Path(target).name if target.endswith(".gguf") else "TARGET.gguf"
        return [
            (
                "llama-server",
                "",
                f"llama-server -m {target_file} -md {FILE} --spec-type {self.spec_type} \\\n"
                f"  --spec-draft-n-max {gamma} --spec-draft-p-min 0",
            )
        ]


def open_gguf(file: Path) -> "gguf.GGUFReader":
    """The library's reader of a file. Raises as `read_header`."""
    read_header(file)  # Our own reader, because it detects truncated files.
    import gguf

    return gguf.GGUFReader(file)


def read_export(
    file: Path, architectures: Collection[str]
) -> tuple["gguf.GGUFReader", dict[str, Any], dict[str, Any]]:
    """Return the reader of an export's file, its metadata, and the facts of `export.json`. Raises
    UserError if they cannot be read, or for another architecture."""
    try:
        reader = open_gguf(file)
        facts = export_facts(file.parent)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(str(error)) from error
    keys = read_keys(reader)
    arch = keys.get("general.architecture")
    if arch not in architectures:
        raise UserError(
            f"general.architecture is {arch!r}, expected one of {', '.join(architectures)}"
        )
    return reader, keys, facts


def tokenizer_keys(path: Path, vocab_size: int) -> dict[str, "gguf.ReaderField"]:
    """Return all `tokenizer.*` keys of a GGUF file. Raises UserError if it has no tokens, or not as
    many as the drafter."""
    fields = open_gguf(path).fields
    copied = {name: field for name, field in fields.items() if name.startswith(COPIED)}
    if "tokenizer.ggml.tokens" not in copied:
        raise UserError(f"{path} has no tokenizer (tokenizer.ggml.tokens); give a complete model")
    count = len(copied["tokenizer.ggml.tokens"].contents())
    if count != vocab_size:
        raise UserError(
            f"the target's GGUF file has {count} tokens and the drafter {vocab_size} output rows; "
            "llama.cpp requires equal numbers. Give the GGUF file made from the drafter's "
            "target"
        )
    return copied


def metadata(config: Any, arch: str, dtype: str) -> dict[str, tuple[Any, str]]:
    """Return the keys that describe a model, with the names of their types (GGUFValueType)."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {key: getattr(config, name) for key, name in SIZES.items()}
    sizes |= dict.fromkeys(HEAD_SIZES, head)
    theta = float(config.rope_parameters["rope_theta"])
    return {
        "general.type": ("model", "STRING"),
        "general.name": ("drafter", "STRING"),
        "general.file_type": (_file_type(dtype), "UINT32"),
        **{f"{arch}.{key}": (size, "UINT32") for key, size in sizes.items()},
        f"{arch}.attention.layer_norm_rms_epsilon": (config.rms_norm_eps, "FLOAT32"),
        f"{arch}.rope.freq_base": (theta, "FLOAT32"),
    }


def write_gguf(
    file: Path,
    arch: str,
    described: Mapping[str, tuple[Any, str]],
    copied: Mapping[str, "gguf.ReaderField"],
    tensors: Mapping[str, Tensor],
    dtype: str,
    kept: Iterable["gguf.ReaderTensor"] = (),
) -> None:
    """Write a GGUF file. described: keys with the names of their types. copied: keys of another
    file. tensors: by GGUF's names. kept: tensors of another file, which keep their bits."""
    import gguf
    from gguf import GGMLQuantizationType, GGUFValueType

    writer = gguf.GGUFWriter(file, arch)
    for key, (value, kind) in described.items():
        sub_type = GGUFValueType.get_type(value[0]) if kind == "ARRAY" else None
        writer.add_key_value(key, value, GGUFValueType[kind], sub_type)
    for name, field in copied.items():
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for stored in kept:
        writer.add_tensor(stored.name, stored.data, raw_dtype=stored.tensor_type)
    for name, tensor in tensors.items():
        stored_type = GGMLQuantizationType[tensor_type(name, tensor.shape, dtype)]
        data = np.ascontiguousarray((tensor if name == D2T else tensor.float()).numpy())
        if name != D2T:
            data = gguf.quants.quantize(data, stored_type)
        writer.add_tensor(name, data, raw_dtype=stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rows_in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows of [heads·d, …] to 0, d/2, 1, d/2 + 1, …, for a rotation of
    neighbours."""
    halves = rows.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def rows_in_halves(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `rows_in_pairs`."""
    pairs = rows.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def read_keys(reader: "gguf.GGUFReader") -> dict[str, Any]:
    """Return a file's metadata."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_weights(reader: "gguf.GGUFReader") -> dict[str, Tensor]:
    """Return a file's tensors in float32, except token ids, which stay int64."""
    import gguf

    def values(tensor: "gguf.ReaderTensor") -> Tensor:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        is_ids = tensor.tensor_type == gguf.GGMLQuantizationType.I64
        data = tensor.data if is_ids else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.tensor(data).reshape(shape)

    return {tensor.name: values(tensor) for tensor in reader.tensors}


def gguf_layer(
    arch: str,
    keys: Mapping[str, Any],
    number: int,
    ours: str,
    input_size: int,
    extra: Mapping[str, str],
) -> list[TensorRow]:
    """Return the tensors of a decoder layer. ours: its name in the model. input_size: the input
    size of its attention. extra: tensors besides the usual ones, by their names in the model; the
    values are GGUF's names."""
    config = {name: keys[f"{arch}.{key}"] for key, name in SIZES.items()}
    config["head_dim"] = keys[f"{arch}.attention.key_length"]
    rows = layer_rows(config, f"blk.{number}", input_size, ["input_layernorm"], ours, PARTS)
    shapes = {row.source: row.shape for row in rows}
    for module, name in extra.items():
        # A bias has one number per row of its matrix; a norm has the size of one head.
        matrix = shapes.get(f"{ours}.{module.removesuffix('.bias')}.weight")
        shape = (config["head_dim"],) if matrix is None else matrix[:1]
        rows.append(TensorRow(f"blk.{number}.{name}", shape, f"{ours}.{module}"))
    return rows


def tensor_type(name: str, shape: Sequence[int], dtype: str) -> str:
    """Return GGUF's name of the type in which a tensor is stored. dtype: that of the weights."""
    if name == D2T:
        return "I64"
    # llama.cpp adds and multiplies, other than in matrix products, only in float32.
    if len(shape) < 2 or not name.endswith(".weight"):
        return "F32"
    # As llama.cpp's own quantiser does with rows that are not whole blocks.
    return "F16" if dtype in QUANTISED and shape[-1] % SHARING else TYPES[dtype]


def _file_type(dtype: str) -> int:
    from gguf import LlamaFileType

    return int(LlamaFileType[FILE_TYPES[dtype]])


def _expected_keys(arch: str, keys: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    tokens = keys.get("tokenizer.ggml.tokens") or []
    expected: dict[str, Any] = {f"{arch}.{key}": is_count for key in (*SIZES, *HEAD_SIZES)}
    return expected | {
        "general.type": "model",
        "general.file_type": _file_type(facts["dtype"]),
        f"{arch}.block_count": facts["layers"],
        f"{arch}.vocab_size": len(tokens),
        f"{arch}.attention.layer_norm_rms_epsilon": is_positive,
        f"{arch}.rope.freq_base": is_positive,
        "tokenizer.ggml.model": lambda x: isinstance(x, str) and x != "",
        "tokenizer.ggml.tokens": lambda x: len(x) > 0,
    }


def stored_tensor(tensor: "gguf.ReaderTensor") -> StoredTensor:
    import gguf

    # GGUF lists the innermost dimension first.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    finite = True
    if tensor.tensor_type.name in TYPES.values():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        finite = bool(np.isfinite(values).all())
    return StoredTensor(shape, tensor.tensor_type.name, finite)
