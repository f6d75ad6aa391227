"""A published drafter in a GGUF file for llama.cpp, read as the directory that it was made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.model.loading import Target
from draftsmith.export.file_schema import FLOATS
from draftsmith.export.formats.block_gguf import ARCH, own_tensors, published_config, rotation_of
from draftsmith.export.formats.gguf_layout import open_gguf, read_keys, read_weights
from draftsmith.export.formats.heads_gguf import require_same_tokens
from draftsmith.export.published import Checkpoint


@dataclass
class GGUFCheckpoint(Checkpoint):
    """A file of block heads (`block_gguf`). tokens: those of its tokenizer. weights: by the names
    of `block_layers`, float32."""

    file: Path
    tokens: Sequence[str]
    weights: dict[str, Tensor]

    @classmethod
    def of_file(cls, source: str, target: Target) -> "GGUFCheckpoint":
        """Open a file. Raises UserError if it is damaged, holds no block drafter or quantised
        weights, or has other rotary positions than the target."""
        file = from_home(source)
        reader = open_gguf(file)
        keys = read_keys(reader)
        arch = keys.get("general.architecture")
        if arch != ARCH:
            raise UserError(
                f"{source} is of llama.cpp's architecture {arch!r}; of GGUF files, those of "
                f"{ARCH!r} are imported (DFlash, DFlash2, DSpark). A small language model needs no "
                "import"
            )
        types = {tensor.tensor_type.name for tensor in reader.tensors}
        quantised = sorted(types - {*FLOATS, "I64"})
        if quantised:
            raise UserError(
                f"{source} has weights in {', '.join(quantised)}; expected the original weights in "
                "float32, bfloat16 or float16"
            )
        weights = read_weights(reader)
        config: dict[str, Any] = published_config(keys, weights)
        config["rope_parameters"] = rotation_of(keys, weights, target)
        tokens = keys.get("tokenizer.ggml.tokens") or []
        return cls(source, file.parent, config, file, tokens, own_tensors(weights))

    @cached_property
    def weight_files(self) -> list[Path]:
        return [self.file]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.weights)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self.weights)

    @cached_property
    def dtype(self) -> str:
        # Norms are stored in float32, whatever the dtype of the matrices.
        return "float32"

    @property
    def tokenizer_notes(self) -> list[str]:
        return []

    def require_tokenizer_of(self, target: Target) -> None:
        require_same_tokens(self.file, self.tokens, target)
