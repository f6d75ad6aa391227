"""The drafter of a row by its label or by what was measured, and drafters that learn each from the
rows that they draft."""

import copy
from collections.abc import Sequence

import numpy as np
import pytest

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import NoDrafter
from decode.drafters.several.combined import CompositeDrafter
from decode.drafters.several.routed import RoutedDrafter
from decode.drafters.several.routing import ByAcceptance, ByLabel
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoded, Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.opening.directory import open_drafter
from tests.lossless import FixedDraft
from tests.test_online import pair, prompts_of
from tests.tiny import finish, tiny_target
from train.online.learning import Online

LABELS = ["de", None, "code", "fr", "de", "code"]


def settings(labels: Sequence[str | None]) -> list[RowSettings]:
    return [RowSettings(label=label) for label in labels]


def drafters(count: int) -> list[SmallLMDrafter]:
    return [SmallLMDrafter(copy.deepcopy(pair()[1]).requires_grad_(False)) for _ in range(count)]


def test_a_row_goes_where_its_label_says() -> None:
    """Also where rows join and leave, and without a label to the first drafter."""
    router = RoutedDrafter(drafters(3), ByLabel(["en", "de", "code"]))
    expected = dict(enumerate([1, 0, 2, 0, 1, 2]))
    seen: list[tuple[int, int]] = []
    decoder = Decoder(
        pair()[0],
        router,
        gamma=2,
        observers=[lambda step: seen.extend(zip(step.rows, router.routes, strict=True))],
    )
    decoding, prompts = Decoding(decoder), prompts_of(len(LABELS))
    decoding.admit(prompts[:1], 4, settings=settings(LABELS)[0])
    decoding.step()
    decoding.admit(prompts[1:4], [3, 9, 12], settings=settings(LABELS)[1:4])
    decoding.step()
    decoding.admit(prompts[4:], 8, settings=settings(LABELS)[4:])
    decoding.set(drafter=router)  # starts anew with the running texts, and their labels
    finish(decoding)
    assert dict(seen) == expected
    assert all(expected[row] == route for row, route in seen)
    plain = Decoder(pair()[0], NoDrafter()).decode(prompts, 12).outputs
    outputs = decoding.result().outputs
    assert outputs == [text[: len(ours)] for text, ours in zip(plain, outputs, strict=True)]
    # Rows whose settings say nothing.
    decoding.admit(prompts[:2], 3)
    assert router.routes.tolist() == [0, 0]


def test_labels_follow_their_rows() -> None:
    texts = Contexts.of([[1], [2]], 4)
    other = Contexts.of([[3]], 4)
    other.labels = ["de"]
    texts.add_rows(other)
    assert texts.labels == [None, None, "de"]
    assert texts.rows_from(1).labels == [None, "de"]
    texts.keep_rows(np.array([2, 0]))
    assert texts.labels == ["de", None]


def test_the_bandit_finds_the_better_drafter_and_forgets() -> None:
    """One drafts what the target says, one a token that never comes."""
    target = pair()[0]
    never, right = FixedDraft((39,)), SmallLMDrafter(target)
    routing = ByAcceptance(2)
    router = RoutedDrafter([never, right], routing)
    decoder = Decoder(target, router, gamma=2)
    prompts = prompts_of(40)
    done = decoder.decode(prompts, 6, batch_size=4)
    assert done.outputs == Decoder(target, NoDrafter()).decode(prompts, 6).outputs
    wrong, good = routing.rows.tolist()
    assert wrong + good == 40
    assert 2 <= wrong < 12
    never_share, right_share = routing.shares()
    assert never_share < 0.2
    assert right_share > 0.8
    assert router.learns
    router.forget()
    assert not routing.rows.any()
    # Each is tried once before one is tried again, also in rows that join together.
    assert sorted(routing.route(np.array([1]), None) for _ in range(2)) == [0, 1]
    assert not RoutedDrafter([never], lambda text: 0).learns


@pytest.mark.slow
def test_the_bandit_counts_only_what_it_was_asked_for() -> None:
    """Before it another drafter drafts every time, so nothing is known of its own two."""
    target = pair()[0]
    routing = ByAcceptance(2)
    router = RoutedDrafter([FixedDraft((39,)), FixedDraft((38,))], routing)
    first = CompositeDrafter([SmallLMDrafter(target), router])
    Decoder(target, first, gamma=2).decode(prompts_of(4), 6)
    assert routing.rows.sum() == 4
    assert not routing.allowed.any()


def answer(decoder: Decoder, learners: Sequence[Online], rows: Sequence[Sequence[int]]) -> Decoded:
    """Decode these rows group by group, with a round of learning after each group."""
    decoding, prompts = Decoding(decoder), prompts_of(96)
    for group in rows:
        each = settings(["ab"[row % 3 == 0] for row in group])
        decoding.admit([prompts[row] for row in group], 16, settings=each)
        finish(decoding)
        for learner in learners:
            if learner.due():
                learner.learn()
                learner.swap()
    return decoding.result()


def test_what_does_not_fit_is_refused() -> None:
    named, target = 'routed:drafters=["ngram","store"]', tiny_target()
    by_label = open_drafter(f'{named},by=label,labels=["en","de"]', target)
    assert isinstance(by_label, RoutedDrafter)
    assert [by_label.routing.route(np.array([1]), x) for x in ("de", "en", None)] == [1, 0, 0]
    measured = open_drafter(f"{named},by=acceptance", target)
    assert isinstance(measured, RoutedDrafter)
    assert isinstance(measured.routing, ByAcceptance)
    for options, message in (
        (',by=label,labels=["en"]', "1 labels for 2 drafters"),
        (',by=label,labels=["en","en"]', "a different one for each drafter"),
        (',labels=["en","de"]', "routed has labels, which are for by=label"),
        (',by=acceptance,examples=["a","b"]', "routed has examples, which are for by=text"),
        (",by=chance", "by is 'chance'"),
        ("", "0 examples for 2 drafters"),
    ):
        with pytest.raises(UserError, match=message):
            open_drafter(named + options, target)
