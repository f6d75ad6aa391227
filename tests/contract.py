"""What every drafter promises, as checks, and how one of each kind is built.

`test_drafter_contract` and `test_heads_contract` run the checks on all kinds. A drafter that is
registered and has no recipe here fails there by name.

Shapes: B rows, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.grammar import GrammarDrafter
from decode.drafters.lookup.lookahead import LookaheadDrafter
from decode.drafters.lookup.max_gram import MaxGramDrafter
from decode.drafters.lookup.ngram import NgramDrafter, StoreDrafter
from decode.drafters.lookup.suffix import SuffixDrafter
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.several.routed import RoutedDrafter
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.sparse import SparseDrafter
from decode.drafters.swift import SwiftDrafter
from decode.drafters.tokenizers.retokenised import RetokenisedDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.loading import Target
from decode.rules import RULES
from decode.shapes import SHAPES, Chain, Shape
from decode.shapes.static import Static
from heads.heads_directory import new_heads
from heads.kinds import HEADS
from heads.options import HeadOptions
from tests.lossless import (
    CONSTRAINED,
    DEEPER,
    LONGER,
    PENALISED,
    PROCESSED,
    Case,
    FixedDraft,
    Pairs,
    decode_runs,
    looked_up,
    lookup_and_cascade,
    merged,
    parallel_lm,
    small_lm,
    through_transformers,
)
from tests.other_tokenizers import shared_small_lm, text_small_lm
from tests.tiny import finish, moved

NEW = 14
WINDOW = SlidingWindow(4, sinks=1)
PROMPTS = [
    np.random.default_rng(length).integers(0, 4, length).tolist()
    for length in (3, 1, 17, 6, 40, 2, 9, 5)
]
LIMITS = [NEW, 1, NEW, 5, 2 * NEW, NEW, 3, NEW]
# The steps before rows join, and how many join together.
ARRIVALS = [(0, 2), (2, 1), (1, 3), (0, 1), (4, 1)]
SAMPLINGS = [
    Sampling(1.0, top_p=0.98),
    Sampling(),
    Sampling(0.7, top_k=3),
    Sampling(1.0, top_p=0.98),
    Sampling(repetition_penalty=1.5),
    Sampling(1.3, min_p=0.1),
    Sampling(),
    Sampling(0.9, repetition_penalty=1.3),
]
GREEDY = [row for row, sampling in enumerate(SAMPLINGS) if sampling == Sampling()]
SETTINGS = [RowSettings(sampling, seed=90 - row) for row, sampling in enumerate(SAMPLINGS)]
CASES = {
    "plain": LONGER,
    "penalised": PENALISED,
    "processed": PROCESSED,
    "constrained": CONSTRAINED,
    "deeper": DEEPER,
    "through transformers": through_transformers(LONGER),
}

# The options of each kind of heads, for a target of two layers.
HEAD_OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"type": "medusa", "heads": 3},
    "blockwise": {"type": "blockwise", "k": 4},
    "hydra": {"type": "hydra", "heads": 3},
    "hydra_plus": {"type": "hydra_plus", "heads": 3, "layers": 2},
    "eagle1": {"type": "eagle1", "depth": 3},
    "eagle3": {"type": "eagle3", "steps": 3, "output_rank": 3},
    "p_eagle": {"type": "p_eagle", "tokens": 3, "layers": 2},
    "pass": {"type": "pass", "tokens": 2},
    # Any token may be the mask: what is drafted then is worse, not wrong.
    "dflash": {"type": "dflash", "layers": 2, "block": 4, "taps": [0], "mask_token": 2},
    "dspark": {"type": "dspark", "layers": 1, "block": 3, "taps": [0], "mask_token": 2, "rank": 4},
    "dflash2": {"type": "dflash2", "layers": 1, "block": 4, "taps": [0], "mask_token": 2}
    | {"group": 8, "rank": 4, "candidates": 2},
    "xpress": {"type": "xpress", "layers": 1, "block": 4, "taps": [0], "mask_token": 2, "rank": 4},
    "domino": {"type": "domino", "layers": 1, "block": 3, "taps": [0], "mask_token": 2}
    | {"gru": 5, "rank": 4},
    "kangaroo": {"type": "kangaroo", "exit_layer": 1, "depth": 3},
    "mtp": {"type": "mtp", "depth": 3},
}


def static(draw: Any = "distinct") -> Static:
    return Static(widths=[2, 2, 1], draw=draw)


def options_for_tokens(kind: str) -> dict[str, Any]:
    """`HEAD_OPTIONS` for a target that has ids that are no tokens, of which one is the mask."""
    return {name: x for name, x in HEAD_OPTIONS[kind].items() if name != "mask_token"}


def moved_heads(
    options: dict[str, Any], target: Target, ids: Tensor | None = None, by: float = 0.2
) -> Any:
    """Heads that are no longer as they start: every weight counts. ids: the draft vocabulary."""
    torch.manual_seed(3)
    heads = new_heads(HeadOptions.of(options), target, ids)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += by * torch.randn(parameter.shape)
    return heads


def heads_drafter(kind: str, shape: Shape | None = None, case: Case = LONGER) -> Drafter:
    return heads_on(case.model(0.0), kind, case.vocab, shape)


def heads_on(lm: Any, kind: str, vocab: int, shape: Shape | None = None) -> Drafter:
    """A drafter with untrained heads. Those guess the token before; these are moved so that they
    guess more than that."""
    options = HeadOptions.of(HEAD_OPTIONS[kind])
    made: Any = HEADS[options.type](options, lm)  # type: ignore[call-arg]
    made.init_weights(lm)
    moved(made, 0.2, seed=5, which=lambda name, _: not name.startswith("output."))
    made.to(lm.dtype).borrow(lm)
    build: Any = DRAFTERS[kind]
    found: Drafter = build(made, vocab, shape)
    return found


def few_slots() -> SparseDrafter:
    """The target over so few of its keys and values that it is often wrong."""
    return SparseDrafter(sinks=1, recent=1, chunk=1, budget=3, every=2)


def vertical(case: Case, **options: Any) -> VerticalCascade:
    """A cascade whose inner drafts are often wrong."""
    inner = SmallLMDrafter(case.model(0.6))
    return VerticalCascade(small_lm(case=case), inner, **({"gamma": 2} | options))


def shaped(case: Case, shape: str, **options: Any) -> Drafter:
    return small_lm(case=case).with_shape(SHAPES[shape](**options))


class RoutedByFirst(RoutedDrafter):
    """By the first token of a text, because the rows here have no labels."""

    def routes_of(self, contexts: Contexts) -> np.ndarray:
        routes: np.ndarray = contexts.tokens[:, 0] % 2
        return routes


# How each kind is built for a case.
RECIPES: dict[str, Callable[[Case], Drafter]] = {
    "none": lambda case: DRAFTERS["none"](),
    "chain": lambda case: small_lm(case=case),
    "tree": lambda case: small_lm("distinct", case),
    "independent": lambda case: small_lm("independent", case),
    "the likeliest paths": lambda case: shaped(case, "dynamic", width=4, nodes=40),
    "two chains": lambda case: shaped(case, "chains", chains=2, budget=6),
    "planned tree": lambda case: shaped(case, "sequoia", acceptance=[0.5, 0.3, 0.1], nodes=6),
    "measured tree": lambda case: shaped(
        case, "calibrated", table=[[0.6, 0.3], [0.5, 0.2], [0.4, 0.1]], nodes=6, draw="independent"
    ),
    "windows": lambda case: small_lm(case=case).with_window(WINDOW),
    "parallel": lambda case: parallel_lm(case=case),
    "parallel tree": lambda case: parallel_lm("distinct", case),
    "skip": lambda case: SkipDrafter(attention=1),
    "first layers": lambda case: SkipDrafter(exit=1),
    "skip tree": lambda case: SkipDrafter(mlp="0").with_shape(static()),
    "few slots": lambda case: few_slots(),
    "tree of few slots": lambda case: few_slots().with_shape(Pairs("distinct")),
    "changing layers": lambda case: SwiftDrafter(window=4, every=2),
    "tree of changing layers": lambda case: SwiftDrafter(window=4, every=2).with_shape(
        Pairs("distinct")
    ),
    "shared tokens": shared_small_lm,
    "pairs of shared tokens": lambda case: shared_small_lm(case).with_shape(Pairs("distinct")),
    "text": text_small_lm,
    "grammar": lambda case: GrammarDrafter(),
    "ngram": lambda case: NgramDrafter(1, 2),
    "longest match": lambda case: MaxGramDrafter(),
    "texts of all rows": lambda case: StoreDrafter(1, 2),
    # Without the outputs of others: sampled texts would depend on them.
    "suffix alone": lambda case: SuffixDrafter(max_cached_requests=0, min_token_prob=0.0),
    "suffix": lambda case: SuffixDrafter(min_token_prob=0.0, max_spec_factor=4.0),
    "suffix tree": lambda case: SuffixDrafter(tree_nodes=6, min_token_prob=0.0, max_spec_offset=5),
    "datastore": looked_up,
    "chain of a datastore": lambda case: looked_up(case).with_shape(Chain()),
    "lookahead": lambda case: LookaheadDrafter(3, 4, 3),
    "in turn": lambda case: CompositeDrafter([NgramDrafter(1, 2), small_lm(case=case)]),
    "merged models": lambda case: merged(SmallLMDrafter(case.model(0.6)), case=case),
    "merged with lookup": lambda case: merged(NgramDrafter(1, 2), case=case),
    "forced or a model": lambda case: merged(GrammarDrafter(), case=case),
    "vertical": vertical,
    "vertical in blocks": lambda case: vertical(case, rule="block", rounds=1),
    "vertical of three": lambda case: VerticalCascade(small_lm(case=case), vertical(case), gamma=2),
    "vertical of few slots": lambda case: VerticalCascade(
        few_slots(), small_lm(case=case), gamma=2
    ),
    "horizontal": lambda case: HorizontalCascade(small_lm(case=case), NgramDrafter(1, 2), depth=2),
    "horizontal models": lambda case: HorizontalCascade(
        small_lm(case=case), SmallLMDrafter(case.model(0.6)), depth=1
    ),
    "lookup or horizontal": lambda case: CompositeDrafter(lookup_and_cascade(case)),
    "routed": lambda case: RoutedByFirst([small_lm(case=case), NgramDrafter(1, 2)], "ab"),
    "lookup, then skip": lambda case: CompositeDrafter([NgramDrafter(3, 3), SkipDrafter(mlp="0")]),
    "lookup, then few slots": lambda case: CompositeDrafter([NgramDrafter(3, 3), few_slots()]),
    # Drafters inside other drafters, whose states have to go together.
    "routed cascades": lambda case: RoutedByFirst(
        [HorizontalCascade(small_lm(case=case), NgramDrafter()), LookaheadDrafter(3, 3, 2)], "ab"
    ),
    "lookahead and parallel": lambda case: SeveralDrafters(
        [LookaheadDrafter(3, 3, 2), parallel_lm(case=case)]
    ),
    "skip, then parallel": lambda case: HorizontalCascade(
        SkipDrafter(mlp="0"), parallel_lm(case=case), depth=2
    ),
    "cascade of cascades": lambda case: VerticalCascade(
        small_lm(case=case),
        HorizontalCascade(parallel_lm(case=case), MaxGramDrafter(), depth=2),
        gamma=3,
    ),
}
# The kinds of drafters with heads that tests outside the contract of heads use too.
HEAD_RECIPES: dict[str, Callable[[Case], Drafter]] = {
    "medusa": lambda case: heads_drafter("medusa", None, case),
    "hydra": lambda case: heads_drafter("hydra", static(), case),
    "hydra_plus": lambda case: heads_drafter("hydra_plus", static(), case),
    "eagle1": lambda case: heads_drafter("eagle1", None, case),
    "eagle1 tree": lambda case: heads_drafter("eagle1", static(), case),
    "dflash": lambda case: heads_drafter("dflash", None, case),
    "kangaroo": lambda case: heads_drafter("kangaroo", static(), case),
    "pass": lambda case: heads_drafter("pass", static(), case),
    "heads with windows": lambda case: heads_drafter("eagle1", static(), case).with_window(WINDOW),
    "blocks with windows": lambda case: heads_drafter("dflash", None, case).with_window(WINDOW),
    "heads, then lookup": lambda case: HorizontalCascade(
        heads_drafter("eagle1", None, case), NgramDrafter(1, 2), depth=4
    ),
    "medusa, then a model": lambda case: HorizontalCascade(
        heads_drafter("medusa", None, case), small_lm(case=case), depth=2
    ),
}
# Those that need a layer between the first and the last.
OF_THREE_LAYERS = ("changing layers", "tree of changing layers")


# Those that draft nothing in rows without a grammar.
DRAFTS_NOTHING = ("none", "grammar")


# Drafters that are named otherwise than by a registered drafter.
NAMES: dict[type[Drafter], str] = {
    CompositeDrafter: "A+B",
    SeveralDrafters: "A++B",
    VerticalCascade: "vertical",
    HorizontalCascade: "horizontal",
    RoutedByFirst: "routed",
    RetokenisedDrafter: "vocabulary=text",
    FixedDraft: "FixedDraft",
}


def name_of(drafter: Drafter) -> str:
    """The name that the drafter is registered by, or the one in `NAMES`."""
    registered = [name for name in DRAFTERS if DRAFTERS[name] is type(drafter)]
    return registered[0] if registered else NAMES[type(drafter)]


def drafts_nothing(drafter: Drafter) -> bool:
    """Whether it may leave every row of plain text without a draft."""
    return type(drafter) in [DRAFTERS[name] for name in DRAFTS_NOTHING]


def recipe(kind: str, case: Case = LONGER) -> Drafter:
    return (RECIPES | HEAD_RECIPES)[kind](case)


def case_of(kind: str) -> Case:
    return DEEPER if kind in OF_THREE_LAYERS else LONGER


def decoder(drafter: Drafter, case: Case = LONGER, **options: Any) -> Decoder:
    return Decoder(case.model(0.0), drafter, **({"gamma": 3} | options))


def alone(which: Decoder, limits: Sequence[int] = LIMITS) -> list[list[int]]:
    return [
        which.decode([prompt], limit, row_ids=[row], seed=3).outputs[0]
        for row, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]


def staggered(
    which: Decoder,
    limits: Sequence[int] = LIMITS,
    settings: Sequence[RowSettings | None] = (None,) * len(PROMPTS),
    **options: Any,
) -> Decoding:
    """All prompts, joining at different steps: some while others run, some when all have ended."""
    decoding = Decoding(which, seed=3, **options)
    for wait, count in ARRIVALS:
        for _ in range(wait):
            if not decoding.finished:
                decoding.step()
        for row in range(len(decoding.outputs), len(decoding.outputs) + count):
            one = settings[row]
            more = {} if one is None else {"settings": one}
            assert decoding.admit([PROMPTS[row]], limits[row], **more) == [row]
    finish(decoding)
    return decoding


def each_with_its_settings(
    drafter: Drafter, case: Case = LONGER, **options: Any
) -> list[list[int]]:
    """The texts of all rows, each in a decoder with its sampling. Greedy ones are the target's."""
    texts = []
    for row, (prompt, one) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        if row in GREEDY:
            texts.append(plain_texts(case)[row][: LIMITS[row]])
            continue
        which = decoder(drafter, case, sampling=one.sampling, **options)
        texts += which.decode([prompt], LIMITS[row], row_ids=[row], seed=one.seed).outputs
    return texts


