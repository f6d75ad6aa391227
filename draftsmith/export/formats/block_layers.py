"""Block drafters for vLLM and SGLang: DFlash (2602.06036), DFlash2, and DSpark (2607.05147) for
vLLM.

H hidden size, V vocabulary, m layers, n taps, R rank. `fc.weight` [H, nH]; `hidden_norm.weight`;
`layers.N.*`, with the tensors of a Qwen3 layer; `norm.weight`. DSpark also has
`markov_head.markov_w1.weight` and `markov_head.markov_w2.weight` [V, R], and maybe
`confidence_head.proj.*`. DFlash2 also has `layers.N.attention_conv.*`, `layers.N.mlp_conv.*` and
`candidate_selector.*`. Embeddings and output layer are the target's. The config names the layers
whose output is read, counted from 0. `speculators_block` has the layout of the library
speculators, which can have a window of the text and a reduced draft vocabulary.

Published configs differ in where they say how a block attends: at the top, or in `dflash_config`
(Model Optimizer, MiMo). Model Optimizer (0.47) also has DSpark's settings there, and its heads'
tensors without `markov_head` and `confidence_head`. All are read as vLLM reads them.
"""

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from decode.base.errors import UserError
from decode.model.loading import Target
from draftsmith.export.file_schema import is_bool, is_count, is_id, key_problems
from draftsmith.export.formats import FORMATS, ExportJob, ImportJob
from draftsmith.export.formats.eagle3_layer import MODEL_TYPE, OUTPUT, ROWS
from draftsmith.export.formats.layer_format import (
    SLIDING,
    LayerFormat,
    expected_window,
    llama_settings,
    window_settings,
)
from draftsmith.export.formats.published_keys import Keys
from draftsmith.export.formats.published_layer import (
    EMBEDDINGS,
    LAYER_KEYS,
    ids_of_offsets,
    map_problems,
    map_value_problems,
    row_problems,
)
from draftsmith.export.formats.tensor_table import OWN_OUTPUT, TensorRow, layer_rows, map_rows
from draftsmith.export.published import Checkpoint
from draftsmith.export.trained_drafter import TrainedDrafter
from heads.dflash2_heads import DFlash2Drafter, DFlash2Heads
from heads.dflash_heads import DFlashDrafter, DFlashHeads
from heads.dspark_heads import DSparkDrafter, DSparkHeads
from heads.heads_drafter import HeadsDrafter
from heads.layers.target_layers import output_layer

CONFIDENCE, RANK = "enable_confidence_head", "markov_rank"
FULL = "full_attention"
INNER = "dflash_config"
# Settings that may be at the top or in `dflash_config`: what these heads do, and why. No setting
# says the same.
STATED: dict[str, tuple[Any, str]] = {
    "attention_sink_bias": (False, "these heads have no learnt sinks"),
    "add_swa_attention_sink_bias": (False, "these heads have no learnt sinks"),
    "input_embedding_scale": (1, "these heads read the target's embeddings as they are"),
    "output_multiplier": (1, "these heads read the target's output layer as it is"),
    "final_logit_softcapping": (None, "these heads read the target's output layer as it is"),
}
# How a block attends.
ATTENTION = ("is_causal", "causal", "use_swa", "swa_window_size")
SHIFT, PROJECTOR = "shift_label", "projector_type"
BLOCK_KEYS = ("block_size", "num_target_layers")
DSPARK_KEYS = (
    *("mask_token_id", "target_layer_ids", RANK, "markov_head_type", CONFIDENCE),
    "confidence_head_with_markov",
)
NESTED_CONFIDENCE = "use_confidence_head"
# Model Optimizer's names of tensors.
FLAT_NAMES = {
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}
# The options of DFlash2 heads, by their names in a config.
SECOND = {
    "conv_kernel_size": "kernel",
    "conv_group_size": "group",
    "selector_rank": "rank",
    "selector_top_k": "candidates",
}


