"""Heads on the target: small modules that read its hidden states and predict the next tokens.

Importing this package registers all kinds of heads and their drafters by name.
"""

from decode.base.registry import import_all
from heads.heads_module import HEADS

__all__ = ["HEADS"]

import_all(__name__)
