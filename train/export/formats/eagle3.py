"""EAGLE-3's layer for vLLM and SGLang (2503.01840).

H hidden size, V vocabulary, V' draft vocabulary. `fc.weight` [H, 3H]; `midlayer.*`, whose q, k and
v read 2H; `norm.weight`; `lm_head.weight` [V', H]. With a reduced draft vocabulary also `d2t`,
int64 [V'], a token's id minus its row, and `t2d`, bool [V]: which tokens have a row. The embeddings
are the target's. The config does not name the captured layers, because engines count them
differently. Without names, all engines capture the layers of `heads.eagle_heads.auxiliary_layers`.
"""

import json
from typing import Any, ClassVar

import torch
from torch import Tensor

from decode.target.loading import Target
from heads.eagle_heads import Eagle3Drafter, Eagle3Options
from heads.heads_module import HeadOptions
from train.export.formats import FORMATS
from train.export.formats.one_layer import OneLayer, layer_specs, of_weights
from train.export.tensors import TensorSpec, whole

LAYER = "midlayer"
OUTPUT, OWN_OUTPUT = "lm_head.weight", "output.layers.0.weight"


class Eagle3(OneLayer):
    """A reduced draft vocabulary stays reduced. layer: the name of the decoder layer."""

    layer: ClassVar[str] = LAYER
    name = "eagle3"
    kinds = ("eagle3",)
    engines: ClassVar[tuple[str, ...]] = ("vllm", "sglang")
    architecture = "LlamaForCausalLMEagle3"
    drafter = Eagle3Drafter
    carries_vocabulary = True

    def depth_of(self, options: Any) -> int:
        depth: int = options.steps
        return depth

    def extra_config(self, heads: Any) -> dict[str, Any]:
        return {"draft_vocab_size": heads.rows}

    def extra_keys(self) -> dict[str, Any]:
        return {"draft_vocab_size": whole}

    def tensors(self, heads: Any, target: Target) -> dict[str, Tensor]:
        found = tensors_of(heads, target.vocab_size)
        return {name.replace(LAYER, self.layer): tensor for name, tensor in found.items()}

    def expected_tensors(self, config: dict[str, Any]) -> dict[str, TensorSpec]:
        hidden, rows = config["hidden_size"], config["draft_vocab_size"]
        found = layer_specs(config, self.layer, 2 * hidden) | {
            "fc.weight": of_weights(config, hidden, 3 * hidden),
            "norm.weight": of_weights(config, hidden),
            OUTPUT: of_weights(config, rows, hidden),
        }
        for norm in ("hidden_norm", "input_layernorm"):
            found[f"{self.layer}.{norm}.weight"] = of_weights(config, hidden)
        if rows != config["vocab_size"]:
            found["d2t"] = TensorSpec((rows,), ("I64",))
            found["t2d"] = TensorSpec((config["vocab_size"],), ("BOOL",))
        return found

    def wrong_values(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        if "d2t" not in weights:
            return []
        ids = _token_ids(weights["d2t"])
        if not are_ids(ids, config["vocab_size"]):
            return ["d2t does not lead to different tokens, ascending"]
        return (
            [] if torch.equal(weights["t2d"].nonzero()[:, 0], ids) else ["t2d is not d2t's tokens"]
        )

    def restored(
        self, weights: dict[str, Tensor], depth: int
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        ids = _token_ids(weights["d2t"]) if "d2t" in weights else None
        others = ("d2t", "t2d", OUTPUT)
        state = {n.replace(self.layer, LAYER): x for n, x in weights.items() if n not in others}
        state[OWN_OUTPUT] = weights[OUTPUT]
        return Eagle3Options(steps=depth), ids, state

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        speculative = json.dumps(
            {"method": "eagle3", "model": repository, "num_speculative_tokens": gamma}
        )
        return [
            ("vLLM", "", f"vllm serve {target} --speculative-config '{speculative}'"),
            (
                "SGLang",
                "",
                f"python -m sglang.launch_server --model {target} \\\n"
                "  --speculative-algorithm EAGLE3 \\\n"
                f"  --speculative-draft-model-path {repository} \\\n"
                f"  --speculative-num-steps {gamma} --speculative-eagle-topk 1 \\\n"
                f"  --speculative-num-draft-tokens {gamma + 1}",
            ),
        ]


FORMATS.register("eagle3")(Eagle3())


def tensors_of(heads: Any, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights of EAGLE-3's heads by the names that engines know, and the maps of a
    reduced draft vocabulary. Heads without an output layer get the target's."""
    found = {name: x for name, x in heads.state_dict().items() if name != OWN_OUTPUT}
    found[OUTPUT] = heads.output.of(1)[0]
    ids = heads.vocabulary
    if ids is not None:
        has_row = torch.zeros(vocab_size, dtype=torch.bool)
        has_row[ids.cpu()] = True
        found |= {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": has_row}
    return found


def are_ids(ids: Tensor, vocab_size: int) -> bool:
    """Whether these are token ids of the vocabulary in ascending order."""
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (ids.diff() > 0).all())


def _token_ids(offsets: Tensor) -> Tensor:
    return offsets + torch.arange(len(offsets))
