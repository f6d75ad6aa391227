"""What a draft-length policy learns of one drafter: its acceptance, its cost and its rest."""

from collections import defaultdict

import numpy as np

from decode.costs import draft_parts

# The minimum of what is divided by: of measured times, in seconds, and of counts.
INSTANT = 1e-9
# Steps with drafts are compared with steps without after so many of either; what a step's weight is
# after one more of its kind.
ENOUGH, FEW, BROUGHT = 6, 3, 0.95
LONGEST = 4.0  # plain steps; other work delayed a step that took longer


class Source:
    """What is known of the only drafter, or of one of several that are asked in turn. Rows that one
    before it serves do not count.

    depth: how deep its next draft may be; 0: it rests. asks: that draft is made to learn from it.
    ended: where the policy let its last drafts end, if it did. grows: the policy decides that
    level by level. alpha, width: its acceptance and its nodes when the policy last decided.
    share: of the rows, those that no drafter before it serves. new_text: it has not drafted since
    the batch began. waited: tokens since its last draft. hopeful: most rows accepted a token of
    that draft. vain: its drafts in passes that read prompts too, which tell no cost. unasked:
    further drafts of two tokens, to see a second depth. probe_s: seconds of drafting a probe,
    catching up included. drafts: without text to catch up on. reading_s: of a new text, which it
    reads before it drafts.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = self.depth = self.ended = max_depth
        self.asks, self.grows, self.new_text, self.hopeful = True, False, True, False
        self.share, self.waited = 1.0, 0.0
        self.vain, self.unasked = 0, 2
        self.probe_s: float | None = None
        self.reading_s = 0.0
        self.drafts = _DraftTimes()
        # By position: tokens that were accepted and tried, drafts that were allowed to go so deep,
        # and nodes that were fed for them. All fade together. They start with one assumed try with
        # acceptance 0.6, so a new drafter gets a few real tries.
        self._counts = np.zeros((4, max_depth))
        self._counts[:, 0] = 0.6, 1.0, 1.0, 1.0
        self.accepted, self.tried, self.allowed, self.fed = self._counts
        self.alpha, self.width = self.acceptance(), self.nodes()
        # By the size of the batch, without its drafts and with: tokens of a row, how many plain
        # steps could be taken meanwhile, steps, and squares of these tokens.
        self._brought: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros((2, 4)))

    def acceptance(self) -> np.ndarray:
        """float64 [max_depth]: by position."""
        return _rates(self.accepted, self.tried)

    def nodes(self) -> np.ndarray:
        """float64 [max_depth]: by depth, the nodes that are fed of a row's draft."""
        return _rates(self.fed, self.allowed)

    def seconds(self) -> np.ndarray:
        """float64 [max_depth + 1]: of drafting, by depth."""
        return np.array([self.drafts(depth) for depth in range(self.max_depth + 1)])

    def compare(self, rows: int, asked: bool, emitted: float, took: float) -> bool:
        """A step of so many rows that this drafter could draft for, and did or not: tokens of a
        row, and how long it took, in plain steps. Whether it brought as much as steps without."""
        took = min(took, LONGEST)
        both = self._brought[rows.bit_length()]
        pays = both[0, 1] < FEW or emitted * both[0, 1] >= took * both[0, 0]
        both[int(asked)] *= BROUGHT
        both[int(asked)] += emitted, took, 1.0, emitted**2
        return bool(pays)

    def lost(self, rows: int, patient: bool) -> float:
        """The plain steps that a step with a draft lost lately, beside steps without. What a model
        of costs leaves out counts here, and no lack of tokens that may be chance. 0: too few are
        known. Infinite: steps without are due. patient: it has not waited for long."""
        (tokens, steps, *_), (drafted, took, count, squares) = self._brought[rows.bit_length()]
        if took < ENOUGH or steps < FEW:
            # Passes that read prompts too tell nothing, so it does not wait for ever.
            return float("inf") if took >= ENOUGH and patient else 0.0
        # The deviation of their sum, in which older ones weigh less. With more rows a draft that
        # loses costs more, so less is left to chance.
        chance = (max(squares - drafted**2 / count, 0.0) / (1 + BROUGHT)) ** 0.5 / rows
        return min(float(tokens / steps * took / max(drafted + chance, INSTANT)) - 1.0, LONGEST)

    def fade(self, share: float) -> None:
        """Results so far weigh less."""
        self._counts *= share

    def see_results(self, accepted: np.ndarray, depths: np.ndarray, fed: np.ndarray) -> None:
        """What became of a draft, by row: accepted tokens, and how deep it could be, int [B]. fed:
        int [D], the nodes of all rows by depth."""
        positions = np.arange(self.max_depth)
        allowed = depths[:, None] > positions
        tried = allowed & (accepted[:, None] >= positions)
        self.tried += tried.sum(0)
        self.accepted += (tried & (accepted[:, None] > positions)).sum(0)
        self.allowed += allowed.sum(0)
        # Another drafter may have gone deeper than the one that ended.
        count = min(len(fed), self.ended)
        self.fed[:count] += fed[:count]

    def see_reading(self, seconds: float, texts: int) -> None:
        """It read this number of new texts in these seconds."""
        each = seconds / texts
        self.reading_s = each if not self.reading_s else 0.5 * (self.reading_s + each)

    def see_seconds(self, seconds: float, depth: int) -> None:
        """What a draft of this depth took."""
        if self.new_text:
            return  # a text's first draft is cold
        if not self.drafts.known or self.waited == 0 or seconds < self.drafts(depth):
            self.drafts.see(depth, seconds)
        if self.waited:
            probe = self.drafts(1) + max(seconds - self.drafts(depth), 0.0)
            self.probe_s = probe if self.probe_s is None else 0.7 * self.probe_s + 0.3 * probe


