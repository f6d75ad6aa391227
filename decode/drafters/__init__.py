"""Drafters by kind. One that needs no training is a class; a trained one is also a directory.

A drafter proposes tokens and is told which of them stayed. It knows nothing of verification
rules, nor of the target beyond its vocabulary.
"""

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from decode.contexts import Contexts, Limits
from decode.draft import Draft, Siblings
from decode.errors import UserError
from decode.observe import Verified
from decode.registry import Registry
from decode.sampling import Noise, Sampling
from decode.target.hidden_states import Features
from decode.target.loading import Target
from decode.trees import Shape


class Drafter(ABC):
    """Life of a drafter within one decode: start → prefill → (draft → verified → commit)* with
    keep_rows between; `commit` may come before `prefill`, where passes without drafts do.

    observes: it learns from the target's scores; `verified` is called for such drafters only.
    taps: the hidden states of the target that it reads (`decode.target.hidden_states`); they are
    taken in the passes that there are anyway, and handed to `read`. trained: it is loaded from a
    directory, and is nothing without one.
    """

    observes: bool = False
    taps: tuple[int, ...] = ()
    trained: bool = False

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "Drafter":
        """The drafter in a directory that `decode.drafters.directory.save_drafter` wrote, on the
        target's device. Raises UserError where it does not fit the target."""
        raise UserError(f"{cls.__name__} is not trained, so it has no directory to be loaded from")

    @property
    def vocab_size(self) -> int | None:
        """How many tokens it knows, as the target; None where it drafts any token it meets."""
        return None

    @property
    def branches(self) -> bool:
        """Whether its drafts may be trees, not only chains."""
        return False

    def siblings(self, sampling: Sampling) -> Siblings:
        """How the children of one node come about, where this drafter draws with `sampling`."""
        return "chosen"

    def deepest(self, gamma: int) -> int:
        """How deep its drafts are at most where γ is asked for. γ is for drafts that have no depth
        of their own: a tree of fixed structure is as deep as it is, be that more or less."""
        return gamma

    def most_nodes(self, gamma: int) -> int:
        """How many nodes one row's draft may have; more than `gamma` for trees."""
        return gamma

    def describe_drafts(self, most: int | None = None) -> str:
        """In a few words what its drafts are, such as `chain`. most: where none may be deeper."""
        return "tree" if self.branches else "chain"

    def with_shape(self, shape: Shape) -> "Drafter":
        """The same drafter, drafting in another shape; UserError where it has no choice of one."""
        raise UserError(f"{type(self).__name__} does not draft in shapes; leave the shape out")

    @abstractmethod
    def start(self, contexts: Contexts) -> None:
        """A new batch begins; the contexts are the prompts. Forget everything about the last."""

    def prefill(self, contexts: Contexts) -> None:
        """Read the texts so far, all but the last token of each, before the first draft is asked
        for. For drafters with a cache of their own: the time is counted apart from that of draft
        steps. Not called where nothing is ever drafted."""
        return None

    @abstractmethod
    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        """At most `limits` deep for each row; fewer, or none, is always allowed.

        What `q` declares must be the distribution the tokens were really drawn from.
        """

    def verified(self, seen: Verified) -> None:
        """How its draft was judged, with all that the target said. Comes before `commit`."""
        return None

    def read(self, features: Features) -> None:
        """The target's hidden states at `taps`, for drafters that name any: after `start` of the
        prompt's tokens, and after each verification, before `commit`, of the last token of the
        text so far and of the accepted ones. So each token's are read once and in order, and those
        of a text's last token are still to come."""
        return None

    def commit(self, contexts: Contexts) -> None:
        """The verdict is in: `contexts` now ends with the tokens that stayed and one more."""
        return None

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Only these rows (int64 [B']) go on, in this order."""
        return None


__all__ = ["DRAFTERS", "Contexts", "Drafter", "Limits", "Verified"]

DRAFTERS: Registry[type[Drafter]] = Registry("drafter")

from decode.drafters import ngram, ngram_store, none, small_lm  # noqa: E402, F401  (each registers itself)
