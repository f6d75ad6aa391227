"""Rows with settings of their own in one running decode, as a service needs them.

Each text is the one that its row has alone, in a decoder made with these settings.
"""

import copy
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from decode.base.errors import UserError
from decode.draft import Draft
from decode.drafters import DRAFTERS
from decode.drafters.lookup.ngram import StoreDrafter
from decode.draw.mixed_sampling import MixedSampling, combined
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.model.cache.prefix_cache import PrefixCache
from decode.shapes.chains import Chains
from decode.shapes.static import Static
from decode.text_stream import Stop, StopStrings
from decode.verification import Verification
from tests.contract import (
    LIMITS,
    NEW,
    PROMPTS,
    SETTINGS,
    decoder,
    each_with_its_settings,
    recipe,
    staggered,
)
from tests.lossless import FixedDraft, longer_model, small_lm
from tests.test_processors import Broken
from tests.tiny import VOCAB, finish, near_drafter, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("chain", "block"),
        ("tree", "traversal"),
        ("tree", "typical"),
    ],
)
def test_rules_see_each_row_with_its_settings(kind: str, rule: str) -> None:
    drafter = recipe(kind)
    run = staggered(decoder(drafter, rule=rule), LIMITS, SETTINGS)
    assert run.result().outputs == each_with_its_settings(drafter, rule=rule)