class _DraftTimes:
    """Seconds of a draft by its depth: a fixed part and a part per depth.

    shared: what was measured before was of several drafters together. It is forgotten when drafts
    of two depths were seen.
    """

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        self._seen: set[int] = set()
        self.shared = False
        self._parts = (0.0, 0.0)

    def know(self, depth: int, seconds: float) -> None:
        self.known[depth] = max(seconds, INSTANT)
        self._parts = draft_parts([*self.known], [*self.known.values()])

    def see(self, depth: int, seconds: float) -> None:
        if depth in self.known:
            ratio = clipped(max(seconds, INSTANT) / self.known[depth])
            # Half of the change applies to all depths, as it does to all passes.
            for other in self.known:
                self.known[other] *= ratio ** (0.25 if other == depth else 0.125)
            seconds = self.known[depth]
        elif self.known:
            usual = self(depth)
            seconds = usual * clipped(max(seconds, INSTANT) / usual)
        self._seen.add(depth)
        if self.shared and len(self._seen) == 2:
            self.known = {one: x for one, x in self.known.items() if one in self._seen}
        self.know(depth, seconds)

    def __call__(self, depth: int) -> float:
        """Seconds of a draft of this depth; 0 without a draft. A depth must be known."""
        fixed, per_depth = self._parts
        return max(fixed + depth * per_depth, INSTANT) if depth else 0.0


def _rates(counts: np.ndarray, of: np.ndarray) -> np.ndarray:
    """float64 [D]: counts ÷ of, by depth. Where little is known, about the rate of the depth
    before."""
    rates = counts / np.maximum(of, INSTANT)
    for i in range(1, len(rates)):
        rates[i] = (counts[i] + 2 * rates[i - 1]) / (of[i] + 2)
    return rates


def tokens_of(alpha: np.ndarray) -> np.ndarray:
    """float64 [max_depth + 1]: the expected tokens that drafts bring per step and row, by γ, for
    this acceptance by position."""
    return np.append(0.0, alpha.cumprod().cumsum())


def clipped(ratio: float) -> float:
    """Limit the effect of one pass: other work may have delayed it."""
    return min(max(ratio, 0.5), 2.0)
