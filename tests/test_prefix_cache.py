"""Keys and values of earlier texts: a prompt that begins like one of them gives the same text."""

from typing import Any

import numpy as np
import pytest
import torch

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.lookup.ngram import NgramDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.prefix_cache import SHORTEST, PrefixCache, prefix_cache
from decode.model.cache.slot_memory import SlotStates
from decode.model.cache.slots import Slots
from decode.settings import EvaluationProtocol
from decode.text import SpeculativeGenerator
from tests.contract import decoder, recipe
from tests.tiny import VOCAB, finish, shortened, tiny_model, tiny_target
from train.measure.evaluation import evaluate

SYSTEM = np.random.default_rng(0).integers(0, 4, 30).tolist()
# The turns of a chat, another chat with the same system message, and a stranger.
LAST = [3, 1, 0]
NEW = 12


def turns(which: Decoder, **options: Any) -> list[list[int]]:
    """The answers to turns of which each continues the one before, then to other prompts."""
    answers, text = [], list(SYSTEM)
    for turn in ([1, 2], LAST, [0, 0, 2, 1]):
        text += turn
        answers += which.decode([text], NEW, seed=4, row_ids=[len(answers)], **options).outputs
        text += answers[-1]
    others = [[*SYSTEM, 2, 2, 0], [0, 1, 2, 3] * 5, [*SYSTEM[:20], 3, 3], SYSTEM[:SHORTEST]]
    return answers + which.decode(others, NEW, seed=5, batch_size=2, **options).outputs


@pytest.mark.parametrize(
    ("kind", "sampling"),
    shortened(
        [("chain", Sampling(1.0)), ("eagle1 tree", Sampling(1.0)), ("dflash", Sampling())],
        [("eagle1 tree", Sampling(1.0))],
    ),
)
def test_a_reused_beginning_changes_no_text(kind: str, sampling: Sampling) -> None:
    known, drafter = PrefixCache(), recipe(kind)
    expected = turns(decoder(drafter, sampling=sampling))
    which = decoder(drafter, sampling=sampling, prefixes=known)
    texts = turns(which)
    assert texts == expected
    # The second and third turn read little more than what is new in them.
    assert known.reused > 2 * len(SYSTEM) + 2 * NEW
    assert known.read < 32 + 9 + 4 + 33 + 20 + 22 + 16
    assert turns(which) == texts  # now all of them are known
    assert (
        decoder(drafter, prefixes=known, first_target=False).decode([SYSTEM], NEW).outputs
        == decoder(recipe("none")).decode([SYSTEM], NEW).outputs
    )


def test_a_wrong_beginning_is_seen() -> None:
    """A control: other keys and values, or those of other tokens, change the texts above."""
    expected = turns(decoder(recipe("none"), sampling=Sampling(1.0)))
    for poison in ("values", "places"):
        known = PrefixCache()
        which = decoder(recipe("none"), sampling=Sampling(1.0), prefixes=known)
        assert turns(which) == expected
        for kept in known._texts.values():
            if poison == "values":
                kept.states.values.tensors = [-x for x in kept.states.values.tensors]
            else:  # each token has the key of another one
                kept.states.keys.tensors = [x.flip(2) for x in kept.states.keys.tensors]
        assert turns(which) != expected


@pytest.mark.parametrize("kind", ["eagle1 tree", "dflash"])
def test_kept_hidden_states_are_those_that_the_target_computes(kind: str) -> None:
    """Of a prompt and of its answer, where drafts were rejected."""
    drafter: Any = recipe(kind)

    def read(which: Decoder, prompt: list[int]) -> torch.Tensor:
        which.decode([prompt], NEW)
        states: torch.Tensor = drafter.states[0, : len(prompt)].clone()
        return states

    known = PrefixCache()
    which = decoder(drafter, prefixes=known)
    first = [*SYSTEM, 3]
    answered = [*first, *which.decode([first], NEW).outputs[0]]
    prompt = [*answered, 2, 1]
    expected = read(decoder(drafter), prompt)
    torch.testing.assert_close(read(which, prompt), expected, rtol=0, atol=1e-4)
    assert known.reused == len(answered) - 1
    for kept in known._texts.values():
        keys, *hidden = kept.states.keys.tensors
        kept.states.keys.tensors = [keys, *(-x for x in hidden)]
    assert (read(which, prompt) - expected).abs().max() > 0.1  # other ones are found


def test_another_drafter_in_the_middle_of_a_text() -> None:
    """Its hidden states have holes then, so the text is not kept."""
    known = PrefixCache()
    which = decoder(recipe("eagle1"), prefixes=known)
    expected = decoder(recipe("none")).decode([SYSTEM], NEW).outputs[0]
    decoding = Decoding(which, [SYSTEM], NEW)
    for kind in ("chain", "eagle1"):
        decoding.step()
        decoding.set(drafter=recipe(kind))
    assert finish(decoding) == {0: expected}
    assert not len(known)


def test_after_a_drafter_of_hidden_states_nothing_is_kept_until_the_slots_are_new() -> None:
    """The slots still have its hidden states, and other drafters' texts have none."""
    known = PrefixCache()
    decoder(recipe("chain"), prefixes=known).decode([SYSTEM], NEW)
    which, kept = decoder(recipe("eagle1"), prefixes=known), len(known)
    expected = decoder(recipe("none")).decode([SYSTEM], NEW).outputs[0]
    decoding = Decoding(which, [SYSTEM], NEW)
    decoding.step()
    decoding.set(drafter=recipe("chain"))
    assert which.lm.drafter_bytes == which.drafter.token_bytes
    decoding.admit([SYSTEM], NEW)
    assert finish(decoding) == {0: expected, 1: expected}
    assert len(known) == kept
    before = known.reused
    assert which.decode([SYSTEM], NEW).outputs == [expected]
    assert known.reused > before


