"""EAGLE-3's layer for vLLM and SGLang (2503.01840), also in the layout of the library speculators.

H hidden size, V vocabulary, V' draft vocabulary. `fc.weight` [H, 3H]; `midlayer.*`, whose q, k and
v read 2H; `norm.weight`; `lm_head.weight` [V', H]. With a reduced draft vocabulary also `d2t`,
int64 [V'], a token's id minus its row, and `t2d`, bool [V]: which tokens have a row. The embeddings
are the target's. EAGLE-3.1's two options are the settings `fc_norm`, with `fc_norm.{0,1,2}.weight`,
and `norm_output`. The config does not name the captured layers, because engines count them
differently. Without names, all engines capture the layers of `heads.eagle3.tapped_layers`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from decode.target.loading import Target
from heads.eagle_heads import Eagle3Drafter, Eagle3Options
from heads.heads_module import HeadOptions
from train.export.file_schema import TensorSpec, extra_key_problems, is_count, key_problems
from train.export.formats import FORMATS, ExportJob, vllm_serving
from train.export.formats.eagle_layer import EagleLayer, layer_tensors, weight_spec

LAYER = "midlayer"
OUTPUT, OWN_OUTPUT = "lm_head.weight", "output.layers.0.weight"
# The version of speculators with this layout.
VERSION = "0.9.0"
LAYER_CONFIG, ROWS = "transformer_layer_config", "draft_vocab_size"
# EAGLE-3.1's options, by the same names in our heads and in both layouts.
SWITCHES = ("fc_norm", "norm_output")
# Settings of the library speculators outside the layer's.
OUTER_KEYS = (ROWS, *SWITCHES, "architectures")
# Its options for layers of other kinds.
OTHER_SWITCHES = ("norm_before_residual", "norm_before_fc")


class Eagle3(EagleLayer):
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
        switches = {name: getattr(heads.options, name) for name in SWITCHES}
        return {"draft_vocab_size": heads.rows} | switches

    def extra_expected_keys(self) -> dict[str, Any]:
        return {"draft_vocab_size": is_count} | dict.fromkeys(SWITCHES, _is_bool)

    def tensors(self, heads: Any, target: Target) -> dict[str, Tensor]:
        tensors = eagle3_tensors(heads, target.vocab_size)
        return {name.replace(LAYER, self.layer): tensor for name, tensor in tensors.items()}

    def expected_tensors(self, config: dict[str, Any]) -> dict[str, TensorSpec]:
        hidden, rows = config["hidden_size"], config["draft_vocab_size"]
        specs = layer_tensors(config, self.layer, 2 * hidden) | {
            "fc.weight": weight_spec(config, hidden, 3 * hidden),
            "norm.weight": weight_spec(config, hidden),
            OUTPUT: weight_spec(config, rows, hidden),
        }
        norms = [f"{self.layer}.{norm}" for norm in ("hidden_norm", "input_layernorm")]
        norms += [f"fc_norm.{tap}" for tap in range(3) if config["fc_norm"]]
        specs |= {f"{norm}.weight": weight_spec(config, hidden) for norm in norms}
        if rows != config["vocab_size"]:
            specs["d2t"] = TensorSpec((rows,), ("I64",))
            specs["t2d"] = TensorSpec((config["vocab_size"],), ("BOOL",))
        return specs

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        if "d2t" not in weights:
            return []
        ids = _token_ids(weights["d2t"])
        if not are_ascending_ids(ids, config["vocab_size"]):
            return ["d2t does not give distinct token ids in ascending order"]
        has_row = weights["t2d"].nonzero()[:, 0]
        return [] if torch.equal(has_row, ids) else ["t2d does not mark the tokens of d2t"]

    def rebuilt_heads(
        self, config: dict[str, Any], weights: dict[str, Tensor], depth: int
    ) -> tuple[HeadOptions, Tensor | None, dict[str, Tensor]]:
        ids = _token_ids(weights["d2t"]) if "d2t" in weights else None
        others = ("d2t", "t2d", OUTPUT)
        state = {n.replace(self.layer, LAYER): x for n, x in weights.items() if n not in others}
        state[OWN_OUTPUT] = weights[OUTPUT]
        switches = {name: config[name] for name in SWITCHES}
        return Eagle3Options(steps=depth, **switches), ids, state

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return [
            vllm_serving("eagle3", target, repository, gamma),
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


def eagle3_tensors(heads: Any, vocab_size: int) -> dict[str, Tensor]:
    """Return the weights of EAGLE-3's heads by the names that engines know, and the maps of a
    reduced draft vocabulary. Heads without an output layer get the target's."""
    tensors = {name: x for name, x in heads.state_dict().items() if name != OWN_OUTPUT}
    tensors[OUTPUT] = heads.output.of(1)[0]
    ids = heads.vocabulary
    if ids is not None:
        has_row = torch.zeros(vocab_size, dtype=torch.bool)
        has_row[ids.cpu()] = True
        tensors |= {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": has_row}
    return tensors


def are_ascending_ids(ids: Tensor, vocab_size: int) -> bool:
    """Whether these are token ids of the vocabulary in ascending order."""
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (ids.diff() > 0).all())


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _token_ids(offsets: Tensor) -> Tensor:
    return offsets + torch.arange(len(offsets))


