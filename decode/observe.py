"""What those who learn from the verification are shown: one pass, as it was judged."""

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

    rows: int [B], which prompts. contexts: the committed texts that the draft followed, before its
    accepted tokens are appended. scores: what the target said after the text and after each node;
    `verdict.places()` are the places along the accepted path. accepted: int [B] on the host.
    block: int [B, D+1] on the host, the accepted tokens followed by the target's own; a text that
    ends inside it is not cut yet. read: where the drafter reads the target's hidden states, those
    it was handed last, before it drafted: they end with the text's last token but one, which is at
    lengths − 2. All of it is the loop's own: to be read during the call, neither kept nor changed.
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
