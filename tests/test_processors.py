"""Processors that depend on the text: each place of a draft is judged after its own text."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.shapes import Growth
from decode.verdict import Scores
from decode.verification import Verification
from tests.test_loop import NEW, PROMPTS, ChainDrafter, RandomTrees, whole_answer
from tests.test_loop import answers as greedy_answers
from tests.tiny import VOCAB, generated, tiny_model

model = functools.cache(tiny_model)


def random_tree(
    rows: int, nodes: int, vocab: int, branching: bool
) -> tuple[Draft, Contexts, list[list[list[int]]]]:
    """A draft after ragged texts, and for each row the text before each of its R places."""
    random = np.random.default_rng(nodes)
    lengths = random.integers(1, 9, rows)
    tokens = random.integers(0, vocab, (rows, 8 + nodes))
    drafted = random.integers(0, vocab, (rows, nodes))
    parents = np.tile(np.arange(nodes) - 1, (rows, 1))
    if branching:
        parents = np.array([[random.integers(-1, i) if i else -1 for i in range(nodes)]] * rows)
        parents.sort(axis=1)  # shallow nodes first
    texts = []
    for row in range(rows):
        before = [tokens[row, : lengths[row]].tolist()]
        for node, parent in enumerate(parents[row]):
            before.append([*before[parent + 1], int(drafted[row, node])])
        texts.append(before)
    draft = Draft(
        torch.as_tensor(drafted),
        np.full(rows, nodes),
        parents=torch.as_tensor(parents) if branching else None,
    )
    return draft, Contexts(tokens, lengths), texts


def one_by_one(logits: Tensor, texts: list[list[list[int]]], processors: Sequence[Any]) -> Tensor:
    """transformers' processors, each place for itself."""
    wanted = logits.clone()
    for row, before in enumerate(texts):
        for place, text in enumerate(before):
            scores = logits[row, place][None].clone()
            for processor in processors:
                scores = processor(torch.tensor([text]), scores)
            wanted[row, place] = scores[0]
    return wanted


