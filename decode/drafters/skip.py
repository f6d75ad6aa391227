"""The target drafts itself without some of its sublayers (Draft & Verify, 2309.08168)."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import CachedGrowth
from decode.drafters.trained import ShapedDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM, LayerView
from decode.model.forward.sublayers import Sublayers
from decode.model.identity import require_same_weights, sample_weights
from decode.model.loading import Target
from decode.shapes import Growth, Shape

# The files of a drafter directory: the set, and a sample of the target's weights, by their dtype.
SUBLAYERS, SAMPLE = "sublayers.json", "target_sample.safetensors"


class SelfDrafter(ShapedDrafter):
    """Draws tokens from the target without the sublayers `skipped`, in any shape. depth_limit: the
    max depth of its drafts; None: no limit.

    A draft reads the target's keys and values of the text. It needs no second model, no cache and
    no pass over the prompt. Its slots are restored after the draft, so there is nothing to roll
    back.
    """

    reads_cache = True
    decoder_only = True  # a view of the target has no sources

    def __init__(
        self, skipped: Sublayers, shape: Shape | None = None, depth_limit: int | None = None
    ) -> None:
        # It gets the target's vocabulary with the target.
        super().__init__(None, shape, depth_limit)
        self.skipped = skipped
        self.lm: CachedLM | None = None
        self._view: LayerView | None = None

    def attach(self, lm: CachedLM) -> None:
        if self.lm is not lm:
            self._view, self.lm = self.view_of(lm), lm
            self.vocab_size = lm.vocab_size

    def view_of(self, lm: CachedLM) -> LayerView:
        """The form of the target that drafts."""
        return lm.view(self.skipped)

    def growth(
        self, view: LayerView, contexts: Contexts, sampling: Sampling, max_depth: int
    ) -> Growth:
        """The object that predicts the next tokens after the text and after each node. max_depth:
        the max depth of the draft."""
        return SelfGrowth(view, contexts, sampling)

    def use(self, skipped: Sublayers) -> None:
        """Draft without these sublayers from now on."""
        assert self.lm is not None
        self._view, self.skipped = self.lm.view(skipped), skipped

    def with_shape(self, shape: Shape) -> "SelfDrafter":
        other = copy.copy(self)
        other.shape = shape
        return other

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        view = self._view
        assert view is not None, "attach() comes before draft()"
        if not limits.depths.any():
            return Draft.none(len(contexts.lengths), view.device)
        if self.depth_limit is not None:
            limits = replace(limits, depths=np.minimum(limits.depths, self.depth_limit))
        room = self.max_nodes(limits.max_depth) + 1
        with view.slots.restored(contexts.lengths - 1, room):
            growth = self.growth(view, contexts, sampling, limits.max_depth)
            return self.shape.grow(growth, limits, sampling, rng)


class SelfGrowth(CachedGrowth):
    """Feeds the last token of the text, and then the nodes, to a form of the target."""

    def __init__(self, lm: CachedLM, contexts: Contexts, sampling: Sampling) -> None:
        super().__init__(lm, contexts.lengths, contexts, sampling, lm.vocab_size)
        self.last_B1 = contexts.last_tokens(lm.device)

    def _first(self) -> Tensor:
        return self.feed(self.last_B1, -1, None)[:, 0]


@DRAFTERS.register("skip")
class SkipDrafter(SelfDrafter):
    """The target without the attention and the MLP of some layers (Draft & Verify, 2309.08168).

    attention, mlp: the layers, from 0, whose attention or MLP is skipped: `3-8/12`, or a list of
    numbers. file: instead of both, a set that `draftsmith calibrate-layers` wrote. exit: instead of
    these, the number of layers that a draft runs, from the first on: an early exit, as LayerSkip
    (2404.16710) drafts. The directory of a `layer_skip` stage holds such a set.

    In the paper's code, sampled drafts are by default the likeliest tokens, but their softmax is
    declared as q, and the text does not have the target's distribution. Here q is the distribution
    that was drawn from. Raises UserError for a set without sublayers, and when it meets the target,
    for a set with other layers than the target's, or with all of them.
    """

    def __init__(
        self,
        attention: str | int | list[int] = "",
        mlp: str | int | list[int] = "",
        file: str | None = None,
        exit: int | None = None,
    ) -> None:
        named = Sublayers.of(attention, mlp)
        if bool(len(named)) + (file is not None) + (exit is not None) > 1:
            raise UserError("give skip either layers, or a file, or an exit, not both")
        if exit is not None and type(exit) is not int:
            raise UserError(f"exit is {exit!r}; expected a number of layers")
        skipped = named if file is None else Sublayers.load(from_home(file))
        if exit is None and not len(skipped):
            raise UserError(
                "skip needs layers to skip: without them, a draft costs as much as the target's "
                "own tokens; give attention=3-8/12, mlp=…, exit=LAYERS, or file=FILE from "
                "calibrate-layers"
            )
        super().__init__(skipped)
        self.exit = exit

    @classmethod
    def load(cls, path: Path, target: Target, *, dtype: str) -> "SkipDrafter":
        """Load a directory written by `write_skip_drafter`. Raises UserError for a target with
        other weights."""
        (name, sample), *_ = load_file(path / SAMPLE).items()
        require_same_weights(sample, name, target.model, f"the target of the drafter {path}")
        return cls(file=str(path / SUBLAYERS))

    def attach(self, lm: CachedLM) -> None:
        if self.exit is not None:
            self.skipped = Sublayers.later(self.exit, lm.layers)
        super().attach(lm)


def write_skip_drafter(directory: Path, skipped: Sublayers, target: Target) -> None:
    """Write the files that `SkipDrafter.load` reads."""
    skipped.save(directory / SUBLAYERS, {"target": target.name})
    dtype = dtype_name(target.dtype)
    save_file({dtype: sample_weights(target.model)}, directory / SAMPLE)
