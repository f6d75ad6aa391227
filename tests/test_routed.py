"""The drafter of a row by its label."""

import copy
from collections.abc import Sequence

import numpy as np
import pytest

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import NoDrafter
from decode.drafters.several.routed import RoutedDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.opening.directory import open_drafter
from tests.test_online import pair, prompts_of
from tests.tiny import finish, tiny_target

LABELS = ["de", None, "code", "fr", "de", "code"]


def settings(labels: Sequence[str | None]) -> list[RowSettings]:
    return [RowSettings(label=label) for label in labels]


def drafters(count: int) -> list[SmallLMDrafter]:
    return [SmallLMDrafter(copy.deepcopy(pair()[1]).requires_grad_(False)) for _ in range(count)]


def test_a_row_goes_where_its_label_says() -> None:
    """Also where rows join and leave, and without a label to the first drafter."""
    router = RoutedDrafter(drafters(3), ["en", "de", "code"])
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


def test_what_does_not_fit_is_refused() -> None:
    named, target = 'routed:drafters=["ngram","store"]', tiny_target()
    router = open_drafter(f'{named},labels=["en","de"]', target)
    assert isinstance(router, RoutedDrafter)
    contexts = Contexts.of([[1], [1], [1]], 2)
    contexts.labels = ["de", "en", None]
    assert router.routes_of(contexts).tolist() == [1, 0, 0]
    for options, message in (
        (',labels=["en"]', "1 labels for 2 drafters"),
        (',labels=["en","en"]', "a different one for each drafter"),
        (",by=acceptance", "the option by is gone; leave it out; give each drafter a label"),
        ("", "needs the option labels"),
    ):
        with pytest.raises(UserError, match=message):
            open_drafter(named + options, target)
