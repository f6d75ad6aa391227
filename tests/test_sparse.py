"""The target that drafts over a part of its keys and values: the part, and that the text stays."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.draft import Contexts
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.sparse import KeptTokens, SparseDrafter, choose_chunks
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.cached_model import CachedLM
from decode.model.forward.prepare_model import prepare
from decode.opening.directory import open_drafter
from decode.shapes import SHAPES
from draftsmith.edge.remote_target import RemoteLM
from tests.tiny import finish, tiny_model, tiny_target

PROMPTS = [[5, 17, 250, 9, 42], [7], [30] * 9, [11, 12, 13, 14, 200, 3] * 6]
# Chosen anew every 6 tokens: 2 sinks, 4 to 6 recent tokens and two chunks of 3.
FEW: dict[str, int] = {"sinks": 2, "recent": 4, "chunk": 3, "budget": 12, "every": 6}


def sparse(**options: int) -> SparseDrafter:
    return SparseDrafter(**(FEW | options))


def run(lm: Any, drafter: Drafter, new: int = 40, **options: Any) -> Decoded:
    return Decoder(lm, drafter, **options).decode(PROMPTS, new)


def plain_texts(lm: Any, new: int = 40) -> list[list[int]]:
    return run(lm, DRAFTERS["none"](), new).outputs


# --- what is kept ---------------------------------------------------------------------------------


def best_chunks(query: Any, key: Any, count: int, most: int, scale: float) -> list[int]:
    """By the definition, for one key head: query [G, D], key [S, D], chunks after the sinks."""
    sinks, size = FEW["sinks"], FEW["chunk"]
    weights = np.zeros(count)
    for head in query.double().numpy():
        means = [
            key[sinks + i * size :][:size].double().numpy().mean(0) @ head for i in range(count)
        ]
        exponents = np.exp(np.array(means) * scale)
        weights += exponents / exponents.sum()
    return sorted(np.argsort(-weights)[:most].tolist())


def kept_slots(turn: int, chosen: list[int]) -> list[int]:
    """The slots of one key head before the token at `turn`."""
    sinks, recent, size = FEW["sinks"], FEW["recent"], FEW["chunk"]
    chunks = max(turn - recent - sinks, 0) // size
    rest = sinks + chunks * size
    middle = [sinks + i * size + j for i in chosen for j in range(size)]
    return [*range(min(sinks, turn)), *middle, *range(min(rest, turn), turn)]


def test_chunks_are_those_of_the_largest_attention() -> None:
    """On a crafted cache of ragged rows: the keys of some chunks point where the query points."""
    generator = torch.Generator().manual_seed(0)
    key_heads, group, size, turn = 2, 2, 8, np.array([40, 11, 3, 0])
    key = torch.randn(4, key_heads, 48, size, generator=generator)
    query = torch.randn(4, key_heads * group, size, generator=generator)
    for head, chunk in ((0, 4), (1, 9)):
        key[0, head, 2 + 3 * chunk : 5 + 3 * chunk] += 5 * query[0, group * head]
    chunks = np.maximum(turn - 6, 0) // 3
    part = KeptTokens(2, 3, turn, chunks, np.minimum(chunks, 2))
    chosen = choose_chunks(query, key, part, size**-0.5)
    slots = part.slots(chosen)
    assert part.omitted.tolist() == [27, 0, 0, 0]
    for row, head in itertools.product(range(4), range(key_heads)):
        count, most = int(chunks[row]), int(part.kept[row])
        of_head = query[row, group * head : group * (head + 1)]
        expected = best_chunks(of_head, key[row, head], count, most, size**-0.5)
        assert chosen[row, head, :most].tolist() == expected
        if row == 0:
            assert (4, 9)[head] in expected
        kept = kept_slots(int(turn[row]), expected)
        assert slots[row, head, : len(kept)].tolist() == kept
        assert len(kept) == turn[row] - part.omitted[row]


class Checked(SparseDrafter):
    """Compares its slots before each draft with what the definition keeps of the target's."""

    checked = chose = 0

    def start(self, contexts: Contexts) -> None:
        self.queries: dict[int, Any] = {}
        self.recorded: list[dict[int, Any]] = [{} for _ in contexts.lengths]
        super().start(contexts)

    def add_rows(self, contexts: Contexts, verification: Any) -> None:
        self.recorded += [{} for _ in range(len(contexts.lengths) - len(self.recorded))]
        super().add_rows(contexts, verification)

    def keep_rows(self, rows: np.ndarray) -> None:
        self.recorded = [self.recorded[row] for row in rows.tolist()]
        super().keep_rows(rows)

    def _gather(self, layer: int, query: Any, key: Any, value: Any, scale: float) -> None:
        super()._gather(layer, query, key, value, scale)
        for row in self._due.tolist():
            self.recorded[row][layer] = query[row, :, 0].clone(), scale
        self.chose += layer == 0

    def _read(self, contexts: Contexts, nodes: int) -> None:
        super()._read(contexts, nodes)
        assert self._target is not None
        pairs = zip(self.lm.slots.layers, self._target.slots.layers, strict=True)
        for layer, (own, full) in enumerate(pairs):
            for row, head in itertools.product(
                range(len(contexts.lengths)), range(full.keys.shape[1])
            ):
                query, scale = self.recorded[row][layer]
                turn, group = int(self._turn[row]), len(query) // full.keys.shape[1]
                count = max(turn - FEW["recent"] - FEW["sinks"], 0) // FEW["chunk"]
                of_head, keys = query[group * head : group * (head + 1)], full.keys[row, head]
                slots = kept_slots(turn, best_chunks(of_head, keys, count, 2, scale))
                slots += range(turn, int(contexts.lengths[row]) - 1)
                for one, other in ((own.keys, full.keys), (own.values, full.values)):
                    assert torch.equal(one[row, head, : len(slots)], other[row, head, slots])
                self.checked += 1


