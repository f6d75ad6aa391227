"""XPress (2608.02438) for the library speculators. vLLM 0.33 serves it.

As DFlash in that layout, and `refiner_head.*`. S block, H hidden size, R rank, V vocabulary, V'
draft vocabulary. `num_jacobi_passes` is how often an engine refines all places of a block at once.
S − 1 passes give what our loop drafts greedily, place by place.
"""

from typing import Any, ClassVar

from draftsmith.export.file_schema import is_count, is_id
from draftsmith.export.formats import FORMATS
from draftsmith.export.formats.block_layers import are_layers
from draftsmith.export.formats.speculators_block import SpeculatorsBlock, block_keys
from draftsmith.export.formats.tensor_table import TensorRow
from heads.xpress_heads import XPressDrafter, XPressHeads

PASSES = "num_jacobi_passes"
# The options of XPress heads, by their names in a config.
REFINER = {"xpress_rank": "rank", "xpress_mlp_ratio": "ratio"}


class SpeculatorsXPress(SpeculatorsBlock):
    """Its settings are at the top."""

    name = "speculators-xpress"
    kinds: ClassVar[tuple[str, ...]] = ("xpress",)
    holds_windows = True
    architecture = "XPressDraftModel"
    own_options = REFINER
    heads = XPressHeads
    drafter = XPressDrafter
    published_keys = block_keys(*REFINER, PASSES)

    def draft_settings(self, heads: Any) -> dict[str, Any]:
        return {
            "mask_token_id": heads.mask_token,
            "target_layer_ids": list(heads.captured_layers),
            **{name: getattr(heads.options, option) for name, option in REFINER.items()},
            PASSES: heads.depth,
        }

    def draft_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    def draft_expected(self) -> dict[str, Any]:
        counts = dict.fromkeys((*REFINER, PASSES), is_count)
        return {"mask_token_id": is_id, "target_layer_ids": are_layers, **counts}

    def table(self, config: dict[str, Any]) -> list[TensorRow]:
        hidden, rank, block = config["hidden_size"], config["xpress_rank"], config["block_size"]
        width, own = rank * config["xpress_mlp_ratio"], "refiner_head"
        shapes = {
            "token_embed": (config["vocab_size"], rank),
            "down_h": (rank, hidden),
            "down_g": (rank, hidden),
            "in_proj": (rank, 3 * rank),
            "mlp_gate": (width, rank),
            "mlp_up": (width, rank),
            "mlp_down": (rank, width),
            "readout": (self.rows_of(config), rank),
        }
        table = [TensorRow(f"{own}.{name}.weight", shape) for name, shape in shapes.items()]
        return [*super().table(config), *table, TensorRow(f"{own}.mix_l", (rank, block, block))]


FORMATS.register("speculators-xpress")(SpeculatorsXPress())
