"""The public names of draftsmith. Importing them also registers every kind of drafter.

>>> from draftsmith import Decoder, load_target, open_drafter, train   # doctest: +SKIP
>>> target = load_target("embedded:smollm2-135m")                      # doctest: +SKIP
>>> decoder = Decoder(target.model, open_drafter("ngram", target))     # doctest: +SKIP
>>> drafters = train("my.yaml").drafters                               # doctest: +SKIP
"""

# ruff: noqa: E402  (the imports come after a check of what they would find)
from importlib.util import find_spec
from pathlib import Path

for _package in ("configs", "decode", "distill", "heads", "train"):
    _spec = find_spec(_package)
    _file = Path(_spec.origin) if _spec and _spec.origin else None
    if _file is None or _file.parents[1] != Path(__file__).parents[1]:
        raise ImportError(
            f"{_file or 'nothing'} is what Python imports as {_package}, and draftsmith has a "
            "package of that name; rename the file or the directory, or start Python elsewhere"
        )

import heads  # noqa: F401  (registers the drafters that read the target's hidden states)
from decode.drafters.directory import open_drafter, save_drafter
from decode.errors import UserError
from decode.loop import Decoded, Decoder
from decode.measure.evaluation import evaluate
from decode.measure.figures import Evaluation
from decode.sampling import Sampling
from decode.settings import EvaluationProtocol
from decode.target.loading import Target, load_target
from decode.text import SpeculativeGenerator, TextPieces
from train.config import RunConfig
from train.entry import train
from train.run import Run
from train.training.checkpoint import Stopped

__version__ = "0.1.0"

__all__ = [
    "Decoded",
    "Decoder",
    "Evaluation",
    "EvaluationProtocol",
    "Run",
    "RunConfig",
    "Sampling",
    "SpeculativeGenerator",
    "Stopped",
    "Target",
    "TextPieces",
    "UserError",
    "evaluate",
    "load_target",
    "open_drafter",
    "save_drafter",
    "train",
]
