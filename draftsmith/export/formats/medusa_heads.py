"""Medusa's heads for TGI and older releases of vLLM, in the layout of the Medusa paper's code.

K heads of L residual blocks on hidden states of size H, V tokens. `medusa_lm_head.safetensors`
has for head i, block j: `{i}.{j}.linear.weight` [H, H] and `.bias` [H], and the head's output layer
`{i}.{L}.weight` [V, H]. Each head has an output layer in the file, whether or not it was trained
with one. If all heads share it, `original_lm_head` tells vLLM to keep one.

A reduced draft vocabulary is filled up with the target's rows. vLLM's code has a `token_map` for
it, but 0.32 refuses every checkpoint with one ("not initialized"), and TGI does not support it.
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import DTYPES, Target
from draftsmith.export.file_schema import DTYPE_NAMES, is_count, tensor_problems
from draftsmith.export.formats import FORMATS, ExportJob, ImportJob, Restored
from draftsmith.export.formats.published_keys import model_keys
from draftsmith.export.formats.published_layer import are_ascending_ids
from draftsmith.export.formats.table_format import TableFormat
from draftsmith.export.formats.tensor_table import TensorRow, expected_tensors, read_state
from draftsmith.export.published import Checkpoint, renamed, stored_tensors
from draftsmith.export.trained_drafter import heads_drafter, rebuild_heads, require_fitting_target
from heads.heads_module import output_layer
from heads.options import MedusaOptions
from heads.parallel_heads import MedusaDrafter

# The names of tensors in published files: those of the paper's code, and vLLM's.
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")
PREFIX = re.compile(r"^medusa_heads?\.")
SHARED_OUTPUT, IDS = "lm_head.weight", "token_map"
# Settings: that all heads have one output layer; the size of a reduced draft vocabulary.
SHARES, ROWS = "original_lm_head", "truncated_vocab_size"
# What an import reads, and what vLLM's configs say of trees and of blocks, which tensors show. Some
# configs are their target's, with Medusa's keys beside it.
KEYS = (
    *("medusa_num_heads", "num_heads", "medusa_num_layers", "num_hidden_layers", "medusa_fc_bias"),
    *("hidden_size", "vocab_size", SHARES, ROWS, "max_paths", "topk", "max_seq_len"),
)


class Medusa(TableFormat):
    """config.json and medusa_lm_head.safetensors. The config has no `architectures`, because TGI
    would take the heads for another kind of speculator."""

    name = "medusa"
    kinds = ("medusa",)
    vllm = {"method": "medusa"}
    weights = "medusa_lm_head.safetensors"
    depth_option = "heads"

    def settings(self, heads: Any, dtype: str, job: ExportJob) -> dict[str, Any]:
        options: MedusaOptions = heads.options
        config = {
            "model_type": "medusa",
            "medusa_num_heads": options.heads,
            "medusa_num_layers": options.layers,
            "hidden_size": heads.hidden_size,
            "vocab_size": job.loaded_target.vocab_size,
            "medusa_fc_bias": True,
            "base_model_name_or_path": job.target_name,
            "torch_dtype": dtype,
        }
        return config if options.output == "own" else config | {SHARES: True}

    def expected_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """Above all no `architectures`."""
        counts = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
        expected = {
            "model_type": "medusa",
            **dict.fromkeys(counts, is_count),
            "medusa_fc_bias": True,
            "base_model_name_or_path": lambda x: isinstance(x, str) and x != "",
            "torch_dtype": lambda x: x in DTYPE_NAMES,
        }
        return expected | ({SHARES: True} if SHARES in config else {})

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden, layers = config["hidden_size"], config["medusa_num_layers"]
        output = (config.get(ROWS, config["vocab_size"]), hidden)
        table = []
        for head in range(config["medusa_num_heads"]):
            for block in (f"{head}.{layer}.linear" for layer in range(layers)):
                table.append(
                    TensorRow(f"{block}.weight", (hidden, hidden), f"blocks.{block}.weight")
                )
                table.append(TensorRow(f"{block}.bias", (hidden,), f"blocks.{block}.bias"))
            ours = f"output.layers.{0 if SHARES in config else head}.weight"
            table.append(TensorRow(f"{head}.{layers}.weight", output, ours))
        return table

    def size(self, config: dict[str, Any]) -> str:
        count, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        return f"{count} Medusa heads, residual blocks in each: {layers}"

    def state(self, heads: Any, target: Target) -> dict[str, Tensor]:
        """With an output layer for all tokens."""
        options, ids = heads.options, heads.vocabulary
        rows = output_layer(target.model).weight
        state = super().state(heads, target)
        for head in range(options.heads if options.output == "own" else 1):
            output, _ = heads.output.of(head + 1)
            full = output if ids is None else _filled(output, ids, rows)
            state[f"output.layers.{head}.weight"] = full
        return state

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        if SHARES not in config:
            return []
        layers = config["medusa_num_layers"]
        return [
            f"{SHARES} is set, but tensor {head}.{layers}.weight differs from head 0's"
            for head in range(1, config["medusa_num_heads"])
            if not torch.equal(weights[f"{head}.{layers}.weight"], weights[f"0.{layers}.weight"])
        ]

    def reload(self, directory: Path, target: Target) -> Drafter:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        require_fitting_target(config, directory, target)
        count, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        state = read_state(self.table(config), load_file(directory / self.weights))
        options = _options(count, layers, shared=SHARES in config)
        return heads_drafter(MedusaDrafter, options, None, state, target)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        keys = checkpoint.config.keys()
        is_named = checkpoint.config.get("model_type") == "medusa" or "medusa_num_heads" in keys
        return is_named or any(BLOCK.fullmatch(name) for name in checkpoint.names)

    def restored(self, job: ImportJob) -> Restored:
        """Heads of other numbers than the config says are read: the paper's own configs are wrong
        about it. Without biases, the blocks get zeros."""
        config, target = job.checkpoint.config, job.target
        tensors, problems = renamed(job.checkpoint.tensors, _our_name)
        ids = tensors.pop(IDS, None)
        blocks = {key: BLOCK.fullmatch(key) for key in tensors}
        places = [(int(m[1]), int(m[2])) for m in blocks.values() if m]
        if not places:
            job.require(
                ["no tensor has the name of a Medusa block, {head}.{block}.linear"], "Medusa"
            )
        count, layers = (1 + max(numbers) for numbers in zip(*places, strict=True))
        if job.depth not in (None, count):
            raise UserError(
                f"--depth is {job.depth}, but {job.checkpoint.source} has {count} Medusa heads and "
                "drafts as many tokens; leave it out"
            )
        shared = bool(config.get(SHARES))
        tensors, others = renamed(tensors, partial(_with_layers, layers=layers, shared=shared))
        if shared and f"0.{layers}.weight" in tensors:
            for head in range(1, count):
                tensors.setdefault(f"{head}.{layers}.weight", tensors[f"0.{layers}.weight"])
        hidden = output_layer(target.model).in_features
        if not config.get("medusa_fc_bias") and not any(n.endswith(".bias") for n in tensors):
            dtype = DTYPES[job.checkpoint.dtype]
            for head, layer in set(places):
                tensors[f"{head}.{layer}.linear.bias"] = torch.zeros(hidden, dtype=dtype)
        sizes: dict[str, Any] = {
            "hidden_size": hidden,
            "vocab_size": target.vocab_size,
            "medusa_num_heads": count,
            "medusa_num_layers": layers,
            "torch_dtype": job.checkpoint.dtype,
        }
        problems += others
        problems += [
            f"config.json: {key} is {config[key]}, but the target {target.name} has {sizes[key]}"
            for key in ("hidden_size", "vocab_size")
            if config.get(key, sizes[key]) != sizes[key]
        ]
        problems += _id_problems(ids, target.vocab_size)
        problems += job.key_problems({"": (*KEYS, *model_keys(config)[""])})
        job.require(problems, "Medusa")
        sizes |= {SHARES: True} if shared else {}
        if ids is not None:
            sizes[ROWS] = len(ids)
            for name in (f"{head}.{layers}.weight" for head in range(count)):
                if name in tensors and len(tensors[name]) == target.vocab_size:
                    tensors[name] = tensors[name][ids]
        table = self.table(sizes)
        expected = expected_tensors(table, job.checkpoint.dtype)
        problems = tensor_problems(expected, stored_tensors(tensors))
        job.require(problems or self.value_problems(sizes, tensors), "Medusa")
        options = _options(count, layers, shared=shared)
        heads = rebuild_heads(options, ids, read_state(table, tensors), target)
        named = config.get("medusa_num_heads", config.get("num_heads", count))
        notes = (
            [] if named == count else [f"its config says {named} heads, and its file has {count}"]
        )
        return Restored.of_heads(heads, target, notes)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        tgi = f"text-generation-launcher --model-id {repository} --speculate {gamma}"
        return [*super().serving(target, repository, gamma), ("TGI", "", tgi)]


FORMATS.register("medusa")(Medusa())


def _options(count: int, layers: int, *, shared: bool) -> MedusaOptions:
    return MedusaOptions(heads=count, layers=layers, output="shared" if shared else "own")


def _our_name(name: str) -> str:
    """Return the name of a published tensor in this layout. Output layers of vLLM's names keep
    them: their number of blocks is not known yet.

    >>> _our_name("medusa_head.0.0.linear.weight"), _our_name("blocks.2.layers.0.bias")
    ('0.0.linear.weight', '2.0.linear.bias')
    """
    name = PREFIX.sub("", name)
    block = VLLM_BLOCK.fullmatch(name)
    return f"{block[1]}.{block[2]}.linear.{block[3]}" if block else name


def _with_layers(name: str, layers: int, shared: bool) -> str:
    """Return the name of an output layer in this layout. layers: the number of blocks of a head.
    shared: all heads have one output layer."""
    if shared and name == SHARED_OUTPUT:
        return f"0.{layers}.weight"
    output = VLLM_OUTPUT.fullmatch(name)
    return f"{output[1]}.{layers}.weight" if output else name


def _id_problems(ids: Tensor | None, vocab_size: int) -> list[str]:
    if ids is None:
        return []
    is_list = ids.dtype == torch.int64 and ids.dim() == 1 and len(ids)
    if is_list and are_ascending_ids(ids, vocab_size):
        return []
    return [f"{IDS} does not hold token ids from 0 to {vocab_size - 1} in ascending order"]


def _filled(rows: Tensor, ids: Tensor, target_rows: Tensor) -> Tensor:
    """Return [V, H]: `rows` at the ids, and the target's rows for all other tokens."""
    filled = target_rows.detach().to(rows.device, rows.dtype, copy=True)
    filled[ids.to(rows.device)] = rows
    return filled
