"""The GGUF file of a target with a trained module of multi-token prediction in it, as the `nextn`
layers that llama.cpp drafts with.

The file is the target's own, as it is quantised: its tensors and keys stay, to the bit. The
module's layers come after the target's. Names and values are those that llama.cpp's
`convert_hf_to_gguf.py` writes for Qwen3.5: a norm is stored with the 1 that the family adds to it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.gguf_file import require_gguf
from decode.model.loading import Target, target_gguf
from draftsmith.export.file_schema import TensorSpec, key_problems, tensor_problems
from draftsmith.export.formats import FORMATS, ExportJob, Format, export_facts
from draftsmith.export.formats.gguf_layout import (
    PARTS,
    open_gguf,
    read_export,
    read_keys,
    read_weights,
    stored_tensor,
    tensor_type,
    write_gguf,
)
from draftsmith.export.trained_drafter import stored_dtype
from heads.heads_directory import make_ready
from heads.mtp_checkpoint import module_heads, own_layers
from heads.mtp_drafter import MtpDrafter

FILE = "model.gguf"
# llama.cpp's name of each family.
ARCHITECTURES = {"qwen3_5_text": "qwen35"}
# The names of a block's tensors, by their names in a layer of the module.
NAMES = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "post_norm": "nextn.shared_head_norm",
    **{f"mtp_block.{part}": name for part, name in PARTS.items()},
    "mtp_block.self_attn.q_norm": "attn_q_norm",
    "mtp_block.self_attn.k_norm": "attn_k_norm",
    "mtp_block.post_attention_layernorm": "post_attention_norm",
}


class MtpGGUF(Format):
    """For targets of the families in `ARCHITECTURES`."""

    name = "mtp-gguf"
    kinds: ClassVar[tuple[str, ...]] = ("mtp",)
    spec_type = "draft-mtp"
    needs_target = True
    depth_option = "depth"

    @staticmethod
    def models(directory: Path) -> dict[str, str]:
        """As in `GGUFLayout`. The target is in the export's own file."""
        return {"model": str(directory / FILE)}

    def target_to_load(self, job: ExportJob) -> str:
        """The target that the module was trained for. The file for serving may be quantised."""
        return str(job.drafter.target["name"])

    def refuse_target(self, job: ExportJob) -> None:
        target_gguf(job.target_spec)

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        target, file = job.loaded_target, target_gguf(job.target_spec)
        heads: Any = job.drafter.heads(self.name, target)
        kind = target.model.config.get_text_config(decoder=True).model_type
        if kind not in ARCHITECTURES:
            raise UserError(
                f"{target.name} is of the family {kind}, whose names in GGUF files are not known "
                f"here; known families: {', '.join(ARCHITECTURES)}. Export it with --format mtp, "
                "and convert that with llama.cpp's convert_hf_to_gguf.py"
            )
        reader = open_gguf(file)
        arch, layers, own = ARCHITECTURES[kind], len(heads.layers), own_layers(target.model)
        _require_target(file, read_keys(reader), arch, own, heads.hidden_size)
        dtype = job.dtype or stored_dtype(heads)
        tensors = _as_stored(heads.state_dict(), own)
        counts = _counts(arch, own + layers, layers)
        copied = {
            key: field
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.") and key not in ("general.architecture", *counts)
        }
        changed = {key: (value, "UINT32") for key, value in counts.items()}
        kept = reader.tensors
        write_gguf(directory / FILE, arch, changed, copied, tensors, dtype, kept)
        return {
            "dtype": dtype,
            "parameters": sum(x.numel() for x in tensors.values()),
            "layers": layers,
            "size": f"a module of {layers} layers in its target's GGUF file",
        }

    def problems(self, directory: Path) -> list[str]:
        require_gguf()
        try:
            reader, keys, facts = read_export(directory / FILE, ARCHITECTURES.values())
        except UserError as error:
            return [str(error)]
        arch, layers = keys["general.architecture"], facts["layers"]
        count = keys.get(f"{arch}.block_count", 0)
        problems = key_problems(_counts(arch, count, layers), keys, FILE)
        if problems:
            return problems
        module = tuple(f"blk.{count - layers + k}." for k in range(layers))
        found = {x.name: stored_tensor(x) for x in reader.tensors if x.name.startswith(module)}
        specs = {
            f"{module[k]}{name}.weight": TensorSpec(
                shape, (tensor_type(f"{name}.weight", shape, facts["dtype"]),)
            )
            for k in range(layers)
            for name, shape in _shapes(arch, keys).items()
        }
        return tensor_problems(specs, found)

    def reload(self, directory: Path, target: Target) -> Drafter:
        heads = module_heads(target, {"depth": export_facts(directory)["max_depth"]})
        weights = read_weights(open_gguf(directory / FILE))
        first = own_layers(target.model)
        state = {
            name: weights[stored] - (1.0 if _is_norm(stored) else 0.0)
            for name, stored in _stored_names(heads.state_dict(), first).items()
        }
        heads.load_state_dict(state, assign=True)
        make_ready(heads, target, target.dtype)
        return MtpDrafter(heads, target.vocab_size)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return [
            (
                "llama-server",
                "",
                f"llama-server -m {FILE} --spec-type {self.spec_type} --spec-draft-n-max {gamma}",
            )
        ]


