"""The stages, one file for each kind. Each file registers its stage."""

from decode.base.registry import import_all
from train.base.stage import STAGES

__all__ = ["STAGES"]

import_all(__name__)
