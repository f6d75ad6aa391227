"""EAGLE-1's layer for vLLM and for SGLang (2401.15077)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.export.formats import FORMATS, ExportJob, ImportJob
from draftsmith.export.formats.layer_format import LayerFormat
from draftsmith.export.formats.published_keys import Keys
from draftsmith.export.formats.published_layer import (
    EMBEDDINGS,
    LAYER_KEYS,
    is_eagle3,
    plain_name,
)
from draftsmith.export.formats.tensor_table import TensorRow, layer_rows
from draftsmith.export.published import Checkpoint
from heads.eagle_drafter import Eagle1Drafter

FC_BIAS = "fc.bias"


class Eagle1(LayerFormat):
    """EAGLE-1's layer for vLLM (2401.15077).

    H hidden size, V vocabulary. `fc.weight` [H, 2H], the half for the embedding first and no bias;
    `layers.0.*` without a norm before attention; `embed_tokens.weight` [V, H]. No norm after the
    layer, and no output layer: vLLM uses all rows of the target's, so a reduced draft vocabulary is
    lost. SGLang cannot serve this (see `Eagle1SGLang`), and vLLM drops a bias in fc silently, so
    heads with one are refused.

    Published directories may leave out the embeddings, and have a bias.
    """

    name = "eagle1"
    kinds = ("eagle1",)
    vllm: ClassVar[dict[str, Any] | None] = {"method": "eagle"}
    architecture = "LlamaForCausalLM"
    drafter = Eagle1Drafter
    depth_option = "depth"
    published_keys: ClassVar[Keys] = {"": (*LAYER_KEYS, "bias")}

    def refuse(self, job: ExportJob) -> None:
        if "vllm" in self.engines and job.drafter.options.bias:
            raise UserError(
                f"{job.drafter} has a bias in fc, which vLLM drops silently; export it as "
                "eagle1-sglang and serve it with SGLang"
            )

    def recognises(self, checkpoint: Checkpoint) -> bool:
        names = {plain_name(name, self.layer) for name in checkpoint.names}
        is_layer = "fc.weight" in names and "hidden_norm.weight" not in names
        is_other = is_eagle3(checkpoint.names) or "speculators_model_type" in checkpoint.config
        return is_layer and not is_other

    def published_config(
        self, job: ImportJob, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        # Their output layer is the target's, and no reader uses a stored one.
        tensors.pop("lm_head.weight", None)
        if contents.get("bias") and FC_BIAS not in tensors:
            return {}, [f"config.json says that fc has a bias, but tensor {FC_BIAS} is missing"]
        return {"bias": True} if FC_BIAS in tensors else {}, []

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden = config["hidden_size"]
        return [
            TensorRow("fc.weight", (hidden, 2 * hidden)),
            *([TensorRow(FC_BIAS, (hidden,))] if config.get("bias") else []),
            *layer_rows(config, self.layer, hidden),
            TensorRow(EMBEDDINGS, (config["vocab_size"], hidden), shared=True, implied=True),
        ]

    def options(
        self, config: dict[str, Any], state: dict[str, Tensor], target: Target
    ) -> dict[str, Any]:
        return {"bias": FC_BIAS in state}


FORMATS.register("eagle1")(Eagle1())


class Eagle1SGLang(Eagle1):
    """EAGLE-1's layer for SGLang: as for vLLM, with another architecture and `fc.bias` [H].

    SGLang's fc always has a bias, and a missing one keeps arbitrary values. So heads without a bias
    get zeros. `Eagle1` imports such directories too.
    """

    name = "eagle1-sglang"
    vllm = None
    sglang = "EAGLE"
    architecture = "LlamaForCausalLMEagle"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return False

    def extra_config(self, heads: Any) -> dict[str, Any]:
        return {"bias": True}

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"bias": True}

    def state(self, heads: Any, target: Target) -> dict[str, Tensor]:
        return {FC_BIAS: torch.zeros(heads.hidden_size), **heads.state_dict()}


FORMATS.register("eagle1-sglang")(Eagle1SGLang())
