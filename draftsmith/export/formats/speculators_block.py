"""Block drafters (DFlash, DFlash2, DSpark) for the library speculators. vLLM serves them.

The config names the layers whose input is read, one higher than in `block_layers`. The weights also
hold the target's embeddings and output layer. With a reduced draft vocabulary the output layer has
its rows only, and the maps `d2t` and `t2d` are those of format eagle3.
"""

from typing import Any, ClassVar

from draftsmith.export.file_schema import extra_key_problems, is_count, is_id, key_problems
from draftsmith.export.formats import FORMATS, ExportJob
from draftsmith.export.formats.block_layers import (
    BLOCK_KEYS,
    DSPARK_KEYS,
    INNER,
    SECOND,
    DFlash2Layers,
    DFlashLayers,
    DSparkLayers,
    are_layers,
)
from draftsmith.export.formats.eagle3_layer import (
    LAYER_CONFIG,
    MODEL_TYPE,
    ROWS,
    VERSION,
    is_speculators_config,
    speculators_config,
    speculators_keys,
)
from draftsmith.export.formats.layer_format import SLIDING
from draftsmith.export.formats.published_keys import Keys
from draftsmith.export.published import Checkpoint

# Settings that the library speculators writes in another way.
OTHER_NAMES = (INNER, "mask_token_id", "target_layer_ids")
# Without it, the library lets the tokens of a block see only those before them if layers have a
# window. Our layers let them see the complete block.
NON_CAUSAL = "sliding_window_non_causal"


def block_keys(*own: str) -> Keys:
    """The keys of a published config. own: of one kind of heads."""
    keys = speculators_keys("block_size", "mask_token_id", "sample_from_anchor", NON_CAUSAL, *own)
    return {**keys, LAYER_CONFIG: (*keys[LAYER_CONFIG], *BLOCK_KEYS)}


class SpeculatorsBlock(DFlashLayers):
    """What both kinds share."""

    has_target_layers = True
    carries_vocabulary = True
    layer_ids = "inputs"
    published_keys: ClassVar[Keys] = block_keys()

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get(MODEL_TYPE) == self.kind

    def published_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        return self.stored_settings(contents)

    def published_problems(self, contents: dict[str, Any]) -> list[str]:
        first = self.heads.first_slot == 0
        expected = {"sample_from_anchor": first}
        # Readers disagree on what is meant if DSpark's is missing.
        usual = {} if first else {"sample_from_anchor": False}
        usual |= {NON_CAUSAL: True} if self.kind == "dflash2" else {}
        if SLIDING in ((contents.get(LAYER_CONFIG) or {}).get("layer_types") or ()):
            expected |= {NON_CAUSAL: True}
        return key_problems(expected, usual | contents, "config.json")

    def config_file(self, config: dict[str, Any], heads: Any, job: ExportJob) -> dict[str, Any]:
        outer = self.draft_settings(heads)
        return {
            "architectures": [self.architecture],
            MODEL_TYPE: self.kind,
            "speculators_version": VERSION,
            "speculators_config": speculators_config(self.kind, job),
            LAYER_CONFIG: {key: x for key, x in config.items() if key not in outer},
            ROWS: heads.rows,
            "block_size": config["block_size"],
            "mask_token_id": heads.mask_token,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in heads.captured_layers],
            "sample_from_anchor": self.heads.first_slot == 0,
            "dtype": config["dtype"],
            **({} if heads.options.window is None else {NON_CAUSAL: True}),
            **{key: x for key, x in outer.items() if key not in OTHER_NAMES},
        }

    def kind_expected(self, config: dict[str, Any]) -> dict[str, Any]:
        return super().kind_expected(config) | {ROWS: is_count}

    def stored_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        layers = contents.get(LAYER_CONFIG)
        ids: Any = contents.get("aux_hidden_state_layer_ids")
        inner = {
            "mask_token_id": contents.get("mask_token_id"),
            "target_layer_ids": [x - 1 for x in ids] if are_layers(ids) else None,
        }
        kind = {key: contents[key] for key in self.draft_expected() if key in contents}
        kind |= {INNER: inner} if self.kind == "dflash" else inner
        # The library states these beside the settings of the layers only.
        kind |= {key: contents[key] for key in (ROWS, "block_size") if key in contents}
        return (layers if isinstance(layers, dict) else {}) | kind

    def setting_problems(self, contents: dict[str, Any]) -> list[str]:
        layers = contents.get(LAYER_CONFIG) or {}
        expected = {
            "architectures": [self.architecture],
            MODEL_TYPE: self.kind,
            "speculators_version": VERSION,
            "speculators_config": lambda x: is_speculators_config(x, self.kind),
            LAYER_CONFIG: lambda x: isinstance(x, dict),
            ROWS: lambda x: is_count(x) and x <= (layers.get("vocab_size") or 0),
            "block_size": lambda x: x == layers.get("block_size"),
            "mask_token_id": is_id,
            "aux_hidden_state_layer_ids": lambda x: are_layers(x) and min(x) >= 1,
            "sample_from_anchor": self.heads.first_slot == 0,
            "dtype": lambda x: x == layers.get("dtype"),
        }
        expected |= {NON_CAUSAL: True} if "sliding_window" in layers else {}
        problems = key_problems(expected, contents, "config.json")
        others = [key for key in self.draft_expected() if key not in OTHER_NAMES]
        return problems + extra_key_problems([*expected, *others], contents, "config.json")


class SpeculatorsDFlash(SpeculatorsBlock):
    """DFlash for the library speculators."""

    name = "speculators-dflash"
    holds_windows = True


class SpeculatorsDSpark(SpeculatorsBlock, DSparkLayers):
    """DSpark for the library speculators."""

    name = "speculators-dspark"
    published_keys = block_keys(*DSPARK_KEYS)


class SpeculatorsDFlash2(SpeculatorsBlock, DFlash2Layers):
    """DFlash2 for the library speculators: its settings are at the top."""

    name = "speculators-dflash2"
    carries_vocabulary = False
    published_keys = block_keys(*SECOND)

    def draft_settings(self, heads: Any) -> dict[str, Any]:
        return DFlash2Layers.draft_settings(self, heads)[INNER]

    def draft_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    def draft_expected(self) -> dict[str, Any]:
        counts = dict.fromkeys(SECOND, is_count)
        return {"mask_token_id": is_id, "target_layer_ids": are_layers, **counts}


for layout in (SpeculatorsDFlash(), SpeculatorsDSpark(), SpeculatorsDFlash2()):
    FORMATS.register(layout.name)(layout)
