"""The negative controls of losslessness: errors that the tests must find. How surely they do is
printed by `python -m tools.controls`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.drafters import Drafter
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.several.cascade import VerticalCascade
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.sparse import SparseDrafter
from decode.rules import RULES, Rule
from decode.rules.speculative import SpeculativeSampling
from heads.parallel_heads import MedusaDrafter
from tests.lossless import (
    COUNTED,
    LONGER,
    PENALISED,
    SHALLOW,
    SHORT,
    Case,
    Fit,
    decode,
    lookup_and_cascade,
    merged,
    model,
    small_lm,
)
from tests.mutants import (
    BonusOffByOne,
    ChoosingDrafter,
    ClampedRatio,
    ColdDrafter,
    DroppingDrafter,
    FirstReject,
    ForgottenRows,
    JudgedAsDistinct,
    LenientCascade,
    NeverCopied,
    NotRenormalised,
    NotRestricted,
    SharedCascade,
    SharedStreams,
    StaleCache,
    TakenForOneQ,
    WrongResidualRow,
    path_one_slot_off,
    processors_see_the_row,
)
from tests.other_tokenizers import shared_small_lm

Making = Callable[[], Any]


@dataclass(frozen=True)
class Setup:
    """What decodes. breaking: a context in which a part of the loop itself is faulty."""

    drafter: Callable[[], Drafter]
    rule: Callable[[], Rule]
    breaking: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Found:
    """total_variation: of the texts and the exact law."""

    statistic: float
    limit: float
    total_variation: float

    @classmethod
    def of(cls, fit: Fit) -> "Found":
        """By χ², which is ∞ if a text has probability 0."""
        statistic = np.inf if fit.impossible else fit.chi2
        return cls(statistic, fit.limit, fit.total_variation)

    @property
    def rejected(self) -> bool:
        return not self.statistic < self.limit


@dataclass(frozen=True)
class Control:
    """sound and faulty differ by the error only. rows: texts per seed. The tests of
    losslessness decode more of them where a case is short, and in their longer forms
    (`make test-thorough`)."""

    name: str
    case: Case
    rows: int
    sound: Setup
    faulty: Setup

    statistic = "chi-square of texts"

    def find(self, setup: Setup, seed: int) -> Found:
        with setup.breaking():
            found, _ = decode(
                setup.drafter(), setup.rule(), rows=self.rows, seed=seed, case=self.case
            )
        return Found.of(found)


class OfDrafting(Control):
    """For errors that cannot show in a text, as q is declared as it is: the drafter is the target,
    so that every token it drafts is accepted."""

    statistic = "rejected share of a drafter that is the target"

    def find(self, setup: Setup, seed: int) -> Found:
        with setup.breaking():
            found, counts = decode(
                setup.drafter(), setup.rule(), rows=self.rows, seed=seed, case=self.case
            )
        return Found(1 - counts.acceptance_rate, 1e-3, found.total_variation)


@dataclass(frozen=True)
class LearningControl:
    """The drafters of tests that learn while they draft, without and with an error. make: the
    tests' own function, of a kind of drafter and a seed. rows: texts per seed."""

    name: str
    rows: int
    make: Callable[..., Any]
    sound: type[Drafter]
    faulty: type[Drafter]

    statistic = Control.statistic

    def find(self, kind: type[Drafter], seed: int) -> Found:
        return Found.of(self.make(kind, seed).run(self.rows, seed))


def _of_rule(
    name: str, faulty: Making, drafter: Making, rows: int, sound: str, case: Case = SHORT
) -> Control:
    return Control(name, case, rows, Setup(drafter, lambda: RULES[sound]()), Setup(drafter, faulty))


def _of_loop(
    name: str, breaking: Making, drafter: Making, rows: int, rule: str, case: Case
) -> Control:
    sound = Setup(drafter, lambda: RULES[rule]())
    return Control(name, case, rows, sound, Setup(sound.drafter, sound.rule, breaking))


def _of_drafter(
    name: str, faulty: Making, sound: Making, rows: int, case: Case, kind: type[Control] = Control
) -> Control:
    setups = (Setup(drafter, SpeculativeSampling) for drafter in (sound, faulty))
    return kind(name, case, rows, *setups)


def _pairs(siblings: Any, case: Case = SHORT) -> Making:
    return lambda: small_lm(siblings, case)


def _two_models() -> Drafter:
    return merged(SmallLMDrafter(LONGER.model(0.6)), case=LONGER)


def _lookup_and_model() -> Drafter:
    return merged(NgramDrafter(1, 2), case=LONGER)


def _small_and_smaller() -> tuple[SmallLMDrafter, SmallLMDrafter]:
    return small_lm(case=LONGER), SmallLMDrafter(LONGER.model(0.6))