class DFlashLayers(LayerFormat):
    """DFlash, as its authors publish it. own_options: the options of the heads besides those of all
    block drafters, by their names in a config. reads_reduced: whether an engine reads such heads
    with a reduced draft vocabulary, in some layout."""

    name = "dflash"
    kinds: ClassVar[tuple[str, ...]] = ("dflash",)
    vllm: ClassVar[dict[str, Any] | None] = {"method": "dflash"}
    layer_ids = "outputs"
    architecture = "DFlashDraftModel"
    heads: ClassVar[type[DFlashHeads]] = DFlashHeads
    drafter: ClassVar[type[HeadsDrafter]] = DFlashDrafter
    has_target_layers: ClassVar[bool] = False
    own_options: ClassVar[dict[str, str]] = {}
    reads_reduced: ClassVar[bool] = True
    published_keys: ClassVar[Keys] = {
        "": (*LAYER_KEYS, *BLOCK_KEYS, ROWS, INNER, "is_causal", *STATED),
        INNER: ("mask_token_id", "target_layer_ids", "block_size", *ATTENTION, *STATED, PROJECTOR),
    }

    @property
    def kind(self) -> str:
        return self.kinds[0]

    def max_depth(self, drafter: TrainedDrafter) -> int | None:
        return drafter.options.block - self.heads.first_slot

    def refuse(self, job: ExportJob) -> None:
        if not job.drafter.is_reduced:
            return
        if not self.reads_reduced:
            raise UserError(
                f"the {self.kind} heads {job.drafter} have a reduced draft vocabulary, which no "
                "engine reads; train them without draft_vocabulary, or use --format draftsmith"
            )
        if not self.carries_vocabulary:
            raise UserError(
                f"the {self.kind} heads {job.drafter} have a reduced draft vocabulary, which not "
                f"all readers of format {self.name} support; export them as "
                f"speculators-{self.kind}"
            )

    def draft_settings(self, heads: Any) -> dict[str, Any]:
        """Return the settings that tell how the heads draft."""
        return {
            INNER: {
                "mask_token_id": heads.mask_token,
                "target_layer_ids": list(heads.captured_layers),
            }
        }

    def draft_of(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a config that holds the mask token and the target's layers."""
        return config[INNER]

    def options(
        self, config: dict[str, Any], state: dict[str, Tensor], target: Target
    ) -> dict[str, Any]:
        draft = self.draft_of(config)
        return {
            "layers": config["num_hidden_layers"],
            "block": config["block_size"],
            "mask_token": draft["mask_token_id"],
            "taps": draft["target_layer_ids"],
            **{option: draft[name] for name, option in self.own_options.items()},
        }

    def read_layers(
        self, contents: dict[str, Any], target: Target, convention: str | None
    ) -> dict[str, Any]:
        if convention in (None, self.layer_ids):
            return {}
        shift = 1 if convention == "outputs" else -1
        return {"taps": [number + shift for number in self.draft_of(contents)["target_layer_ids"]]}

    def draft_expected(self) -> dict[str, Any]:
        """Return the expected values of `draft_settings`, for `key_problems`."""
        return {INNER: is_dflash_config}

    def settings(self, heads: Any, dtype: str, job: ExportJob) -> dict[str, Any]:
        config = llama_settings(heads.config, self.architecture, dtype)
        del config["mlp_bias"]
        layers, window = heads.options.layers, heads.options.window
        target = job.loaded_target
        return config | {
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "layer_types": [FULL] * layers,
            "use_sliding_window": window is not None,
            **window_settings(window, layers),
            "block_size": heads.options.block,
            "num_target_layers": target.model.config.get_text_config().num_hidden_layers,
            **self.draft_settings(heads),
        }

    def kind_expected(self, config: dict[str, Any]) -> dict[str, Any]:
        window = expected_window(config) if self.holds_windows else {}
        return {
            "model_type": "qwen3",
            "layer_types": lambda x: x == [FULL] * (config.get("num_hidden_layers") or 0),
            "use_sliding_window": bool(window),
            **window,
            "block_size": is_count,
            "num_target_layers": is_count,
            **self.draft_expected(),
        }

    def value_problems(self, config: dict[str, Any], weights: dict[str, Tensor]) -> list[str]:
        taps = self.draft_of(config)["target_layer_ids"]
        # An import has no such number: the heads compare the layers with the target's.
        count = config.get("num_target_layers", taps[-1] + 1)
        if taps != sorted(set(taps)) or taps[-1] >= count:
            return [f"config.json: the target's layers are {taps}, which is not valid"]
        return map_value_problems(weights, config["vocab_size"])

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden, size = config["hidden_size"], config["head_dim"]
        rows, vocab_size = self.rows_of(config), config["vocab_size"]
        taps = self.draft_of(config)["target_layer_ids"]
        table = [TensorRow("fc.weight", (hidden, len(taps) * hidden))]
        table += [TensorRow(f"{norm}.weight", (hidden,)) for norm in ("hidden_norm", "norm")]
        for layer in (f"layers.{number}" for number in range(config["num_hidden_layers"])):
            table += layer_rows(config, layer, hidden, ["input_layernorm"])
            table += [TensorRow(f"{layer}.self_attn.{x}_norm.weight", (size,)) for x in ("q", "k")]
        if self.has_target_layers:
            table.append(TensorRow(EMBEDDINGS, (vocab_size, hidden), shared=True, implied=True))
            table.append(TensorRow(OUTPUT, (rows, hidden), OWN_OUTPUT, shared=True, implied=True))
        return table + map_rows(rows, vocab_size)

    def rows_of(self, config: dict[str, Any]) -> int:
        """Return the number of tokens that the heads draft, V'."""
        return config.get(ROWS) or config["vocab_size"]

    def recognises(self, checkpoint: Checkpoint) -> bool:
        config = checkpoint.config
        return MODEL_TYPE not in config and _published_kind(config) == self.kind

    def published_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        """With the window and the block size at the top, and the others of these settings left out:
        `published_problems` has looked at them."""
        inner = dict(_inner(contents))
        plain = {key: x for key, x in contents.items() if key not in STATED}
        attention = {key: inner.pop(key, None) for key in ATTENTION}
        for key in (*STATED, PROJECTOR, SHIFT):
            inner.pop(key, None)
        if "block_size" in inner:
            plain["block_size"] = inner.pop("block_size")
        if attention["use_swa"] and SLIDING not in (plain.get("layer_types") or ()):
            plain["layer_types"] = [SLIDING]
            plain["use_sliding_window"] = True
        if plain.get("num_target_layers") == 0:  # Model Optimizer's, trained from stored states
            del plain["num_target_layers"]
        if attention["swa_window_size"] is not None:
            plain["sliding_window"] = attention["swa_window_size"]
        plain["is_causal"] = _is_causal(contents)
        return plain | ({INNER: inner} if INNER in contents else {})

    def published_problems(self, contents: dict[str, Any]) -> list[str]:
        """Return the problems with a published config outside of `published_settings`."""
        problems = [
            f"config.json: {place}{key} is {settings[key]!r}, expected {usual!r}: {why}"
            for place, settings in (("", contents), (f"{INNER}.", _inner(contents)))
            for key, (usual, why) in STATED.items()
            if settings.get(key) not in (None, usual)
        ]
        projector = _inner(contents).get(PROJECTOR)
        if projector not in (None, self.kind):
            problems.append(
                f"config.json: {INNER}.{PROJECTOR} is {projector!r}, heads that are not read here; "
                "known are DFlash's, DFlash2's, Domino's and DSpark's"
            )
        if _is_causal(contents):
            problems.append(
                "config.json: a token of a block sees only those before it (by is_causal, by "
                f"{INNER}.causal, or, without them, by layers of the type {SLIDING}); expected "
                "blocks whose tokens all see each other"
            )
        return problems

    def layer_count(self, contents: dict[str, Any]) -> Any:
        return contents.get("num_hidden_layers")

    def published_config(
        self, job: ImportJob, contents: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], list[str]]:
        target, vocab_size = job.target, job.target.vocab_size
        layer_count = target.model.config.get_text_config().num_hidden_layers
        usual = {"use_sliding_window": None, "num_target_layers": layer_count}
        expected: dict[str, Any] = {
            "num_hidden_layers": is_count,
            "block_size": lambda x: is_count(x) and x > 1,
            "use_sliding_window": lambda x: not x or SLIDING in (contents.get("layer_types") or ()),
            "num_target_layers": layer_count,
            **{key: x for key, x in self.draft_expected().items() if key != "is_causal"},
        }
        problems = key_problems(expected, usual | contents, "config.json")
        block, context = contents.get("block_size"), target.max_positions
        if is_count(block) and block >= context:
            problems.append(
                f"block_size is {block}; expected from 2 to {context - 1}: the target's context "
                f"has {context} tokens"
            )
        problems += self.published_problems(job.checkpoint.config)
        rows = contents.get(ROWS) or vocab_size
        problems += map_problems(tensors, rows, vocab_size)
        if rows != vocab_size and "d2t" not in tensors:
            problems.append(f"tensor d2t is missing; it tells which tokens the {rows} rows draft")
        problems = problems or map_value_problems(tensors, vocab_size)
        if problems:
            return {}, problems
        table = output_layer(target.model).weight.detach()
        if "d2t" in tensors:
            table = table[ids_of_offsets(tensors["d2t"]).to(table.device)]
        problems = row_problems(OUTPUT, tensors.pop(OUTPUT, None), table, "output layer")
        keys = ("num_hidden_layers", "block_size", *self.draft_expected())
        return {key: contents[key] for key in keys} | {ROWS: len(table)}, problems

    def serving(self, target: str, repository: str, gamma: int) -> list[tuple[str, str, str]]:
        served = super().serving(target, repository, gamma)
        if "sglang" in self.engines:
            command = (
                f"python -m sglang.launch_server --model {target} \\\n"
                "  --speculative-algorithm DFLASH \\\n"
                f"  --speculative-draft-model-path {repository}"
            )
            served.append(("SGLang", "", command))
        return served


