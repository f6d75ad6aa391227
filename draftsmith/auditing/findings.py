"""What an audit found: one finding for each question, and the verdict of all."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from train.base.exit_status import ExitStatus


class Judgement(StrEnum):
    """EQUAL: no difference was found, up to the size that stands with it. WRONG: a difference that
    chance or rounding does not explain. UNJUDGED: the question could not be asked."""

    EQUAL = "equal"
    WRONG = "wrong"
    UNJUDGED = "not judged"


@dataclass(frozen=True)
class Finding:
    """The answer to one question.

    group: greedy, sampled, exact or contract. detail: a sentence with figures. p: the probability
    that an engine without error gives a statistic as large; None for what is no test. sees: the
    smallest error that this would have found, in words. figures: the numbers of drafted and
    accepted tokens, by name.
    """

    group: str
    name: str
    verdict: Judgement
    detail: str
    p: float | None = None
    sees: str = ""
    figures: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Details quote what a server said, and no report can end by it."""
        for name in ("name", "detail", "sees"):
            object.__setattr__(self, name, printable(getattr(self, name)))


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    subject: what was audited, and how: address, model, target, sampling, level, and counts.
    findings: in the order of the questions. greedy texts must be the target's up to rounding,
    sampled ones must be drawn from its law.
    """

    subject: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = {k: printable(x) if isinstance(x, str) else x for k, x in self.subject.items()}
        object.__setattr__(self, "subject", named)

    @property
    def verdict(self) -> Judgement:
        """WRONG if anything is, else UNJUDGED if anything could not be judged."""
        return worst(finding.verdict for finding in self.findings)

    @property
    def exit_status(self) -> ExitStatus:
        """0: equal. 1: wrong. 2: not judged."""
        return {
            Judgement.EQUAL: ExitStatus.DONE,
            Judgement.WRONG: ExitStatus.FAILED,
            Judgement.UNJUDGED: ExitStatus.BAD_INPUT,
        }[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Converts to JSON values."""
        return {
            "verdict": str(self.verdict),
            "subject": self.subject,
            "findings": [asdict(finding) for finding in self.findings],
        }


def printable(text: str) -> str:
    """Return a text without what a terminal or a file cannot hold as it is: control characters,
    separators of lines, lone surrogates and what is no character are written as escapes.

    >>> printable("a\x1b[31m\u2028\ud800 é")
    'a\\x1b[31m\\u2028\\ud800 é'
    """
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def worst(verdicts: Iterable[Judgement]) -> Judgement:
    """The verdict of several; UNJUDGED of none."""
    found = set(verdicts)
    if Judgement.WRONG in found:
        return Judgement.WRONG
    return Judgement.EQUAL if found == {Judgement.EQUAL} else Judgement.UNJUDGED