class AfterEven(LogitsProcessor):
    """Depends on the whole text: forbids the tokens congruent to its sum, modulo 3."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rest = input_ids.sum(1, keepdim=True) % 3
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == rest, -torch.inf)


def processors_of(name: str) -> list[Any]:
    return {
        "min-length": [transformers.MinLengthLogitsProcessor(30, list(range(100)))],
        "several": [
            transformers.RepetitionPenaltyLogitsProcessor(1.7),
            transformers.NoRepeatNGramLogitsProcessor(3),
            AfterEven(),
        ],
    }[name]


@pytest.mark.parametrize(
    ("nodes", "branching", "penalty"),
    [(0, False, 1.3), (1, True, 0.7), (6, False, 0.7), (6, True, 1.3)],
)
def test_the_repetition_penalty_equals_transformers(
    nodes: int, branching: bool, penalty: float
) -> None:
    draft, contexts, texts = random_tree(5, nodes, 20, branching)
    logits = torch.randn(5, nodes + 1, 20, generator=torch.Generator().manual_seed(0))
    found = Scores(logits, Sampling(repetition_penalty=penalty), draft, contexts).logits
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    torch.testing.assert_close(found, one_by_one(logits, texts, [processor]), rtol=0, atol=0)
    assert not torch.equal(found, logits)


@pytest.mark.parametrize("branching", [False, True])
def test_any_processors_see_the_text_before_each_place(branching: bool) -> None:
    draft, contexts, texts = random_tree(5, 6, 20, branching)
    logits = torch.randn(5, 7, 20, generator=torch.Generator().manual_seed(0))
    processors = [transformers.NoRepeatNGramLogitsProcessor(2), AfterEven()]
    sampling = Sampling(repetition_penalty=1.3)
    scores = Scores(logits, sampling, draft, contexts, processors)
    # The penalty comes first, as in generate().
    first = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    wanted = one_by_one(logits, texts, [first, *processors])
    assert torch.equal(scores.logits, wanted)
    assert torch.equal(scores.raw, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("penalty", [1.1, None])
def test_half_precision_is_processed_in_float32(dtype: torch.dtype, penalty: float | None) -> None:
    """As in generate(): 2,000 places have the argmax, and the very scores, that it has there.
    Without a penalty of ours, a processor does what it does."""
    rows, nodes, vocab = 500, 3, 300
    random = np.random.default_rng(0)
    logits = torch.randn(rows, nodes + 1, vocab, generator=torch.Generator().manual_seed(0))
    logits = (4 * logits).to(dtype)
    # Texts of likely tokens, as texts are.
    likely = logits.topk(8, -1).indices.flatten(1).numpy()
    tokens, drafted = random.permuted(likely, axis=1), random.permuted(likely, axis=1)
    draft = Draft(torch.as_tensor(drafted[:, :nodes]), np.full(rows, nodes))
    contexts = Contexts(tokens, np.full(rows, 12))
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty or 1.1)
    sampling = Sampling(repetition_penalty=penalty or 1.0)
    given = [] if penalty else [theirs]
    scores = Scores(logits, sampling, draft, contexts, given)
    text = np.concatenate([tokens[:, :12], drafted[:, :nodes]], 1)
    wanted = torch.stack(
        [
            theirs(torch.as_tensor(text[:, : 12 + place]), logits[:, place].float())
            for place in range(nodes + 1)
        ],
        1,
    )
    assert scores.logits.dtype == torch.float32
    assert torch.equal(scores.logits, wanted)
    if dtype == torch.bfloat16:  # or rounding made no difference
        assert (wanted.to(dtype).argmax(-1) != wanted.argmax(-1)).sum() > 10
    assert scores.raw is logits
    growth = FixedGrowth(
        logits[0, 0], contexts, Sampling(repetition_penalty=1.1), torch.device("cpu"), vocab
    )
    at_first = theirs(torch.as_tensor(tokens[:, :12]), logits[:1, 0].float().repeat(rows, 1))
    assert torch.equal(growth.first(), at_first)


def test_nothing_is_made_of_logits_that_are_not_processed() -> None:
    """A float32 copy of all logits of a large vocabulary would cost more than the loop does."""
    logits = torch.randn(2, 3, 20).bfloat16()
    draft, contexts, _ = random_tree(2, 2, 20, False)
    assert Scores(logits, Sampling(), draft, contexts).logits is logits
    growth = FixedGrowth(logits[0, 0], contexts, Sampling(), torch.device("cpu"), 20)
    assert growth.first().dtype == torch.bfloat16


class FixedGrowth(Growth):
    """Logits that depend on nothing, so that only the penalty tells nodes apart."""

    def __init__(self, logits: Tensor, *args: Any) -> None:
        super().__init__(*args)
        self.logits = logits

    def _first(self) -> Tensor:
        return self.logits.expand(self.rows, -1)

    def _extend(self, count: int) -> Tensor:
        return self.logits.expand(self.rows, count, -1)


# --- whole decodes --------------------------------------------------------------------------------


def drafter(name: str, answers: dict[tuple[int, ...], list[int]]) -> Drafter:
    if name == "trees":
        return RandomTrees("llama", 1, answers.__getitem__)
    if name == "same":
        return SmallLMDrafter(model("llama"))
    return DRAFTERS[name]()


@pytest.mark.parametrize("name", ["min-length", "several"])
def test_greedy_text_with_processors_equals_generate(name: str) -> None:
    """Whatever is drafted, in a ragged batch."""
    processors = LogitsProcessorList(processors_of(name))
    call = {"logits_processor": processors}
    answers = {prompt: generated(model("llama"), prompt, NEW, call) for prompt in PROMPTS}
    assert list(answers.values()) != greedy_answers("llama")  # the processors do something
    for kind in ("none", "ngram", "same", "trees"):
        decoder = Decoder(model("llama"), drafter(kind, answers), gamma=5, processors=processors)
        together = decoder.decode(PROMPTS, NEW)
        assert together.outputs == list(answers.values()), kind
        if kind in ("same", "trees"):
            assert together.counts.accepted[1:].sum() > 0, kind


# --- logits that cannot be used -------------------------------------------------------------------


class Broken(torch.nn.Module):
    """An output layer that is NaN wherever the hidden state says so."""

    def __init__(self, output: Any, hidden: Tensor) -> None:
        super().__init__()
        self.output, self.hidden = output, hidden
        self.weight = output.weight

    def forward(self, hidden: Tensor) -> Tensor:
        hit = (hidden - self.hidden).abs().amax(-1, keepdim=True) < 1e-4
        return torch.where(hit, torch.nan, self.output(hidden))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("place", [0, 5])
def test_logits_that_are_nan_stop_with_step_and_row(place: int, temperature: float) -> None:
    """In one row, at one place of its text; the rows beside it are sound."""
    broken = tiny_model("llama")
    prompt = PROMPTS[3]
    sampling = Sampling(temperature, top_k=50)
    plain = Decoder(broken, DRAFTERS["none"](), rule="exact", sampling=sampling)
    wanted = plain.decode(PROMPTS, NEW).outputs
    text = [*prompt, *wanted[3][:place]]
    with torch.inference_mode():
        hidden = broken.model(torch.tensor([text])).last_hidden_state[0, -1]
    broken.set_output_embeddings(Broken(broken.get_output_embeddings(), hidden.clone()))
    said = rf"logits are NaN or infinite in step {'0' if not place else '[1-9]'} .*for prompt 3"
    for name in ("none", "same"):
        decoder = Decoder(broken, drafter(name, {}), gamma=2, rule="exact", sampling=sampling)
        with pytest.raises(UserError, match=said):
            decoder.decode(PROMPTS, NEW)
        assert decoder.decode(PROMPTS[:3], NEW).outputs == wanted[:3]


def test_nan_after_a_rejected_draft_is_none_of_the_texts_business() -> None:
    """Only the places on the accepted path are looked at."""
    prompt = PROMPTS[1]
    wanted = whole_answer("llama", prompt)[:NEW]
    broken = tiny_model("llama")
    with torch.inference_mode():
        text = [*prompt, wanted[0], (wanted[1] + 1) % VOCAB]
        hidden = broken.model(torch.tensor([text])).last_hidden_state[0, -1]
    broken.set_output_embeddings(Broken(broken.get_output_embeddings(), hidden.clone()))
    wrong = ChainDrafter("llama", lambda row, place: True)
    shown = []

    def observe(seen: Verification) -> None:
        shown.append(bool(seen.scores.raw.isnan().any()))

    decoder = Decoder(broken, wrong, gamma=3, observers=[observe])
    assert decoder.decode([prompt], NEW).outputs == [wanted]
    assert shown[0]


def test_a_drafter_of_nans_drafts_for_nothing() -> None:
    """What it drafts is rejected, and the text is the target's own."""
    lame = tiny_model("llama", layers=1)
    with torch.no_grad():
        lame.model.norm.weight[0] = torch.nan
    for temperature in (0.0, 1.0):
        decoder = Decoder(
            model("llama"), SmallLMDrafter(lame), sampling=Sampling(temperature, top_k=5)
        )
        run = decoder.decode(PROMPTS, NEW)
        if temperature:
            assert run.counts.accepted.sum() == 0
            assert len({token for output in run.outputs for token in output}) > 20
        else:
            assert run.outputs == greedy_answers("llama")
