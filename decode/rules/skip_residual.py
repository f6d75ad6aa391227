"""Speculative sampling without its residual, for debugging. LOSSY."""

from torch import Tensor

from decode.rules import RULES
from decode.rules.speculative import SpeculativeSampling


@RULES.register("speculative_skip_residual")
class SkipResidual(SpeculativeSampling):
    """Lossy: draws from p after a rejection, not from norm((p − q)₊). Acceptance is the same as in
    speculative sampling, so any difference between the two comes from the residual.
    """

    lossless = False

    def after_rejection(self, p: Tensor, q: Tensor) -> Tensor:
        return p
