"""EAGLE-3's layer for vLLM and SGLang (2503.01840), also in the layout of the library speculators.

H hidden size, V vocabulary, V' draft vocabulary. `fc.weight` [H, 3H]; `midlayer.*`, whose q, k and
v read 2H; `norm.weight`; `lm_head.weight` [V', H]. With a reduced draft vocabulary also `d2t`,
int64 [V'], a token's id minus its row, and `t2d`, bool [V]: which tokens have a row. The embeddings
are the target's. EAGLE-3.1's two options are the settings `fc_norm`, with `fc_norm.{0,1,2}.weight`,
and `norm_output`. `norm_before_fc` comes with `input_norm.weight` [3H].

The config names the captured layers only if they are not those that all engines capture without
names (`heads.layers.target_layers.auxiliary_layers`), because engines count them differently
(`published_layer`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.export.file_schema import extra_key_problems, is_bool, is_count, key_problems
from draftsmith.export.formats import FORMATS, ExportJob, ImportJob
from draftsmith.export.formats.layer_format import LayerFormat
from draftsmith.export.formats.published_keys import HARMLESS, Keys
from draftsmith.export.formats.published_layer import (
    LAYER_IDS,
    LAYER_KEYS,
    NAMING,
    NESTED,
    captured_count,
    captured_layers,
    is_eagle3,
    map_problems,
    map_value_problems,
    named_layers,
)
from draftsmith.export.formats.tensor_table import OWN_OUTPUT, TensorRow, layer_rows, map_rows
from draftsmith.export.published import Checkpoint
from heads.eagle_drafter import Eagle3Drafter
from heads.heads_drafter import HeadsDrafter
from heads.layers.target_layers import output_layer

LAYER = "midlayer"
OUTPUT = "lm_head.weight"
MASK_HIDDEN = "mask_hidden"  # of P-EAGLE
# The version of speculators with this layout.
VERSION = "0.9.0"
LAYER_CONFIG, ROWS = "transformer_layer_config", "draft_vocab_size"
SPECULATORS = "speculators_config"
MODEL_TYPE = "speculators_model_type"
# EAGLE-3.1's options, by the same names in our heads and in both layouts.
SWITCHES = ("fc_norm", "norm_output")
# Options of published layers, also by the same names.
OTHER_SWITCHES = ("norm_before_residual", "norm_before_fc")
ALL_SWITCHES = (*SWITCHES, *OTHER_SWITCHES)
# What some files state in `eagle_config` of every EAGLE-3 layer, and why another value is refused.
STATED: dict[str, tuple[Any, str]] = {
    "use_aux_hidden_state": (True, "else it reads one hidden state, in EAGLE-1's way"),
    "use_input_layernorm_in_first_layer": (True, "these heads norm the embeddings"),
    "use_last_layernorm": (True, "these heads have a norm before the output layer"),
    "use_mtp_layernorm": (False, "these heads have no such norm"),
    "next_layer_regular": (True, "these heads have one layer"),
    "parallel_draft_step": (1, "these heads draft one token after the other"),
    "parallel_draft_heads_num_layers": (None, "these heads draft one token after the other"),
}
# Settings of the library speculators outside the layer's.
OUTER_KEYS = (ROWS, *ALL_SWITCHES, *NAMING, "target_hidden_size", "architectures")


class Eagle3(LayerFormat):
    """A reduced draft vocabulary stays reduced. layer: the name of the decoder layer."""

    layer: ClassVar[str] = LAYER
    name = "eagle3"
    kinds = ("eagle3",)
    vllm: ClassVar[dict[str, Any] | None] = {"method": "eagle3"}
    sglang: ClassVar[str | None] = "EAGLE3"
    architecture = "LlamaForCausalLMEagle3"
    drafter: ClassVar[type[HeadsDrafter]] = Eagle3Drafter
    depth_option = "steps"
    carries_vocabulary = True
    published_keys: ClassVar[Keys] = {
        "": (*LAYER_KEYS, *NAMING, NESTED, ROWS, *ALL_SWITCHES),
        NESTED: (*NAMING, *ALL_SWITCHES, *STATED),
    }

    def refuse(self, job: ExportJob) -> None:
        captured = job.drafter.options.captured_layers
        if "sglang" in self.engines and captured and captured[0] == 0:
            raise UserError(
                f"{job.drafter} reads the output of layer 0, which is the input of layer 1; SGLang "
                "takes numbers that begin with 1 for outputs. Export it as speculators"
            )

    def recognises(self, checkpoint: Checkpoint) -> bool:
        is_plain = MODEL_TYPE not in checkpoint.config and not has_stand_in(checkpoint.names)
        return is_plain and is_eagle3(checkpoint.names)

    def extra_config(self, heads: Any) -> dict[str, Any]:
        options = heads.options
        config = {ROWS: heads.rows} | {name: getattr(options, name) for name in SWITCHES}
        config |= {name: True for name in OTHER_SWITCHES if getattr(options, name)}
        return config | named_inputs(options.captured_layers)

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        expected: dict[str, Any] = {ROWS: is_count} | dict.fromkeys(SWITCHES, is_bool)
        expected |= {name: True for name in OTHER_SWITCHES if name in config}
        return expected | expected_inputs(config)

    def read_layers(
        self, contents: dict[str, Any], target: Target, convention: str | None
    ) -> dict[str, Any]:
        return {"captured_layers": captured_layers(contents, target, convention)}

    def published_config(
        self, job: ImportJob, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        stated = contents.get(NESTED)
        nested = stated if isinstance(stated, dict) else {}
        config: dict[str, Any] = {}
        problems = []
        for name in ALL_SWITCHES:
            config[name] = nested.get(name, contents.get(name, False))
            if not is_bool(config[name]):
                problems.append(f"config.json: {name} is {config[name]!r}, expected true or false")
        problems += [
            f"eagle_config: {key} is {nested[key]!r}, expected {usual!r}: {why}"
            for key, (usual, why) in STATED.items()
            if nested.get(key, usual) not in (usual, None)
        ]
        if contents.get("tie_word_embeddings") and OUTPUT not in tensors:
            ours = job.target.model.get_input_embeddings().weight
            if ours is not output_layer(job.target.model).weight:
                problems.append(
                    f"config.json: tie_word_embeddings is True and there is no {OUTPUT}, so its "
                    f"output layer is its embeddings; expected {OUTPUT}, or a target with tied ones"
                )
        rows = config[ROWS] = contents.get(ROWS) or contents.get("vocab_size")
        problems += map_problems(tensors, rows, contents.get("vocab_size"))
        named = named_layers(contents)
        if named is not None:
            config[LAYER_IDS] = named
        count, width = captured_count(contents), contents.get("hidden_size")
        fc = tensors.get("fc.weight")
        if fc is not None and width and is_count(width) and fc.shape[-1] != count * width:
            problems.append(
                f"fc.weight reads {fc.shape[-1]} numbers, which are {fc.shape[-1] / width:g} "
                f"hidden states of size {width}; expected {count}, as many as captured layers"
            )
        return config, problems

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden, count = config["hidden_size"], captured_count(config)
        norms = range(count if config["fc_norm"] else 0)
        table = features_table(config, self.layer, LAYER)
        table += [TensorRow(f"fc_norm.{number}.weight", (hidden,)) for number in norms]
        if config.get("norm_before_fc"):
            table.append(TensorRow("input_norm.weight", (count * hidden,)))
        return table

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        return map_value_problems(weights, config["vocab_size"])

    def options(
        self, config: dict[str, Any], state: dict[str, Tensor], target: Target
    ) -> dict[str, Any]:
        switches = {name: config.get(name, False) for name in ALL_SWITCHES}
        return switches | output_option(state)


FORMATS.register("eagle3")(Eagle3())


def features_table(config: dict[str, Any], layer: str, ours: str = "") -> list[TensorRow]:
    """Return the tensors that all layouts of EAGLE-3 require. layer: the name of the layer that
    reads the features. ours: its name in our heads, empty if it is the same. Without an output
    layer, a published drafter has the target's."""
    hidden, rows, vocab_size = config["hidden_size"], config[ROWS], config["vocab_size"]
    norms = ("hidden_norm", "input_layernorm")
    return [
        TensorRow("fc.weight", (hidden, captured_count(config) * hidden)),
        *layer_rows(config, layer, 2 * hidden, norms, ours),
        TensorRow("norm.weight", (hidden,)),
        TensorRow(OUTPUT, (rows, hidden), OWN_OUTPUT, implied=rows == vocab_size),
        *map_rows(rows, vocab_size),
    ]