@functools.cache
def plain_texts(case: Case) -> list[list[int]]:
    """The target's own greedy texts."""
    return decoder(DRAFTERS["none"](), case).decode(PROMPTS, max(LIMITS)).outputs


# --- the checks -----------------------------------------------------------------------------------


def check_rows_are_their_own(make: Callable[[], Drafter], case: Case = LONGER) -> None:
    """Rows join and leave, and have samplings of their own. A greedy text is the target's, and a
    sampled one is that of the row alone, unless drafts depend on other rows."""
    drafter = make()
    # Memory for the longest texts from the start is what other tests have; here it grows.
    run = staggered(decoder(drafter, case), LIMITS, SETTINGS, ahead=1)
    outputs, plain = run.result().outputs, plain_texts(case)
    assert all(outputs[row] == plain[row][: LIMITS[row]] for row in GREEDY)
    if not drafter.learns:
        assert outputs == each_with_its_settings(drafter, case)
    # Rows side by side, and drafts that are accepted: or nothing was tried.
    assert max(len(step.rows) for step in run.steps) > 3
    assert drafts_nothing(drafter) or run.result().counts.accepted.sum() > 5


def check_greedy_texts_survive_everything(make: Callable[[], Drafter], case: Case = LONGER) -> None:
    """Prompts that are read in parts, beginnings that are known, steps of some rows only, steps
    without drafts, and another drafter of the kind in the middle."""
    plain = [text[:NEW] for text in plain_texts(case)]
    which = decoder(make(), case, prefixes=PrefixCache(10**7), first_target=False)
    # The first half of a prompt that is read in parts is then known to the prefix cache.
    which.decode([*PROMPTS[:3], PROMPTS[4][:20]], 2)
    decoding = Decoding(which)
    for prompt in PROMPTS[:3]:
        decoding.admit([prompt], NEW)
        decoding.step()
    decoding.set(drafter=make())
    waits = decoding.begin(PROMPTS[3:5], NEW)
    # The hidden states of a row come once and in order, so no such row sits out.
    most = np.where(np.arange(len(decoding.rows)) % 2 == 0, 3, -1)
    decoding.step(None if which.drafter.captured_layers else most)
    decoding.read(waits[0], 4)
    decoding.step(0)
    decoding.read(waits[0])
    decoding.admit(PROMPTS[5:], NEW)
    finish(decoding)
    assert decoding.result().outputs == plain
    assert drafts_nothing(which.drafter) or decoding.result().counts.accepted.sum()


