"""Heads on the target: small modules that read its hidden states and predict the next tokens.

Importing this package registers all kinds of heads and their drafters by name: Medusa and Blockwise
(`parallel_heads`), Hydra and Hydra++ (`hydra_heads`), EAGLE-1 and EAGLE-3 (`eagle_heads`), P-EAGLE
(`p_eagle_heads`), DFlash (`dflash_heads`), DSpark (`dspark_heads`), PaSS (`pass_heads`, and
`in_tree` in the passes that verify), Kangaroo (`kangaroo_heads`), multi-token prediction
(`mtp_heads`).
"""

from heads import (
    dflash_heads,
    dspark_heads,
    eagle_drafter,
    eagle_heads,
    hydra_heads,
    in_tree,
    kangaroo_heads,
    mtp_drafter,
    mtp_heads,
    p_eagle_heads,
    parallel_heads,
    pass_heads,
)
from heads.heads_module import HEADS

__all__ = [
    "HEADS",
    "dflash_heads",
    "dspark_heads",
    "eagle_drafter",
    "eagle_heads",
    "hydra_heads",
    "in_tree",
    "kangaroo_heads",
    "mtp_drafter",
    "mtp_heads",
    "p_eagle_heads",
    "parallel_heads",
    "pass_heads",
]
