"""Draft-length policies: each by cases worked out by hand, the cost model on a made-up clock."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.costs import Costs
from decode.draft import Asked, Draft
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.skip import SelfDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.lengths import POLICIES, Fixed, Policy
from decode.lengths.confidence import AdaptiveConfidence
from decode.lengths.cost_model import CostModel
from decode.lengths.heuristic import Heuristic
from decode.lengths.source import Source
from decode.lengths.worth import LEAST, Worth
from decode.loop.decoding import Decoder
from decode.model.forward.sublayers import Sublayers
from decode.shapes import SHAPES
from decode.tree_nodes import leave_out
from decode.verification import Seconds, Verification
from tests.tiny import tiny_model, verification

model = functools.cache(tiny_model)
PROMPTS = [[5, 17, 250, 9, 42], [7], [30] * 9, [11, 12, 13, 14] * 3]


def step(
    depths: Sequence[int],
    accepted: Sequence[int],
    drafted: Sequence[int] | None = None,
    *,
    draft_s: float = 0.0,
    pass_s: float = 1.0,
    width: float | None = None,
    signals: dict[str, np.ndarray] | None = None,
) -> Verification:
    """What the loop would report of chains so deep, of which so many tokens were accepted."""
    allowed, kept = np.array(depths), np.array(accepted)
    drawn = allowed if drafted is None else np.array(drafted)
    max_depth = int(drawn.max(initial=0))
    return verification(
        accepted,
        depths=allowed,
        drafted=drawn,
        nodes_by_depth=(np.arange(max_depth) < drawn[:, None]).astype(np.int64),
        reached=np.minimum(kept + 1, drawn),
        emitted=kept + 1,
        fed=len(kept) * (1 + max_depth if width is None else width),
        draft_steps=max_depth,
        seconds=Seconds(draft_s, pass_s),
        signals=signals or {},
    )


def made(spec: str, rows: int = 1) -> Any:
    policy = POLICIES.make(spec)
    policy.start(rows)
    return policy


def tell(policy: Any, confidence: float, accepted: int, rows: int = 1) -> None:
    """In each row a token of which the drafter is so sure, and what became of it."""
    sure = torch.full((rows,), confidence, dtype=torch.float64)
    policy.measure = lambda logits, estimate: sure
    ask(policy, 0, torch.zeros(rows, 4))
    policy.observe(step([1] * rows, [accepted] * rows, signals=policy.signals()))


def ask(
    policy: Policy, place: int, logits: torch.Tensor, drafting: Sequence[bool] | None = None
) -> torch.Tensor:
    rows = torch.ones(len(logits), dtype=torch.bool)
    if drafting is not None:
        rows = torch.tensor(drafting)
    return policy.stops(place, logits, rows)


# --- by hand --------------------------------------------------------------------------------------


def test_heuristic_by_row() -> None:
    policy = made("heuristic:max_depth=8,first=4", rows=4)
    # All accepted; some; none; a row whose drafter had nothing to say.
    policy.observe(step([4, 4, 4, 4], [4, 3, 0, 0], drafted=[4, 4, 4, 0]))
    assert policy.depths().tolist() == [6, 3, 3, 4]
    # All of fewer tokens than were allowed is all.
    policy.observe(step([6, 3, 3, 4], [2, 3, 3, 4], drafted=[2, 3, 3, 4]))
    assert policy.depths().tolist() == [8, 5, 5, 6]
    policy.keep_rows(np.array([3, 0]))
    policy.observe(step([6, 8], [6, 8]))
    assert policy.depths().tolist() == [8, 8]
    for _ in range(10):
        policy.observe(step([8, 8], [8, 0]))
    assert policy.depths().tolist() == [8, 1]
    policy.start(2)
    assert policy.depths().tolist() == [4, 4]


def test_a_whole_path_of_a_tree_is_a_whole_success() -> None:
    policy = Heuristic(8, first=3)
    policy.start(2)
    tree = step([3, 3], [3, 2], drafted=[9, 9], width=10)
    tree.depth = 3
    policy.observe(tree)
    assert policy.depths().tolist() == [5, 2]
    assert tree.accepted_share().tolist() == [1, 2 / 3]


def test_by_batch_follows_the_rows_that_are_left() -> None:
    policy = made("by_batch:table={1:8,4:3,16:0}", rows=20)
    assert policy.max_depth == 8
    assert set(policy.depths().tolist()) == {0}
    policy.keep_rows(np.arange(15))
    assert policy.depths().tolist() == [3] * 15
    policy.keep_rows(np.arange(3))
    assert policy.depths().tolist() == [8] * 3


def test_confidence_is_the_largest_probability_at_temperature_1() -> None:
    policy = made("confidence:threshold=0.5,min_depth=2,max_depth=4", rows=3)
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.45, 0.35, 0.2], [0.5, 0.25, 0.25]])
    logits = probs.log() + 3
    assert not ask(policy, 0, logits).any()
    # A row that may draft one token only is not asked about others.
    assert not ask(policy, 1, logits, [True, True, False]).any()
    # Below the threshold, not at it (1e-6: rounding).
    policy.threshold -= 1e-6
    assert ask(policy, 2, logits, [True, True, False]).tolist() == [False, True, False]
    told = step([4, 4, 1], [0, 1, 1], drafted=[4, 2, 1], signals=policy.signals())
    policy.observe(told)
    # As far as a row was asked while it drafted, the place it stopped at included.
    assert np.isnan(told.signals["confidence"]).sum(1).tolist() == [0, 0, 2]
    assert told.signals["confidence"][1] == pytest.approx([0.45] * 3)


def test_entropy_sets_the_length() -> None:
    policy = made("entropy:max_depth=5,min_depth=1,flat=0.5", rows=4)
    two = torch.tensor([0.5, 0.5, 0, 0])  # ln 2 / ln 4 = 0.5
    one = torch.tensor([1.0, 0, 0, 0])
    # h = H/ln 4 with γ(h) = 5 − 4·min(1, 2h): one bit → 1, certain → 5, flat → 1.
    skewed = torch.tensor([0.9, 0.1 / 3, 0.1 / 3, 0.1 / 3])
    h = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 3)) / math.log(4)
    gamma = round(5 - 4 * min(1, h / 0.5))
    assert gamma == 2
    logits = torch.stack([two, one, torch.full((4,), 0.25), skewed]).log()
    stopped = [ask(policy, place, logits).tolist() for place in range(6)]
    first = [[row[b] for row in stopped].index(True) for b in range(4)]
    assert first == [1, 5, 1, gamma]


def test_entropy_average_goes_on_from_the_text_that_was_kept() -> None:
    policy = made("entropy:max_depth=4,ema=0.5,flat=1.0", rows=2)

    def told(*values: tuple[float, float]) -> None:
        for place, pair in enumerate(values):
            policy.measure = lambda logits, estimate, pair=pair: torch.tensor(pair)
            ask(policy, place, torch.zeros(2, 4))

    told((0.4, 0.4), (0.8, 0.8), (0.0, 0.0))
    # Row 0 kept its first token: the third place, after a rejected token, does not count.
    policy.observe(step([4, 4], [1, 2], drafted=[2, 2], signals=policy.signals()))
    assert policy._past == pytest.approx([0.6, 0.3])
    policy.keep_rows(np.array([1]))
    assert policy._past == pytest.approx([0.3])


def test_adaptive_confidence_learns_where_drafting_pays() -> None:
    """Accepted exactly above 0.7: the threshold ends between the pairs around it."""
    policy = AdaptiveConfidence(max_depth=4, threshold=0.2, window=40)
    policy.start(2)
    random = np.random.default_rng(0)
    seen = []
    for _ in range(40):
        confidence = float(random.uniform(0, 1))
        seen.append(confidence)
        tell(policy, confidence, int(confidence > 0.7), rows=2)
    below, above = max(c for c in seen if c <= 0.7), min(c for c in seen if c > 0.7)
    assert policy.thresholds == pytest.approx([(below + above) / 2] * 2)
    policy.keep_rows(np.array([1]))

    # Now nothing is ever accepted: above all confidences. Then everything: below them.
    for accepted in (0, 1):
        for confidence in seen:
            tell(policy, confidence, accepted)
        if accepted:
            assert policy.thresholds == pytest.approx([min(seen) / 2])
        else:
            assert policy.thresholds[0] > max(seen)
    policy.start(1)
    assert policy.thresholds.tolist() == [0.2]


def test_adaptive_confidence_maximises_its_criterion() -> None:
    random = np.random.default_rng(1)
    policy = AdaptiveConfidence(max_depth=4, window=60, price=0.4)
    policy.start(1)
    pairs = []
    for _ in range(60):
        confidence = float(random.choice([0.1, 0.3, 0.5, 0.7, 0.9]))
        accepted = int(random.random() < confidence)
        pairs.append((confidence, accepted))
        tell(policy, confidence, accepted)

    def worth(theta: float) -> float:
        return sum(accepted - 0.4 for confidence, accepted in pairs if confidence >= theta)

    best = max(worth(theta) for theta in np.arange(0, 1, 0.01))
    assert worth(policy.thresholds[0]) == pytest.approx(best)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draft_exit_ends_after_an_unlikely_token_and_moves_its_threshold(
    temperature: float,
) -> None:
    """The rule of the paper's code, replayed on the record of a decode that accepts everything."""
    which = Decoder(
        model("llama"),
        SelfDrafter(Sublayers()),
        policy="draft_exit:max_depth=2,threshold=0.4,goal=0.6",
        sampling=Sampling(temperature),
    )
    run = which.decode([[5, 6, 7]], 60, seed=1)
    theta, rate = 0.4, 0.0
    seen = set()
    for done in run.steps:
        drafted, limit = int(done.drafted[0]), int(done.depths[0])
        if not drafted:
            continue
        likely = done.signals["confidence"][0]
        below = np.flatnonzero(likely[:limit] < np.float32(theta))
        assert drafted == (below[0] + 1 if len(below) else limit)
        rate = 0.5 * rate + 0.5 * done.accepted[0] / drafted
        change = 0.01 if rate < 0.6 else 0.0 if drafted == 2 else -0.01
        theta += 0.1 * change
        seen.add(change)
    assert seen == {0.01, 0.0, -0.01}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("heuristic:first=9", "first is 9; expected a length from 1 to max_depth, 8"),
        ("confidence:threshold=1.5", "threshold is 1.5"),
        ("confidence:min_depth=9", "expected 1 ≤ min_depth ≤ max_depth"),
        ("entropy:ema=1", "ema is 1"),
        ("adaptive_confidence:window=2", "window is 2"),
        ("feedback:ema=0.5", "'feedback' is gone; heuristic follows"),
        ("by_batch:table={4:2}", "from 1 on"),
        ("by_batch", "needs the option table"),
        ("cost_model:memory=1.0", "memory is 1.0"),
    ],
)
def test_bad_options_are_named(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        POLICIES.make(spec)


# --- in the loop ----------------------------------------------------------------------------------

SPECS = {
    "adaptive_confidence": "adaptive_confidence:max_depth=5,window=16,threshold=0.5",
    "by_batch": "by_batch:table={1:4,3:2,4:0}",
    "confidence": "confidence:max_depth=5,threshold=0.5",
    "cost_model": "cost_model:max_depth=4",
    "draft_exit": "draft_exit:max_depth=5,threshold=0.3",
    "entropy": "entropy:max_depth=5,ema=0.5,flat=0.5",
    "fixed": "fixed:max_depth=3",
    "heuristic": "heuristic:max_depth=6",
    "worth": "worth:max_depth=4",
}


def test_every_policy_is_tested() -> None:
    # `reach` needs a drafter with estimates: tests/test_block_drafters.py decodes with it.
    assert sorted([*SPECS, "reach"]) == list(POLICIES)


def test_reach_ends_by_the_product_of_the_estimates() -> None:
    policy = made("reach:max_depth=3,threshold=0.3,min_depth=1", rows=3)
    rows, logits = torch.ones(3, dtype=torch.bool), torch.zeros(3, 4)
    estimates = [[0.1, 0.9, 0.5], [1.0, 0.5, 0.5], [1.0, 0.8, 1.0]]
    expected = [[False, False, False], [True, False, True], [True, False, True]]
    ended = torch.zeros(3, dtype=torch.bool)
    for place, (estimate, ends) in enumerate(zip(estimates, expected, strict=True)):
        ended |= policy.stops(place, logits, rows & ~ended, torch.tensor(estimate))
        assert ended.tolist() == ends
    with pytest.raises(UserError, match="threshold is 2"):
        POLICIES.make("reach:threshold=2")


@pytest.mark.parametrize("name", SPECS)
def test_greedy_text_is_the_targets(name: str) -> None:
    target, policy = model("llama"), POLICIES.make(SPECS[name])
    drafter = SmallLMDrafter(model("llama", seed=7, layers=1))
    plain = Decoder(target, DRAFTERS["none"]()).decode(PROMPTS, 24)
    found = Decoder(target, drafter, policy=policy).decode(PROMPTS, 24)
    assert found.outputs == plain.outputs
    assert max(int(step.depths.max()) for step in found.steps) <= policy.max_depth


def short_lm() -> SmallLMDrafter:
    """One whose context is full long before the text ends."""
    return SmallLMDrafter(model("llama", seed=5, layers=1, max_positions=24))


@pytest.mark.parametrize(
    ("name", "first"),
    [("confidence", NgramDrafter), ("entropy", short_lm)],
)
def test_a_policy_hears_only_of_rows_that_its_drafter_serves(
    name: str, first: Callable[[], Drafter]
) -> None:
    """Rows beside them are served by other drafters, which may ask the policy too."""
    drafter = CompositeDrafter([first(), SmallLMDrafter(model("llama", seed=7, layers=1))])
    policy = POLICIES.make(SPECS[name])
    runs = Decoder(model("llama"), drafter, policy=policy, sampling=Sampling(0.5))

    def told(rows: Sequence[int]) -> dict[int, Any]:
        """Of each row its text, and what was drafted in each of its steps."""
        found = runs.decode([PROMPTS[row % 4] for row in rows], 24, row_ids=rows)
        if first is NgramDrafter and len(rows) > 4:
            heard = [
                ~np.isnan(s.signals[policy.signal][:, 0])
                for s in found.steps
                if policy.signal in s.signals
            ]
            # Rows that were looked up beside rows that were not, or nothing is put to the test.
            assert any(rows.any() and not rows.all() for rows in heard)
        return {
            row: (
                found.outputs[place],
                [
                    (int(s.depths[at]), int(s.drafted[at]), int(s.accepted[at]))
                    for s in found.steps
                    for at in np.flatnonzero(s.rows == place)
                ],
            )
            for place, row in enumerate(rows)
        }

    together = told(range(12))
    for begin in (0, 6):
        assert told(range(begin, begin + 6)) == {
            row: together[row] for row in range(begin, begin + 6)
        }
    for row in (0, 2, 9):
        assert told([row]) == {row: together[row]}


# --- the cost model, on a made-up clock -----------------------------------------------------------

PLAIN = 0.02  # seconds of a plain step


@dataclass
class Made:
    """A drafter on the made-up clock. alpha(token): the acceptance of each drafted token. c: of a
    draft's step, in plain steps. fixed: of a draft beside its steps. finds: the share of the rows
    for which it has a draft. says: how likely it says that each token is; None: it does not say,
    and asks no policy. missed: tokens that it has not read. prompt: plain steps in which it reads
    that of a text that joined. joined: those that it has not read. asked: when it was."""

    alpha: Callable[[float], float]
    c: float
    fixed: float = 0.0
    finds: float = 1.0
    says: float | None = 0.5
    missed: float = 60.0
    prompt: float = 0.0
    joined: float = 0.0
    asked: list[float] = field(default_factory=list)

    def draft(
        self, policy: Policy, depths: np.ndarray, number: int, random: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """The tokens of each row, int [B], at most `depths`, and how many plain steps they take:
        3% of a step's for each token that it has missed."""
        depth, went = int(depths.max()), 1
        while went < depth and self.says is not None and policy.weighs:
            sure = torch.full((len(depths), 1), self.says) * torch.tensor(depths > went)[:, None]
            if not policy.grows(went, sure, None, number):
                break
            went += 1
        went = depth if self.says is None or not policy.weighs else went
        has = random.random(len(depths)) < self.finds
        reading = 0.03 * self.c * max(self.missed - 2, 0.0)
        self.missed = 0.0
        return np.minimum(depths, went) * has, went * self.c + self.fixed + reading


class FindsFirst(Made):
    """It finds nothing after so many drafts."""

    found = 0

    def draft(self, *given: Any) -> tuple[np.ndarray, float]:
        self.finds = float(len(self.asked) <= self.found)
        return super().draft(*given)


def asked_in_turn(
    policy: Policy, drafters: Sequence[Made], at: float, random: np.random.Generator
) -> tuple[np.ndarray, Draft, np.ndarray, list[Asked]]:
    """The depths of the rows, their draft as the loop gets it, the acceptance of each row's tokens,
    and what each drafter did, in plain steps."""
    depths = policy.depths()
    free, sizes, sources = depths.copy(), np.zeros_like(depths), np.full(len(depths), -1)
    alpha, says, asked = np.zeros(len(depths)), np.full(len(depths), 0.5), []
    for number, one in enumerate(drafters):
        most = free
        if len(drafters) > 1 and number < len(policy.by_source):
            most = np.minimum(free, policy.by_source[number])
        seconds = reading = 0.0
        drafted = np.zeros_like(depths)
        if most.any():
            one.asked.append(at)
            reading, one.joined = one.prompt * min(one.joined, len(depths)), 0.0
            drafted, seconds = one.draft(policy, most, number, random)
        its = drafted > 0
        sizes[its], sources[its], alpha[its], free[its] = drafted[its], number, one.alpha(at), 0
        says[its] = 0.5 if one.says is None else one.says
        asked.append(Asked(seconds, int(drafted.max()), reading))
    tokens = torch.full((len(depths), int(sizes.max())), 5)
    sure = torch.tensor(says, dtype=torch.float32)[:, None].expand(tokens.shape)
    draft = Draft(tokens, sizes, confidence=sure)
    if len(drafters) > 1:
        draft.sources, draft.asked = sources, asked
    return depths, draft, alpha, asked


def decode_made(
    policy: Policy,
    drafters: Sequence[Made],
    tokens: int,
    *,
    slope: float = 0.05,
    rows: int = 1,
    lasts: float = np.inf,
    seed: int = 0,
) -> tuple[list[tuple[float, int, float]], float]:
    """((token, γ, seconds) of each step, and plain decoding's time over the total's inverse).

    It goes the way of the loop: the policy decides how deep drafts are, which get another level and
    which nodes are fed. A pass of n tokens of each row costs 1 + slope·(n − 1). Every time jitters
    by 3%. lasts: the tokens of a text; another one follows it.
    """
    random = np.random.default_rng(seed)
    policy.start(rows)
    at, ended, taken = 0.0, 0.0, []
    while at < tokens:
        depths, draft, alpha, did = asked_in_turn(policy, drafters, at, random)
        keep = policy.kept(draft) if depths.any() else None
        if keep is not None:
            leave_out(draft, keep)
        stays = random.random((rows, draft.levels())) < alpha[:, None]
        accepted = np.minimum(stays.cumprod(1).sum(1), draft.sizes)
        jitter = np.exp(0.03 * random.standard_normal(2)) * PLAIN
        drafted = float(draft.sizes.mean())
        told = step(
            depths.tolist(),
            accepted,
            draft.sizes,
            draft_s=sum(one.seconds for one in did) * jitter[0],
            pass_s=(1 + slope * drafted) * jitter[1],
            width=1 + drafted,
        )
        told.draft, told.draft_steps = draft, draft.went or draft.levels()
        told.seconds.draft_prefill = PLAIN * sum(one.reading for one in did)
        policy.observe(told)
        seconds = told.draft_prefill_s + told.draft_s + told.verify_s
        taken.append((at, int(depths.max()), seconds))
        emitted = float(told.emitted.mean())
        at += emitted
        ended += rows * emitted / lasts
        for one in drafters:
            one.missed += emitted
        while ended >= 1:  # the eldest text
            ended -= 1
            policy.keep_rows(np.arange(1, rows))
            policy.add_rows(1)
            for one in drafters:
                one.joined += 1
    return taken, sum(seconds for _, _, seconds in taken) / (at * PLAIN)


def simulate(
    policy: Policy,
    alpha: Callable[[float], float],
    tokens: int,
    *,
    c: float,
    rows: int = 1,
    prompt: int = 60,
    seed: int = 0,
    fixed: float = 0.0,
) -> tuple[list[tuple[float, int, float]], float]:
    """`decode_made` with one drafter, which reads the prompt before its first draft."""
    drafter = Made(alpha, c, fixed, missed=float(prompt))
    return decode_made(policy, [drafter], tokens, rows=rows, seed=seed)


by_costs = pytest.mark.parametrize("kind", [CostModel, Worth])


@by_costs
@pytest.mark.parametrize(("c", "most"), [(0.02, 16), (0.1, 1), (0.5, 4)])
def test_a_useless_drafter_costs_at_most_5_per_cent(
    c: float, most: int, kind: type[CostModel]
) -> None:
    for acceptance in (0.0, 0.05):
        # Without the prompt, which any drafter must read once.
        _, cost = simulate(kind(most), lambda _, a=acceptance: a, 256, c=c, prompt=0)
        assert cost <= 1.05


@by_costs
@pytest.mark.parametrize("fixed", [0.3, 1.0])
def test_a_drafter_that_finds_nothing_rests(fixed: float, kind: type[CostModel]) -> None:
    """Also after it found something once."""
    for found in (0, 6):
        one = FindsFirst(lambda _: 1.0, 0.02, fixed=fixed, says=None)
        one.found = found
        _, cost = decode_made(kind(4), [one], 400)
        assert 0 < sum(at > 50 for at in one.asked) < 60
        assert cost < 1.1


@by_costs
def test_drafts_that_find_nothing_lower_the_acceptance(kind: type[CostModel]) -> None:
    """Of the rows that no drafter before this one serves."""
    for finds in (0.2, 0.5):
        policy, one = kind(1), Made(lambda _: 0.9, 0.0, fixed=0.01, finds=finds, says=None)
        decode_made(policy, [one], 1000)
        assert policy._sources[0].acceptance()[0] == pytest.approx(0.9 * finds, abs=0.15)
    policy, second = kind(1), Made(lambda _: 0.9, 0.05, finds=0.8, says=None)
    first = Made(lambda _: 0.9, 0.0, finds=0.8, says=None)
    decode_made(policy, [first, second], 600, rows=8, slope=0.01)
    assert policy._sources[1].acceptance()[0] == pytest.approx(0.72, abs=0.15)


@by_costs
@pytest.mark.parametrize("c", [0.02, 0.5])
def test_a_drafter_that_becomes_good_is_used_within_64_tokens(
    c: float, kind: type[CostModel]
) -> None:
    for seed in range(2):
        taken, _ = simulate(kind(8), lambda at: float(at >= 200), 364, c=c, seed=seed)
        late = [gamma for at, gamma, _ in taken if at >= 264]
        assert min(late) >= 4
        drafted_before = [gamma for at, gamma, _ in taken if 100 < at < 200]
        assert np.mean(drafted_before) < 0.5


@by_costs
def test_a_drafter_that_is_slow_to_catch_up_is_tried_again(kind: type[CostModel]) -> None:
    """What it missed costs more a token than probes may cost."""
    taken, _ = simulate(kind(2), lambda _: 0.0, 8_000, c=2.0)
    assert 3 <= sum(gamma > 0 for at, gamma, _ in taken if at > 3_000) <= 5


def test_a_lack_of_tokens_that_may_be_chance_is_no_loss() -> None:
    one, eight = Source(4), Source(4)
    for source in (one, eight):
        for _ in range(4):
            source.compare(1, False, 1.0, 1.0)
    for place in range(8):  # both 1.125 tokens in the time of 1.2 steps
        one.compare(1, True, 1.0 + (place == 7), 1.2)
        eight.compare(1, True, 1.125, 1.2)
    assert one.lost(1, True) < 0 < eight.lost(1, True) < 0.1


@by_costs
def test_prompts_that_a_drafter_reads_count_as_its_costs(kind: type[CostModel]) -> None:
    """Texts are short, and a probe reads the prompts of those that joined."""
    heads = Made(lambda _: 0.3, 0.1, missed=0.0, prompt=0.35)
    _, cost = decode_made(kind(4), [heads], 1_000, slope=0.5, rows=8, lasts=32)
    assert len(heads.asked) > 5
    assert cost <= 1.05


@by_costs
@pytest.mark.parametrize(
    ("alpha", "prompt", "lasts", "reads"),
    [(0.5, 1.0, 100, True), (0.5, 8.0, 40, False), (0.7, 12.0, 40, False)],
)
def test_new_texts_are_read_if_their_drafts_save_more(
    kind: type[CostModel], alpha: float, prompt: float, lasts: float, reads: bool
) -> None:
    """A draft brings half a token for a seventh of a step, in each of four texts. To read one takes
    a twelfth, or the whole, of what that saves."""
    heads = Made(lambda _: alpha, 0.1, missed=0.0, prompt=prompt)
    policy = kind(1)
    taken, cost = decode_made(policy, [heads], 2_000, rows=4, lasts=lasts)
    drafted = np.mean([gamma > 0 for at, gamma, _ in taken if at > 500])
    assert drafted > 0.9 if reads else drafted < 0.3
    assert cost < (0.88 if reads else 1.06)


@by_costs
def test_a_drafter_that_becomes_useless_is_dropped(kind: type[CostModel]) -> None:
    c = 0.1
    taken, _ = simulate(kind(8), lambda at: 0.95 * (at < 200), 456, c=c)
    assert np.mean([gamma for at, gamma, _ in taken if 100 < at < 200]) > 2
    lost = sum(seconds / PLAIN - 1 for at, _, seconds in taken if at >= 201)
    assert lost < 0.05 * 256 + 10  # what it takes to notice, once


@by_costs
@pytest.mark.parametrize(("c", "alpha"), [(0.1, 0.6)])
def test_it_is_nearly_as_quick_as_the_best_fixed_length(
    c: float, alpha: float, kind: type[CostModel]
) -> None:
    best = min(simulate(Fixed(n), lambda _: alpha, 2000, c=c)[1] for n in range(1, 9))
    _, cost = simulate(kind(8), lambda _: alpha, 2000, c=c)
    assert best < 0.95
    assert cost < 1.06 * best


@pytest.mark.parametrize("told", [False, True])
def test_a_draft_in_one_pass_is_deep_or_not_at_all(told: bool) -> None:
    """A draft of one token pays as little as it does for a small LM of this cost, but one of eight
    costs hardly more. Where acceptance is low, no depth pays."""
    for alpha, pays in ((0.85, True), (0.3, False)):
        policy = CostModel(8)
        if told:
            policy.use_costs(Costs(PLAIN, 1, 0.01, (1, 2, 9), (1.0, 1.03, 1.24), fixed=0.9))
        taken, cost = simulate(policy, lambda _, a=alpha: a, 1000, c=0.01, fixed=0.9)
        late = [gamma for at, gamma, _ in taken if at > 200]
        if pays:
            best = min(
                simulate(Fixed(n), lambda _: 0.85, 1000, c=0.01, fixed=0.9)[1] for n in range(1, 9)
            )
            assert np.mean(late) > 5
            assert cost < 1.06 * best
        else:
            assert np.mean(late) < 0.5
            assert cost < 1.06


def test_acceptance_is_pooled_over_a_batch() -> None:
    """Rows share each pass, so that their mean decides; rows that leave change what a pass costs,
    which is known from passes of as many tokens."""
    _, cost = simulate(CostModel(6), lambda _: 0.8, 300, c=0.1, rows=8)
    assert cost < 0.7
    policy = CostModel(6)
    policy.use_costs(Costs(PLAIN, 1, 0.1, (1, 2, 4, 8, 64), (1.0, 1.05, 1.1, 1.2, 5.0)))
    policy.start(16)
    policy._sources[0].accepted[0], policy._sources[0].tried[0] = 600.0, 1000.0
    # 16 rows are bound by compute, and a pass of 32 tokens costs 1.6 of 16; alone, 4 cost 1.1.
    assert policy.depths().max() == 0
    policy.keep_rows(np.array([3]))
    assert policy.depths().tolist() == [3]


def test_measured_costs_spare_the_start() -> None:
    blind, told = CostModel(8), CostModel(8)
    told.use_costs(Costs(PLAIN, 1, 0.5, (1, 2, 9), (1.0, 1.05, 1.4)))
    for policy in (blind, told):
        policy.start(1)
    assert blind.depths().tolist() == [0]
    assert told.depths()[0] > 0
    told.observe(step([1], [0], draft_s=PLAIN / 2, pass_s=PLAIN))
    told.observe(step([1], [0], draft_s=PLAIN / 2, pass_s=PLAIN))
    assert told.depths().tolist() == [0]


def test_reading_the_prompt_is_not_what_a_draft_step_costs() -> None:
    policy = CostModel(4)
    simulate(policy, lambda _: 1.0, 60, c=0.1, prompt=2000)
    assert policy._sources[0].drafts(1) == pytest.approx(0.1 * PLAIN, rel=0.1)


@pytest.mark.parametrize("kind", [CostModel, Worth])
@pytest.mark.parametrize(("rows", "alpha"), [(1, 0.97), (8, 0.8)])
def test_a_good_drafter_is_used_in_each_text(
    kind: type[CostModel], rows: int, alpha: float
) -> None:
    """Also if no step of the first one was plain, and none can be compared with."""
    policy = kind(4)
    found = [
        simulate(policy, lambda _: alpha, 60, c=0.1, rows=rows, seed=seed)[1] for seed in range(5)
    ]
    assert max(found[1:]) < 0.8


@by_costs
def test_a_drafter_of_unknown_cost_drafts_rarely_beside_prompts(kind: type[CostModel]) -> None:
    """Passes that read prompts too tell no cost, so no draft there finds out what one costs."""
    policy = kind(4)
    policy.start(2)
    policy.observe(step([0, 0], [0, 0], pass_s=PLAIN))
    policy.observe(step([0, 0], [0, 0], pass_s=PLAIN))
    drafts = 0
    for _ in range(200):
        told = step(policy.depths().tolist(), [0, 0], pass_s=3 * PLAIN)
        told.fed_beside = 64
        policy.observe(told)
        drafts += bool(told.depths.any())
    assert 5 < drafts < 15


def test_one_disturbed_pass_is_not_believed() -> None:
    policy = CostModel(4)
    simulate(policy, lambda _: 0.9, 100, c=0.1)
    before = policy.depths()[0]
    policy.observe(step([4], [4], draft_s=0.4 * PLAIN, pass_s=100 * PLAIN))
    assert policy.depths()[0] >= before - 2 > 0


# --- what each token is worth ---------------------------------------------------------------------

CURVES = {"flat": (1, 1.01, 1.02, 1.03), "bent": (1, 1.05, 1.9, 3.6), "steep": (1, 1.9, 3.8, 7.6)}


def worth(v: Sequence[float], *, c: float, fixed: float = 0.0, rows: int = 3) -> Worth:
    """The policy for rows whose passes of 1, 2, 4 and 8 tokens per row cost v."""
    policy = Worth(3)
    policy.use_costs(Costs(PLAIN, rows, c, (1, 2, 4, 8), tuple(v), fixed=fixed))
    policy.start(rows)
    return policy


def said(confidence: Any, parents: Sequence[Sequence[int]] | None = None) -> Draft:
    """Drafts of whose nodes the drafter says so much, [B, N]."""
    values = torch.as_tensor(np.asarray(confidence), dtype=torch.float32)
    tokens, sizes = torch.full(values.shape, 5), np.full(len(values), values.shape[1])
    above = None if parents is None else torch.tensor(parents)
    return Draft(tokens, sizes, parents=above, confidence=values)


def judged(
    policy: Worth, draft: Draft, right: np.ndarray, *, draft_s: float = 0.0, curve: Any = (1, 1.9)
) -> Verification:
    """The pass over what the policy feeds of chains, of which the nodes `right`, bool [B, N], are
    accepted up to the first that is not."""
    keep = policy.kept(draft)
    if keep is not None:
        leave_out(draft, keep)
    accepted = np.minimum(right.cumprod(1).sum(1), draft.sizes)
    fed = len(right) + int(draft.sizes.sum())
    pass_s = PLAIN * float(np.interp(fed / len(right), 2 ** np.arange(len(curve)), curve))
    width = fed / len(right)
    told = step([right.shape[1]] * len(right), accepted, draft.sizes, width=width)
    told.draft, told.nodes = draft, np.broadcast_to(np.arange(right.shape[1]), right.shape)
    told.draft_steps, told.seconds = draft.went or draft.levels(), Seconds(draft_s, pass_s)
    policy.observe(told)
    return told


def closed(parents: Sequence[int]) -> list[list[int]]:
    """All sets of nodes that hold the parent of each of their nodes."""
    sets = itertools.product([False, True], repeat=len(parents))
    return [
        np.flatnonzero(some).tolist()
        for some in sets
        if all(above < 0 or some[above] for above, node in zip(parents, some, strict=True) if node)
    ]


@pytest.mark.parametrize("curve", ["flat", "bent", "steep"])
def test_the_nodes_with_the_most_tokens_per_second_are_fed(curve: str) -> None:
    """Of two trees together, against all sets of nodes, at the rate that is the best."""
    random = np.random.default_rng(0)
    parents, counts = [-1, -1, 0, 0, 2], set()
    for _ in range(12):
        policy = worth(CURVES[curve], c=0.1, rows=2)
        policy._graded[1] = random.random(policy._graded[1].shape) * 20
        policy._graded[0] = policy._graded[1] * random.random(policy._graded[1].shape)
        policy._accepted, policy._expected_of = random.random((2, 2)) * 8
        policy.depths()
        draft = said(random.random((2, 5)), [parents] * 2)
        policy._rate = 0.0
        assert policy.kept(draft) is None  # tokens without a price
        nodes = policy._fed_nodes
        assert nodes is not None
        own = (policy._accepted + 2) / (policy._expected_of + 2)
        chances = np.minimum(own[:, None] * nodes.chances, 1)
        for node in range(2, 5):
            chances[:, node] *= chances[:, parents[node]]

        def rate(one: list[int], other: list[int], policy: Worth = policy, p: Any = chances) -> Any:
            passes = policy._passes(np.array([2 + len(one) + len(other)]))
            assert passes is not None
            return (2 + p[0, one].sum() + p[1, other].sum()) / (
                policy._sources[0].drafts(3) + passes[0]
            )

        policy._rate = max(rate(*pair) for pair in itertools.product(closed(parents), repeat=2))
        policy._sources[0].asks = False
        keep = policy.kept(draft)
        keep = np.ones((2, 5), dtype=bool) if keep is None else keep
        kept = [np.flatnonzero(row).tolist() for row in keep]
        assert all(row in closed(parents) for row in kept)
        assert rate(*kept) == pytest.approx(policy._rate)
        counts.add(int(keep.sum()))
    assert len(counts) > (3 if curve != "flat" else 0)


def test_only_tokens_that_are_worth_their_price_are_fed() -> None:
    """The drafter knows which half of its tokens are right. One that is not would never pay, and
    tokens of both kinds together would not either."""
    curve, random = (1, 1.7, 3.1, 5.9), np.random.default_rng(0)
    policy, seconds, tokens, fed = worth(curve, c=0.02, rows=8), 0.0, 0.0, []
    for number in range(300):
        depth = int(policy.depths()[0])
        if not depth:
            told = step([0] * 8, [0] * 8, pass_s=PLAIN)
            policy.observe(told)
        else:
            good = random.random((8, depth)) < 0.5
            right = good & (random.random((8, depth)) < 0.95)
            confidence = np.where(good, 0.8, 0.3)
            told = judged(
                policy, said(confidence), right, draft_s=0.02 * depth * PLAIN, curve=curve
            )
        if number >= 100:
            seconds += told.seconds.draft + told.seconds.verify
            tokens += float(told.emitted.sum())
            fed.append(int(told.drafted.sum()))
    good_chance, bad_chance = policy._chances[0, [2 - LEAST, -1 - LEAST], 0]
    assert good_chance > 0.85
    assert bad_chance < 0.4
    assert np.mean(fed) == pytest.approx(4, abs=1.5)
    assert tokens / seconds * PLAIN / 8 > 1.06


def test_a_row_that_accepts_drafts_beside_one_that_does_not_and_both_come_back() -> None:
    """Past the corner of the curve only the tokens of one row pay. A row that rests is tried again
    when its own results are forgotten. The drafter says nothing."""
    curve = (1, 1.6, 2.9, 5.5)
    policy = worth(curve, c=0.02, rows=2)
    fed, shares = np.zeros(2), []
    for number in range(160):
        depth = max(int(policy.depths()[0]), 1)
        right = np.zeros((2, depth), dtype=bool)
        right[int(number >= 80)] = True
        draft = said(right)
        draft.confidence = None
        told = judged(policy, draft, right, draft_s=0.02 * depth * PLAIN, curve=curve)
        fed += told.drafted
        if number in (79, 159):
            shares.append(fed / max(fed.sum(), 1))
            fed[:] = 0
    assert shares[0][0] > 0.8
    assert shares[1][1] > 0.5


def test_a_tree_of_which_the_drafter_says_nothing_is_fed_whole() -> None:
    policy = worth(CURVES["steep"], c=0.02)
    policy.depths()
    draft = said(np.full((3, 2), 1e-3), [[-1, -1]] * 3)
    assert policy._price() > 0.1
    policy._sources[0].asks = False
    assert policy.kept(draft) is not None
    draft.confidence = None
    assert policy.kept(draft) is None


def test_a_draft_to_learn_from_has_a_node_at_least() -> None:
    """The best one. It counts as what a draft gives when it would have been fed anyway."""
    policy, acceptance = worth(CURVES["steep"], c=0.02), []
    policy._sources[0].accepted[0], policy._sources[0].tried[0] = 1.0, 20.0
    assert not policy.depths().any()
    for _ in range(100):
        policy.depths()
        policy._sources[0].asks = True
        told = judged(policy, said([[1e-3], [0.1], [1e-3]]), np.ones((3, 1), dtype=bool))
        assert told.drafted.tolist() == [0, 1, 0]
        acceptance.append(float(policy._sources[0].acceptance()[0]))
    assert min(acceptance) < 0.1
    assert acceptance[-1] > 0.3


def test_drafters_that_are_asked_in_turn_are_corrected_apart() -> None:
    """They say the same of their tokens, and one is right."""
    policy = worth(CURVES["flat"], c=0.0, rows=2)
    for _ in range(20):
        policy.depths()
        draft = said(np.full((2, 1), 0.8))
        draft.sources, draft.asked = np.array([0, 1]), [Asked(1.0, 1), Asked(1.0, 1)]
        judged(policy, draft, np.array([[True], [False]]), curve=CURVES["flat"])
    assert policy._chances[0, 2 - LEAST, 0] > 0.9
    assert policy._chances[1, 2 - LEAST, 0] < 0.2
    drafter = CompositeDrafter([NgramDrafter(), SmallLMDrafter(model("llama", seed=7, layers=1))])
    both = Worth(4)
    Decoder(model("llama"), drafter, policy=both).decode(PROMPTS, 40)
    assert both._graded[1].sum((1, 2)).astype(bool).tolist() == [True, True, False]
    assert [bool(source.drafts.known) for source in both._sources] == [True, True]


def test_where_heads_end_the_deeper_nodes_of_lookup_are_no_nodes_of_theirs() -> None:
    """Eight rows: lookup finds three tokens for one of them, and heads end after their first."""
    policy = worth(CURVES["flat"], c=0.3, rows=8)
    heads = policy._source(1)
    for _ in range(3):
        policy.depths()
        heads.asks = False
        assert not policy.grows(1, torch.full((8, 1), 0.01), None, 1)
        draft = said(np.full((8, 3), 0.9))
        draft.sources, sizes = np.array([0] + [1] * 7), np.array([3] + [1] * 7)
        draft.asked = [Asked(1.0, 3), Asked(1.0, 1)]
        draft.cut(sizes)
        judged(policy, draft, np.ones((8, 3), dtype=bool), curve=CURVES["flat"])
    assert heads.nodes().max() <= 1


def test_drafts_that_are_seen_say_what_a_level_takes() -> None:
    """What was measured before was of another drafter too, and heads never go four deep."""
    policy = Worth(4)
    policy.use_costs(Costs(PLAIN, 1, 0.05, (1, 2), (1.0, 1.1)))
    policy.start(1)
    heads = policy._source(1)
    heads.new_text, heads.waited = False, 0.0
    for _ in range(20):
        heads.see_seconds(0.4 * PLAIN, 3)
        heads.see_seconds(0.2 * PLAIN, 1)
    assert heads.drafts(3) - heads.drafts(1) == pytest.approx(0.2 * PLAIN, rel=0.2)


def lookup(alpha: float = 0.9, finds: float = 0.4) -> Made:
    return Made(lambda _: alpha, 0.0, 0.02, finds=finds, says=None)


@by_costs
def test_heads_rest_while_lookup_goes_on(kind: type[CostModel]) -> None:
    """Theirs would cost more than it brings in the rows that lookup leaves them."""
    for seed in range(2):
        both = [lookup(), Made(lambda _: 0.2, 0.3)]
        taken, cost = decode_made(kind(4), both, 600, rows=8, seed=seed)
        late = sum(at > 100 for at, *_ in taken)
        looked, headed = (sum(at > 100 for at in one.asked) for one in both)
        assert looked > 0.9 * late
        assert headed < 0.1 * late
        # Probes cost a small share of plain decoding, which takes twice as long.
        _, alone = decode_made(kind(4), [lookup()], 600, rows=8, seed=seed)
        assert cost < 1.1 * alone < 0.9


@by_costs
def test_heads_that_become_good_come_back_beside_lookup(kind: type[CostModel]) -> None:
    both = [lookup(), Made(lambda at: 0.9 * (at >= 300), 0.1)]
    taken, _ = decode_made(kind(4), both, 500, rows=8)
    early, late = (sum(a < at < a + 200 for at, *_ in taken) for a in (100, 400))
    # A probe of a drafter that is this quick costs little.
    assert sum(100 < at < 300 for at in both[1].asked) < 0.25 * early
    assert sum(400 < at < 600 for at in both[1].asked) > 0.85 * late


@by_costs
def test_lookup_that_is_wrong_rests_while_heads_go_on(kind: type[CostModel]) -> None:
    """What it finds would else keep the rows from heads."""
    both = [lookup(alpha=0.0, finds=0.9), Made(lambda _: 0.9, 0.1)]
    taken, cost = decode_made(kind(4), both, 600, rows=8)
    late = sum(at > 100 for at, *_ in taken)
    looked, headed = (sum(at > 100 for at in one.asked) for one in both)
    assert looked < 0.1 * late
    assert headed > 0.9 * late
    _, alone = decode_made(kind(4), [Made(lambda _: 0.9, 0.1)], 600, rows=8)
    assert cost < 1.1 * alone < 0.8


def test_drafts_grow_while_another_level_is_worth_its_time() -> None:
    """The more rows may still accept something, the sooner it is."""
    policy = worth(CURVES["flat"], c=0.3, rows=2)
    policy._sources[0].accepted[:2], policy._sources[0].tried[:2] = 7.0, 10.0
    policy.depths()
    policy._sources[0].asks = False

    def grows(*sure: float) -> bool:
        policy._sources[0].ended = 3
        found = policy.grows(1, torch.tensor(sure)[:, None], None)
        assert policy._sources[0].ended == (3 if found else 1)
        return found

    # A level costs 0.3 plain steps, in which the two rows would get 0.6 tokens or more. A token
    # after one of which the chance is c is accepted with chance 0.7 c.
    assert grows(0.99, 0.99)
    assert not grows(0.99, 0.01)
    assert not grows(0.2, 0.2)
    # Then the average decides no more how deep drafts may be.
    assert policy.depths().tolist() == [3, 3]
    policy._sources[0].asks = True
    assert policy.grows(1, torch.tensor([[0.01], [0.01]]), None)


class Shallow(Fixed):
    """Lets no draft have a third level."""

    weighs = True

    def grows(self, depth: int, confidence: torch.Tensor, *of: Any) -> bool:
        parents, source = of
        assert not source
        assert confidence.shape[1] == (1 if parents is None else parents.shape[1])
        assert 0 < confidence.max() <= 1
        return depth < 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "shape",
    [
        "chain",
        "dynamic:width=2,nodes=9",
        "static:widths=[2,1,1]",
        "static:widths=[1,2,1],draw=distinct",
    ],
)
def test_drafts_of_all_shapes_end_where_they_should(shape: str, temperature: float) -> None:
    sampling = Sampling(temperature)
    plain = Decoder(model("llama"), None, sampling=sampling).decode(PROMPTS, 24, seed=2)
    drafter = SmallLMDrafter(model("llama"), shape=SHAPES.make(shape))  # the target itself
    found = Decoder(
        model("llama"), drafter, policy=Shallow(4), sampling=sampling, rule="exact"
    ).decode(PROMPTS, 24, seed=2)
    assert found.outputs == plain.outputs
    assert max(step.draft_steps for step in found.steps) == 2
    assert max(int(step.accepted.max()) for step in found.steps) == 2


class Half(Fixed):
    """Feeds the first half of the nodes."""

    def kept(self, draft: Draft) -> np.ndarray:
        half = (draft.sizes + 1) // 2
        kept: np.ndarray = np.arange(draft.tokens.shape[1]) < half[:, None]
        return kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [False, True])
def test_what_is_left_out_of_chosen_drafts_does_not_change_the_text_of_a_seed(
    temperature: float, tree: bool
) -> None:
    """Chosen tokens are judged by exact match, so a text depends on its seed alone."""
    sampling = Sampling(temperature, top_k=2)  # so that texts repeat themselves
    prompts = [[11, 12, 13] * 4, [5, 6] * 5, [9, 8, 7, 9, 8, 7], [3]]
    plain = Decoder(model("llama"), None, sampling=sampling).decode(prompts, 40, seed=3)
    shape = SHAPES["dynamic"](width=3, nodes=12)
    drafter = SmallLMDrafter(model("llama", seed=7, layers=1), shape=shape)
    drafted = Decoder(
        model("llama"), drafter if tree else NgramDrafter(), sampling=sampling, policy=Half(4)
    )
    found = drafted.decode(prompts, 40, seed=3)
    assert found.outputs == plain.outputs
    assert sum(int(step.drafted.sum()) for step in found.steps) > 0
