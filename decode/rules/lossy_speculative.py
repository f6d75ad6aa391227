"""Speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318) with lenience, which
is LOSSY."""

from torch import Tensor

from decode.base.errors import UserError
from decode.rules import RULES
from decode.rules.speculative import SpeculativeSampling


@RULES.register("lenience")
class Lenience(SpeculativeSampling):
    """Lossy: accepts with probability min(1, p(x)/(l·q(x))); the rest is speculative sampling.

    lenience: l in (0, 1]; 1 is speculative sampling, and then the rule is lossless. No token gets
    more than 1/l times its probability under the target. It can be changed at any time, also
    during decoding. Raises UserError outside this range.
    """

    lossless = False

    def __init__(self, lenience: float = 0.5) -> None:
        if not 0 < lenience <= 1:
            raise UserError(
                f"lenience is {lenience}; expected a number in (0, 1], where 1 is lossless"
            )
        self.lenience = lenience

    @property
    def lenience(self) -> float:
        return self._lenience

    @lenience.setter
    def lenience(self, lenience: float) -> None:
        self._lenience, self.lossless = lenience, lenience == 1

    def accepts(self, uniforms: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
        return uniforms * (self._lenience * q_x) < p_x
