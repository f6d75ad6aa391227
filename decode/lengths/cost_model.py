"""The draft length with the most tokens per second by measured costs, or 0 if no draft pays."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from decode.base.errors import require_fits
from decode.costs import Costs, extrapolated
from decode.draft import Asked
from decode.lengths import POLICIES, Policy
from decode.lengths.source import FEW, INSTANT, Source, clipped, tokens_of
from decode.verification import Verification

# Of the lines of passes: what a pass's weight is after one more, the share of a pass's change that
# applies to all of them, and how far apart passes must be, in tokens², to tell of a slope.
FADES, LEVEL, DOUBT = 0.96, 0.2, 1.0
ROUNDS = 4  # until the depths and the rate that they give fit each other; two are usual
RAREST = 64  # a probe comes after so many times `patience`, whatever it costs
# Of the steps after the early ones, one in so many is looked at closely: a policy takes time too.
# In the others no times are read, and what was decided stays; where all drafters rest, it stays
# REST times as long, or until one is due.
EARLY, READ, REST = 32, 3, 4
# Drafters that are told from each other; the tokens of a text, while none has ended; what the mean
# of those that ended weighs after one more.
DRAFTERS, TEXT, STAYS = 3, 128.0, 0.9


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
    tokens. The cost of a probe includes feeding the drafter the text since its last draft, and the
    texts that it has not read. A probe that finds nothing is one of which nothing is accepted.
    After a successful probe the next one follows at once. So few tokens pass until a drafter that
    has become good is used again.

    A drafter reads a new text before its first draft in it. It drafts beside such texts if that is
    worth it: if drafts save more time, over as many tokens as texts had lately, than it takes.

    What drafts brought is compared with what steps without brought, by the size of the batch. If
    they lost, for a reason that no cost or acceptance says, drafts are as rare as probes, and as
    deep as costs and acceptance say.

    Of several drafters that are asked in turn, all this is known of each, for the rows that none
    before it serves. So one may rest while others draft.

    For trees, it decides how deep the tree may grow. The shape decides which nodes the tree has
    (`sequoia` chooses a tree from measured costs).

    The policy reads a clock. So under rules that draw, except `exact`, a text may differ between
    two runs and depend on the other rows. Its distribution never does.
    """

    needs_costs = True
    by_batch = True
    reads_times = True
    per_row = MappingProxyType({"_tokens": 0.0, "_unread": np.ones(DRAFTERS, dtype=bool)})
    _tokens: np.ndarray  # [B]: of each text so far
    _unread: np.ndarray  # bool [B, drafters]: the texts that a drafter has not read

    def __init__(
        self,
        max_depth: int = 8,
        memory: float = 0.97,
        probe_share: float = 0.0125,
        patience: int = 24,
    ) -> None:
        super().__init__(max_depth)
        shares = {"memory": memory, "probe_share": probe_share}
        require_fits(lambda x: 0 < x < 1, "a number between 0 and 1", **shares)
        require_fits(lambda x: x >= 1, "at least 1 token", patience=patience)
        self.memory, self.probe_share, self.patience = memory, probe_share, patience
        self._passes = _PassTimes()
        self._known: dict[int, float] = {}  # seconds of drafts by depth, measured before
        self._sources = [Source(max_depth)]
        self._rate = 0.0  # the tokens per second of all rows that drafts of the best depths give
        # Seconds of a pass without drafts, and those that one more token adds to a pass.
        self._plain, self._token = INSTANT, 0.0
        self._overhead: float | None = None  # seconds of a step without a draft, beside its pass
        self._steps = 0
        # Tokens of a row, in all steps, and until results last faded.
        self._emitted = self._faded_at = 0.0
        self._text, self._texts = TEXT, 0  # the tokens of a text, on average, and how many ended
        self._settled = False  # it decided for these rows
        self._wakes = 0.0  # the tokens of a row after which a drafter is due, while all rest

    def start(self, rows: int) -> None:
        if self.rows:
            self._see_ended(self._tokens)
        super().start(rows)
        self._settled = False
        self._passes.rows = rows
        for source in self._sources:
            source.new_text, source.hopeful = True, False

    def keep_rows(self, rows: np.ndarray) -> None:
        self._see_ended(np.delete(self._tokens, rows))
        super().keep_rows(rows)
        self._settled = False

    def add_rows(self, count: int) -> None:
        super().add_rows(count)
        self._settled = False

    def _see_ended(self, tokens: np.ndarray) -> None:
        """Texts ended. tokens: of each, [n]."""
        for count in tokens.tolist():
            self._texts += 1
            self._text += max(1 / self._texts, 1 - STAYS) * (count - self._text)

    def use_costs(self, costs: Costs) -> None:
        for width, v in zip(costs.widths, costs.v, strict=True):
            self._passes.know(width * costs.rows, v * costs.step_s)
        for depth in {1, self.max_depth}:
            self._known[depth] = float(costs.draft(depth)) * costs.step_s
            for source in self._sources:
                source.drafts.know(depth, self._known[depth])

    def _source(self, number: int) -> Source:
        """What is known of this drafter."""
        while number >= len(self._sources):
            self._sources.append(source := Source(self.max_depth))
            for depth, seconds in self._known.items():
                source.drafts.know(depth, seconds)
            for source in self._sources:
                source.drafts.shared = True
        return self._sources[number]

    @property
    def by_source(self) -> tuple[int, ...]:
        return tuple(source.depth for source in self._sources)

    def depths(self) -> np.ndarray:
        asks = any(source.asks and source.depth for source in self._sources)
        decides = self._reads()
        if self._steps >= EARLY and not any(self.by_source):  # all rest
            decides = not self._steps % (READ * REST) or self._emitted >= self._wakes
        if not self._settled or decides or asks:
            self._decide()
        return np.full(self.rows, max(self.by_source))

    def _decide(self) -> None:
        """How deep each drafter may draft."""
        self._passes.rows, self._settled, self._wakes = self.rows, True, float("inf")
        if (passes := self._passes(self.rows + np.arange(2))) is not None:
            self._plain, self._token = float(passes[0]), float(passes[1] - passes[0])
        known = []
        for source in self._sources:
            source.alpha, source.width = source.acceptance(), source.nodes()
            depth = self._unknown(source)
            source.asks = depth is not None
            if depth is None:
                known.append(source)
            else:
                source.depth = depth
        for source, depth in zip(known, self._best(known) if known else (), strict=True):
            lost = source.lost(self.rows, source.waited < self.patience)
            reads = self._worth_reading(source, depth)
            source.asks = lost > 0 or not depth or not reads
            if source.asks:
                left = self._wait(source, lost) - source.waited
                self._wakes = min(self._wakes, self._emitted + left)
                due = left <= 0 or (source.hopeful and reads and lost != float("inf"))
                depth = due * max(depth, 1)
            source.depth = depth

    def _reads(self) -> bool:
        """Whether it looks at this step closely."""
        return self._steps < EARLY or not self._steps % READ

    def _unknown(self, source: Source) -> int | None:
        """The depth of drafts that tells a cost which is not known yet."""
        if self._passes(np.array([self.rows])) is None:
            return 0  # first, the cost of a plain step
        if not source.drafts.known or not self._passes.known_beyond(self.rows):
            return int(source.vain < FEW or source.waited >= self.patience)
        if len(source.drafts.known) == 1 and self.max_depth > 1 and source.unasked:
            source.unasked -= 1
            return 2
        return None

    def _best(self, sources: Sequence[Source]) -> list[int]:
        """The depth of each of these drafters with the most tokens per time, of all together: the
        one that brings the most beyond what all together would give in the time that it takes."""
        rows = [self.rows * source.share for source in sources]
        brings = [n * tokens_of(x.alpha) for n, x in zip(rows, sources, strict=True)]
        takes = [
            source.seconds() + self._token * n * np.append(0.0, source.width.cumsum())
            for n, source in zip(rows, sources, strict=True)
        ]
        depths = [0] * len(sources)
        for _ in range(ROUNDS):
            gained = sum(x[depth] for x, depth in zip(brings, depths, strict=True))
            taken = sum(x[depth] for x, depth in zip(takes, depths, strict=True))
            self._rate, before = float((self.rows + gained) / (self._plain + taken)), depths
            beyond = [b - self._rate * t for b, t in zip(brings, takes, strict=True)]
            depths = [int(x.argmax()) for x in beyond]
            if depths == before:
                break
        for place, source in enumerate(sources):
            if not depths[place]:  # perhaps by chance
                alpha = source.alpha.copy()
                alpha[0] += (alpha[0] * (1 - alpha[0]) / (source.tried[0] + 1)) ** 0.5
                more = rows[place] * tokens_of(alpha) - self._rate * takes[place]
                depths[place] = int(more.argmax())
        return depths

    def _unread_by(self, source: Source) -> np.ndarray:
        """bool [B], to be written to: the texts that a drafter has not read."""
        unread: np.ndarray = self._unread[:, min(self._sources.index(source), DRAFTERS - 1)]
        return unread

    def _new_texts(self, source: Source) -> int:
        """How many texts a drafter would read before a draft."""
        return int(self._unread_by(source).sum()) if source.reading_s else 0

    def _worth_reading(self, source: Source, depth: int) -> bool:
        """Whether drafts of this depth save in a text what reading it takes, if there are new ones.
        Other texts follow these, so what the others of the batch would save does not count."""
        if not self._new_texts(source):
            return True
        brings = source.share * float(tokens_of(source.alpha)[depth])  # tokens of a row
        fed = self._token * source.share * float(source.width[:depth].sum())
        saves = self._plain * brings / self.rows - source.drafts(depth) / self.rows - fed
        return bool(saves * self._text / (1 + brings) >= source.reading_s)

    def _price(self) -> float:
        """The tokens that the batch could get in the time that one more token adds to a pass."""
        return self._rate * self._token

    def _wait(self, source: Source, lost: float) -> float:
        """The tokens from a draft to the next one where none pays, or none did lately. Infinite if
        steps without drafts are due. lost: see `Source.lost`."""
        if lost == float("inf"):
            return lost
        # The expected loss of a probe compared to plain decoding, in plain steps.
        fed = self.rows * source.share * source.width[0] + 1  # one is fed in any case
        cost = (source.probe_s or source.drafts(1)) + self._token * fed
        cost += self._new_texts(source) * source.reading_s
        loss = max(float(cost / self._plain - source.share * source.alpha[0]), lost)
        rarest = max(self.patience, loss / (1.3 * self.probe_share))
        # What a probe reads grows with the wait, so a longer wait may never be long enough.
        rarest = min(rarest, RAREST * self.patience)
        return min(loss / self.probe_share, rarest)

    def observe(self, verification: Verification) -> None:
        emitted = float(verification.emitted.sum()) / max(len(verification.emitted), 1)
        self._steps += 1
        self._emitted += emitted
        self._tokens += verification.emitted
        looks = self._reads() or any(x.depth and (x.asks or x.waited) for x in self._sources)
        if not (looks or verification.depths.any() or verification.draft_prefill_s):
            self._pass_by(verification, emitted)
            return
        asked, drafted_by = self._asked(verification)
        both = [*zip(self._sources, asked, strict=True)]
        faded = self.memory ** (self._emitted - self._faded_at)
        self._faded_at = self._emitted
        beside = bool(verification.fed_beside)
        timed = looks and not beside  # prompts make a pass longer
        more = self._see_pass(verification) if timed else 0.0
        plain = self._passes(np.array([self.rows])) if timed else None
        took = verification.draft_s + verification.verify_s + verification.overhead_s
        for number, (source, (part, levels, reading)) in enumerate(both):
            asks, pays = part > 0, True
            free = (drafted_by < 0) | (drafted_by >= number)  # no drafter before it serves them
            source.vain += asks and beside
            if reading and (new := self._unread_by(source)).any():
                source.see_reading(reading, int(new.sum()))
                new[:] = False
            if plain is not None and free.any() and not (source.new_text and asks):
                pays = source.compare(self.rows, asks, emitted, took / float(plain[0]))
            source.fade(faded)
            if not asks:
                source.waited += emitted
                continue
            # One alone has the depths of the loop, whatever it was allowed.
            most = source.depth if verification.draft.asked else self.max_depth
            depths = np.minimum(verification.depths, min(most, source.ended))
            if not levels:
                # It found nothing, which took time too: no row gets a token.
                nothing = np.zeros_like(depths[free])
                source.see_results(nothing, depths[free], np.zeros(1))
                source.vain += not source.drafts.known
                source.waited, source.hopeful = 0.0, False
                continue
            stays = self.memory**emitted
            source.share = stays * source.share + (1 - stays) * float(free.mean())
            accepted, fed = self._results(verification, drafted_by == number)
            source.see_results(accepted[free], depths[free], fed)
            if timed:
                source.see_seconds(part * (verification.draft_s + more), levels)
            # The first draft after a rest reads what it missed. Those after it go on if they pay.
            hopeful = bool((accepted[free] > 0).mean() > 0.5)
            source.hopeful = hopeful and (pays or source.waited > 0)
            source.waited, source.new_text = 0.0, False

    def _pass_by(self, verification: Verification, emitted: float) -> None:
        """A step that is not looked at, without a draft."""
        drafts = verification.draft.asked
        asked = [one.seconds > 0 for one in drafts] or [bool(verification.depths.any())]
        for number, source in enumerate(self._sources):
            its = number < len(asked) and asked[number]
            source.waited = 0.0 if its else source.waited + emitted

    def _asked(self, verification: Verification) -> tuple[list[Asked], np.ndarray]:
        """What each drafter did, its seconds as a share of the time of drafting; and the drafter of
        each row, int [B], −1: none."""
        draft, steps = verification.draft, verification.draft_steps
        if draft.sources is None or not draft.asked:
            part = float(verification.depths.any())
            asked = [Asked(part, steps, verification.draft_prefill_s)]
            drafted_by = np.full(len(verification.accepted), 0 if steps else -1)
        else:
            whole = max(sum(one.seconds for one in draft.asked), INSTANT)
            asked = [one._replace(seconds=one.seconds / whole) for one in draft.asked]
            drafted_by = draft.sources
        self._source(len(asked) - 1)
        return [*asked, *[Asked()] * (len(self._sources) - len(asked))], drafted_by

    def _results(
        self, verification: Verification, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """int [B], the accepted tokens of the draft of each of these rows, bool [B], 0 for the
        others, and int [D], the nodes of all these rows by depth."""
        return verification.accepted * rows, verification.nodes_by_depth[rows].sum(0)

    def _see_pass(self, verification: Verification) -> float:
        """Learn what a pass costs. Returns the seconds of the step beside it that are due to its
        draft: to judge it, and to keep its tokens."""
        seconds, more = verification.overhead_s, 0.0
        if not verification.draft_steps:
            usual = seconds if self._overhead is None else self._overhead
            self._overhead = usual * clipped(max(seconds, INSTANT) / max(usual, INSTANT)) ** 0.1
        elif self._overhead is not None:
            more = max(seconds - self._overhead, 0.0)
        self._passes.see(verification.fed, verification.verify_s + seconds - more)
        return more


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
        ratio = clipped(taken / usual)
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