class Speculators(Eagle3):
    """The layout of the library speculators. vLLM serves such a directory.

    The weights are those of format eagle3, with `layers.0` instead of `midlayer`. In `config.json`,
    `transformer_layer_config` has the layer's settings. `speculators_config` has the algorithm, γ
    and the target: its hub id, or the name of its directory if it has none. The config names the
    captured layers. Both readers capture the input of the named layer.
    """

    name = "speculators"
    engines = ()
    architecture = "Eagle3DraftModel"
    layer = "layers.0"

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        return {
            "architectures": config["architectures"],
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": job.gamma,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "default_proposal_method": "greedy",
                "verifier": {
                    "name_or_path": job.target_name,
                    "architectures": job.loaded_target.model.config.architectures,
                },
            },
            LAYER_CONFIG: {key: x for key, x in config.items() if key not in OUTER_KEYS},
            ROWS: config[ROWS],
            **{name: config[name] for name in SWITCHES},
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in heads.captured_layers],
            "target_hidden_size": None,
            **dict.fromkeys(OTHER_SWITCHES, False),
            "embed_requires_grad": False,
            "dtype": config["dtype"],
        }

    def layer_config(self, contents: dict[str, Any]) -> dict[str, Any]:
        layer = contents.get(LAYER_CONFIG)
        outer = {key: contents[key] for key in OUTER_KEYS if key in contents}
        return outer | (layer if isinstance(layer, dict) else {})

    def setting_problems(self, contents: dict[str, Any]) -> list[str]:
        expected = {
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            "speculators_config": _is_sound,
            LAYER_CONFIG: lambda x: isinstance(x, dict),
            "eagle_aux_hidden_state_layer_ids": lambda x: isinstance(x, list) and len(x) == 3,
            "target_hidden_size": None,
            **dict.fromkeys(OTHER_SWITCHES, False),
            "embed_requires_grad": False,
            "dtype": lambda x: x == (contents.get(LAYER_CONFIG) or {}).get("dtype"),
        }
        problems = key_problems(expected, contents, "config.json")
        return problems + extra_key_problems([*expected, *OUTER_KEYS], contents, "config.json")

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        return [vllm_serving("eagle3", target, repository, gamma)]


FORMATS.register("speculators")(Speculators())


def _is_sound(settings: Any) -> bool:
    """Whether these settings name the drafting method and the target correctly."""
    try:
        (method,) = settings["proposal_methods"]
        verifier = settings["verifier"]
        return bool(
            settings["algorithm"] == "eagle3"
            and settings["default_proposal_method"] == method["proposal_type"] == "greedy"
            and is_count(method["speculative_tokens"])
            and (method["verifier_accept_k"], method["accept_tolerance"]) == (1, 0)
            and isinstance(verifier["name_or_path"], str)
            and isinstance(verifier["architectures"], list)
        )
    except (KeyError, TypeError, ValueError):
        return False
