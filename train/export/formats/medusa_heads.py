"""Medusa's heads for vLLM and TGI, in the layout of the Medusa paper's code.

K heads of L residual blocks on hidden states of size H, V tokens. `medusa_lm_head.safetensors`
has for head i, block j: `{i}.{j}.linear.weight` [H, H] and `.bias` [H], and the head's output layer
`{i}.{L}.weight` [V, H]. Each head has an output layer in the file, whether or not it was trained
with one. If all heads share it, `original_lm_head` tells vLLM to keep one.

A reduced draft vocabulary is filled up with the target's rows. vLLM's code has a `token_map` for
it, but 0.32 refuses every checkpoint with one ("not initialized"), and TGI does not support it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.drafters import Drafter
from decode.target.loading import Target
from heads.heads_directory import stored_options
from heads.heads_module import Heads, output_layer
from heads.parallel_heads import MedusaDrafter, MedusaOptions
from train.export.file_schema import (
    DTYPE_NAMES,
    TensorSpec,
    extra_key_problems,
    is_count,
    key_problems,
    read_json,
    read_tensors,
    tensor_problems,
)
from train.export.formats import FORMATS, ExportJob, Format, vllm_serving
from train.export.trained_drafter import (
    copy_to_cpu,
    heads_drafter,
    read_heads_for,
    require_fitting_target,
)

WEIGHTS = "medusa_lm_head.safetensors"


class Medusa(Format):
    """config.json and medusa_lm_head.safetensors. The config has no `architectures`, because TGI
    would take the heads for another kind of speculator."""

    name = "medusa"
    kinds = ("medusa",)
    engines = ("vllm", "tgi")
    needs_target = True

    def max_depth(self, drafter: Path) -> int:
        options: Any = stored_options(drafter)
        depth: int = options.heads
        return depth

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        target = job.loaded_target
        heads = read_heads_for(self.name, job.drafter, target)
        options: MedusaOptions = heads.options
        ids = heads.vocabulary
        shared = options.output != "own"
        dtype = job.dtype or "float32"
        weights = _blocks(heads)
        rows = output_layer(target.model).weight
        for head in range(options.heads):
            output, _ = heads.output.of(head + 1)
            weights[f"{head}.{options.layers}.weight"] = (
                output if ids is None else _filled(output, ids, rows)
            )
        save_file(copy_to_cpu(weights, dtype), directory / WEIGHTS)
        config = {
            "model_type": "medusa",
            "medusa_num_heads": options.heads,
            "medusa_num_layers": options.layers,
            "hidden_size": heads.hidden_size,
            "vocab_size": target.vocab_size,
            "medusa_fc_bias": True,
            "base_model_name_or_path": job.target_name,
            "torch_dtype": dtype,
        }
        if shared:
            config["original_lm_head"] = True
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        return {
            "dtype": dtype,
            "kept": None if ids is None else len(ids),
            "filled_from": None if ids is None else "the target's output layer",
            "parameters": sum(tensor.numel() for tensor in weights.values()),
            "size": f"{options.heads} Medusa heads, residual blocks in each: {options.layers}",
        }

    def problems(self, directory: Path) -> list[str]:
        config = read_json(directory / "config.json")
        if config is None:
            return ["config.json is missing or is not JSON"]
        expected: dict[str, Any] = {
            "model_type": "medusa",
            "medusa_num_heads": is_count,
            "medusa_num_layers": is_count,
            "hidden_size": is_count,
            "vocab_size": is_count,
            "medusa_fc_bias": True,
            "base_model_name_or_path": lambda x: isinstance(x, str) and x != "",
            "torch_dtype": lambda x: x in DTYPE_NAMES,
        }
        if "original_lm_head" in config:
            expected["original_lm_head"] = True
        problems = key_problems(expected, config, "config.json")
        # Above all `architectures`: with it, TGI takes this for another kind of speculator.
        problems += extra_key_problems(expected, config, "config.json")
        if problems:
            return problems
        tensors, problems = read_tensors([directory / WEIGHTS])
        problems += tensor_problems(expected_tensors(config), tensors)
        return problems or _sharing_problems(config, load_file(directory / WEIGHTS))

    def reload(self, directory: Path, target: Target) -> Drafter:
        config = json.loads((directory / "config.json").read_text())
        require_fitting_target(config, directory, target)
        count, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        weights = load_file(directory / WEIGHTS)
        shared = "original_lm_head" in config
        options = MedusaOptions(heads=count, layers=layers, output="shared" if shared else "own")
        state = {f"blocks.{name}": tensor for name, tensor in weights.items() if ".linear." in name}
        for head in range(1 if shared else count):
            state[f"output.layers.{head}.weight"] = weights[f"{head}.{layers}.weight"]
        return heads_drafter(MedusaDrafter, options, None, state, target)

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return [
            vllm_serving("medusa", target, repository, gamma),
            ("TGI", "", f"text-generation-launcher --model-id {repository} --speculate {gamma}"),
        ]


FORMATS.register("medusa")(Medusa())


def expected_tensors(config: dict[str, Any]) -> dict[str, TensorSpec]:
    """Return the tensors that a sound config requires."""
    hidden, layers = config["hidden_size"], config["medusa_num_layers"]
    dtypes = (DTYPE_NAMES[config["torch_dtype"]],)
    specs = {}
    for head in range(config["medusa_num_heads"]):
        for layer in range(layers):
            specs[f"{head}.{layer}.linear.weight"] = TensorSpec((hidden, hidden), dtypes)
            specs[f"{head}.{layer}.linear.bias"] = TensorSpec((hidden,), dtypes)
        specs[f"{head}.{layers}.weight"] = TensorSpec((config["vocab_size"], hidden), dtypes)
    return specs


def _sharing_problems(config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
    if "original_lm_head" not in config:
        return []
    layers = config["medusa_num_layers"]
    return [
        f"original_lm_head is set, but tensor {head}.{layers}.weight differs from head 0's"
        for head in range(1, config["medusa_num_heads"])
        if not torch.equal(weights[f"{head}.{layers}.weight"], weights[f"0.{layers}.weight"])
    ]


def _blocks(heads: Heads) -> dict[str, Tensor]:
    prefix = "blocks."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in heads.state_dict().items()
        if name.startswith(prefix)
    }


def _filled(rows: Tensor, ids: Tensor, target_rows: Tensor) -> Tensor:
    """Return [V, H]: `rows` at the ids, and the target's rows for all other tokens."""
    filled = target_rows.detach().to(rows.device, rows.dtype, copy=True)
    filled[ids.to(rows.device)] = rows
    return filled
