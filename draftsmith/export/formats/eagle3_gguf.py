"""EAGLE-3's layer as a GGUF file for llama.cpp (2503.01840).

H hidden size, V' draft vocabulary. `fc.weight` [H, 3H]; `blk.0.*`, whose q, k and v read 2H, with
`attn_norm` for the embedding and `attn_norm_2` for the state; `output_norm.weight`;
`output.weight` [V', H].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.export.file_schema import is_count
from draftsmith.export.formats import FORMATS, ExportJob, export_facts
from draftsmith.export.formats.eagle3_layer import ALL_SWITCHES
from draftsmith.export.formats.gguf_layout import (
    D2T,
    FILE,
    gguf_layer,
    open_gguf,
    read_keys,
    read_weights,
    rows_in_halves,
    rows_in_pairs,
)
from draftsmith.export.formats.heads_gguf import HeadsGGUF
from draftsmith.export.formats.tensor_table import OWN_OUTPUT, TensorRow, read_state
from draftsmith.export.trained_drafter import heads_drafter, require_fitting_target
from heads.eagle_drafter import Eagle3Drafter
from heads.options import Eagle3Options

ARCH = "eagle3"
ROTATED = {"blk.0.attn_q.weight": "head_count", "blk.0.attn_k.weight": "head_count_kv"}


class Eagle3GGUF(HeadsGGUF):
    """EAGLE-3, one layer with the sizes of its target's."""

    name = "eagle3-gguf"
    kinds = ("eagle3",)
    arch = ARCH
    architectures = (ARCH,)
    spec_type = "draft-eagle3"
    elsewhere = "eagle3"
    depth_option = "steps"

    def refuse(self, job: ExportJob) -> None:
        options = job.drafter.options
        used = [name for name in ALL_SWITCHES if getattr(options, name)]
        used += ["a layer with other settings than its target's"] if options.layer else []
        if used:
            raise UserError(
                f"{job.drafter} has {' and '.join(used)}, which format {self.name} does not write; "
                "export it as eagle3 and serve it with vLLM"
            )

    def described(self, heads: Any) -> dict[str, tuple[Any, str]]:
        return {
            f"{ARCH}.target_hidden_size": (heads.hidden_size, "UINT32"),
            f"{ARCH}.norm_before_residual": (False, "BOOL"),
            f"{ARCH}.norm_before_fc": (False, "BOOL"),
        }

    def own_facts(self, heads: Any) -> dict[str, Any]:
        return {
            "layers": 1,
            "captured_layers": heads.options.captured_layers,
            "size": "one decoder layer",
        }

    def arranged(self, tensors: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
        counts = (config.num_attention_heads, config.num_key_value_heads)
        rotated = {
            name: rows_in_pairs(tensors[name], count)
            for name, count in zip(ROTATED, counts, strict=True)
        }
        return tensors | rotated

    def extra_expected_keys(self, arch: str) -> dict[str, Any]:
        return super().extra_expected_keys(arch) | {
            f"{ARCH}.target_hidden_size": is_count,
            f"{ARCH}.norm_before_residual": False,
            f"{ARCH}.norm_before_fc": False,
        }

    def rows(self, keys: Mapping[str, Any], facts: Mapping[str, Any]) -> list[TensorRow]:
        hidden = keys[f"{ARCH}.embedding_length"]
        captured = len(keys[self.taps_key]) * keys[f"{ARCH}.target_hidden_size"]
        rows = facts["kept"] or keys[f"{ARCH}.vocab_size"]
        return [
            TensorRow("fc.weight", (hidden, captured)),
            TensorRow("output_norm.weight", (hidden,), "norm.weight"),
            TensorRow("output.weight", (rows, hidden), OWN_OUTPUT),
            TensorRow("blk.0.attn_norm_2.weight", (hidden,), "midlayer.hidden_norm.weight"),
            *gguf_layer(ARCH, keys, 0, "midlayer", 2 * hidden, {}),
        ]

    def reload(self, directory: Path, target: Target) -> Drafter:
        reader = open_gguf(directory / FILE)
        keys, weights = read_keys(reader), read_weights(reader)
        sizes = {
            "hidden_size": keys[f"{ARCH}.embedding_length"],
            "vocab_size": keys[f"{ARCH}.vocab_size"],
        }
        require_fitting_target(sizes, directory, target)
        for name, count in ROTATED.items():
            weights[name] = rows_in_halves(weights[name], keys[f"{ARCH}.attention.{count}"])
        facts = export_facts(directory)
        state = read_state(self.table(ARCH, keys, facts), weights)
        options = Eagle3Options(
            steps=facts["max_depth"], captured_layers=facts.get("captured_layers")
        )
        ids: torch.Tensor | None = weights.get(D2T)
        drafter = heads_drafter(Eagle3Drafter, options, ids, state, target)
        if keys[self.taps_key] != [layer + 1 for layer in drafter.heads.captured_layers]:
            raise UserError(
                f"{directory} reads the inputs of layers {keys[self.taps_key]} of its "
                f"target; in {target.name} these are other layers. Use the target it was made "
                "for"
            )
        return drafter


FORMATS.register("eagle3-gguf")(Eagle3GGUF())