FORMATS.register("mtp-gguf")(MtpGGUF())


def _counts(arch: str, blocks: int, layers: int) -> dict[str, int]:
    """The keys that say how many layers there are. blocks: with those of the module."""
    return {f"{arch}.block_count": blocks, f"{arch}.nextn_predict_layers": layers}


def _stored_names(state: Mapping[str, Tensor], first: int) -> dict[str, str]:
    """The names in the file by those in the heads. first: the number of the module's first layer.

    >>> _stored_names({"layers.0.enorm.weight": torch.ones(1)}, 32)
    {'layers.0.enorm.weight': 'blk.32.nextn.enorm.weight'}
    """
    names = {}
    for name in state:
        _, number, *parts, kind = name.split(".")
        names[name] = f"blk.{first + int(number)}.{NAMES['.'.join(parts)]}.{kind}"
    return names


def _is_norm(name: str) -> bool:
    return name.removesuffix(".weight").endswith("norm")


def _as_stored(state: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
    """The module's tensors as they are stored, float32 for norms, which have the family's 1."""
    names = _stored_names(state, first)
    tensors = {names[name]: x.detach().cpu() for name, x in state.items()}
    return {name: x.float() + 1.0 if _is_norm(name) else x for name, x in tensors.items()}


def _shapes(arch: str, keys: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors. Queries have a gate of their size beside them."""
    hidden, inner = keys[f"{arch}.embedding_length"], keys[f"{arch}.feed_forward_length"]
    head = keys[f"{arch}.attention.key_length"]
    queries = keys[f"{arch}.attention.head_count"] * head
    values = keys[f"{arch}.attention.head_count_kv"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "nextn.eh_proj": (hidden, 2 * hidden),
        "attn_q": (2 * queries, hidden),
        "attn_k": (values, hidden),
        "attn_v": (values, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    return {name: shapes.get(name, (hidden,)) for name in NAMES.values()}


def _require_target(
    file: Path, keys: Mapping[str, Any], arch: str, layers: int, hidden: int
) -> None:
    """Raise UserError unless a file is the target's, without a module."""
    expected = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.nextn_predict_layers": 0,
        f"{arch}.embedding_length": hidden,
    }
    usual = {f"{arch}.nextn_predict_layers": 0}
    for key, value in expected.items():
        found = keys.get(key, usual.get(key))
        if found != value:
            raise UserError(
                f"{key} of {file} is {found}, expected {value}; give the target's file without a "
                "module, as convert_hf_to_gguf.py writes it with --no-mtp"
            )
