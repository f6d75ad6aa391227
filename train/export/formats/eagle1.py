"""EAGLE-1's layer for vLLM (2401.15077).

H hidden size, V vocabulary. `fc.weight` [H, 2H], the half for the embedding first and no bias;
`layers.0.*` without a norm before attention; `embed_tokens.weight` [V, H]. No norm after the layer,
and no output layer: vLLM uses all rows of the target's, so a reduced draft vocabulary is lost.
"""

import json
from typing import Any

from torch import Tensor

from decode.target.loading import Target
from heads.eagle_heads import Eagle1Drafter, Eagle1Options
from heads.heads_module import HeadOptions
from train.export.formats import FORMATS
from train.export.formats.one_layer import OneLayer, layer_specs, of_weights
from train.export.tensors import TensorSpec

EMBEDDINGS = "embed_tokens.weight"


class Eagle1(OneLayer):
    """SGLang cannot serve this: it needs another architecture and a bias in fc."""

    name = "eagle1"
    kinds = ("eagle1",)
    engines = ("vllm",)
    architecture = "LlamaForCausalLM"
    drafter = Eagle1Drafter

    def depth_of(self, options: Any) -> int:
        depth: int = options.depth
        return depth

    def tensors(self, heads: Any, target: Target) -> dict[str, Tensor]:
        table: Tensor = target.model.get_input_embeddings().weight
        return {**heads.state_dict(), EMBEDDINGS: table}

    def expected_tensors(self, config: dict[str, Any]) -> dict[str, TensorSpec]:
        hidden = config["hidden_size"]
        return layer_specs(config, "layers.0", hidden) | {
            "fc.weight": of_weights(config, hidden, 2 * hidden),
            EMBEDDINGS: of_weights(config, config["vocab_size"], hidden),
        }

    def restored(
        self, weights: dict[str, Tensor], depth: int
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        # The embeddings are the target's. Heads borrow them.
        state = {name: tensor for name, tensor in weights.items() if name != EMBEDDINGS}
        return Eagle1Options(depth=depth), None, state

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        speculative = json.dumps(
            {"method": "eagle", "model": repository, "num_speculative_tokens": gamma}
        )
        return [("vLLM", "", f"vllm serve {target} --speculative-config '{speculative}'")]


FORMATS.register("eagle1")(Eagle1())