CONTROLS = [
    _of_drafter(
        "q of another temperature", lambda: ColdDrafter(model(0.2)), small_lm, 20_000, SHORT
    ),
    _of_drafter(
        "q of a draw, but the likeliest token is drafted",
        lambda: ChoosingDrafter(model(0.2)),
        small_lm,
        3_000,
        SHORT,
    ),
    _of_drafter(
        "drawn tokens dropped for their own q",
        lambda: DroppingDrafter(model(0.2)),
        small_lm,
        8_000,
        SHORT,
    ),
    _of_drafter(
        "q of shared tokens, not renormalised",
        lambda: shared_small_lm(kind=NotRestricted),
        shared_small_lm,
        6_000,
        LONGER,
    ),
    _of_rule("residual of the wrong row", WrongResidualRow, small_lm, 10_000, "speculative"),
    _of_rule("bonus of the wrong row", BonusOffByOne, small_lm, 5_000, "speculative"),
    _of_rule("q clamped from below", ClampedRatio, small_lm, 25_000, "speculative"),
    _of_rule("block ends at the first rejection", FirstReject, small_lm, 6_000, "block"),
    _of_rule(
        "distinct siblings, q not renormalised",
        lambda: NotRenormalised("traversal"),
        _pairs("distinct"),
        10_000,
        "traversal",
    ),
    _of_rule(
        "independent siblings judged as distinct",
        lambda: JudgedAsDistinct("multi_round"),
        _pairs("independent"),
        15_000,
        "multi_round",
    ),
    _of_rule(
        "mixed siblings of two models, one q for all",
        lambda: TakenForOneQ("spectr"),
        _two_models,
        1_500,
        "multi_round",
        LONGER,
    ),
    _of_rule(
        "mixed siblings of lookup and a model, one q for all",
        lambda: TakenForOneQ("spectr"),
        _lookup_and_model,
        1_500,
        "traversal",
        LONGER,
    ),
    _of_rule(
        "accepted by the numbers it was drawn with",
        lambda: SharedStreams("speculative"),
        _pairs(None, LONGER),
        3_000,
        "speculative",
        LONGER,
    ),
    _of_loop(
        "path committed one slot off",
        path_one_slot_off,
        _pairs("independent", LONGER),
        1_500,
        "multi_round",
        LONGER,
    ),
    _of_loop(
        "processors see the row's text, not the path's",
        processors_see_the_row,
        _pairs(None, PENALISED),
        9_000,
        "speculative",
        PENALISED,
    ),
    _of_loop(
        "penalties count the row's tokens, not the path's",
        processors_see_the_row,
        _pairs(None, COUNTED),
        1_500,
        "speculative",
        COUNTED,
    ),
    _of_drafter(
        "a cascade's inner rule with the numbers of the target's",
        lambda: SharedCascade(*_small_and_smaller()),
        lambda: VerticalCascade(*_small_and_smaller()),
        16_000,
        LONGER,
    ),
    _of_drafter(
        "a cascade's inner rule lossy",
        lambda: LenientCascade(*_small_and_smaller(), lenience=0.3),
        lambda: VerticalCascade(*_small_and_smaller()),
        1_500,
        LONGER,
    ),
    _of_drafter(
        "the row of q of the place, not of the drafter",
        lambda: ForgottenRows(lookup_and_cascade()),
        lambda: CompositeDrafter(lookup_and_cascade()),
        1_500,
        LONGER,
    ),
    _of_drafter(
        "drafter's cache stale after full acceptance",
        lambda: StaleCache(LONGER.model(0.0)),
        lambda: SmallLMDrafter(LONGER.model(0.0)),
        1_000,
        SHALLOW,
        OfDrafting,
    ),
    _of_drafter(
        "a part of the cache without the newest tokens",
        lambda: NeverCopied(budget=140),
        lambda: SparseDrafter(budget=140),
        1_000,
        SHALLOW,
        OfDrafting,
    ),
]


def learning_controls() -> list[LearningControl]:
    # Their modules take seconds to import.
    from tests import test_online, test_online_heads

    name = "q of the weights before the last swap"
    return [
        LearningControl(
            f"{name}, small_lm", 20_000, test_online.learning, SmallLMDrafter, test_online.OldQ
        ),
        LearningControl(
            f"{name}, medusa",
            100_000,
            lambda kind, seed: test_online_heads.learning("medusa", seed, kind),
            MedusaDrafter,
            test_online_heads.declaring_old_q(MedusaDrafter),
        ),
    ]


def enumerated() -> dict[str, Callable[[str], float]]:
    """The errors whose outcomes tests enumerate, and what computes their total variation."""
    from tests import test_cascade, test_rules, test_shapes_lossless

    return {
        **dict.fromkeys(test_rules.ERRORS, test_rules.variation),
        **dict.fromkeys(
            test_shapes_lossless.SPECTR_ON_MERGED, test_shapes_lossless.variation_of_merged
        ),
        **dict.fromkeys(
            test_shapes_lossless.CHANGED_CHAINS, test_shapes_lossless.variation_of_chains
        ),
        **dict.fromkeys(test_cascade.LENIENT_INSIDE, test_cascade.variation_of_lenient),
    }
