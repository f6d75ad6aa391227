"""Heads as a GGUF file for llama.cpp: what the layouts of EAGLE-3 and of block drafters share.

The file has the heads' own tensors. Embeddings are the target's, and so is the output layer of
heads that do not write one. With a reduced draft vocabulary there is `d2t`, int64 [V'], the token
id of each row (other layouts store the id minus the row). Llama 3's rotary positions also need
`rope_freqs.weight`. `target_layers` are the layers whose input is captured. This input is the
output of the layer one lower.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.base.errors import UserError
from decode.model.loading import Target, target_gguf
from draftsmith.export.formats import ExportJob
from draftsmith.export.formats.eagle3_layer import are_inputs
from draftsmith.export.formats.gguf_layout import (
    D2T,
    FILE,
    GGUFLayout,
    metadata,
    tokenizer_keys,
    write_gguf,
)
from draftsmith.export.formats.published_layer import are_ascending_ids
from draftsmith.export.formats.tensor_table import OWN_OUTPUT, TensorRow, written_tensors
from draftsmith.export.trained_drafter import stored_dtype

FREQUENCIES = "rope_freqs.weight"
ROTATIONS = ("default", "llama3")


class HeadsGGUF(GGUFLayout):
    """A reduced draft vocabulary stays reduced.

    arch: llama.cpp's name of such heads. elsewhere: the layout to export other rotary positions
    as, and to convert that.
    """

    arch: ClassVar[str]
    elsewhere: ClassVar[str]
    carries_vocabulary = True

    @property
    def taps_key(self) -> str:
        return f"{self.arch}.target_layers"

    @abstractmethod
    def described(self, heads: Any) -> dict[str, tuple[Any, str]]:
        """Return the keys that only such heads have, as `metadata` does."""

    @abstractmethod
    def rows(self, keys: Mapping[str, Any], facts: Mapping[str, Any]) -> list[TensorRow]:
        """Return the tensors of the heads, and of an output layer if it is written."""

    def extra_expected_keys(self, arch: str) -> dict[str, Any]:
        return {self.taps_key: are_inputs}

    @abstractmethod
    def own_facts(self, heads: Any) -> dict[str, Any]:
        """Return the facts that only such heads have, among them their `layers` and `size`."""

    def arranged(self, tensors: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
        """Return the tensors as llama.cpp needs them."""
        return tensors

    def target_to_load(self, job: ExportJob) -> str:
        """Return the target that the heads were trained for. The file for serving may be quantized
        and then has other weights."""
        return str(job.drafter.target["name"])

    def table(
        self, arch: str, keys: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> list[TensorRow]:
        table = self.rows(keys, facts)
        if facts["rope"] == "llama3":
            pairs = keys[f"{arch}.rope.dimension_count"] // 2
            table.append(TensorRow(FREQUENCIES, (pairs,), shared=True))
        return table + ([TensorRow(D2T, (facts["kept"],), shared=True)] if facts["kept"] else [])

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        heads: Any = job.drafter.heads(self.name, job.loaded_target)
        config = heads.config
        rope = config.rope_parameters.get("rope_type", "default")
        if rope not in ROTATIONS:
            raise UserError(
                f"{job.drafter} has rope_type {rope}, which format {self.name} does not write; "
                f"export it as {self.elsewhere} and convert that with llama.cpp's own "
                "convert_hf_to_gguf.py"
            )
        dtype = job.dtype or stored_dtype(heads)
        file = target_gguf(job.target_spec)
        copied = tokenizer_keys(file, config.vocab_size)
        require_same_tokens(file, copied["tokenizer.ggml.tokens"].contents(), job.loaded_target)
        inputs = [layer + 1 for layer in heads.captured_layers]
        described = metadata(config, self.arch, dtype) | {self.taps_key: (inputs, "ARRAY")}
        described |= self.described(heads)
        copied = {key: field for key, field in copied.items() if key not in described}
        keys = {key: value for key, (value, _) in described.items()}
        kept = None if heads.vocabulary is None else len(heads.vocabulary)
        facts = {"dtype": dtype, "kept": kept, "rope": rope, **self.own_facts(heads)}
        output = {OWN_OUTPUT: heads.output.of(1)[0]}
        written = written_tensors(self.rows(keys, facts), heads.state_dict(), output)
        tensors = {name: tensor.detach().cpu() for name, tensor in written.items()}
        parameters = sum(tensor.numel() for tensor in tensors.values())
        tensors = self.arranged(tensors, config)
        if rope == "llama3":
            tensors[FREQUENCIES] = rotation_slowdowns(config)
        if heads.vocabulary is not None:
            tensors[D2T] = heads.vocabulary.cpu()
        write_gguf(directory / FILE, self.arch, described, copied, tensors, dtype)
        return facts | {"parameters": parameters}

    def value_problems(self, weights: Mapping[str, Tensor], keys: Mapping[str, Any]) -> list[str]:
        if D2T not in weights or are_ascending_ids(weights[D2T], keys[f"{self.arch}.vocab_size"]):
            return []
        return [f"{D2T} does not hold distinct token ids in ascending order"]


def rotation_slowdowns(config: LlamaConfig) -> Tensor:
    """Return [d/2]: how many times slower each pair of a head rotates because of the scaling in
    Llama 3's configs."""
    size = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, size, 2).float() / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return plain / scaled


def require_same_tokens(file: Path, tokens: Sequence[str], target: Target) -> None:
    """Raise UserError if a GGUF file's tokens are not the target's. Up to 1% may differ: some files
    write a few tokens differently, such as those that only fill up the vocabulary."""
    target_tokens = target.tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    pairs = zip(target_tokens, tokens, strict=True)
    different = sum(a is not None and a != b for a, b in pairs)
    if different > len(tokens) // 100:
        raise UserError(
            f"{different} of the {len(tokens)} tokens of {file} differ from {target.name}'s; "
            "the drafter was made for that model. Give a GGUF file of it"
        )
