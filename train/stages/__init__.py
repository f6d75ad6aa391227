"""The stages, one file for each kind. Each file registers its stage."""

from train.base.stage import STAGES
from train.stages import (
    datastore,
    distill,
    feature_cache,
    generate,
    heads,
    layer_skip,
    online,
    teacher_cache,
)

__all__ = [
    "STAGES",
    "datastore",
    "distill",
    "feature_cache",
    "generate",
    "heads",
    "layer_skip",
    "online",
    "teacher_cache",
]
