"""The draft length with the most tokens per second by measured costs, or 0 if no draft pays."""

from collections import defaultdict
from typing import Any

import numpy as np

from decode.base.errors import require_fits
from decode.costs import Costs, draft_parts, extrapolated
from decode.lengths import POLICIES, Policy
from decode.verification import Verification

# Seconds: the minimum of every measured time, because times are divided by each other.
INSTANT = 1e-9
# Of the lines of passes: what a pass's weight is after one more, the share of a pass's change that
# applies to all of them, and how far apart passes must be, in tokens², to tell of a slope.
FADES, LEVEL, DOUBT = 0.96, 0.2, 1.0
# Steps with drafts are compared with steps without after so many of either; what a step's weight is
# after one more of its kind.
ENOUGH, FEW, BROUGHT = 6, 3, 0.95
LONGEST = 4.0  # plain steps; other work delayed a step that took longer
RAREST = 64  # a probe comes after so many times `patience`, whatever it costs
# Of the passes after the early ones, times are read in one of so many: a policy takes time too.
EARLY, READ = 32, 3


@POLICIES.register("cost_model")
class CostModel(Policy):
    """Maximises expected tokens per time, (1 + Σᵢ Πⱼ≤ᵢ αⱼ)/(γc + v(γ+1)), over γ = 0 …
    max_depth: the speed-up of 2211.17192 (theorem 3.8) with acceptance by position and the real
    costs of a pass and of a draft. γc is the cost of a draft of depth γ: a fixed part and a part
    per depth, so that a drafter that computes all depths in one pass drafts deep or not at all.

    Acceptance is pooled over the batch, because the rows share the cost. It decays exponentially
    with the emitted tokens: a result from n tokens ago weighs `memory`ⁿ. Costs are measured on
    every pass and draft (or before, see `use_costs`) and decay slowly. If they were not measured
    before, the first drafts are one and two tokens deep, to tell the two parts apart. A position
    deeper than the ones tried lately is assumed to have the acceptance of the position before it.

    If no draft pays, the policy drafts nothing, unless one would pay whose acceptance is a standard
    error higher, as bandits choose. It also drafts an occasional probe: a draft of one token.
    Probes are rare enough that a useless drafter costs about `probe_share` of plain decoding. But
    there is at least one every `patience` tokens, unless a single probe costs more than
    1.3 · patience · probe_share plain steps: then the cost limit has priority, up to 64 · patience
    tokens. The cost of a probe includes feeding the drafter the text since its last draft, but not
    its pass over the prompt before its first draft. After a successful probe the next one follows
    at once. So few tokens pass until a drafter that has become good is used again.

    What drafts brought is compared with what steps without brought, by the size of the batch. If
    they lost, for a reason that no cost or acceptance says, drafts are as rare as probes, and as
    deep as costs and acceptance say.

    For trees, it decides how deep the tree may grow. The shape decides which nodes the tree has
    (`sequoia` chooses a tree from measured costs).

    The policy reads a clock. So under rules that draw, except `exact`, a text may differ between
    two runs and depend on the other rows. Its distribution never does.
    """

    needs_costs = True
    by_batch = True
    reads_times = True

    def __init__(
        self,
        max_depth: int = 8,
        memory: float = 0.97,
        probe_share: float = 0.015,
        patience: int = 24,
    ) -> None:
        super().__init__(max_depth)
        shares = {"memory": memory, "probe_share": probe_share}
        require_fits(lambda x: 0 < x < 1, "a number between 0 and 1", **shares)
        require_fits(lambda x: x >= 1, "at least 1 token", patience=patience)
        self.memory, self.probe_share, self.patience = memory, probe_share, patience
        self._passes = _PassTimes()
        # By the size of the batch, without drafts and with: tokens of a row, and how many plain
        # steps could be taken meanwhile.
        self._brought: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros((2, 2)))
        self._drafts = _DraftTimes()  # without text to catch up on
        self._unasked = 2  # further drafts of two tokens, to see a second depth
        self._vain = 0  # drafts in passes that read prompts too, which tell no cost
        self._probe_s: float | None = None  # of drafting a probe, catching up included
        # By depth: drafts that were allowed to go so deep, and nodes that were fed for them.
        self._allowed, self._fed = np.zeros((2, max_depth))
        self._allowed[0] = self._fed[0] = 1.0
        self._asks = False  # the next draft is made to learn from it
        self._ended = max_depth  # where the policy let the last drafts end, if it did
        self._rate = 0.0  # the tokens per second of all rows that drafts of the best depth give
        self._overhead: float | None = None  # seconds of a step without a draft, beside its pass
        self._steps = 0
        # Accepted and tried by position. They start with one assumed try with acceptance 0.6, so a
        # new drafter gets a few real tries.
        self._accepted, self._tried = np.zeros(max_depth), np.zeros(max_depth)
        self._accepted[0], self._tried[0] = 0.6, 1.0
        self._new_text = True
        self._waited = 0.0  # tokens since the last draft
        self._hopeful = False  # most rows accepted a token of the last draft

    def start(self, rows: int) -> None:
        super().start(rows)
        self._passes.rows = rows
        self._new_text, self._hopeful = True, False

    def use_costs(self, costs: Costs) -> None:
        for width, v in zip(costs.widths, costs.v, strict=True):
            self._passes.know(width * costs.rows, v * costs.step_s)
        for depth in {1, self.max_depth}:
            self._drafts.know(depth, float(costs.draft(depth)) * costs.step_s)

    def depths(self) -> np.ndarray:
        self._passes.rows = self.rows
        depth = self._unknown()
        self._asks = depth is not None
        if depth is None:
            depth, lost = self._best(), self._lost()
            self._asks = lost > 0 or not depth
            if self._asks:
                depth = 0 if lost == float("inf") else self._probe(lost) * max(depth, 1)
        return np.full(self.rows, depth)

    def _unknown(self) -> int | None:
        """The depth of drafts that tells a cost which is not known yet."""
        if self._passes(np.array([self.rows])) is None:
            return 0  # first, the cost of a plain step
        if not self._drafts.known or not self._passes.known_beyond(self.rows):
            return int(self._vain < FEW or self._waited >= self.patience)
        if len(self._drafts.known) == 1 and self.max_depth > 1 and self._unasked:
            self._unasked -= 1
            return 2
        return None

    def _best(self) -> int:
        """The depth with the most tokens per time."""
        seconds, alpha = self._seconds(), self._acceptance()
        rates = self.rows * _tokens(alpha) / seconds
        best = int(rates.argmax())
        self._rate = float(rates[best])
        if not best:  # perhaps by chance
            alpha[0] += (alpha[0] * (1 - alpha[0]) / (self._tried[0] + 1)) ** 0.5
            best = int((_tokens(alpha) / seconds).argmax())
        return best

    def _lost(self) -> float:
        """The plain steps that a step with a draft lost lately, beside steps without. What a model
        of costs leaves out counts here. 0: too few are known. Infinite: steps without are due."""
        (tokens, steps), (drafted, took) = self._brought[self.rows.bit_length()]
        if took < ENOUGH or steps < FEW:
            # Passes that read prompts too tell nothing, so it does not wait for ever.
            due = took >= ENOUGH and self._waited < self.patience
            return float("inf") if due else 0.0
        return min(float(tokens / steps * took / max(drafted, INSTANT)) - 1.0, LONGEST)

    def _price(self) -> float:
        """The tokens that the batch could get in the time that one more token adds to a pass."""
        passes = self._passes(self.rows + np.arange(2))
        return 0.0 if passes is None else self._rate * float(passes[1] - passes[0])

    def _probe(self, lost: float) -> int:
        """1 if a draft is due although none pays, or none did lately, else 0. lost: see `_lost`."""
        # The expected loss of a probe compared to plain decoding, in plain steps.
        plain, step = self._seconds()[:2]
        token = self._price() / max(self._rate, INSTANT)  # one is fed in any case
        cost = (self._probe_s or self._drafts(1)) + step - self._drafts(1) + token
        loss = max(cost / plain - _tokens(self._acceptance())[1], lost)
        rarest = max(self.patience, loss / (1.3 * self.probe_share))
        # What a probe reads grows with the wait, so a longer wait may never be long enough.
        rarest = min(rarest, RAREST * self.patience)
        interval = min(loss / self.probe_share, rarest)
        return int(self._hopeful or self._waited >= interval)

    def _acceptance(self) -> np.ndarray:
        """float64 [max_depth]: by position."""
        alpha = np.empty(self.max_depth)
        alpha[0] = self._accepted[0] / max(self._tried[0], 1e-9)
        for i in range(1, self.max_depth):
            alpha[i] = (self._accepted[i] + 2 * alpha[i - 1]) / (self._tried[i] + 2)
        return alpha

    def _seconds(self) -> np.ndarray:
        """float64 [max_depth + 1]: the expected seconds of a step, by γ."""
        passes = self._passes(self.rows * (1 + np.append(0.0, self._nodes().cumsum())))
        assert passes is not None
        drafts = [self._drafts(gamma) for gamma in range(self.max_depth + 1)]
        return np.array(drafts) + passes

    def _nodes(self) -> np.ndarray:
        """float64 [max_depth]: by depth, the nodes that are fed of a row's draft."""
        nodes = self._fed / np.maximum(self._allowed, 1e-9)
        for i in range(1, self.max_depth):
            nodes[i] = (self._fed[i] + 2 * nodes[i - 1]) / (self._allowed[i] + 2)
        return nodes

    def observe(self, verification: Verification) -> None:
        emitted = float(verification.emitted.mean())
        self._steps += 1
        probes = bool(self._waited and verification.draft_steps)
        timed = probes or self._steps < EARLY or not self._steps % READ
        timed = timed and not verification.fed_beside  # prompts make a pass longer
        more = self._see_pass(verification) if timed else 0.0
        plain = self._passes(np.array([self.rows]))
        asks, pays = bool(verification.depths.any()), True
        self._vain += asks and bool(verification.fed_beside)
        if plain is not None and not verification.fed_beside and not (self._new_text and asks):
            took = verification.draft_s + verification.verify_s + verification.overhead_s
            took = min(took / float(plain[0]), LONGEST)
            both = self._brought[self.rows.bit_length()]
            pays = both[0, 1] < FEW or emitted * both[0, 1] >= took * both[0, 0]
            both[int(asks)] *= BROUGHT
            both[int(asks)] += emitted, took
        faded = self.memory**emitted
        for sums in (self._accepted, self._tried, self._allowed, self._fed):
            sums *= faded
        if not verification.draft_steps:
            # No draft was allowed, or the drafter drafted nothing: there is no acceptance to learn.
            self._waited = 0.0 if verification.depths.any() else self._waited + emitted
            return
        accepted, fed = self._results(verification)
        positions = np.arange(self.max_depth)
        allowed = np.minimum(verification.depths, self._ended)[:, None] > positions
        tried = allowed & (accepted[:, None] >= positions)
        self._tried += tried.sum(0)
        self._accepted += (tried & (accepted[:, None] > positions)).sum(0)
        self._allowed += allowed.sum(0)
        # Another drafter may have gone deeper than the one that ended.
        count = min(len(fed), self._ended)
        self._fed[:count] += fed[:count]
        if timed:
            self._see_draft(verification.draft_s + more, verification.draft_steps)
        # The first draft after a rest reads what it missed. Those after it go on if they pay.
        self._hopeful = bool((accepted > 0).mean() > 0.5) and (pays or self._waited > 0)
        self._waited, self._new_text = 0.0, False

    def _results(self, verification: Verification) -> tuple[np.ndarray, np.ndarray]:
        """int [B], the accepted tokens of each row's draft, and int [D], the nodes of all rows by
        depth."""
        return verification.accepted, verification.nodes_by_depth.sum(0)

    def _see_pass(self, verification: Verification) -> float:
        """Learn what a pass costs. Returns the seconds of the step beside it that are due to its
        draft: to judge it, and to keep its tokens."""
        seconds, more = verification.overhead_s, 0.0
        if not verification.draft_steps:
            usual = seconds if self._overhead is None else self._overhead
            self._overhead = usual * _clipped(max(seconds, INSTANT) / max(usual, INSTANT)) ** 0.1
        elif self._overhead is not None:
            more = max(seconds - self._overhead, 0.0)
        self._passes.see(verification.fed, verification.verify_s + seconds - more)
        return more

    def _see_draft(self, seconds: float, depth: int) -> None:
        if self._new_text:
            return  # a text's first draft is cold
        if not self._drafts.known or self._waited == 0 or seconds < self._drafts(depth):
            self._drafts.see(depth, seconds)
        if self._waited:
            probe = self._drafts(1) + max(seconds - self._drafts(depth), 0.0)
            self._probe_s = probe if self._probe_s is None else 0.7 * self._probe_s + 0.3 * probe


