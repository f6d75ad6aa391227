"""What an audit asks, and how it judges."""

from dataclasses import dataclass, field

from decode.base.errors import UserError, require_whole
from decode.draw.sampling import Sampling
from decode.model.loading import DTYPES
from draftsmith.auditing import JudgingOptions


@dataclass(frozen=True, kw_only=True)
class AuditOptions(JudgingOptions):
    """What is asked, and how it is judged.

    sampling: of the sampled requests; greedy: none are made. samples: sampled answers to each
    prompt. seed: of the requests, and of the random numbers of the test. level: the probability
    that an engine without error is called wrong by any test. engine_dtype: what the engine computes
    in; None: the target's dtype. rounding: of logits, in place of what the dtype says. exact: short
    sampled answers for the joint law of their first `exact_tokens` tokens; None: some if the
    target's vocabulary is tiny.
    """

    sampling: Sampling = field(default_factory=lambda: Sampling(1.0))
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole(1, samples=self.samples, max_new_tokens=self.max_new_tokens)
        require_whole(0, seed=self.seed, exact=self.exact or 0)
        require_whole(2, exact_tokens=self.exact_tokens)
        for name in ("logit_bias", "min_tokens", "stop_token_ids", "grammar"):
            if getattr(self.sampling, name):
                raise UserError(
                    f"sampling has {name}, which an audit does not ask for; leave it out"
                )
        if not 1e-12 <= self.level <= 0.1:
            raise UserError(f"level is {self.level!r}; expected a number from 1e-12 to 0.1")
        if self.engine_dtype is not None and self.engine_dtype not in DTYPES:
            raise UserError(f"engine_dtype is {self.engine_dtype!r}; expected {', '.join(DTYPES)}")
        if self.rounding is not None and not 0 <= self.rounding <= 100:
            raise UserError(f"rounding is {self.rounding!r}; expected a logit from 0 to 100")
