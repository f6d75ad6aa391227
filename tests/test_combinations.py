"""Drafters inside other drafters, in one decode with all that can happen to its rows."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.lookup.lookahead import LookaheadDrafter
from decode.drafters.lookup.max_gram import MaxGramDrafter
from decode.drafters.lookup.ngram import NgramDrafter, StoreDrafter
from decode.drafters.lookup.suffix import SuffixDrafter
from decode.drafters.pard import ParallelLMDrafter, mark_parallel
from decode.drafters.several.cascade import HorizontalCascade, VerticalCascade
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.several.measured import MeasuredComposite
from decode.drafters.several.routed import RoutedDrafter
from decode.drafters.skip import SkipDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.swift import SwiftDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.prefix_cache import PrefixCache
from tests.tiny import tiny_model

PROMPTS = [[5, 17, 250, 9, 42], [7], [11, 12, 13, 14] * 3, [30] * 9, [11, 12, 13, 14] * 3 + [2]]
NEW = 20


@functools.cache
def target() -> Any:
    return tiny_model("llama", layers=4)


@functools.cache
def near(parallel: bool) -> Any:
    """The target with weights moved a little, so that it often agrees."""
    lm = copy.deepcopy(target())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    if parallel:
        mark_parallel(lm.config, 299)
    return lm


def small() -> SmallLMDrafter:
    return SmallLMDrafter(near(False))


def pard() -> SmallLMDrafter:
    return ParallelLMDrafter(near(True))


# Drafts of these depend on nothing but the row.
OF_ROWS: dict[str, Callable[[], Drafter]] = {
    "skip++ngram": lambda: SeveralDrafters([SkipDrafter("1-2"), NgramDrafter()]),
    "lookahead++pard": lambda: SeveralDrafters([LookaheadDrafter(3, 3, 2), pard()]),
    "vertical pard, ngram": lambda: VerticalCascade(pard(), NgramDrafter()),
    "vertical small, pard": lambda: VerticalCascade(small(), pard(), gamma=3),
    "horizontal skip, pard": lambda: HorizontalCascade(SkipDrafter("1"), pard(), depth=2),
    "measured": lambda: MeasuredComposite(
        [VerticalCascade(small(), NgramDrafter()), SkipDrafter("1")], [0.2, 0.4]
    ),
    "routed": lambda: RoutedDrafter(
        [HorizontalCascade(small(), NgramDrafter()), LookaheadDrafter(3, 3, 2)],
        lambda text: int(text[0]) % 2,
    ),
}
# Drafts of these depend on other rows too.
OF_ALL: dict[str, Callable[[], Drafter]] = {
    "suffix+skip": lambda: CompositeDrafter([SuffixDrafter(min_score=0.5), SkipDrafter("1", "2")]),
    "swift": lambda: SwiftDrafter(window=4),
    "cascades": lambda: VerticalCascade(
        small(), HorizontalCascade(pard(), MaxGramDrafter(), depth=2), gamma=3
    ),
    "horizontal pard, store": lambda: HorizontalCascade(pard(), StoreDrafter(), depth=2),
}


@pytest.mark.parametrize("name", [*OF_ROWS, *OF_ALL])
def test_rows_join_wait_and_get_another_drafter(name: str) -> None:
    make = (OF_ROWS | OF_ALL)[name]
    plain = Decoder(target(), DRAFTERS["none"]()).decode(PROMPTS, NEW).outputs
    decoding = Decoding(Decoder(target(), make(), gamma=5, prefixes=PrefixCache(10**7)))
    for prompt in PROMPTS[:4]:
        decoding.admit([prompt], NEW)
        decoding.step()
    decoding.set(drafter=make())
    decoding.step()
    decoding.admit(PROMPTS[4:], NEW)
    decoding.step(np.where(np.arange(len(decoding.rows)) % 2 == 0, 99, -1))
    while not decoding.finished:
        decoding.step()
    done = decoding.result()
    assert done.outputs == plain
    assert done.counts.acceptance_rate > 0


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_sampled_row_says_the_same_alone(name: str) -> None:
    def texts(rows: list[int]) -> list[list[int]]:
        decoder = Decoder(target(), OF_ROWS[name](), gamma=5, sampling=Sampling(1.0, top_p=0.95))
        prompts = [PROMPTS[row] for row in rows]
        return decoder.decode(prompts, NEW, seed=3, row_ids=rows).outputs

    together = texts([0, 1, 2, 3])
    assert [texts([row])[0] for row in range(4)] == together
