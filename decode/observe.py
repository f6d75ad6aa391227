"""One verification pass, as observers see it: drafters that learn, and other code."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decode.contexts import Contexts
from decode.draft import Draft
from decode.rules import Verdict
from decode.scores import Scores
from decode.target.hidden_states import Features


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
