"""A module of multi-token prediction for the library speculators (2412.19437), which trains it.

`mtp_layers.0.*` is the decoder layer, of the target's family. Beside its parts are
`token_layernorm.weight` and `hidden_layernorm.weight` [H], `input_proj.weight` [H, 2H] and
`final_layernorm.weight` [H]. H hidden size. Embeddings and output layer are the target's. In
`config.json`, `transformer_layer_config` is the target's config, and no setting of a layer stands
beside it. `speculators stitch-mtp` puts the module into its target's checkpoint, for engines.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.loading import Target
from decode.model.pretrained import explained
from draftsmith.export.file_schema import (
    DTYPE_NAMES,
    TensorSpec,
    extra_key_problems,
    key_problems,
    read_json,
    read_tensors,
    tensor_problems,
)
from draftsmith.export.formats import (
    FORMATS,
    ExportJob,
    Format,
    ImportJob,
    Restored,
    export_facts,
)
from draftsmith.export.formats.eagle3_layer import (
    LAYER_CONFIG,
    MODEL_TYPE,
    SPECULATORS,
    VERSION,
    is_speculators_config,
    speculators_config,
    speculators_keys,
)
from draftsmith.export.formats.published_keys import HARMLESS, Keys
from draftsmith.export.formats.published_layer import EMBEDDINGS, row_problems, stated_tokens
from draftsmith.export.published import Checkpoint, stored_tensors
from draftsmith.export.trained_drafter import copy_to_cpu, rebuild_heads, stored_dtype
from heads.heads_directory import build_heads, make_ready
from heads.layers.target_layers import output_layer
from heads.mtp_drafter import MtpDrafter
from heads.mtp_heads import MtpHeads
from heads.options import HeadOptions, MtpOptions

WEIGHTS, CONFIG, OUTPUT = "model.safetensors", "config.json", "lm_head.weight"
# Settings outside of the target's, of every such module.
STATED = {"num_nextn_predict_layers": 1, "tie_word_embeddings": False}
# The families that the library has such a layer for.
FAMILIES = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Names of the parts beside the decoder layer, by their names in ours.
PARTS = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}
# Settings of the target that say how many layers a module in its checkpoint has.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class SpeculatorsMtp(Format):
    """For modules of one layer."""

    name = "speculators-mtp"
    kinds: ClassVar[tuple[str, ...]] = ("mtp",)
    needs_target = True
    depth_option = "depth"
    # The settings of the target are compared with its own.
    published_keys: ClassVar[Keys] = {
        **{key: x for key, x in speculators_keys().items() if key != LAYER_CONFIG},
        "": (MODEL_TYPE, "speculators_version", SPECULATORS, LAYER_CONFIG, *STATED),
    }

    def refuse(self, job: ExportJob) -> None:
        layers = job.drafter.options.layers
        if layers != 1:
            raise UserError(
                f"{job.drafter} has {layers} layers, and the library speculators reads modules of "
                "one; use --format mtp, or train it with layers: 1"
            )

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        target = job.loaded_target
        text = target.model.config.get_text_config(decoder=True)
        if text.model_type not in FAMILIES:
            raise UserError(
                f"{target.name} is of the family {text.model_type}, for which the library "
                f"speculators has no such layer; it has those of {', '.join(FAMILIES)}. Use "
                "--format mtp or --format draftsmith"
            )
        heads = job.drafter.heads(self.name, target)
        dtype = job.dtype or stored_dtype(heads)
        tensors = {_stored_name(name): x for name, x in heads.state_dict().items()}
        save_file(copy_to_cpu(tensors, dtype), directory / WEIGHTS)
        contents = {
            "architectures": ["MTPDraftModel"],
            MODEL_TYPE: "mtp",
            "speculators_version": VERSION,
            SPECULATORS: speculators_config("mtp", job),
            LAYER_CONFIG: json.loads(text.to_json_string(use_diff=True)),
            **STATED,
            "dtype": dtype,
        }
        (directory / CONFIG).write_text(json.dumps(contents, indent=2), encoding="utf-8")
        return {
            "dtype": dtype,
            "parameters": sum(x.numel() for x in tensors.values()),
            "size": "a module of one layer",
        }

    def problems(self, directory: Path) -> list[str]:
        contents = read_json(directory / CONFIG)
        if contents is None:
            return [f"{CONFIG} is missing or is not JSON"]
        expected: dict[str, Any] = {
            "architectures": ["MTPDraftModel"],
            MODEL_TYPE: "mtp",
            "speculators_version": VERSION,
            SPECULATORS: lambda x: is_speculators_config(x, "mtp"),
            LAYER_CONFIG: lambda x: isinstance(x, dict) and x.get("model_type") in FAMILIES,
            **STATED,
            "dtype": lambda x: x in DTYPE_NAMES,
        }
        problems = key_problems(expected, contents, CONFIG)
        problems += extra_key_problems(expected, contents, CONFIG)
        if problems:
            return problems
        try:
            heads = _shapes(contents[LAYER_CONFIG])
        except UserError as error:
            return [str(error)]
        tensors, problems = read_tensors([directory / WEIGHTS])
        return problems + tensor_problems(_specs(heads, contents["dtype"]), tensors)

    def reload(self, directory: Path, target: Target) -> Drafter:
        tensors = load_file(directory / WEIGHTS)
        heads = _rebuilt(tensors, target, export_facts(directory)["max_depth"])
        make_ready(heads, target, target.dtype)
        return MtpDrafter(heads, target.vocab_size)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get(MODEL_TYPE) == "mtp"

    def restored(self, job: ImportJob) -> Restored:
        target, checkpoint = job.target, job.checkpoint
        problems = key_problems(STATED, STATED | checkpoint.config, CONFIG)
        problems += job.key_problems(self.published_keys) + _setting_problems(job)
        tensors = dict(checkpoint.tensors)
        for name, table, what in (
            (EMBEDDINGS, target.model.get_input_embeddings().weight, "embeddings"),
            (OUTPUT, output_layer(target.model).weight, "output layer"),
        ):
            problems += row_problems(name, tensors.pop(name, None), table.detach(), what)
        job.require(problems, self.name)
        heads = build_heads(HeadOptions.of({"type": "mtp"}), target, None, "meta")
        specs = _specs(heads, checkpoint.dtype)
        job.require(tensor_problems(specs, stored_tensors(tensors)), self.name)
        rebuilt = _rebuilt(tensors, target, job.depth or stated_tokens(checkpoint.config))
        return Restored.of_heads(rebuilt, target, [])

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return [("the library speculators", "", f"speculators stitch-mtp {repository} {target}")]


FORMATS.register("speculators-mtp")(SpeculatorsMtp())


def _stored_name(name: str) -> str:
    """The name in the file by that in the heads.

    >>> _stored_name("layers.0.enorm.weight")
    'mtp_layers.0.token_layernorm.weight'
    >>> _stored_name("layers.0.mtp_block.mlp.up_proj.weight")
    'mtp_layers.0.mlp.up_proj.weight'
    """
    _, number, part, *rest = name.split(".")
    own = () if part == "mtp_block" else (PARTS[part],)
    return ".".join(["mtp_layers", number, *own, *rest])


def _specs(heads: Any, dtype: str) -> dict[str, TensorSpec]:
    return {
        _stored_name(name): TensorSpec(tuple(x.shape), (DTYPE_NAMES[dtype],))
        for name, x in heads.state_dict().items()
    }


def _rebuilt(tensors: dict[str, Tensor], target: Target, depth: int | None) -> Any:
    """The heads with these tensors. depth: None for the usual one."""
    options = HeadOptions.of({"type": "mtp"} | ({} if depth is None else {"depth": depth}))
    names = build_heads(options, target, None, "meta").state_dict()
    return rebuild_heads(options, None, {x: tensors[_stored_name(x)] for x in names}, target)


def _shapes(settings: dict[str, Any]) -> MtpHeads:
    """Heads on the device `meta`, for a config of their target. Of the target one layer is made."""
    with explained(f"{CONFIG}: no target can be made of its {LAYER_CONFIG}"), torch.device("meta"):
        config = AutoConfig.for_model(**settings)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["full_attention"]
        return MtpHeads(MtpOptions(), AutoModelForCausalLM.from_config(config))


def _setting_problems(job: ImportJob) -> list[str]:
    """A problem for each setting in which the target of a published module is not ours, by name."""
    settings = job.checkpoint.config.get(LAYER_CONFIG) or {}
    text = job.target.model.config.get_text_config(decoder=True)
    if settings.get("model_type") != text.model_type:
        return [
            f"{CONFIG}: {LAYER_CONFIG}.model_type is {settings.get('model_type')!r}, expected "
            f"{text.model_type!r}, the target's"
        ]
    with explained(f"{CONFIG}: its {LAYER_CONFIG} cannot be read"):
        theirs = AutoConfig.for_model(**settings).to_dict()
    ours = text.to_dict()
    return [
        f"{CONFIG}: {place} is {theirs.get(key)!r}, expected {ours.get(key)!r}, the target's. If "
        f"it changes nothing: --ignore-keys {place}"
        for key in sorted((theirs.keys() | ours.keys()) - HARMLESS - set(COUNTS))
        if theirs.get(key) != ours.get(key)
        and (place := f"{LAYER_CONFIG}.{key}") not in job.ignored
    ]