def test_the_sampling_of_one_row_for_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control."""
    drafter = recipe("chain")
    expected = each_with_its_settings(drafter)
    monkeypatch.setattr(
        "decode.loop.rows.combined", lambda settings, kinds: (settings or [Sampling()])[0]
    )
    assert staggered(decoder(drafter), LIMITS, SETTINGS).result().outputs != expected


def test_equal_settings_are_one_plain_sampling() -> None:
    kinds = np.array([0, 1, 1, 0])
    assert combined([Sampling(0.5), Sampling(0.5)], kinds) == Sampling(0.5)
    assert combined([Sampling(0.5), Sampling()], kinds * 0) == Sampling(0.5)
    found = combined([Sampling(0.5), Sampling()], kinds)
    assert isinstance(found, MixedSampling)
    assert not found.greedy
    assert found.at(torch.tensor([1, 2])) == Sampling()
    assert found != combined([Sampling(0.5), Sampling()], kinds)


def test_a_row_has_its_own_stop_and_end() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama")
    prompts = [[5, 17, 250], [7], [30] * 9, [11, 12, 13]]
    plain = Decoder(model, DRAFTERS["none"]()).decode(prompts, 16).outputs
    eos = plain[0][4]
    stops = [StopStrings(tokenizer, tokenizer.decode(text[9:11])) for text in plain]
    which = Decoder(model, DRAFTERS["ngram"](), eos_token_ids=[eos], stop=stops[0])
    settings = [
        RowSettings(),
        RowSettings(ignore_eos=True, stop=stops[1]),
        RowSettings(ignore_eos=True),
        RowSettings(stop=stops[1]),
    ]
    decoding = Decoding(which)
    # One prompt with all settings, and once with the decoder's own stop.
    for setting in settings:
        decoding.admit(prompts[:2], [16, 15], settings=setting)
        decoding.step()
    decoding.admit(prompts[:2], 16)
    outputs = finish(decoding)
    for begin, setting in enumerate([*settings, RowSettings(stop=stops[0])]):
        for row in (0, 1):
            ends = () if setting.ignore_eos else (eos,)
            one = Decoder(model, DRAFTERS["none"](), eos_token_ids=ends, stop=setting.stop)
            limit = 15 if row and begin < 4 else 16
            assert outputs[2 * begin + row] == one.decode([prompts[row]], limit).outputs[0]
    assert len(set(map(len, outputs.values()))) > 3
    assert not stops[0]._texts
    assert not stops[1]._texts


def test_settings_that_cannot_be_used() -> None:
    decoding = Decoding(decoder(recipe("chain")), PROMPTS[:1], NEW)
    one = RowSettings()
    for limits, settings, problem in (
        ([NEW, 0], one, "max_new_tokens is 0"),
        ([NEW] * 3, one, "there are 3 max_new_tokens for 2 prompts"),
        (NEW, [one], "there are 1 settings for 2 prompts"),
        (NEW, RowSettings(logprobs=6), "logprobs is 6; expected at most 5"),
    ):
        with pytest.raises(UserError, match=problem):
            decoding.admit(PROMPTS[:2], limits, settings=settings)
    for fields, problem in (
        ({"seed": 1 << 63}, "seed is 9223372036854775808"),
        ({"logprobs": -1}, "logprobs is -1"),
    ):
        with pytest.raises(UserError, match=problem):
            RowSettings(**fields)
    # At temperature 0 exact match judges these drafts; `spectr` cannot.
    decoding = Decoding(decoder(recipe("eagle1 tree"), rule="spectr"))
    decoding.admit(PROMPTS[:1], NEW, settings=RowSettings())
    with pytest.raises(UserError, match="distinct siblings, but the rule SpecTr"):
        decoding.admit(PROMPTS[1:2], NEW, settings=RowSettings(Sampling(1.0)))
    expected = decoder(recipe("none")).decode(PROMPTS[:1], NEW).outputs[0]
    assert finish(decoding) == {0: expected}


# --- a broken row ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "length", "value", "said"),
    [
        ("none", 17, -torch.inf, r"mask all tokens in step 0 .prefill. for prompt 2"),
        ("chain", 22, torch.nan, r"mask all tokens in step \d+ .verification. for prompt 2"),
        ("chain", 17, None, "a logits processor fails in step 0 .* prompt 2, .*: KeyError: 'lost'"),
        ("eagle1 tree", 22, None, "processor fails in step .* prompt 2, .*: KeyError: 'lost'"),
    ],
)
def test_a_row_without_a_token_fails_alone(kind: str, length: int, value: Any, said: str) -> None:
    """At its prompt or later: the other rows go on with the same texts. value: of all its logits;
    None: the processor raises."""
    prompt, drafter = torch.tensor(PROMPTS[2]), recipe(kind)

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < length:
            return scores
        hit = (input_ids[:, : len(prompt)] == prompt).all(1, keepdim=True)
        if value is None and hit.any():
            raise KeyError("lost")
        return scores if value is None else torch.where(hit, value, scores)

    for sampling in (Sampling(), Sampling(1.0)):
        which = decoder(drafter, sampling=sampling, processors=[processor])
        expected = decoder(drafter, sampling=sampling).decode(PROMPTS, NEW, seed=3).outputs
        failed: dict[int, UserError] = {}
        ended: list[int] = []
        decoding = Decoding(
            which,
            PROMPTS[:4],
            NEW,
            seed=3,
            on_error=failed.__setitem__,
            on_end=lambda row, _: ended.append(row),  # noqa: B023
        )
        decoding.admit(PROMPTS[4:], NEW)
        outputs = dict(finish(decoding))
        assert decoding.errors == failed
        assert list(failed) == [2]
        assert re.search(said, str(failed[2]))
        # No token of the pass in which it failed.
        text = outputs.pop(2)
        assert text == expected[2][: len(text)]
        assert len(text) <= length - len(prompt)
        assert kind != "none" or len(text) == length - len(prompt)
        assert outputs == {row: text for row, text in enumerate(expected) if row != 2}
        assert sorted(ended) == sorted(outputs)
        decoding.result()
        with pytest.raises(UserError, match=said):
            which.decode(PROMPTS, NEW, seed=3)


def test_nan_logits_fail_one_row_and_are_not_remembered() -> None:
    kind = "chain"
    which = decoder(recipe(kind))
    expected = which.decode(PROMPTS, NEW).outputs
    ids = torch.tensor([[*PROMPTS[4], *expected[4][:6]]])
    broken = copy.deepcopy(longer_model(0.0))
    with torch.inference_mode():
        hidden = broken.model(ids).last_hidden_state[0, -1].clone()
    broken.set_output_embeddings(Broken(broken.get_output_embeddings(), hidden))
    known = PrefixCache()
    decoding = Decoding(
        Decoder(broken, recipe(kind), gamma=3, prefixes=known),
        PROMPTS,
        NEW,
        on_error=lambda row, error: None,
    )
    outputs = finish(decoding)
    assert list(decoding.errors) == [4]
    assert "NaN or infinite in step" in str(decoding.errors[4])
    text = outputs.pop(4)
    assert text == expected[4][: len(text)]
    assert outputs == {row: text for row, text in enumerate(expected) if row != 4}
    assert known.find(np.array([*PROMPTS[4], 0, 0])) is None


class Rude(Stop):
    """Raises for one row, at its third token."""

    def start(self) -> None:
        self.seen = 0

    def cut(self, row: int, tokens: list[int]) -> int | None:
        self.seen += len(tokens)
        if self.seen > 2:
            raise OverflowError("out of range")
        return None


class Failing(StoreDrafter):
    """Raises in the second draft, after the third one, and then in both."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.drafts, self.failing = 0, ["draft 2", "observe 3", "draft 5", "observe 5"]

    def _may_fail(self, call: str) -> None:
        if f"{call} {self.drafts}" in self.failing:
            self.failing.remove(f"{call} {self.drafts}")
            raise IndexError(call)

    def draft(self, *args: Any) -> Draft:
        self.drafts += 1
        self._may_fail("draft")
        return super().draft(*args)

    def observe(self, verification: Verification) -> None:
        self._may_fail("observe")
        super().observe(verification)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_a_stop_or_a_drafter_that_raises_ends_no_other_text(
    sampling: Sampling, caplog: pytest.LogCaptureFixture
) -> None:
    """With `exact`, no text depends on drafts."""
    expected = decoder(recipe("none"), sampling=sampling, rule="exact").decode(PROMPTS, NEW)
    drafter = Failing()
    decoding = Decoding(
        decoder(drafter, sampling=sampling, rule="exact"), on_error=lambda row, error: None
    )
    settings = [RowSettings(sampling) for _ in PROMPTS]
    settings[1] = replace(settings[1], stop=Rude())
    decoding.admit(PROMPTS, NEW, settings=settings)
    outputs = finish(decoding)
    assert not drafter.failing
    assert sum("the drafter fails" in record.message for record in caplog.records) == 4
    assert list(decoding.errors) == [1]
    assert re.search(r"the stop fails .* prompt 1, .*: OverflowError", str(decoding.errors[1]))
    text = outputs.pop(1)
    assert text == expected.outputs[1][: len(text)]
    assert len(text) < 3
    assert outputs == {row: text for row, text in enumerate(expected.outputs) if row != 1}
    with pytest.raises(IndexError):
        decoder(Failing(), rule="exact").decode(PROMPTS, NEW)