class DSparkLayers(DFlashLayers):
    """DSpark, as its authors publish it. vLLM reads it in its newer runner, which needs a GPU."""

    name = "dspark"
    kinds: ClassVar[tuple[str, ...]] = ("dspark",)
    vllm = {"method": "dspark"}
    architecture = "Qwen3DSparkModel"
    own_options = {RANK: "rank", CONFIDENCE: "confidence"}
    heads = DSparkHeads
    drafter = DSparkDrafter
    published_keys: ClassVar[Keys] = {
        "": (*DFlashLayers.published_keys[""], *DSPARK_KEYS),
        INNER: (*DFlashLayers.published_keys[INNER], *DSPARK_KEYS, NESTED_CONFIDENCE, SHIFT),
    }

    def draft_settings(self, heads: Any) -> dict[str, Any]:
        return {
            "mask_token_id": heads.mask_token,
            "target_layer_ids": list(heads.captured_layers),
            RANK: heads.options.rank,
            "markov_head_type": "vanilla",
            CONFIDENCE: heads.estimates,
            "confidence_head_with_markov": heads.estimates,
        }

    def published_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        """With the settings of `dflash_config` at the top."""
        plain = super().published_settings(contents)
        inner = plain.pop(INNER, {})
        if NESTED_CONFIDENCE in inner:
            estimates = inner.pop(NESTED_CONFIDENCE)
            inner |= dict.fromkeys((CONFIDENCE, "confidence_head_with_markov"), estimates)
        return plain | inner

    def published_problems(self, contents: dict[str, Any]) -> list[str]:
        problems, inner = super().published_problems(contents), _inner(contents)
        problems += [
            f"config.json: {key} is {contents[key]!r}, and {INNER}.{key} {inner[key]!r}; expected "
            "the same in both places"
            for key in DSPARK_KEYS
            if key in contents and key in inner and contents[key] != inner[key]
        ]
        if inner.get(SHIFT) not in (None, True):
            problems.append(
                f"config.json: {INNER}.{SHIFT} is {inner[SHIFT]!r}, expected True: the first token "
                "of the block predicts the first token of the draft"
            )
        return problems

    def tensor_name(self, name: str) -> str | None:
        plain = super().tensor_name(name)
        for flat, own in FLAT_NAMES.items():
            if plain is not None and plain.startswith(flat):
                return own + plain.removeprefix(flat)
        return plain

    def draft_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    def draft_expected(self) -> dict[str, Any]:
        return {
            "mask_token_id": is_id,
            "target_layer_ids": are_layers,
            RANK: is_count,
            "markov_head_type": "vanilla",
            CONFIDENCE: is_bool,
            "confidence_head_with_markov": is_bool,
        }

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        rank, rows = config[RANK], (config["vocab_size"], self.rows_of(config))
        table = super().table(config)
        table += [
            TensorRow(f"markov_head.markov_w{number}.weight", (count, rank))
            for number, count in enumerate(rows, 1)
        ]
        if config[CONFIDENCE]:
            table.append(
                TensorRow("confidence_head.proj.weight", (1, config["hidden_size"] + rank))
            )
            table.append(TensorRow("confidence_head.proj.bias", (1,)))
        return table


