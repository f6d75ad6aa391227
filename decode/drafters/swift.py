"""The target drafts itself, and searches while it serves for the sublayers to skip (SWIFT,
2410.06916).

Shapes: B rows, n tokens of a trial.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from decode.base.device import to_device
from decode.base.errors import UserError, require_fits, require_whole
from decode.draft import Contexts, Draft, Limits
from decode.drafters import DRAFTERS
from decode.drafters.skip import SelfDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.model.cache.cached_model import CachedLM
from decode.model.forward.sublayers import Sublayers

# The paper's interval between sets that are not random.
VARY_EVERY = 25


@dataclass(eq=False)
class LayerSearch:
    """Proposes sets of sublayers of one size, and keeps the set with the best score.

    The first and the last layer are never skipped. `best` begins with every second of the other
    layers, and that is also the first set that is tried. Then come random sets of `ratio` of the
    sublayers between. Every `VARY_EVERY`-th set is the best one with one sublayer exchanged.

    goal: the search is done at this score, after `max_failures` sets in a row that were not better,
    or after `max_trials` sets.
    """

    layers: int
    rng: np.random.Generator
    ratio: float
    goal: float
    max_failures: int
    max_trials: int

    def __post_init__(self) -> None:
        inner = frozenset(range(1, self.layers - 1))
        self.candidates = Sublayers(inner, inner).singles()
        self.size = min(max(round(self.ratio * len(self.candidates)), 1), len(self.candidates))
        every_second = frozenset(range(1, self.layers - 1, 2))
        self.best = Sublayers(every_second, every_second)
        self.score = -1.0  # of the best; no real score is this low
        self.trials = self.failures = 0

    @property
    def done(self) -> bool:
        """Whether no set is tried any more."""
        exhausted = self.trials >= self.max_trials or self.failures >= self.max_failures
        return exhausted or self.score >= self.goal

    def propose(self) -> Sublayers:
        """The next set to try."""
        if not self.trials:
            return self.best
        inside = np.array([single <= self.best for single in self.candidates])
        sides = np.flatnonzero(inside), np.flatnonzero(~inside)
        if self.trials % VARY_EVERY or not all(map(len, sides)):
            return self._joined(self.rng.permutation(len(self.candidates))[: self.size])
        return self.best ^ self._joined(np.array([self.rng.choice(side) for side in sides]))

    def _joined(self, numbers: np.ndarray) -> Sublayers:
        joined = Sublayers()
        for number in numbers.tolist():
            joined = joined ^ self.candidates[number]
        return joined

    def learn(self, tried: Sublayers, score: float) -> bool:
        """Whether the set is the best so far. score: 0 to 1."""
        self.trials += 1
        if score <= self.score:
            self.failures += 1
            return False
        self.best, self.score, self.failures = tried, score, 0
        return True


@DRAFTERS.register("swift")
class SwiftDrafter(SelfDrafter):
    """As `skip`, with a set that is searched while texts are decoded (SWIFT, 2410.06916).

    A set is tried on the last `window` emitted tokens of all rows that have as many. One pass of
    the target without the set reads them, on the keys and values of the text before them. The score
    is the share of emitted tokens that are its likeliest ones. One set is tried every `every`
    drafts, until one scores `goal`, or `max_failures` sets in a row were not better, or
    `max_trials` sets were tried. The best set drafts. It is kept across requests.

    ratio: the share of the sublayers between the first and the last layer that are skipped. seed:
    of the search. The paper's drafts end below a confidence of 0.8: `--policy
    confidence:threshold=0.8`.

    Differs from the paper: it proposes every 25th set by Bayesian optimisation, and here that is
    the best set with one sublayer exchanged; it searches again for each data set, and here the
    search goes on over requests.

    Drafts depend on other rows and earlier requests. So under rules that accept at random, the same
    seed gives another text each time; its distribution is the target's (`CounterRNG`). Raises
    UserError for options out of range, and for a target of fewer than 3 layers.
    """

    per_row = MappingProxyType({"_begins": lambda new: new.lengths.copy()})
    _begins: np.ndarray  # [B]: where the emitted tokens begin

    def __init__(
        self,
        ratio: float = 0.45,
        window: int = 32,
        goal: float = 0.93,
        every: int = 1,
        max_failures: int = 300,
        max_trials: int = 1000,
        seed: int = 0,
    ) -> None:
        require_fits(lambda x: 0 < x <= 1, "a share above 0 and at most 1", ratio=ratio, goal=goal)
        most = {"max_failures": max_failures, "max_trials": max_trials}
        require_whole(window=window, every=every, **most)
        super().__init__(Sublayers())
        self.window, self.every, self.seed = window, every, seed
        self._options: dict[str, Any] = {"ratio": ratio, "goal": goal, **most}
        self.search: LayerSearch | None = None
        self._drafts = 0

    def attach(self, lm: CachedLM) -> None:
        layers = lm.layers
        if layers < 3:
            raise UserError(
                f"swift keeps the target's first and last layer, but the target has {layers} "
                "layers; expected at least 3"
            )
        if self.search is None or self.search.layers != layers:
            self._drafts = 0
            self.search = LayerSearch(layers, np.random.default_rng(self.seed), **self._options)
            self.skipped = self.search.best
            for single in self.search.candidates[:2]:
                lm.view(single)  # raises if an attention block or an MLP cannot be skipped
        super().attach(lm)

    def forget(self) -> None:
        self.search = self.lm = None  # both begin again when the target is attached

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        assert self.search is not None
        judges = contexts.lengths - self._begins >= self.window
        if judges.any() and not self.search.done:
            self._drafts += 1
            if self._drafts % self.every == 0:
                self._try(contexts, judges)
        return super().draft(contexts, limits, sampling, rng)

    def _try(self, contexts: Contexts, judges: np.ndarray) -> None:
        """Score one set on the texts of these rows, bool [B], and use it if it is the best."""
        assert self.search is not None
        assert self.lm is not None
        tried = self.search.propose()
        view = self.lm.view(tried)
        # The target has read all tokens but the last. Other rows only keep the batch rectangular.
        start = np.maximum(contexts.lengths - 1 - self.window, 0)
        columns = start[:, None] + np.arange(self.window + 1)
        columns = np.minimum(columns, contexts.tokens.shape[1] - 1)
        tokens = to_device(np.take_along_axis(contexts.tokens, columns, axis=1), view.device)
        with view.slots.restored(start, self.window):
            likeliest = view.forward(tokens[:, :-1], start).argmax(-1)
        right = (likeliest == tokens[:, 1:])[to_device(judges, view.device)]
        if self.search.learn(tried, float(right.float().mean())):
            self.use(tried)
