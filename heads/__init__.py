"""Heads on the target: small modules that read its hidden states and predict the next tokens.

Importing this package registers all kinds of heads and their drafters by name: Medusa and Blockwise
(`parallel_heads`), Hydra and Hydra++ (`hydra_heads`), EAGLE-1 (`eagle1_heads`), EAGLE-3
(`eagle3_heads`), P-EAGLE (`p_eagle_heads`), DFlash (`dflash_heads`), DFlash2 (`dflash2_heads`),
DSpark (`dspark_heads`), PaSS (`pass_heads`, and `in_tree` in the passes that verify), Kangaroo
(`kangaroo_heads`), multi-token prediction (`mtp_heads`).
"""

from decode.base.registry import import_all
from heads.heads_module import HEADS

__all__ = ["HEADS"]

import_all(__name__)
