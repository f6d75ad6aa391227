"""The settings of stages, one class for each kind. Nothing here imports torch."""

from decode.base.registry import import_all

import_all(__name__)