def check_law(drafter: Drafter, rule: str, case: Case, rows: int = 4_000, **options: Any) -> None:
    """Texts have the exact joint distribution: prompts of different lengths, drafts several deep,
    several rounds, and texts that end inside a block."""
    found, runs = decode_runs(drafter, RULES[rule](), rows=rows, case=case, **options)
    assert found.passes, found
    assert found.df > 60
    (run,) = runs
    assert run.counts.by_accepted[2:].sum() / run.counts.steps > 0.001
    assert len(run.steps) >= 3
    if case.eos:
        cut = sum(int((step.emitted <= step.accepted).sum()) for step in run.steps)
        assert cut / rows > 0.02


def check_forgets(make: Callable[[], Drafter], case: Case = LONGER) -> None:
    """After `forget` it drafts as a new one does, and before it does not, if it learns."""

    def accepted(which: Decoder) -> list[list[int]]:
        decoded = which.decode(PROMPTS, 2 * NEW)
        return [[*step.drafted.tolist(), *step.accepted.tolist()] for step in decoded.steps]

    which = decoder(make(), case)
    first, second = accepted(which), accepted(which)
    which.drafter.forget()
    again = accepted(decoder(which.drafter, case))
    assert again == first
    assert which.drafter.learns or second == first


def check_stored(
    drafter: Drafter, stored: Drafter, target: Any, prompts: Sequence[Sequence[int]]
) -> None:
    """A drafter from its directory drafts what the one that was saved drafts."""
    plain, *runs = (
        Decoder(target, each, gamma=3).decode(prompts, NEW)
        for each in (DRAFTERS["none"](), drafter, stored)
    )
    assert plain.outputs == runs[0].outputs == runs[1].outputs
    assert runs[0].counts.drafted.tolist() == runs[1].counts.drafted.tolist()
    assert runs[0].counts.accepted.tolist() == runs[1].counts.accepted.tolist()
