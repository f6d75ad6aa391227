"""The negative controls of losslessness (`tests.controls`) behind HTTP.

`draftsmith audit` must find them by enumeration, and the same decode without the error must pass:
`python -m tools.audit_controls` prints them with the others.
"""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from decode.rules import RULES
from decode.settings import DecodeSettings
from draftsmith.auditing.audit_options import AuditOptions
from draftsmith.auditing.entry import audit
from draftsmith.auditing.findings import Audit
from tests.controls import CONTROLS, Control, Setup
from tests.lossless import Case
from tests.other_tokenizers import words
from tests.service import serving
from tests.tiny import as_target

RULE = "of_control"
ROWS = 96
# Greedy answers and the transform find what they find; here enumeration is to find all.
FEW = {"samples": 160, "max_new_tokens": 24}


def target_of(case: Case) -> Any:
    names = [chr(ord("a") + token) for token in range(case.vocab)]
    return replace(as_target(case.model(0.0), words(*names)), eos_token_ids=case.eos)


@dataclass(frozen=True)
class LawControl:
    """A control of `tests.controls` whose error changes the law. texts: short answers that are
    counted."""

    control: Control
    texts: int

    @property
    def name(self) -> str:
        return self.control.name

    def audit(self, *, broken: bool, seed: int = 0) -> Audit:
        """broken: with the error."""
        case = self.control.case
        setup: Setup = self.control.faulty if broken else self.control.sound
        options = AuditOptions(
            sampling=case.sampling, seed=seed, exact=self.texts, exact_tokens=case.new, **FEW
        )
        target = target_of(case)
        with (
            mock.patch.dict(RULES._parts, {RULE: setup.rule}),
            setup.breaking(),
            serving(
                target, setup.drafter(), DecodeSettings(gamma=case.gamma, rule=RULE), max_rows=ROWS
            ) as running,
        ):
            return audit(running.url, target, case.prompts, options, concurrency=16)


# Those that the transform finds on a larger vocabulary (`tests.audit_controls`) are not repeated.
NAMES = {
    "q of shared tokens, not renormalised": 2048,
    "residual of the wrong row": 2048,
    "distinct siblings, q not renormalised": 4096,
    "independent siblings judged as distinct": 8192,
    "mixed siblings of two models, one q for all": 2048,
    "mixed siblings of lookup and a model, one q for all": 2048,
    "a cascade's inner rule with the numbers of the target's": 4096,
    "a cascade's inner rule lossy": 2048,
    "the row of q of the place, not of the drafter": 2048,
}
LAW_CONTROLS = [
    LawControl(control, NAMES[control.name]) for control in CONTROLS if control.name in NAMES
]
