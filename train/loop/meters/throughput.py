"""The speed of a training over its last steps."""

from collections.abc import Sequence

from distill.flops import TextFlops


class Throughput:
    """Tokens and model FLOPs of the steps since the last `figures`.

    The time is that of the steps alone: figures on dev text and checkpoints are not in it.
    peak: FLOP/s of all ranks together. None: not known.
    """

    def __init__(self, peak: float | None) -> None:
        self.peak = peak
        self._seconds = self._tokens = self._flops = 0.0

    def add(self, seconds: float, tokens: int, flops: float) -> None:
        """Count a step. tokens: predicted ones, of all ranks. flops: 0 if they are not known."""
        self._seconds += seconds
        self._tokens += tokens
        self._flops += flops

    def figures(self) -> dict[str, float]:
        """tokens_per_second; if FLOPs are known, model_tflops_per_second of all ranks; if the peak
        is known too, mfu: their share of the peak (2204.02311, appendix B). Begins anew."""
        seconds, tokens, flops = self._seconds, self._tokens, self._flops
        self._seconds = self._tokens = self._flops = 0.0
        if not seconds:
            return {}
        figures = {"tokens_per_second": tokens / seconds}
        if flops:
            figures["model_tflops_per_second"] = flops / seconds / 1e12
            if self.peak is not None:
                figures["mfu"] = flops / seconds / self.peak
        return figures


def flops_of(rule: TextFlops | None, lengths: Sequence[int], predictions: int) -> float:
    """The FLOPs of rows with these lengths, and `predictions` predicted tokens in all; 0 without a
    rule."""
    if rule is None:
        return 0.0
    return (
        rule.per_token * sum(lengths)
        + rule.per_pair * sum(length**2 for length in lengths)
        + rule.per_prediction * predictions
    )


def in_words(figures: dict[str, float]) -> str:
    """The figures of `Throughput` in short, such as `1,200 tokens/s, MFU 31.0%`."""
    parts = []
    if "tokens_per_second" in figures:
        parts.append(f"{figures['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in figures:
        parts.append(f"MFU {figures['mfu']:.1%}")
    elif "model_tflops_per_second" in figures:
        parts.append(f"{figures['model_tflops_per_second']:.3g} model TFLOP/s")
    return ", ".join(parts)