def output_option(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the option of heads without an output layer in their state."""
    return {} if OWN_OUTPUT in state else {"output": "target"}


def are_inputs(value: Any) -> bool:
    """Whether these are numbers of layers in ascending order, whose inputs are captured."""
    numbers = isinstance(value, list) and value and all(map(is_count, value))
    return bool(numbers) and value == sorted(set(value))


def has_stand_in(names: Iterable[str]) -> bool:
    """Whether published tensors of these names hold P-EAGLE's stand-in for unknown features."""
    return any(name.removeprefix("model.") == MASK_HIDDEN for name in names)


def named_inputs(captured: Sequence[int] | None) -> dict[str, Any]:
    """Return the settings that name the layers whose outputs are captured; none for the usual
    layers. Engines look for them in two places."""
    if captured is None:
        return {}
    inputs = [layer + 1 for layer in captured]
    return {LAYER_IDS: inputs, NESTED: {LAYER_IDS: inputs}}


def expected_inputs(config: dict[str, Any]) -> dict[str, Any]:
    """Return the expected values of `named_inputs`, for `key_problems`."""
    if LAYER_IDS not in config:
        return {}
    return {LAYER_IDS: are_inputs, NESTED: {LAYER_IDS: config[LAYER_IDS]}}


def speculators_keys(*others: str) -> Keys:
    """The keys of a published config of the library speculators. others: of one kind of heads."""
    return {
        "": (
            *(MODEL_TYPE, "speculators_version", SPECULATORS, LAYER_CONFIG),
            *(*NAMING, ROWS, *ALL_SWITCHES, "target_hidden_size", *others),
            "tie_word_embeddings",
        ),
        LAYER_CONFIG: (*LAYER_KEYS, *HARMLESS),
        SPECULATORS: ("algorithm", "proposal_methods", "default_proposal_method", "verifier"),
        f"{SPECULATORS}.proposal_methods": (
            *("proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance"),
        ),
        f"{SPECULATORS}.verifier": ("name_or_path", "architectures"),
    }


class Speculators(Eagle3):
    """The layout of the library speculators. vLLM serves such a directory.

    The weights are those of format eagle3, with `layers.0` instead of `midlayer`. In `config.json`,
    `transformer_layer_config` has the layer's settings. `speculators_config` has the algorithm, γ
    and the target: its hub id, or the name of its directory if it has none. The config names the
    captured layers. Both readers capture the input of the named layer.

    algorithm: the library's name of the kind. outer_keys: the settings outside of the layer's.
    trains_embeddings: whether the library trains the embeddings in the file further.
    """

    name = "speculators"
    algorithm: ClassVar[str] = "eagle3"
    outer_keys: ClassVar[tuple[str, ...]] = OUTER_KEYS
    trains_embeddings: ClassVar[bool] = False
    sglang = None
    holds_windows = True
    architecture = "Eagle3DraftModel"
    layer = "layers.0"
    published_keys = speculators_keys()

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get(MODEL_TYPE) == self.algorithm

    def published_config(
        self, job: ImportJob, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        config, problems = super().published_config(job, contents, tensors)
        if "norm_before_residual" not in contents:
            problems.append(
                "config.json has no norm_before_residual, and readers assume different values; "
                "expected true or false"
            )
        return config, problems

    def extra_config(self, heads: Any) -> dict[str, Any]:
        return {
            ROWS: heads.rows,
            **{name: getattr(heads.options, name) for name in ALL_SWITCHES},
            LAYER_IDS: [layer + 1 for layer in heads.captured_layers],
            "target_hidden_size": None,
        }

    def extra_expected_keys(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            ROWS: is_count,
            **dict.fromkeys(ALL_SWITCHES, is_bool),
            LAYER_IDS: are_inputs,
            "target_hidden_size": None,
        }

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        return {
            MODEL_TYPE: self.algorithm,
            "speculators_version": VERSION,
            SPECULATORS: speculators_config(self.algorithm, job),
            LAYER_CONFIG: {key: x for key, x in config.items() if key not in self.outer_keys},
            **{key: x for key, x in config.items() if key in self.outer_keys},
            "embed_requires_grad": self.trains_embeddings,
            "dtype": config["dtype"],
        }

    def stored_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        layer = contents.get(LAYER_CONFIG)
        settings = {key: contents[key] for key in self.outer_keys if key in contents}
        return settings | (layer if isinstance(layer, dict) else {})

    def setting_problems(self, contents: dict[str, Any]) -> list[str]:
        expected = {
            MODEL_TYPE: self.algorithm,
            "speculators_version": VERSION,
            SPECULATORS: lambda x: is_speculators_config(x, self.algorithm),
            LAYER_CONFIG: lambda x: isinstance(x, dict),
            "embed_requires_grad": self.trains_embeddings,
            "dtype": lambda x: x == (contents.get(LAYER_CONFIG) or {}).get("dtype"),
        }
        problems = key_problems(expected, contents, "config.json")
        return problems + extra_key_problems([*expected, *self.outer_keys], contents, "config.json")


FORMATS.register("speculators")(Speculators())


def speculators_config(algorithm: str, job: ExportJob) -> dict[str, Any]:
    """Return the algorithm, γ and the target, as the library speculators writes them."""
    return {
        "algorithm": algorithm,
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
            # A config that was read from a GGUF file names none.
            "architectures": [type(job.loaded_target.model).__name__],
        },
    }


def is_speculators_config(settings: Any, algorithm: str) -> bool:
    """Whether these settings name the drafting method and the target correctly."""
    try:
        (method,) = settings["proposal_methods"]
        verifier = settings["verifier"]
        return bool(
            settings["algorithm"] == algorithm
            and settings["default_proposal_method"] == method["proposal_type"] == "greedy"
            and is_count(method["speculative_tokens"])
            and (method["verifier_accept_k"], method["accept_tolerance"]) == (1, 0)
            and isinstance(verifier["name_or_path"], str)
            and isinstance(verifier["architectures"], list)
        )
    except (KeyError, TypeError, ValueError):
        return False
