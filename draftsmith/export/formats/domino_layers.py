"""Domino's heads for SGLang (2605.29707), as Model Optimizer (0.47) writes them too.

As DFlash in `block_layers`, and `prefix_gru.weight_ih_l0` [3G, H], `prefix_gru.weight_hh_l0`
[3G, G], `embed_proj.0.weight` [R, H + G] and `embed_proj.2.weight` [V, R]. H hidden size, G size of
the GRU's state, R rank, V vocabulary. Their sizes are in `dflash_config`.
"""

from functools import partial
from typing import Any, ClassVar

from draftsmith.export.file_schema import is_count
from draftsmith.export.formats import FORMATS
from draftsmith.export.formats.block_layers import (
    INNER,
    PROJECTOR,
    SHIFT,
    DFlashLayers,
    is_dflash_config,
)
from draftsmith.export.formats.published_keys import Keys
from draftsmith.export.formats.tensor_table import TensorRow
from heads.domino_heads import DominoDrafter, DominoHeads

RANK = "emb_dim"
# The options of Domino heads, by their names in a config.
SIZES = {"gru_hidden_dim": "gru", RANK: "rank"}
# What is stated of such heads: each token of the block predicts the next one, and the first place
# is read without the GRU.
STATED = {PROJECTOR: "domino", SHIFT: True, "pure_draft_prefix_len": 1}


class DominoLayers(DFlashLayers):
    """Domino. SGLang reads it in bfloat16."""

    name = "domino"
    kinds: ClassVar[tuple[str, ...]] = ("domino",)
    vllm = None
    own_options = SIZES
    reads_reduced = False
    heads = DominoHeads
    drafter = DominoDrafter
    published_keys: ClassVar[Keys] = {
        "": (*DFlashLayers.published_keys[""], RANK),
        INNER: (*DFlashLayers.published_keys[INNER], *SIZES, *STATED),
    }

    def draft_settings(self, heads: Any) -> dict[str, Any]:
        draft = super().draft_settings(heads)[INNER]
        sizes = {name: getattr(heads.options, option) for name, option in SIZES.items()}
        return {INNER: draft | STATED | sizes, RANK: heads.options.rank}

    def published_settings(self, contents: dict[str, Any]) -> dict[str, Any]:
        plain = super().published_settings(contents)
        inner = contents[INNER]
        return plain | {
            INNER: STATED | plain[INNER] | {key: inner[key] for key in STATED if key in inner},
            RANK: contents.get(RANK) or inner.get(RANK),
        }

    def draft_expected(self) -> dict[str, Any]:
        inner = partial(is_dflash_config, counts=SIZES, stated=STATED)
        return {INNER: inner, RANK: is_count}

    def value_problems(self, config: dict[str, Any], weights: dict[str, Any]) -> list[str]:
        inner, outer = config[INNER][RANK], config[RANK]
        if inner != outer:
            return [
                f"config.json: {RANK} is {outer}, and {INNER}.{RANK} {inner}; expected the same in "
                "both places"
            ]
        return super().value_problems(config, weights)

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden, draft = config["hidden_size"], self.draft_of(config)
        size, rank = (draft[name] for name in SIZES)
        shapes = {
            "prefix_gru.weight_ih_l0": (3 * size, hidden),
            "prefix_gru.weight_hh_l0": (3 * size, size),
            "embed_proj.0.weight": (rank, hidden + size),
            "embed_proj.2.weight": (config["vocab_size"], rank),
        }
        rows = [TensorRow(name, shape) for name, shape in shapes.items()]
        return [*super().table(config), *rows]


FORMATS.register("domino")(DominoLayers())
