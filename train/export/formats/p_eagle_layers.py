"""P-EAGLE's layers for vLLM (2602.01469).

As format eagle3, with several decoder layers, `layers.0` to `layers.{n − 1}`: the first is
EAGLE-3's, the others read H and have `input_layernorm` only. `mask_hidden` [1, 1, 3H] stands for
unknown features. The embeddings `embed_tokens.weight` [V, H] are the target's, except the row of
`pard_token`, which stands for unknown tokens. No text contains this token.
"""

from typing import Any

from torch import Tensor

from decode.drafters.pard import free_token
from decode.target.loading import Target
from heads.heads_module import HeadOptions
from heads.p_eagle_heads import PEagleDrafter, PEagleOptions
from train.export.checkpoint import Checkpoint
from train.export.file_schema import TensorSpec, is_count
from train.export.formats import FORMATS, ExportJob, Format, vllm_serving
from train.export.formats.eagle3_layer import MASK_HIDDEN, Eagle3, eagle3_tensors, shared_tensors
from train.export.formats.layer_format import layer_tensors, weight_spec
from train.export.formats.published_layer import EMBEDDINGS

MASK_EMBEDDING = "mask_embedding"


class PEagle(Eagle3):
    """vLLM needs `parallel_drafting` in its speculative_config to read it."""

    layer = "layers.0"
    name = "p_eagle"
    kinds = ("p_eagle",)
    engines = ("vllm",)
    holds_windows = True
    drafter = PEagleDrafter

    def refuse(self, job: ExportJob) -> None:
        """Nothing is refused."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return MASK_HIDDEN in checkpoint.names

    restored = Format.restored  # only exported

    def depth_of(self, options: Any) -> int:
        depth: int = options.tokens
        return depth

    def extra_config(self, heads: Any) -> dict[str, Any]:
        return {"draft_vocab_size": heads.rows, "num_hidden_layers": len(heads.layers)}

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        return config | {"pard_token": free_token(job.loaded_target)}

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(("draft_vocab_size", "num_hidden_layers", "pard_token"), is_count)

    def tensors(self, heads: Any, target: Target) -> dict[str, Tensor]:
        tensors = eagle3_tensors(heads, target.vocab_size)
        embeddings = target.model.get_input_embeddings().weight.detach().clone()
        embeddings[free_token(target)] = tensors.pop(MASK_EMBEDDING).to(embeddings)
        return tensors | {EMBEDDINGS: embeddings}

    def expected_tensors(self, config: dict[str, Any]) -> dict[str, TensorSpec]:
        hidden = config["hidden_size"]
        specs = shared_tensors(config, self.layer) | {
            MASK_HIDDEN: weight_spec(config, 1, 1, 3 * hidden),
            EMBEDDINGS: weight_spec(config, config["vocab_size"], hidden),
        }
        for number in range(1, config["num_hidden_layers"]):
            name = f"layers.{number}"
            specs |= layer_tensors(config, name, hidden)
            specs[f"{name}.input_layernorm.weight"] = weight_spec(config, hidden)
        return specs

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        if config["pard_token"] >= config["vocab_size"]:
            return [f"pard_token is {config['pard_token']}, but there is no such embedding"]
        return super().value_problems(config, weights)

    def rebuilt_heads(
        self, config: dict[str, Any], weights: dict[str, Tensor], depth: int | None
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        ids, state = self.rebuilt_state(weights)
        state[MASK_EMBEDDING] = state.pop(EMBEDDINGS)[config["pard_token"]]
        options: dict[str, Any] = {} if depth is None else {"tokens": depth}
        return PEagleOptions(layers=config["num_hidden_layers"], **options), ids, state

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return [vllm_serving("eagle3", target, repository, gamma, parallel_drafting=True)]


FORMATS.register("p_eagle")(PEagle())
