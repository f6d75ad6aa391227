"""The base of trained drafters: they draft in any shape, and take new weights while they serve."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from decode.base.errors import UserError
from decode.base.registry import Choice
from decode.draft import Contexts, Draft, Siblings
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.model.cache.real_tokens import Listed
from decode.model.forward.prepare_model import refresh_packed
from decode.model.loading import Target
from decode.shapes import Chain, Growth, Shape


class ShapedDrafter(Drafter):
    """A drafter that gives logits after any node, and therefore works with any shape.

    shape: default a chain. depth_limit: the max depth of its drafts; None: no limit.
    """

    def __init__(
        self, vocab_size: int | None, shape: Shape | None = None, depth_limit: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.shape = shape or Chain()
        self.depth_limit = depth_limit

    @property
    def estimates(self) -> bool:
        return False

    @property
    def branches(self) -> bool:
        return self.shape.branches

    def siblings(self, sampling: Sampling) -> Siblings:
        return self.shape.siblings(sampling)

    def max_depth(self, gamma: int) -> int:
        return self.shape.depth or min(gamma, self.depth_limit or gamma)

    def max_nodes(self, gamma: int) -> int:
        return self.shape.max_nodes(min(gamma, self.depth_limit or gamma))

    def describe_drafts(self, max_depth: int | None = None) -> str:
        return self.shape.describe(max_depth)


class InTarget(ABC):
    """A trained drafter that may also be a part of the target's own checkpoint."""

    @classmethod
    @abstractmethod
    def in_target(cls, choice: Choice, target: Target, dtype: torch.dtype) -> Drafter:
        """The drafter in the target's checkpoint. choice: its name and options. dtype: of its
        weights. Raises UserError if there is none, and for wrong options."""


class VerifyingDrafter(ShapedDrafter):
    """A drafter whose model can verify the drafts of another one: the middle of a cascade."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its logits are."""

    @abstractmethod
    def make_room(self, contexts: Contexts, depths: np.ndarray) -> np.ndarray:
        """int [B]: how deep each row can be drafted now, at most `depths`, int [B]. Comes once
        before the `verify` calls of one draft."""

    @abstractmethod
    def verify(self, contexts: Contexts, draft: Draft, drafting: np.ndarray) -> Tensor | Listed:
        """The logits after each text and after each node of a chain, [B, N+1, V], or `Listed`.
        drafting: bool [B], the rows whose logits are read. `rewind` takes back what is not
        accepted."""


class ParallelGrowth(Growth):
    """The growth of a drafter that knows the logits of all depths before any token is drawn.

    The logits at a depth do not depend on the tokens before. So all nodes at one depth have the
    same q, which is still the distribution that they are drawn from.

    logits: [B, d, V'], at depth 1 … d. The other arguments are those of `Growth`.
    """

    def __init__(
        self,
        contexts: Contexts,
        sampling: Sampling,
        vocab_size: int,
        vocabulary: Tensor | None,
        logits: Tensor,
    ) -> None:
        super().__init__(contexts, sampling, logits.device, vocab_size, vocabulary)
        self.logits = logits

    def _first(self) -> Tensor:
        return self.logits[:, 0]

    def _extend(self, count: int) -> Tensor:
        return self.of_children(self.logits, count)

    def of_children(self, values: Tensor, count: int) -> Tensor:
        """[B, n, …]: of values by depth, [B, d, …], those of the children of the last `count` fed
        nodes."""
        if self.ancestors is None:
            fed = self.fed.shape[1]
            return values[:, fed - count + 1 : fed + 1]
        depths = self.ancestors[:, -count:].sum(2)
        return values[torch.arange(self.rows, device=self.device)[:, None], depths]


def require_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises UserError unless the module has parameters with these names and shapes."""
    parameters = dict(module.named_parameters())
    for name, tensor in weights.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            shape = (
                f"shape {tuple(parameters[name].shape)} for it"
                if name in parameters
                else "no such parameter"
            )
            raise UserError(
                f"the new weights contain {name} of shape {tuple(tensor.shape)}, but the drafter "
                f"{type(module).__name__} has {shape}; use weights of the same model"
            )


@torch.no_grad()
def take_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies the values in, converted to the module's dtype and device, and repacks packed layers.
    Raises UserError as `require_weights` does, and then changes nothing."""
    require_weights(module, weights)
    parameters = dict(module.named_parameters())
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)
    refresh_packed(module)
