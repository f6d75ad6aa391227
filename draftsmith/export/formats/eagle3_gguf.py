"""EAGLE-3's layer as a GGUF file for llama.cpp (2503.01840).

H hidden size, V' draft vocabulary. `fc.weight` [H, 3H]; `blk.0.*`, whose q, k and v read 2H, with
`attn_norm` for the embedding and `attn_norm_2` for the state; `output_norm.weight`;
`output.weight` [V', H]. With a reduced draft vocabulary also `d2t`, int64 [V'], the token id of
each row (other layouts store the id minus the row). The embeddings are the target's.
`target_layers` are the layers whose input is captured. This input is the output of the layer one
lower. Llama 3's rotary positions also need `rope_freqs.weight`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import Target, target_gguf
from draftsmith.export.file_schema import is_count
from draftsmith.export.formats import FORMATS, ExportJob, export_facts
from draftsmith.export.formats.eagle3_layer import ALL_SWITCHES, are_inputs
from draftsmith.export.formats.gguf_layout import (
    D2T,
    FILE,
    GGUFLayout,
    gguf_layer,
    metadata,
    read_keys,
    read_weights,
    rows_in_halves,
    rows_in_pairs,
    tokenizer_keys,
    write_gguf,
)
from draftsmith.export.formats.published_layer import are_ascending_ids
from draftsmith.export.formats.tensor_table import OWN_OUTPUT, Row, read_state, written_tensors
from draftsmith.export.trained_drafter import heads_drafter, require_fitting_target, stored_dtype
from heads.eagle_drafter import Eagle3Drafter
from heads.options import Eagle3Options

ARCH = "eagle3"
FREQUENCIES = "rope_freqs.weight"
ROTATED = {"blk.0.attn_q.weight": "head_count", "blk.0.attn_k.weight": "head_count_kv"}


class Eagle3GGUF(GGUFLayout):
    """A reduced draft vocabulary stays reduced."""

    name = "eagle3-gguf"
    kinds = ("eagle3",)
    architectures = (ARCH,)
    spec_type = "draft-eagle3"
    carries_vocabulary = True
    depth_option = "steps"

    def target_to_load(self, job: ExportJob) -> str:
        """Return the target that the heads were trained for. The file for serving may be quantized
        and then has other weights."""
        return str(job.drafter.target["name"])

    def refuse(self, job: ExportJob) -> None:
        options = job.drafter.options
        used = [name for name in ALL_SWITCHES if getattr(options, name)]
        used += ["a layer with other settings than its target's"] if options.layer else []
        if used:
            raise UserError(
                f"{job.drafter} has {' and '.join(used)}, which format {self.name} does not write; "
                "export it as eagle3 and serve it with vLLM"
            )

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        heads: Any = job.drafter.heads(self.name, job.loaded_target)
        config = heads.config
        rope = config.rope_parameters.get("rope_type", "default")
        if rope not in ("default", "llama3"):
            raise UserError(
                f"{job.drafter} has rope_type {rope}, which format {self.name} does not write; "
                "export it as eagle3 and convert that with llama.cpp's own convert_hf_to_gguf.py"
            )
        dtype = job.dtype or stored_dtype(heads)
        file = target_gguf(job.target_spec)
        copied = tokenizer_keys(file, config.vocab_size)
        _require_same_tokens(file, copied["tokenizer.ggml.tokens"].contents(), job.loaded_target)
        described = metadata(config, ARCH, dtype) | {
            f"{ARCH}.target_layers": ([layer + 1 for layer in heads.captured_layers], "ARRAY"),
            f"{ARCH}.target_hidden_size": (heads.hidden_size, "UINT32"),
            f"{ARCH}.norm_before_residual": (False, "BOOL"),
            f"{ARCH}.norm_before_fc": (False, "BOOL"),
        }
        kept = None if heads.vocabulary is None else len(heads.vocabulary)
        keys = {key: value for key, (value, _) in described.items()}
        table = [
            row for row in self.table(ARCH, keys, {"kept": kept, "rope": rope}) if not row.shared
        ]
        output = {OWN_OUTPUT: heads.output.of(1)[0]}
        written = written_tensors(table, heads.state_dict(), output)
        tensors = {name: tensor.detach().cpu() for name, tensor in written.items()}
        counts = (config.num_attention_heads, config.num_key_value_heads)
        for name, count in zip(ROTATED, counts, strict=True):
            tensors[name] = rows_in_pairs(tensors[name], count)
        parameters = sum(tensor.numel() for tensor in tensors.values())
        if rope == "llama3":
            tensors[FREQUENCIES] = rotation_slowdowns(config)
        if heads.vocabulary is not None:
            tensors[D2T] = heads.vocabulary.cpu()
        write_gguf(directory / FILE, ARCH, described, copied, tensors, dtype)
        return {
            "dtype": dtype,
            "kept": kept,
            "parameters": parameters,
            "layers": 1,
            "rope": rope,
            "captured_layers": heads.options.captured_layers,
            "size": "one decoder layer",
        }

    def extra_expected_keys(self, arch: str) -> dict[str, Any]:
        return {
            f"{ARCH}.target_layers": are_inputs,
            f"{ARCH}.target_hidden_size": is_count,
            f"{ARCH}.norm_before_residual": False,
            f"{ARCH}.norm_before_fc": False,
        }

    def table(self, arch: str, keys: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Row]:
        hidden = keys[f"{ARCH}.embedding_length"]
        captured = len(keys[f"{ARCH}.target_layers"]) * keys[f"{ARCH}.target_hidden_size"]
        rows = facts["kept"] or keys[f"{ARCH}.vocab_size"]
        table = [
            Row("fc.weight", (hidden, captured)),
            Row("output_norm.weight", (hidden,), "norm.weight"),
            Row("output.weight", (rows, hidden), OWN_OUTPUT),
            Row("blk.0.attn_norm_2.weight", (hidden,), "midlayer.hidden_norm.weight"),
            *gguf_layer(ARCH, keys, 0, "midlayer", 2 * hidden, {}),
        ]
        if facts["rope"] == "llama3":
            pairs = keys[f"{ARCH}.rope.dimension_count"] // 2
            table.append(Row(FREQUENCIES, (pairs,), shared=True))
        return table + ([Row(D2T, (rows,), shared=True)] if facts["kept"] else [])

    def value_problems(self, weights: Mapping[str, Tensor], keys: Mapping[str, Any]) -> list[str]:
        if D2T not in weights or are_ascending_ids(weights[D2T], keys[f"{ARCH}.vocab_size"]):
            return []
        return [f"{D2T} does not hold distinct token ids in ascending order"]

    def reload(self, directory: Path, target: Target) -> Drafter:
        from gguf import GGUFReader

        reader = GGUFReader(directory / FILE)
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
        if keys[f"{ARCH}.target_layers"] != [layer + 1 for layer in drafter.heads.captured_layers]:
            raise UserError(
                f"{directory} reads the inputs of layers {keys[f'{ARCH}.target_layers']} of its "
                f"target; in {target.name} these are other layers. Use the target it was made "
                "for"
            )
        return drafter


FORMATS.register("eagle3-gguf")(Eagle3GGUF())


def rotation_slowdowns(config: LlamaConfig) -> Tensor:
    """Return [d/2]: how many times slower each pair of a head rotates because of the scaling in
    Llama 3's configs."""
    size = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, size, 2).float() / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return plain / scaled


def _require_same_tokens(file: Path, tokens: Sequence[str], target: Target) -> None:
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
