"""The tensors of a layout as a table. A row states one tensor, and it is written, checked and read
by this row.

H hidden size, V vocabulary, V' draft vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from decode.base.errors import UserError
from draftsmith.export.file_schema import DTYPE_NAMES, TensorSpec

# The output layer of heads that have one for all of them, in their state.
OWN_OUTPUT = "output.layers.0.weight"


@dataclass(frozen=True)
class TensorRow:
    """A tensor of a file.

    name: in the file. shape: in PyTorch's order. ours: its name in the state of our heads, empty if
    it is the same. shared: whether it is not part of that state: it comes from the target, or is a
    map of the draft vocabulary. implied: whether published files may leave it out. dtype: by
    safetensors' name; None for that of the weights.
    """

    name: str
    shape: tuple[int, ...]
    ours: str = ""
    shared: bool = False
    implied: bool = False
    dtype: str | None = None

    @property
    def source(self) -> str:
        return self.ours or self.name


def written_tensors(
    table: Iterable[TensorRow], state: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors to write. state: the state of the heads. shared: other tensors; those
    without a row are left out. Raises UserError for a part of the state that has no row."""
    rows = list(table)
    unknown = sorted(state.keys() - {row.source for row in rows})
    if unknown:
        raise UserError(f"this layout has no tensor for {', '.join(unknown)} of these heads")
    tensors = {**shared, **state}
    return {row.name: tensors[row.source] for row in rows}


def expected_tensors(table: Iterable[TensorRow], dtype: str) -> dict[str, TensorSpec]:
    """Return what a file must hold, for `tensor_problems`. dtype: the dtype of the weights."""
    return {row.name: TensorSpec(row.shape, (row.dtype or DTYPE_NAMES[dtype],)) for row in table}


def read_state(table: Iterable[TensorRow], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of heads from the tensors of a file."""
    return {
        row.source: tensors[row.name] for row in table if not row.shared and row.name in tensors
    }


def layer_rows(
    config: Mapping[str, Any],
    name: str,
    input_size: int,
    norms: Iterable[str] = (),
    ours: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[TensorRow]:
    """Return the tensors of a decoder layer. input_size: the input size of its attention. norms:
    the norms before attention. ours: the layer's name in our heads, empty if it is the same. names:
    of its parts, where they differ from ours."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[heads] * config["head_dim"]
        for heads in ("num_attention_heads", "num_key_value_heads")
    )
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(norms, (hidden,)),
        "self_attn.q_proj": (queries, input_size),
        "self_attn.k_proj": (keys, input_size),
        "self_attn.v_proj": (keys, input_size),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return [
        TensorRow(f"{name}.{names.get(part, part)}.weight", shape, f"{ours or name}.{part}.weight")
        for part, shape in shapes.items()
    ]


def map_rows(rows: int, vocab_size: int) -> list[TensorRow]:
    """Return the maps of a reduced draft vocabulary with this number of rows; a complete one has
    none. The second map follows from the first."""
    if rows == vocab_size:
        return []
    return [
        TensorRow("d2t", (rows,), shared=True, dtype="I64"),
        TensorRow("t2d", (vocab_size,), shared=True, implied=True, dtype="BOOL"),
    ]
