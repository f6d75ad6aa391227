"""The length that yields most tokens per second by measured costs; plain decoding if none pays."""

import numpy as np

from decode.errors import UserError
from decode.measure.costs import Costs, straight_on
from decode.policies import POLICIES, Policy
from decode.stats import Step

# Seconds; no time is shorter, as ratios of times are taken.
INSTANT = 1e-9


@POLICIES.register("cost_model")
class CostModel(Policy):
    """Maximises expected tokens per time, (1 + Σᵢ Πⱼ≤ᵢ αⱼ)/(γc + v(γ+1)), over γ = 0 … most: the
    speed-up of 2211.17192 (theorem 3.8) with acceptance by position and the real cost of a pass.

    Acceptance is pooled over the batch, as the cost is shared, and forgotten exponentially with
    the tokens emitted: what was seen n tokens ago weighs `memory`ⁿ. Costs are measured on every
    pass (or before, see `use_costs`) and forgotten slowly. A deeper position than was tried lately
    is taken to accept like the one before it.

    When nothing pays, drafts are left out altogether, and a draft of one token is tried now and
    then: so seldom that a useless drafter costs about `probe_share` of plain decoding, but at
    least every `patience` tokens (unless a single try costs more than 1.3 · patience · probe_share
    plain steps: then cost comes first). What a probe costs includes that a model feeds all it
    missed since its last draft, but not that it reads the prompt before its first. After a success
    the next follows at once, so few tokens pass until a drafter that has become good is used again.

    On a tree's shape it decides how deep the tree may grow; which nodes it has is the shape's
    matter (`sequoia` chooses a tree from measured costs).

    Because it reads a clock, a text may differ between two runs, and with the rows beside it, under
    rules that draw, other than `exact`; the distribution it is drawn from never does.
    """

    needs_costs = True

    def __init__(
        self,
        most: int = 8,
        memory: float = 0.97,
        probe_share: float = 0.03,
        patience: int = 24,
    ) -> None:
        super().__init__(most)
        for name, value in (("memory", memory), ("probe_share", probe_share)):
            if not 0 < value < 1:
                raise UserError(f"{name} is {value}; expected a number between 0 and 1")
        if patience < 1:
            raise UserError(f"patience is {patience}; expected at least 1 token")
        self.memory, self.probe_share, self.patience = memory, probe_share, patience
        self._passes = _PassTimes()
        self._draft_s: float | None = None  # of a draft step that had nothing to catch up on
        self._probe_s: float | None = None  # of a probe's drafting, catching up included
        self._nodes = 1.0  # of a draft, per draft step
        # Accepted and tried by position. One made-up try: a new drafter deserves a few real ones.
        self._accepted, self._tried = np.zeros(most), np.zeros(most)
        self._accepted[0], self._tried[0] = 0.6, 1.0
        self._new_text = True
        self._waited = 0.0  # tokens since the last draft
        self._hopeful = False  # the last draft of one token was kept

    def start(self, rows: int) -> None:
        super().start(rows)
        self._new_text, self._hopeful = True, False

    def use_costs(self, costs: Costs) -> None:
        for width, v in zip(costs.widths, costs.v, strict=True):
            self._passes.know(width * costs.rows, v * costs.step_s)
        self._draft_s = max(costs.c * costs.step_s, INSTANT)

    def depths(self) -> np.ndarray:
        return np.full(self.rows, self._choose())

    def _choose(self) -> int:
        plain = self._passes(np.array([self.rows]))
        if plain is None:
            return 0  # what a plain step costs is the first thing to know
        if self._draft_s is None or not self._passes.known_beyond(self.rows):
            return 1
        gammas = np.arange(self.most + 1)
        best = int(np.argmax(self._expected() / self._seconds(gammas)))
        if best:
            return best
        # What a probe is expected to lose against plain decoding, in plain steps.
        cost = (self._probe_s or self._draft_s) + self._seconds(np.array([1]))[0] - self._draft_s
        loss = cost / plain[0] - self._expected()[1]
        rarest = max(self.patience, loss / (1.3 * self.probe_share))
        interval = min(loss / self.probe_share, rarest)
        return int(self._hopeful or self._waited >= interval)

    def _expected(self) -> np.ndarray:
        """float64 [most + 1]: tokens a step is expected to emit, per row, by γ."""
        alpha = np.empty(self.most)
        alpha[0] = self._accepted[0] / max(self._tried[0], 1e-9)
        for i in range(1, self.most):
            alpha[i] = (self._accepted[i] + 2 * alpha[i - 1]) / (self._tried[i] + 2)
        return 1 + np.append(0.0, alpha.cumprod().cumsum())

    def _seconds(self, gammas: np.ndarray) -> np.ndarray:
        """float64, as `gammas`: what a step with a draft so deep is expected to take."""
        passes = self._passes(self.rows * (1 + gammas * self._nodes))
        assert passes is not None
        assert self._draft_s is not None
        return gammas * self._draft_s + passes

    def observe(self, step: Step) -> None:
        rows, emitted = len(step.rows), float(step.emitted.mean())
        self._passes.see(rows * step.width, step.verify_s + step.overhead_s)
        faded = self.memory**emitted
        self._accepted *= faded
        self._tried *= faded
        if not step.depth:
            # Nothing drafted, or a drafter that had nothing to say: no news of acceptance.
            self._waited = 0.0 if step.depths.any() else self._waited + emitted
            return
        places = np.arange(self.most)
        tried = (step.depths[:, None] > places) & (step.accepted[:, None] >= places)
        self._tried += tried.sum(0)
        self._accepted += (tried & (step.accepted[:, None] > places)).sum(0)
        self._nodes = (step.width - 1) / step.depth
        self._see_draft(step.draft_s, step.depth)
        self._hopeful = bool((step.accepted > 0).mean() > 0.5)
        self._waited, self._new_text = 0.0, False

    def _see_draft(self, seconds: float, depth: int) -> None:
        if self._new_text:
            return  # a text's first draft is cold
        a_step = max(seconds / depth, INSTANT)
        if self._draft_s is None:
            self._draft_s = a_step
        elif self._waited == 0 or a_step < self._draft_s:
            self._draft_s *= _clipped(a_step / self._draft_s) ** 0.25
        if self._waited:
            probe = self._draft_s + max(seconds - depth * self._draft_s, 0.0)
            self._probe_s = probe if self._probe_s is None else 0.7 * self._probe_s + 0.3 * probe


