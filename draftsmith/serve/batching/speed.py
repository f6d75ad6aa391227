"""How fast texts are answered, to tell a client when to ask again."""

import math

LONGEST_RETRY = 120  # seconds; OpenAI's client ignores longer ones


class AnswerSpeed:
    """Moving averages: tokens per second of the last passes, and tokens of the last texts."""

    def __init__(self) -> None:
        self._tokens_per_second = self._tokens_per_text = math.nan

    def passed(self, tokens: int, seconds: float) -> None:
        """A pass gave `tokens` tokens."""
        self._tokens_per_second = _averaged(self._tokens_per_second, tokens / max(seconds, 1e-6))

    def ended(self, tokens: int) -> None:
        """A text has ended with `tokens` tokens."""
        self._tokens_per_text = _averaged(self._tokens_per_text, tokens)

    def seconds_for(self, texts: int) -> int:
        """Seconds until `texts` texts are answered; 1 if no text has ended yet."""
        seconds = texts * self._tokens_per_text / self._tokens_per_second
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY) if math.isfinite(seconds) else 1


def _averaged(before: float, new: float) -> float:
    """An exponential moving average. before: NaN at first."""
    return new if math.isnan(before) else 0.9 * before + 0.1 * new
