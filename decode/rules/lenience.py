"""Lenience: speculative sampling that accepts more (2211.17192, appendix A.5). LOSSY."""

from torch import Tensor

from decode.errors import UserError
from decode.rules import RULES
from decode.rules.speculative import SpeculativeSampling


@RULES.register("lenience")
class Lenience(SpeculativeSampling):
    """Lossy: accept with probability min(1, p(x)/(l·q(x))), then as speculative sampling.

    lenience: l in (0, 1]; 1 is speculative sampling. No token gets more than 1/l times the
    probability the target gives it. May be set anew at any time, also while decoding. Raises
    UserError outside of its range.
    """

    lossless = False

    def __init__(self, lenience: float = 0.5) -> None:
        if not 0 < lenience <= 1:
            raise UserError(
                f"lenience is {lenience}; expected a number in (0, 1], where 1 is lossless"
            )
        self.lenience = lenience

    def accepts(self, uniforms: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        return uniforms * (self.lenience * q_x) < p_x
