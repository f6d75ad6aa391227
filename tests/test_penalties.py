"""Penalties that count generated tokens, biases, least lengths: each position by its own text."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.draw.mixed_sampling import combined
from decode.draw.penalties import AnswerSpans
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder, Decoding
from decode.loop.rows import RowSettings
from decode.rules import RULES
from decode.verdict import Scores
from tests.lossless import COUNTED, decode, small_lm
from tests.test_processors import FixedGrowth, random_tree
from tests.tiny import finish

ALL = {
    "presence_penalty": 0.7,
    "frequency_penalty": 1.3,
    "logit_bias": {"3": 5, 7: -100, 2: 0.5},
    "min_tokens": 4,
    "stop_token_ids": [5, 6],
    "repetition_penalty": 1.5,
}
EOS = np.array([1, 9])


def by_hand(logits: Tensor, text: list[int], begin: int, sampling: Sampling) -> Tensor:
    """The definition of vLLM, for one text."""
    scores, generated = logits.clone(), text[begin:]
    for token, bias in sampling.logit_bias:  # type: ignore[misc]
        scores[token] += bias
    for token in set(text):
        factor = sampling.repetition_penalty
        scores[token] *= factor if scores[token] < 0 else 1 / factor
    for token in set(generated):
        scores[token] -= sampling.frequency_penalty * generated.count(token)
        scores[token] -= sampling.presence_penalty
    if len(generated) < sampling.min_tokens:
        scores[[*EOS.tolist(), *sampling.stop_token_ids]] = -torch.inf
    return scores


@pytest.mark.parametrize(
    ("name", "nodes", "branching"),
    [
        *((name, 6, bool(i % 2)) for i, name in enumerate(ALL)),
        ("all", 0, False),
        ("all", 6, True),
        ("mixed", 1, False),
        ("mixed", 6, True),
    ],
)
def test_each_place_is_penalised_by_its_own_text(name: str, nodes: int, branching: bool) -> None:
    draft, contexts, texts = random_tree(5, nodes, 12, branching)
    begins = np.minimum(contexts.lengths, [0, 2, 3, 9, 1])
    contexts.answers = AnswerSpans(begins, EOS)
    some: dict[str, Any] = {name: ALL[name]} if name in ALL else ALL
    each = [Sampling(**some)] * 5
    if name == "mixed":
        each = [Sampling(**dict([item])) for item in ALL.items()][:5]
    sampling = combined(each, np.arange(5))
    logits = torch.randn(5, nodes + 1, 12, generator=torch.Generator().manual_seed(0))
    found = Scores(logits, sampling, draft, contexts).logits
    wanted = torch.stack(
        [
            torch.stack([by_hand(logits[row, place], text, int(begins[row]), each[row])
                         for place, text in enumerate(texts[row])])
            for row in range(5)
        ]
    )  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, 20, 3)])
@pytest.mark.parametrize("branching", [False, True])
def test_a_drafter_is_penalised_as_the_target(branching: bool, vocabulary: Tensor | None) -> None:
    """Grown layer by layer, over the whole vocabulary and a reduced one."""
    ids = torch.arange(20) if vocabulary is None else vocabulary
    draft, contexts, _ = random_tree(5, 6, len(ids), branching)
    contexts.answers = AnswerSpans(np.minimum(contexts.lengths, 2), EOS)
    everywhere = torch.randn(20, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(**ALL)  # type: ignore[arg-type]
    growth = FixedGrowth(everywhere[ids], contexts, sampling, torch.device("cpu"), 20, vocabulary)
    found = [growth.first()[:, None]]
    for begin, end in ((0, 2), (2, 3), (3, 6)):
        parents = draft.parents[:, begin:end] if draft.parents is not None else None
        found.append(growth.extend(draft.tokens[:, begin:end], parents))
    target = Draft(ids[draft.tokens], draft.sizes, parents=draft.parents)
    wanted = Scores(everywhere.expand(5, 7, -1), sampling, target, contexts).logits[..., ids]
    assert torch.equal(torch.cat(found, 1), wanted)
    assert not torch.equal(wanted, everywhere[ids].expand_as(wanted))


def test_texts_have_the_law_of_counted_penalties() -> None:
    """`tests/controls.py` has the error that this finds: the row's counts for each node."""
    drafter, rule = small_lm("distinct", COUNTED), RULES["traversal"]()
    found, counts = decode(drafter, rule, rows=6_000, case=COUNTED)
    assert found.passes, found
    assert counts.accepted.sum() > 1000


def test_a_text_that_goes_on_elsewhere_counts_all_that_is_generated() -> None:
    """`answered`: a greedy text begun anew after any of its tokens is the same."""
    sampling = Sampling(presence_penalty=1.9, frequency_penalty=0.6, min_tokens=7)
    decoder = Decoder(COUNTED.model(0.0), small_lm(case=COUNTED), eos_token_ids=(4,))
    (whole,) = decoder_text(decoder, [(2, 1)], sampling, 0)
    assert len(whole) >= 7
    for done in range(1, len(whole)):
        (rest,) = decoder_text(decoder, [(2, 1, *whole[:done])], sampling, done, 12 - done)
        assert whole[:done] + rest == whole


def decoder_text(
    decoder: Decoder, prompts: Any, sampling: Sampling, answered: int, limit: int = 12
) -> list[list[int]]:
    decoding = Decoding(decoder)
    decoding.admit(prompts, limit, settings=RowSettings(sampling, answered=answered))
    return list(finish(decoding).values())


def test_a_stop_id_ends_its_own_row_only() -> None:
    decoder = Decoder(COUNTED.model(0.0), small_lm(case=COUNTED))
    (plain,) = decoder_text(decoder, [(2, 1)], Sampling(), 0)
    token = plain[2]
    each = [RowSettings(Sampling(stop_token_ids=ids)) for ids in ((token,), (), (token, token))]
    decoding = Decoding(decoder)
    decoding.admit([(2, 1)] * 3, 12, settings=each)
    ended = plain[: plain.index(token) + 1]
    assert list(finish(decoding).values()) == [ended, plain, ended]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; expected a number from −2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {"a": 1}}, "logit_bias has the key 'a'; expected a token id"),
        ({"logit_bias": {3: 101}}, "logit_bias of 3 is 101; expected a number from −100 to 100"),
        ({"logit_bias": dict.fromkeys(range(2000), 1)}, "logit_bias has 2000 ids"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"stop_token_ids": [99]}, "stop_token_ids has the token id 99; expected ids from 0 to 4"),
        ({"logit_bias": {5: 1}}, "logit_bias has the token id 5"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], said: str) -> None:
    decoder = Decoder(COUNTED.model(0.0), small_lm(case=COUNTED))
    with pytest.raises(UserError, match=said):
        Decoding(decoder).admit([(1,)], 2, settings=RowSettings(Sampling(**fields)))


def test_equal_settings_are_one_kind_of_row() -> None:
    one, other = Sampling(logit_bias={"2": 1, "1": 0}), Sampling(logit_bias={1: 0.0, 2: 1.0})
    assert one == other
    assert hash(one) == hash(other)
    assert Contexts.of([(1,)], 1).answers is None
