"""Takes personal data and secrets out of a text before it is stored.

A match becomes `[redacted: KIND]`. The patterns are simple and find only what looks like one of the
kinds; docs/learning.md lists them.

Time is linear in the length of a text, whoever wrote it. A run of characters that a pattern may
begin with is entered at its first character alone: the look-behind holds the same class. What a
pattern has read of a run it does not give back (`*+`, `(?>…)`), or it reads a bounded number.
"""

import re
from collections import Counter
from functools import partial

_SECRETS = (
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
    r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic, Stripe
    r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|npm_|pypi-|xox[abeoprs]-)[A-Za-z0-9_-]{16,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",  # AWS
    r"\bAIza[A-Za-z0-9_-]{30,}",  # Google
    # JSON web tokens
    r"(?<![A-Za-z0-9_-])(?>[A-Za-z0-9_-]*?eyJ)[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*",
    r"(?i:\bBearer)\s++[A-Za-z0-9._~+/-]{16,}=*",
    r"(?<=://)[^\s/:@]++:[^\s/@]++(?=@)",  # USER:PASSWORD in an address
    r"(?i:\b(?:password|passwd|pwd|secret|token|api[_-]?key)\b[\"']?\s*+[:=]\s*+)[\"']?[^\s\"',;]{6,}",
)
_MAIL = r"(?<![\w.+%-])[\w.+%-]++@[A-Za-z0-9][A-Za-z0-9-]*+(?<!-)(?:\.[A-Za-z0-9-]+)+"
_CARD = r"(?<![\w.])\d(?:[ -]?\d){12,18}(?![\w])"
# With a + or a leading 0 and separators, or as (123) 456-7890 and 123-456-7890.
_PHONE = (
    r"(?<![\w+])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d(?:[ .-]?\d){5,12}"
    r"|0\d{1,4}[ /-]\d(?:[ -]?\d){4,9}"
    r"|\(\d{3}\) ?\d{3}[ .-]\d{4}"
    r"|\d{3}[.-]\d{3}[.-]\d{4})(?!\w)"
)


def passes_luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1)."""
    doubled = [int(digit) * (1 + i % 2) for i, digit in enumerate(reversed(digits))]
    return sum(n - 9 if n > 9 else n for n in doubled) % 10 == 0


# Secrets come first: a password may hold digits that look like a phone number.
_KINDS = {
    "secret": re.compile("|".join(_SECRETS), re.DOTALL),
    "mail": re.compile(_MAIL),
    "card": re.compile(_CARD),
    "phone": re.compile(_PHONE),
}


def redact(text: str) -> tuple[str, Counter[str]]:
    """Return the text without its personal data and secrets, and how many of each kind it had."""
    counts: Counter[str] = Counter()

    def mark(kind: str, match: re.Match[str]) -> str:
        if kind == "card" and not passes_luhn(re.sub(r"\D", "", match[0])):
            return match[0]
        counts[kind] += 1
        return f"[redacted: {kind}]"

    for kind, pattern in _KINDS.items():
        text = pattern.sub(partial(mark, kind), text)
    return text, counts