class DFlash2Layers(DFlashLayers):
    """DFlash2, as its authors publish it, also with a window of the text. vLLM reads it in its
    newer runner, which needs a GPU."""

    name = "dflash2"
    kinds: ClassVar[tuple[str, ...]] = ("dflash2",)
    architecture = "DFlash2DraftModel"
    own_options = SECOND
    reads_reduced = False
    heads = DFlash2Heads
    drafter = DFlash2Drafter
    holds_windows = True
    published_keys: ClassVar[Keys] = {
        "": DFlashLayers.published_keys[""],
        INNER: (*DFlashLayers.published_keys[INNER], *SECOND),
    }

    def draft_settings(self, heads: Any) -> dict[str, Any]:
        draft = super().draft_settings(heads)[INNER]
        draft |= {name: getattr(heads.options, option) for name, option in SECOND.items()}
        # Without it, layers with a window let a token of a block see only those before it.
        return {INNER: draft, "is_causal": False}

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        draft = config[INNER] | {"block_size": config["block_size"]}
        outer = {key: x for key, x in config.items() if key != "block_size"}
        return outer | {INNER: draft}

    def stored_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        draft = dict(_inner(contents))
        block = draft.pop("block_size", contents.get("block_size"))
        return contents | {INNER: draft, "block_size": block}

    def draft_expected(self) -> dict[str, Any]:
        return {INNER: partial(is_dflash_config, counts=SECOND), "is_causal": False}

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden, draft = config["hidden_size"], self.draft_of(config)
        taps, rank = draft["conv_kernel_size"], draft["selector_rank"]
        numbers = 2 * taps * (hidden // draft["conv_group_size"])
        table = super().table(config)
        for layer in range(config["num_hidden_layers"]):
            for part in (f"layers.{layer}.{name}_conv" for name in ("attention", "mlp")):
                table.append(TensorRow(f"{part}.base_kernel", (2, taps, hidden)))
                table.append(TensorRow(f"{part}.kernel_projection.weight", (numbers, hidden)))
        own, books = "candidate_selector", ("predecessor", "successor")
        table += [TensorRow(f"{own}.{x}_codebook", (config["vocab_size"], rank)) for x in books]
        return [*table, TensorRow(f"{own}.hidden_projection.weight", (rank, hidden))]


for layout in (DFlashLayers(), DSparkLayers(), DFlash2Layers()):
    FORMATS.register(layout.name)(layout)


def are_layers(value: Any) -> bool:
    """Whether the value is a list of layer numbers, counted from 0."""
    return isinstance(value, list) and bool(value) and all(map(is_id, value))


def _inner(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that tells how heads draft, if there is a valid one."""
    inner = config.get(INNER)
    return inner if isinstance(inner, dict) else {}


def _published_kind(config: dict[str, Any]) -> str | None:
    """The kind of the heads that a published config is of, None for other drafters."""
    inner = _inner(config)
    if RANK in config or RANK in inner:
        return "dspark"
    if "selector_rank" in inner:
        return "dflash2"
    if inner.get(PROJECTOR) == "domino":
        return "domino"
    return "dflash" if INNER in config else None


def _is_causal(config: dict[str, Any]) -> bool:
    """Whether the tokens of a block see only those before them, as vLLM (0.33) reads a config."""
    for stated in (config.get("is_causal"), _inner(config).get("causal")):
        if stated is not None:
            return bool(stated)
    return SLIDING in (config.get("layer_types") or ())


def is_dflash_config(
    value: Any,
    counts: Collection[str] = (),
    stated: Mapping[str, Any] = MappingProxyType({}),
) -> bool:
    """counts, stated: what is beside the mask token and the target's layers."""
    return (
        isinstance(value, dict)
        and value.keys() == {"mask_token_id", "target_layer_ids", *counts, *stated}
        and is_id(value["mask_token_id"])
        and are_layers(value["target_layer_ids"])
        and all(is_count(value[name]) for name in counts)
        and all(value[name] == usual for name, usual in stated.items())
    )
