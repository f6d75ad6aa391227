"""Heads on the target: small modules that read its hidden states and predict the next tokens.

Importing this package registers all kinds of heads and their drafters by name.
"""

from heads import blockwise, eagle1, eagle3, hydra, hydra_plus, medusa
from heads.base import HEADS

__all__ = ["HEADS", "blockwise", "eagle1", "eagle3", "hydra", "hydra_plus", "medusa"]