@pytest.mark.parametrize("shape", ["chain", "static:widths=[3,2,1]"])
def test_slots_have_the_kept_tokens_while_rows_join_and_leave(shape: str) -> None:
    lm = tiny_model("llama")
    plain, drafter = plain_texts(lm), Checked(**FEW).with_shape(SHAPES.make(shape, depth=3))
    decoding = Decoding(Decoder(lm, drafter))
    for prompt, new in zip(PROMPTS, (40, 12, 40, 30), strict=True):
        (row,) = decoding.begin([prompt], new)
        while row in decoding.waiting:
            if not decoding.finished:
                decoding.step()
            decoding.read(row, 30)
        decoding.step()
    finish(decoding)
    for text, whole in zip(decoding.result().outputs, plain, strict=True):
        assert text == whole[: len(text)]
    assert drafter.checked > 200
    assert drafter.chose > 10


# --- the text -------------------------------------------------------------------------------------


def test_more_of_the_text_is_accepted_more() -> None:
    lm = tiny_model("llama")
    rates = [
        run(lm, sparse(budget=budget, recent=1), 60).counts.acceptance_rate
        for budget in (6, 30, 120)
    ]
    assert rates[0] < rates[1] < rates[2] == 1


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sparse:budget=139", "a budget of 139 tokens has no room .* expected at least 140"),
        ("sparse:chunk=0", "chunk is 0"),
        ("sparse:every=0", "every is 0"),
        ("sparse:window=4", "has no option 'window'"),
        ("vertical:model=ngram,inner=sparse", "expected a small language model, or sparse"),
        ("vertical:model=sparse,inner=sparse", "reads the target's keys and values"),
    ],
)
def test_bad_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_drafter(spec, tiny_target())


def test_a_cascade_is_named_with_its_options() -> None:
    opened: Any = open_drafter("vertical:model='sparse:budget=300,every=9',gamma=2", tiny_target())
    assert (opened.model.budget, opened.model.every, opened.gamma) == (300, 9, 2)


def test_targets_that_attend_otherwise_are_refused() -> None:
    windowed = tiny_model("gemma3_text", head_dim=8, sliding_window=5, layers=6)
    with pytest.raises(UserError, match="a window of 5 tokens"):
        Decoder(windowed, sparse())
    Decoder(tiny_model("mistral", sliding_window=256), sparse())  # as long as its context
    eager = tiny_model("gpt2")
    eager.set_attn_implementation("eager")
    prepare(eager, lean=False)
    with pytest.raises(UserError, match="cannot read the queries of GPT2LMHeadModel"):
        Decoder(eager, sparse())
    with pytest.raises(UserError, match="the target, which is on another machine"):
        sparse().attach(object.__new__(RemoteLM))
    lm = CachedLM(tiny_model("llama"))
    drafter = sparse()
    drafter.attach(lm)
    assert drafter.vocab_size == lm.vocab_size