def test_a_drafter_that_fails_while_a_text_ends_begins_anew() -> None:
    """In the same pass. Its state may not have these rows, so it is not asked to keep any."""
    drafter = Failing()
    drafter.failing = ["observe 1", "keep 1"]
    drafter.keep_rows = lambda rows: drafter._may_fail("keep")  # type: ignore[method-assign]
    decoding = Decoding(decoder(drafter, rule="exact"), on_error=lambda row, error: None)
    decoding.admit(PROMPTS[:2], [2, 4])
    outputs = finish(decoding)
    assert drafter.failing == ["keep 1"]
    assert not decoding.errors
    assert [len(outputs[row]) for row in (0, 1)] == [2, 4]


@pytest.mark.parametrize("parents", [None, (-1, -1, 0)])
def test_a_drafted_token_whose_keys_are_not_finite_ends_no_text(parents: Any) -> None:
    """Its row gets no draft in that pass: a mask does not hide NaN."""
    target = tiny_model("llama", tie=False)
    prompts = [[5, 9, 12, 40], [7, 7, 3, 2, 1, 8], [100]]
    expected = Decoder(target, DRAFTERS["none"]()).decode(prompts, NEW).outputs
    unseen = max(set(range(VOCAB)) - {token for text in (*expected, *prompts) for token in text})
    with torch.no_grad():
        target.get_input_embeddings().weight[unseen] = torch.nan
    for tokens in ((unseen, 3, 4), (expected[0][1], 3, unseen)):
        found = Decoder(target, FixedDraft(tokens, parents)).decode(prompts, NEW)
        assert found.outputs == expected
        # Where the end of the text cuts that token off, the tokens before it are drafted.
        assert all((step.drafted <= tokens.index(unseen)).all() for step in found.steps)


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_log_probabilities_are_those_of_the_target(kind: str) -> None:
    """Without penalty and temperature, of each token and of the likeliest at its place."""
    settings = [replace(one, logprobs=(None, 0, 2, 5)[row % 4]) for row, one in enumerate(SETTINGS)]
    given: dict[int, int] = {}

    def on_tokens(row: int, tokens: list[int]) -> None:
        given[row] = given.get(row, 0) + len(tokens)
        if row in decoding.logprobs:
            assert len(decoding.logprobs[row]) == given[row]

    drafter = recipe(kind)
    decoding = Decoding(decoder(drafter), on_tokens=on_tokens)
    decoding.admit(PROMPTS, LIMITS, settings=settings)
    outputs = finish(decoding)
    assert list(outputs.values()) == each_with_its_settings(drafter)
    assert sorted(decoding.logprobs) == [1, 2, 3, 5, 6, 7]
    for row, entries in decoding.logprobs.items():
        text = torch.tensor([[*PROMPTS[row], *outputs[row]]])
        with torch.inference_mode():
            logits = longer_model(0.0)(text).logits[0, len(PROMPTS[row]) - 1 : -1]
        log_p = logits.log_softmax(-1)
        assert [entry.token for entry in entries] == outputs[row]
        for place, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(log_p[place, entry.token].item(), abs=1e-5)
            best = log_p[place].topk(settings[row].logprobs or 0)
            assert [id_ for id_, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(
                best.values.tolist(), abs=1e-5
            )


# --- exchanged parts ------------------------------------------------------------------------------

ORDER = [
    "chain",
    "none",
    "eagle1 tree",
    "ngram",
    "hydra_plus",
    "tree",
    "in turn",
    "medusa",
    "chain",
]


def test_parts_are_exchanged_while_texts_run() -> None:
    """Greedy texts stay, and so do sampled ones under `exact`, whose texts ignore the drafts."""
    for sampling in (Sampling(), Sampling(1.0)):
        expected = decoder(recipe("none"), rule="exact", sampling=sampling).decode(
            PROMPTS, 2 * NEW, seed=3
        )
        which = decoder(recipe("eagle1"), rule="exact", sampling=sampling)
        decoding = Decoding(which, PROMPTS[:5], 2 * NEW, seed=3)
        policies = ["fixed:max_depth=5", None, "fixed:max_depth=1", "heuristic"]
        for place, kind in enumerate(ORDER):
            decoding.step()
            decoding.set(drafter=recipe(kind))
            if place == 3:  # a part of the prompts is read for another drafter
                (waits, *_) = decoding.begin(PROMPTS[5:], 2 * NEW)
                decoding.read(waits, 4)
            if place == 5:
                assert waits in decoding.waiting
                decoding.read(waits)
            if place % 2 and (policy := policies[place // 2]) is not None:
                decoding.set(policy=policy)
        finish(decoding)
        assert decoding.result().outputs == expected.outputs
        assert decoding.result().counts.accepted.sum() > 20
        accepted = [int(step.accepted.sum()) for step in decoding.steps]
        assert sum(count > 0 for count in accepted) > 4


def test_an_exchange_that_is_refused_changes_nothing() -> None:
    which = decoder(recipe("chain"), sampling=Sampling(1.0))
    expected = which.decode(PROMPTS, NEW, seed=3).outputs
    decoding = Decoding(which, PROMPTS, NEW, seed=3)
    decoding.step()
    before = which.drafter, which.policy, which.parts
    for change, problem in (
        ({"drafter": small_lm()}, "vocabulary of 16 tokens, but the target's has 5"),
        ({"policy": "fixed:max_depth=0"}, "gamma is 0"),
        ({"policy": "fixed:max_depth=9999"}, "do not fit into the target's context"),
        ({"drafter": recipe("tree"), "policy": "confidence"}, "works only with chains"),
    ):
        with pytest.raises(UserError, match=problem):
            decoding.set(**change)
    assert (which.drafter, which.policy, which.parts) == before
    assert finish(decoding) == dict(enumerate(expected))


def test_texts_do_not_depend_on_torchs_default_dtype() -> None:
    """Another thread that loads a model changes it for a while, for all threads."""
    which = decoder(recipe("eagle1 tree"), sampling=Sampling(1.0))
    expected = which.decode(PROMPTS, NEW, seed=3).outputs
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert which.decode(PROMPTS, NEW, seed=3).outputs == expected
    finally:
        torch.set_default_dtype(torch.float32)


# --- prompts and ids as transformers gives them ---------------------------------------------------


def test_prompts_and_eos_as_transformers_gives_them() -> None:
    target, prompts = tiny_model("llama"), [[5, 9, 12], [7]]
    expected = Decoder(target, DRAFTERS["none"]()).decode(prompts, 6).outputs
    padded = {"input_ids": torch.tensor([[5, 9, 12], [0, 0, 7]])}
    padded["attention_mask"] = torch.tensor([[1, 1, 1], [0, 0, 1]])
    forms: list[Any] = [
        BatchEncoding(padded),
        [np.array(prompts[0]), torch.tensor(prompts[1])],
        [tuple(prompts[0]), prompts[1]],
    ]
    for eos in (None, [], VOCAB - 1):
        decoder = Decoder(target, DRAFTERS["none"](), eos_token_ids=eos)
        assert [decoder.decode(form, 6).outputs for form in forms] == [expected] * 3
    for bad in ([5, 9, 12], torch.tensor([5, 9]), [[1.5]], [["a"]], [[[1]]], "text", [None]):
        with pytest.raises(UserError, match=r"prompt 0 is of the type .* a list of"):
            decoder.decode(bad, 6)
    for eos in (1.5, "a", [None]):
        with pytest.raises(UserError, match=r"eos_token_id is .*; expected"):
            Decoder(target, DRAFTERS["none"](), eos_token_ids=eos)
    with pytest.raises(UserError, match=r"seed is 1.5; expected a whole number"):
        decoder.decode(prompts, 6, seed=1.5)


@pytest.mark.parametrize("shape", [Static(widths=[3, 2], draw="distinct"), Chains(chains=3)])
def test_a_greedy_row_beside_sampled_rows_keeps_its_tree(shape: Any) -> None:
    def passes_of_first(settings: list[RowSettings]) -> int:
        drafter = near_drafter().with_shape(shape)
        decoding = Decoding(Decoder(tiny_model("llama"), drafter, gamma=3, rule="multi_round"))
        decoding.admit([[5, 9, 12]] * len(settings), 40, settings=settings)
        finish(decoding)
        return sum(0 in step.rows for step in decoding.steps)

    greedy = RowSettings(Sampling())
    assert passes_of_first([greedy, RowSettings(Sampling(1.0))]) == passes_of_first([greedy])
