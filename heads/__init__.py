"""Heads on the target: small modules that read its hidden states and guess the tokens to come.

Importing this package registers its kinds of heads, and their drafters, under their names.
"""

from heads import blockwise, eagle1, eagle3, hydra, hydra_plus, medusa
from heads.base import HEADS

__all__ = ["HEADS", "blockwise", "eagle1", "eagle3", "hydra", "hydra_plus", "medusa"]
