"""EAGLE-3's layer in the layout of the library speculators. vLLM serves such a directory.

The weights are those of format eagle3, with `layers.0` instead of `midlayer`. In `config.json`,
`transformer_layer_config` has the layer's settings. `speculators_config` has the algorithm, γ and
the target: its hub id, or the name of its directory if it has none.
"""

import json
from typing import Any

from train.export.formats import FORMATS, ExportJob
from train.export.formats.eagle3 import Eagle3
from train.export.tensors import key_problems, whole

# The version of speculators with this layout.
VERSION = "0.9.0"
LAYER_CONFIG, ROWS = "transformer_layer_config", "draft_vocab_size"
# The library's options beyond the paper's layer.
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Speculators(Eagle3):
    """The config names the captured layers. Both readers capture the input of the named layer."""

    name = "speculators"
    engines = ()
    architecture = "Eagle3DraftModel"
    layer = "layers.0"

    def stored(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        assert job.target is not None
        own = (ROWS, "architectures")
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
                    "architectures": job.target.model.config.architectures,
                },
            },
            LAYER_CONFIG: {key: x for key, x in config.items() if key not in own},
            ROWS: config[ROWS],
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in heads.captured_layers],
            "target_hidden_size": None,
            **dict.fromkeys(SWITCHES, False),
            "embed_requires_grad": False,
            "dtype": config["dtype"],
        }

    def flat(self, stored: dict[str, Any]) -> dict[str, Any]:
        layer = stored.get(LAYER_CONFIG)
        own = {key: stored[key] for key in (ROWS, "architectures") if key in stored}
        return own | (layer if isinstance(layer, dict) else {})

    def wrong_settings(self, stored: dict[str, Any]) -> list[str]:
        expected = {
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            "speculators_config": _is_sound,
            LAYER_CONFIG: lambda x: isinstance(x, dict),
            "eagle_aux_hidden_state_layer_ids": lambda x: isinstance(x, list) and len(x) == 3,
            "target_hidden_size": None,
            **dict.fromkeys(SWITCHES, False),
            "embed_requires_grad": False,
            "dtype": lambda x: x == (stored.get(LAYER_CONFIG) or {}).get("dtype"),
        }
        others = stored.keys() - expected.keys() - {ROWS, "architectures"}
        return key_problems(expected, stored, "config.json") + [
            f"config.json has {key}, which is not expected" for key in sorted(others)
        ]

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        speculative = json.dumps(
            {"method": "eagle3", "model": repository, "num_speculative_tokens": gamma}
        )
        return [("vLLM", "", f"vllm serve {target} --speculative-config '{speculative}'")]


FORMATS.register("speculators")(Speculators())


def _is_sound(found: Any) -> bool:
    """Whether these settings name the drafting method and the target correctly."""
    try:
        (method,) = found["proposal_methods"]
        verifier = found["verifier"]
        return bool(
            found["algorithm"] == "eagle3"
            and found["default_proposal_method"] == method["proposal_type"] == "greedy"
            and whole(method["speculative_tokens"])
            and (method["verifier_accept_k"], method["accept_tolerance"]) == (1, 0)
            and isinstance(verifier["name_or_path"], str)
            and isinstance(verifier["architectures"], list)
        )
    except (KeyError, TypeError, ValueError):
        return False
