"""The public names of draftsmith. The first one that is used also registers every kind of drafter.

>>> from draftsmith import Decoder, load_target, open_drafter, train   # doctest: +SKIP
>>> target = load_target("embedded:smollm2-135m")                      # doctest: +SKIP
>>> decoder = Decoder(target.model, open_drafter("ngram", target))     # doctest: +SKIP
>>> drafters = train("my.yaml").drafters                               # doctest: +SKIP
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

for _package in ("configs", "decode", "distill", "heads", "train"):
    _spec = find_spec(_package)
    _file = Path(_spec.origin) if _spec and _spec.origin else None
    if _file is None or _file.parents[1] != Path(__file__).parents[1]:
        raise ImportError(
            f"{_file or 'nothing'} is what Python imports as {_package}, and draftsmith has a "
            "package of that name; rename the file or the directory, or start Python elsewhere"
        )

__version__ = "0.1.0"

# The module of each public name. They load torch, and a command that only prints its help needs
# none of them.
_MODULES = {
    "Audit": "draftsmith.auditing.findings",
    "AuditOptions": "draftsmith.auditing.audit_options",
    "Decoded": "decode.loop.decoded",
    "Decoder": "decode.loop.decoding",
    "Evaluation": "train.measure.figures",
    "EvaluationProtocol": "decode.settings",
    "Grammars": "decode.grammars",
    "Run": "train.run.run",
    "RunConfig": "train.run.config",
    "Sampling": "decode.draw.sampling",
    "SpeculativeGenerator": "decode.text",
    "Stopped": "train.loop.checkpoint",
    "Target": "decode.model.loading",
    "TextPieces": "decode.text",
    "UserError": "decode.base.errors",
    "audit": "draftsmith.auditing.entry",
    "evaluate": "train.measure.evaluation",
    "load_target": "decode.model.loading",
    "open_drafter": "decode.opening.directory",
    "save_drafter": "decode.opening.directory",
    "train": "train.run.entry",
}

if TYPE_CHECKING:
    from decode.base.errors import UserError as UserError
    from decode.draw.sampling import Sampling as Sampling
    from decode.grammars import Grammars as Grammars
    from decode.loop.decoded import Decoded as Decoded
    from decode.loop.decoding import Decoder as Decoder
    from decode.model.loading import Target as Target
    from decode.model.loading import load_target as load_target
    from decode.opening.directory import open_drafter as open_drafter
    from decode.opening.directory import save_drafter as save_drafter
    from decode.settings import EvaluationProtocol as EvaluationProtocol
    from decode.text import SpeculativeGenerator as SpeculativeGenerator
    from decode.text import TextPieces as TextPieces
    from draftsmith.auditing.audit_options import AuditOptions as AuditOptions
    from draftsmith.auditing.entry import audit as audit
    from draftsmith.auditing.findings import Audit as Audit
    from train.loop.checkpoint import Stopped as Stopped
    from train.measure.evaluation import evaluate as evaluate
    from train.measure.figures import Evaluation as Evaluation
    from train.run.config import RunConfig as RunConfig
    from train.run.entry import train as train
    from train.run.run import Run as Run

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("heads.kinds")  # registers the drafters that read the target's hidden states
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
