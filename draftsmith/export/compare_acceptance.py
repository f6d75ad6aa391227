"""Is a drafter's acceptance in an engine that of our own loop? One rule for exports and audits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.verification import Verification
from train.engines.counters import DraftCounts

BATCH = 8
# Larger than noise: with 2,000 drafted tokens the standard error of a share is at most 0.011.
TOLERANCE, TOLERANCE_TOKENS = 0.03, 2000
# With fewer drafted tokens, one text's end moves the share by more than an error would.
FEWEST_TOKENS = 200


def interval(accepted: int, of: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of so many tokens, at least one."""
    from scipy.stats import binomtest  # takes a second

    found = binomtest(accepted, of).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Acceptance:
    """theirs, ours: drafted and accepted tokens of the engine, and of our loop on the same prompts.
    gamma: tokens of a draft, which are accepted or rejected together. level: the probability that
    chance alone makes them differ. parting: the share of the texts that chance may make different
    ones: 1 if they are drawn, 0 if all are the same in both."""

    theirs: DraftCounts
    ours: DraftCounts
    gamma: int
    level: float
    parting: float

    @property
    def fewest(self) -> float:
        """Drafted tokens, of the loop that has fewer."""
        return min(self.theirs.drafted, self.ours.drafted)

    @property
    def allowed(self) -> float:
        """The largest difference of the shares that is no error."""
        both = self.theirs + self.ours
        rate = both.rate or 0.0
        of_each = sum(1 / max(counts.drafted, 1) for counts in (self.theirs, self.ours))
        chance = math.sqrt(rate * (1 - rate) * self.gamma * of_each * self.parting)
        fixed = TOLERANCE * math.sqrt(max(1.0, TOLERANCE_TOKENS / max(self.fewest, 1)))
        return fixed + NormalDist().inv_cdf(1 - self.level / 2) * chance

    @property
    def fault(self) -> str | None:
        """What is wrong, without the engine's name; None: the shares agree."""
        theirs, ours = self.theirs.rate or 0.0, self.ours.rate or 0.0
        if abs(theirs - ours) <= self.allowed:
            return None
        return (
            f"draft efficiency is {theirs:.3f} there and {ours:.3f} in our loop; they may differ "
            f"by {self.allowed:.3g}"
        )


@dataclass(frozen=True)
class Counting:
    """How an engine counts drafted and accepted tokens. Engines differ, and our own loop is counted
    in the same way.

    first_drafted: the first token after the prompt is drafted too; else the prefill yields it.
    stops_at_eos: a draft ends with its first end-of-text token; else it always has γ tokens.
    past_end: tokens drafted and accepted after the end of a text count.
    end_is_last: nothing is accepted after the end-of-text token, nor the token itself unless it is
    the draft's last.
    past_length: a draft has γ tokens even if fewer may follow; else it is cut to that number.
    chooses: draft tokens are the drafter's likeliest ones also where the text is drawn; else they
    are drawn too.
    """

    first_drafted: bool = False
    stops_at_eos: bool = False
    past_end: bool = False
    end_is_last: bool = False
    past_length: bool = False
    chooses: bool = False

    def of_draft(
        self, draft: Sequence[int], block: Sequence[int], eos: Sequence[int]
    ) -> tuple[int, int]:
        """How many tokens of a draft count as drafted, and as accepted. block: those that were
        accepted, and the target's own token after them."""
        drafted, accepted = len(draft), len(block) - 1
        end = next((place for place, token in enumerate(block) if token in eos), None)
        if end is not None and self.end_is_last and end < len(draft) - 1:
            accepted = min(accepted, end)
        if self.stops_at_eos:
            drafted = next((x + 1 for x, token in enumerate(draft) if token in eos), drafted)
        if end is not None and not self.past_end:
            drafted = min(drafted, end + 1)
        return drafted, min(accepted, drafted)


@dataclass(frozen=True)
class OwnLoop:
    """Our own loop with the drafter of an engine."""

    target: Target
    drafter: Drafter
    prompts: Sequence[Sequence[int]]
    gamma: int
    max_new_tokens: int


def count_drafts(
    loop: OwnLoop, counting: Counting, sampling: Sampling | None = None
) -> tuple[int, int]:
    """Return the numbers of tokens that our loop drafts and accepts, counted as in `counting`.
    sampling: None is greedy."""
    target = loop.target
    drafted = accepted = 0
    # Enough room for a draft of γ tokens wherever in a text it begins.
    room = loop.max_new_tokens + (loop.gamma if counting.past_length else 0)
    lengths: dict[int, int] = {}  # of the texts so far

    def count(verification: Verification) -> None:
        nonlocal drafted, accepted
        for place, row in enumerate(verification.rows.tolist()):
            tokens = verification.draft.tokens[place, : verification.drafted[place]].tolist()
            right = int(verification.accepted[place])
            length = lengths.get(row, int(not counting.first_drafted))
            lengths[row] = length + right + 1
            if length >= loop.max_new_tokens:
                continue
            block = verification.block[place, : right + 1].tolist()
            counted = counting.of_draft(tokens, block, target.eos_token_ids)
            drafted += counted[0]
            accepted += counted[1]

    decoder = Decoder(
        target.model,
        loop.drafter,
        eos_token_ids=target.eos_token_ids,
        gamma=loop.gamma,
        first_target=not counting.first_drafted,
        observers=[count],
        sampling=sampling,
        draft_sampling=Sampling() if counting.chooses else None,
    )
    for begin in range(0, len(loop.prompts), BATCH):
        lengths.clear()
        decoder.decode(loop.prompts[begin : begin + BATCH], room, seed=begin)
    return drafted, accepted