def states(tokens: int, value: int = 0) -> SlotStates:
    """1 layer, 1 head of size 1: 8 bytes of keys and values per token."""
    slots = Slots(1, 1, tokens, torch.device("cpu"))
    slots.place(np.zeros(1, dtype=np.int64), tokens)
    slots.layers[0].update(*torch.full((2, 1, 1, tokens, 1), float(value)))
    assert slots.token_bytes == 8
    return slots.take(0, tokens)


def text(begin: int, count: int) -> np.ndarray:
    return np.arange(begin, begin + count)


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago() -> None:
    known = PrefixCache(100 * 8)
    for begin in (0, 1000, 2000):
        known.add(text(begin, 30), states(30, begin))
    assert (len(known), known.bytes) == (3, 90 * 8)
    reached = known.find(text(0, 20))  # used again, so it is not the oldest now
    assert reached is not None
    assert reached.count == 20
    known.add(text(3000, 40), states(40))
    assert known.bytes <= known.max_bytes
    assert known.find(text(1000, 30)) is None
    assert all(known.find(text(begin, 30)) is not None for begin in (0, 2000, 3000))
    # A longer text takes the place of its beginning; a known one is not kept twice.
    known.add(text(0, 50), states(50))
    known.add(text(0, 40), states(40))
    assert [len(kept.tokens) for kept in known._texts.values()] == [40, 50]
    # The longest common beginning counts, if it is long enough.
    assert known.find(np.append(text(0, SHORTEST - 1), 9)) is None
    longest = known.find(np.append(text(0, 45), [1, 2]))
    assert longest is not None
    assert longest.count == 45
    with pytest.raises(UserError, match=r"prefix cache has -1 bytes; expected a number ≥ 0"):
        PrefixCache(-1)


def test_a_text_that_is_too_long_keeps_its_beginning() -> None:
    model = tiny_model("llama")
    known = PrefixCache(0)
    which = Decoder(model, DRAFTERS["none"](), prefixes=known)
    prompt = np.random.default_rng(1).integers(3, VOCAB, 60).tolist()
    expected = which.decode([prompt], NEW).outputs
    assert not len(known)
    known.max_bytes = 20 * which.lm.slots.token_bytes
    for _ in range(2):
        assert which.decode([prompt], NEW).outputs == expected
        assert known.bytes == known.max_bytes
    assert known.reused == 20


def test_other_weights_share_nothing() -> None:
    known = PrefixCache()
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    prompt = [[5, 6, 7, 8] * 8]
    for which in (model, other, model):
        plain = Decoder(which, DRAFTERS["none"]()).decode(prompt, NEW).outputs
        assert Decoder(which, NgramDrafter(), prefixes=known).decode(prompt, NEW).outputs == plain
        assert not known.reused
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    plain = Decoder(model, DRAFTERS["none"]()).decode(prompt, NEW).outputs
    assert Decoder(model, NgramDrafter(), prefixes=known).decode(prompt, NEW).outputs == plain
    assert not known.reused


def test_rows_that_run_join_with_a_known_beginning() -> None:
    known = PrefixCache()
    which = decoder(recipe("chain"), sampling=Sampling(1.0), prefixes=known)
    plain = decoder(recipe("chain"), sampling=Sampling(1.0))
    decoding = Decoding(which, [[1, 2], SYSTEM], NEW)
    decoding.step()
    decoding.drop(1)  # what was read of it stays
    prompts = [[*SYSTEM, row] for row in range(3)]
    decoding.admit([[2], *prompts], NEW)
    finish(decoding)
    assert known.reused == 3 * len(SYSTEM)
    for row, prompt in enumerate([[2], *prompts], 2):
        assert plain.decode([prompt], NEW, row_ids=[row]).outputs[0] == decoding.outputs[row]


def test_an_evaluation_reuses_turns_and_times_complete_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches: list[PrefixCache] = []

    def kept(model: Any) -> PrefixCache:
        caches.append(PrefixCache())
        return caches[-1]

    monkeypatch.setattr("train.measure.evaluation.prefix_cache", kept)
    target = tiny_target()
    prompts = [SYSTEM, [*SYSTEM, 7, 8, 9]]
    options: Any = {"timed_prompts": 2, "timed_tokens": 4, "generate": False}
    protocol = EvaluationProtocol(gamma=3, max_new_tokens=NEW, batch_size=1, **options)
    texts = evaluate(target, NgramDrafter(), prompts, protocol).outputs
    (known,) = caches
    assert known.reused >= len(SYSTEM) - 1
    assert known.reused + known.read == sum(map(len, prompts))  # nothing of the timed decodes
    plain = Decoder(target.model, NgramDrafter(), eos_token_ids=target.eos_token_ids, gamma=3)
    assert texts == plain.decode(prompts, NEW).outputs


def test_the_generator_reuses_turns_in_float32() -> None:
    target = tiny_target()
    chat = [{"role": "user", "content": "The quick brown fox"}]
    texts = []
    for limit in (None, 0):
        generator = SpeculativeGenerator(
            target.model, target.tokenizer, "ngram", prefix_cache_bytes=limit
        )
        messages, answers = list(chat), []
        for _ in range(3):
            answers.append(generator.generate(messages, max_new_tokens=8, temperature=0.0))
            messages += [{"role": "assistant", "content": answers[-1]}, *chat]
        texts.append(answers)
        assert (generator.prefixes is None) == (limit == 0)
        assert limit == 0 or (generator.prefixes is not None and generator.prefixes.reused > 20)
    assert texts[0] == texts[1]
    assert prefix_cache(tiny_model("llama").bfloat16()) is None
