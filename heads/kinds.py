"""All kinds of heads. Importing this file registers them and their drafters by name."""

from decode.base.registry import import_all
from heads.heads_module import HEADS

__all__ = ["HEADS"]

import_all("heads")
