"""One verification pass: the verdict on the host, and the pass as observers see it.

Shapes: B rows, D draft tokens on the longest path.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from decode.contexts import Contexts
from decode.draft import Draft
from decode.errors import UserError
from decode.logits import Scores
from decode.rules import Verdict
from decode.target.hidden_states import Features


@dataclass
class Judged:
    """accepted, reached: int [B], as in `Verdict`. block: int64 [B, D+1], the accepted tokens of
    each row, then the target's next token. broken: bool [B], whether any logits along the accepted
    path were NaN, infinite or all masked.
    """

    accepted: np.ndarray
    reached: np.ndarray
    block: np.ndarray
    broken: np.ndarray

    @classmethod
    def of(cls, draft: Draft, scores: Scores, verdict: Verdict) -> "Judged":
        """Copies the verdict to the host, in one transfer."""
        path_tokens = draft.tokens.gather(1, verdict.path)
        peaks = scores.peaks_at(verdict.places())
        visited = torch.arange(peaks.shape[1], device=peaks.device) <= verdict.accepted[:, None]
        packed = torch.cat(
            [
                verdict.accepted[:, None],
                verdict.reached[:, None],
                verdict.next_token[:, None],
                (visited & ~peaks.isfinite()).any(1, keepdim=True),
                path_tokens,
            ],
            dim=1,
        )
        host = packed.cpu().numpy()
        accepted, reached, following, broken = host[:, 0], host[:, 1], host[:, 2], host[:, 3]
        block = np.concatenate([host[:, 4:], np.zeros_like(host[:, :1])], axis=1)
        np.put_along_axis(block, accepted[:, None], following[:, None], axis=1)
        return cls(accepted, reached, block, broken.astype(bool))

    def require_usable(
        self, scores: Scores, verdict: Verdict, rows: np.ndarray, contexts: Contexts, step: int
    ) -> None:
        """Raise UserError if a row is broken. The message describes the first broken row, and says
        whether the model or a logits processor is the cause. rows: int [B], the prompt of each row.
        step: 0 is the prefill."""
        if not self.broken.any():
            return
        place = int(self.broken.argmax())
        where = (
            f"in step {step} ({'prefill' if step == 0 else 'verification'}) for prompt "
            f"{rows[place]}, after {contexts.lengths[place]} tokens of text"
        )
        on_path = verdict.places()[place, : int(verdict.accepted[place]) + 1]
        if not scores.raw[place, on_path].amax(-1).isfinite().all():
            raise UserError(
                f"the target's logits are NaN or infinite {where}; check its weights, or use a "
                f"dtype with more range than {str(scores.raw.dtype).removeprefix('torch.')}"
            )
        raise UserError(
            f"the logits processors leave no token to choose {where}; at least one logit must be "
            "finite: take the processor away that masks all, or let it spare a token"
        )


@dataclass
class Verified:
    """One verification pass over B rows; D is the depth of the longest accepted path.

    rows: int [B], the prompt of each row. contexts: the committed texts before the draft's accepted
    tokens are appended. scores: the target's logits after the text and after each node.
    `verdict.places()` gives the places along the accepted path. accepted: int [B] on the host.
    block: int [B, D+1] on the host, the accepted tokens, then the target's next token. A text that
    ends inside the block is not cut yet. read: if the drafter reads the target's hidden states, the
    last ones it got before it drafted. They end with the text's second-to-last token, at position
    lengths − 2. The loop owns all of this: read it during the call, do not keep or change it.
    """

    rows: np.ndarray
    contexts: Contexts
    draft: Draft
    scores: Scores
    verdict: Verdict
    accepted: np.ndarray
    block: np.ndarray
    read: Features | None = None


Observer = Callable[[Verified], None]