class _DraftTimes:
    """Seconds of a draft by its depth: a fixed part and a part per depth."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        self._parts = (0.0, 0.0)

    def know(self, depth: int, seconds: float) -> None:
        self.known[depth] = max(seconds, INSTANT)
        self._parts = draft_parts([*self.known], [*self.known.values()])

    def see(self, depth: int, seconds: float) -> None:
        if depth in self.known:
            ratio = _clipped(max(seconds, INSTANT) / self.known[depth])
            # Half of the change applies to all depths, as it does to all passes.
            for other in self.known:
                self.known[other] *= ratio ** (0.25 if other == depth else 0.125)
            seconds = self.known[depth]
        elif self.known:
            usual = self(depth)
            seconds = usual * _clipped(max(seconds, INSTANT) / usual)
        self.know(depth, seconds)

    def __call__(self, depth: int) -> float:
        """Seconds of a draft of this depth; 0 without a draft. A depth must be known."""
        fixed, per_depth = self._parts
        return max(fixed + depth * per_depth, INSTANT) if depth else 0.0


class _PassTimes:
    """Seconds of a verification pass of some rows by the number of tokens it is fed, over all rows.

    A line through the passes of about as many rows, by least squares of relative errors. So
    neighbours tell of each other, and no single pass bends it. Passes of long ago weigh less. It is
    a line because a policy asks near its own passes: a pass is bound by the memory first and by
    arithmetic beyond some number of tokens. rows: of the passes that are seen and asked about.
    """

    rows = 1

    def __init__(self) -> None:
        self._known: dict[int, float] = {}  # measured before
        self._once: dict[int, float] = {}  # seen once; a cold or disturbed pass is slow
        self._seen: set[int] = set()
        self._lines: dict[int, _Line] = {}

    def know(self, tokens: int, seconds: float) -> None:
        self._known[tokens] = max(seconds, INSTANT)
        self._seen.add(tokens)

    def known_beyond(self, tokens: int) -> bool:
        return max(self._seen, default=0) > tokens

    def see(self, tokens: int, seconds: float) -> None:
        seconds = max(seconds, INSTANT)
        if tokens not in self._seen and len(self._seen) < 2:
            if tokens not in self._once:
                self._once[tokens] = seconds
                return
            seconds = min(seconds, self._once.pop(tokens))
            self.know(tokens, seconds)
        self._line().see(tokens, seconds)
        self._seen.add(tokens)

    def __call__(self, tokens: np.ndarray) -> np.ndarray | None:
        """float64, same shape as `tokens`: seconds; None while nothing is known."""
        if not self._seen:
            return None
        line = self._line()
        return np.maximum(line.at(tokens), INSTANT)

    def _line(self) -> "_Line":
        kind = self.rows.bit_length()
        if kind not in self._lines:
            known = np.array(sorted(self._known))
            values = np.array([self._known[n] for n in known])
            near = np.linspace(self.rows, 2 * self.rows + 4, 5)
            line = self._lines[kind] = _Line()
            for n, taken in zip(near, extrapolated(near, known, values), strict=True):
                line.add(float(n), float(taken))
            line.slope = max(line.fitted(), 0.0)
        return self._lines[kind]


class _Line:
    """a + b·n by least squares of relative errors, from decayed sums. slope: what b is, also where
    passes tell nothing of it."""

    def __init__(self) -> None:
        self.slope = 0.0
        self._sums = [0.0] * 5  # of w, w·n, w·t, w·n², w·n·t

    def add(self, n: float, taken: float, fade: float = 1.0) -> None:
        w = 1 / taken**2
        new = w, w * n, w * taken, w * n * n, w * n * taken
        self._sums = [fade * old + one for old, one in zip(self._sums, new, strict=True)]

    def fitted(self) -> float:
        n, t, nn, nt = (x / self._sums[0] for x in self._sums[1:])
        return (nt - n * t + DOUBT * self.slope) / (nn - n * n + DOUBT)

    def see(self, n: int, taken: float) -> None:
        usual = max(float(self.at(n)), INSTANT)
        ratio = _clipped(taken / usual)
        # Half of the change applies to all passes: contexts grow, and the load of the machine
        # changes.
        shift = ratio**LEVEL
        w, n1, t, nn, nt = self._sums
        self._sums = [w / shift**2, n1 / shift**2, t / shift, nn / shift**2, nt / shift]
        self.slope *= shift
        self.add(n, usual * ratio, FADES)
        self.slope = max(self.fitted(), 0.0)

    def at(self, tokens: Any) -> Any:
        w, n, t, *_ = self._sums
        return t / w + self.slope * (tokens - n / w)


def _tokens(alpha: np.ndarray) -> np.ndarray:
    """float64 [max_depth + 1]: the expected number of tokens per step and row, by γ, for this
    acceptance by position."""
    return 1 + np.append(0.0, alpha.cumprod().cumsum())


def _clipped(ratio: float) -> float:
    """Limit the effect of one pass: other work may have delayed it."""
    return min(max(ratio, 0.5), 2.0)