class _PassTimes:
    """Seconds of a verification pass by how many tokens it is fed in all, over all rows."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._once: dict[int, float] = {}  # seen once: what is cold or disturbed is slow

    def know(self, tokens: int, seconds: float) -> None:
        self._known[tokens] = max(seconds, INSTANT)

    def known_beyond(self, tokens: int) -> bool:
        return max(self._known, default=0) > tokens

    def see(self, tokens: int, seconds: float) -> None:
        seconds = max(seconds, INSTANT)
        if tokens in self._known:
            ratio = _clipped(seconds / self._known[tokens])
            # Half of it moves all passes: contexts grow, and other work comes and goes.
            for other in self._known:
                self._known[other] *= ratio ** (0.2 if other == tokens else 0.1)
        elif tokens in self._once:
            self._known[tokens] = min(seconds, self._once.pop(tokens))
        else:
            self._once[tokens] = seconds

    def __call__(self, tokens: np.ndarray) -> np.ndarray | None:
        """float64, as `tokens`; None as long as nothing is known."""
        if not self._known:
            return None
        known = np.array(sorted(self._known))
        return straight_on(tokens, known, np.array([self._known[n] for n in known]))


def _clipped(ratio: float) -> float:
    """One pass that something else held up says little."""
    return float(np.clip(ratio, 0.5, 2.0))
