"""The whole loop, sampled: many texts against the exact joint distribution of several tokens.

Shapes: B rows, n nodes at one depth, N drafted nodes, V vocabulary.
"""

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from decode.draft import Contexts, Draft, Limits, Siblings
from decode.drafters import Drafter
from decode.drafters.lookup.documents import Datastore, write_datastore
from decode.drafters.lookup.ngram import NgramDrafter
from decode.drafters.lookup.rest import RestDrafter, RestOptions
from decode.drafters.pard import ParallelLMDrafter, mark_parallel
from decode.drafters.several.cascade import HorizontalCascade
from decode.drafters.several.combined import SeveralDrafters
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.lengths import Policy
from decode.lengths.worth import Worth
from decode.loop.decoded import Decoded
from decode.loop.decoding import Decoder
from decode.loop.step import decided
from decode.model.forward.prepare_model import prepare
from decode.rules import Rule
from decode.shapes import Growth, Shape
from decode.stats import Counts
from decode.verdict import Decision, Scores
from decode.verification import Verification
from tests.tiny import is_matrix, moved, padded, tiny_model

VOCAB = 16
HEAD = 2  # the first tokens are likely ones; every other has a probability near 0.003
PROMPT = (0, 2, 1, 0, 1)
NEW = 4  # the prefill's token, then two drafted ones and a bonus
SAMPLING = Sampling(temperature=0.8, top_k=VOCAB - 1, top_p=0.998)
BATCH = 50_000


@functools.cache
def model(apart: float) -> Any:
    """A tiny llama with few likely tokens and many rare ones; `apart` moves its weights randomly.

    What an error does to a distribution shows in likely tokens, or in many equally rare ones; over
    texts that are spread evenly it would drown in the noise of thousands of bins.
    """
    shape: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 1, "kv_heads": 1, "tie": False}
    lm = moved(tiny_model("llama", vocab=VOCAB, seed=10, **shape), apart, seed=1, which=is_matrix)
    with torch.no_grad():
        # Channel 0 of the hidden states is large and never changes; after the norm it is about √8.
        lm.get_input_embeddings().weight[:, 0] = 10.0
        layer = lm.model.layers[0]
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
        output = lm.get_output_embeddings().weight
        output[:HEAD] *= 4
        output[:, 0] = 0
        output[0, 0] = 0.3
        output[HEAD:, 0] = -4.8 / 8**0.5
        output *= SAMPLING.temperature
    return lm


@functools.cache
def longer_model(apart: float, layers: int = 2) -> Any:
    """One of five tokens, which stay likely, and two layers: a wrong key or value in the cache
    shows in what follows. `apart` moves its weights randomly."""
    shape: dict[str, Any] = {"layers": layers, "hidden": 8, "heads": 1, "kv_heads": 1, "tie": False}
    lm = tiny_model("llama", vocab=5, seed=4, **shape)
    return moved(lm, apart, seed=2, which=is_matrix)


def more_texts(times: int) -> pytest.MarkDecorator:
    """A test of a law in the gate, and with `times` as many texts as a longer test."""
    longer = pytest.param(times, marks=pytest.mark.thorough)
    return pytest.mark.parametrize("times", [1, longer])


@dataclass(frozen=True)
class Case:
    """What is decoded many times, so that texts can be counted.

    prompts: of rows in turn, in one ragged batch. new: tokens of a text, unless one of `eos` ends
    it. summed: tokens at the start of a text that are summed over, for fuller bins. processors:
    those of the target, which take many rows at once.
    """

    model: Callable[[float], Any]
    vocab: int
    prompts: tuple[tuple[int, ...], ...]
    new: int
    gamma: int
    sampling: Sampling
    eos: tuple[int, ...] = ()
    summed: int = 0
    processors: tuple[Any, ...] = ()

    def decoder(self, drafter: Drafter, rule: Rule | str | None = None, **options: Any) -> Decoder:
        """What decodes the case, unless the options say something else."""
        usual = {"eos_token_ids": self.eos, "gamma": self.gamma, "sampling": self.sampling}
        usual |= {"processors": self.processors}
        return Decoder(self.model(0.0), drafter, rule=rule, **(usual | options))


# The prefill's token, then two drafted ones and a bonus.
SHORT = Case(model, VOCAB, (PROMPT,), NEW, 3, SAMPLING, summed=1)
# Up to five rounds, drafts four deep, ragged from the first pass on; token 4 ends a text.
LONGER = Case(
    longer_model, 5, ((0, 2, 1), (1,), (3, 0, 2, 2, 1, 0)), 6, 4, Sampling(1.0, top_p=0.98), (4,)
)
# A layer between the first and the last, which a draft may skip.
DEEPER = replace(LONGER, model=functools.partial(longer_model, layers=3))
# Drafts so shallow that another one follows a whole acceptance.
SHALLOW = replace(LONGER, gamma=2)
# Prompts of few tokens: which others stand on a path makes a difference.
PENALISED = replace(
    LONGER,
    prompts=((2,), (3, 2), (2, 2, 3)),
    eos=(),
    sampling=Sampling(1.0, repetition_penalty=1.8),
)


# What is generated counts, not the prompt; two ids end a text, but not before its third token.
COUNTED = replace(
    PENALISED,
    eos=(4,),
    sampling=Sampling(
        1.0,
        presence_penalty=1.4,
        frequency_penalty=-0.9,
        logit_bias={1: -0.5},
        min_tokens=2,
        stop_token_ids=(3,),
    ),
)


class NeverTwice(transformers.LogitsProcessor):
    """No token stands beside its like, and a pair that came once does not come again soon."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.scatter(1, input_ids[:, -1:], -torch.inf)
        if input_ids.shape[1] < 3:
            return scores
        before = input_ids[:, -3:-2]
        return scores.scatter(1, before, scores.gather(1, before) - 1.0)


PROCESSED = replace(PENALISED, processors=(NeverTwice(),))


class Sums:
    """A constraint whose masks depend on all tokens of a text: no token comes twice in a row, none
    is the sum of the text modulo 3, and a text ends (4) where its sum is even."""

    ends = frozenset({4})

    def start(self) -> "SumsMatcher":
        return SumsMatcher()


class SumsMatcher:
    ends = Sums.ends

    def __init__(self) -> None:
        self.text: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.packbits(sums_allow(self.text), bitorder="little")

    def advance(self, token: int) -> bool:
        if not sums_allow(self.text)[token]:
            return False
        self.text.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]

    def forced(self) -> list[int]:
        """Nothing is forced: a guess, whose later tokens may not even follow."""
        first = int(sums_allow(self.text).argmax())
        return [first, (first + 1) % 4, *self.ends]


def sums_allow(text: Sequence[int]) -> np.ndarray:
    """bool [5]: what may follow a text."""
    return _allowed(tuple(text))


@functools.cache
def _allowed(text: tuple[int, ...]) -> np.ndarray:
    tokens, total = np.arange(5), sum(text)
    allowed = (tokens < 4) & ~np.isin(tokens, text[-1:]) & (tokens != total % 3)
    allowed[4] = bool(text) and total % 2 == 0
    return allowed


CONSTRAINED = replace(LONGER, sampling=Sampling(1.0, top_p=0.98, grammar=Sums()))


@functools.cache
def exact_law(case: Case) -> np.ndarray:
    """float64 [P, V+1, …, V+1]: the law of each prompt's texts, V standing for no token, from plain
    forwards of all texts and transformers' own processors and warpers."""
    sampling = case.sampling
    warpers = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
            *case.processors,
            transformers.TemperatureLogitsWarper(sampling.temperature),
            *([transformers.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
            *([transformers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
        ]
    )
    texts = torch.tensor(list(itertools.product(range(case.vocab), repeat=case.new - 1)))
    laws = []
    for prompt in case.prompts:
        ids = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts], 1)
        with torch.inference_mode():
            logits = case.model(0.0)(ids).logits[:, len(prompt) - 1 :].double()  # [·, new, V]
        if sampling.grammar is not None:
            allowed = [[sums_allow(text[:i]) for i in range(case.new)] for text in texts.tolist()]
            logits = logits.masked_fill(~torch.as_tensor(np.array(allowed)), -torch.inf)
        logits = logits + torch.stack([_added(texts[:, :i], case) for i in range(case.new)], 1)
        probs = torch.stack(
            [warpers(ids[:, : len(prompt) + i], logits[:, i]).softmax(-1) for i in range(case.new)],
            1,
        )
        joint = probs[:, case.new - 1]
        for i in range(case.new - 1):
            joint = joint * probs[:, i].gather(1, texts[:, i : i + 1])
        law = np.zeros((case.vocab + 1,) * case.new)
        last = torch.arange(case.vocab).repeat(len(texts), 1).flatten()[:, None]
        whole = torch.cat([texts.repeat_interleave(case.vocab, 0), last], 1).numpy()
        np.add.at(law, tuple(_cut(whole, case).T), joint.flatten().numpy())
        laws.append(law.sum(tuple(range(case.summed))))
    return np.stack(laws)


def _added(texts: Tensor, case: Case) -> Tensor:
    """float64 [n, V]: what penalties that count generated tokens add to logits after them."""
    sampling = case.sampling
    counts = torch.nn.functional.one_hot(texts, case.vocab).sum(1).double()
    added = -sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
    for token, bias in dict(sampling.logit_bias).items():
        added[:, token] += bias
    if texts.shape[1] < sampling.min_tokens:
        added[:, [*case.eos, *sampling.stop_token_ids]] = -torch.inf
    return added


def through_transformers(case: Case) -> Case:
    """The same case, decoded through transformers' forward."""

    @functools.cache
    def other(apart: float) -> Any:
        lm = copy.deepcopy(case.model(apart))
        prepare(lm, lean=False)
        return lm

    return replace(case, model=other)


def _cut(texts: np.ndarray, case: Case) -> np.ndarray:
    """int [n, new]: texts with no token, V, after an EOS."""
    is_eos = np.isin(texts, [*case.eos, *case.sampling.stop_token_ids])
    return np.where(is_eos.cumsum(1) - is_eos > 0, case.vocab, texts)


@dataclass
class Fit:
    """How texts fit the exact law: χ² over bins that expect 5 or more, all others pooled.

    impossible: how many texts have probability 0. total_variation: of the shares of texts and the
    law; by chance alone it is above 0, and the smaller the more texts there are.
    """

    chi2: float
    df: int
    impossible: int
    total_variation: float

    @property
    def limit(self) -> float:
        # χ² has mean df and variance 2·df: ten standard deviations, never met by chance.
        return self.df + 10 * (2 * self.df) ** 0.5

    @property
    def passes(self) -> bool:
        return self.impossible == 0 and self.chi2 < self.limit


def fit_texts(texts: Sequence[Sequence[int]], case: Case) -> Fit:
    """Row i answers prompt i modulo their number."""
    padded = np.full((len(texts), case.new), case.vocab)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    which = np.arange(len(texts)) % len(case.prompts)
    law = exact_law(case)
    counts = np.zeros(law.shape)
    np.add.at(counts, (which, *padded[:, case.summed :].T), 1)
    expected = law * np.bincount(which).reshape(-1, *[1] * (law.ndim - 1))
    large = expected >= 5
    found = np.append(counts[large], counts[~large & (expected > 0)].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 5:
        found, wanted = found[:-1], wanted[:-1]
    chi2 = float(((found - wanted) ** 2 / wanted).sum())
    distance = float(np.abs(counts - expected).sum() / (2 * len(texts)))
    return Fit(chi2, len(wanted) - 1, int(counts[expected == 0].sum()), distance)


def fit(texts: np.ndarray) -> Fit:
    """texts: int [B, 3], those of SHORT without their first tokens."""
    return fit_texts(np.pad(texts, ((0, 0), (1, 0))).tolist(), SHORT)


class Watched(Rule):
    """A rule, counting the rounds in which it rejected a token and so came to a residual."""

    # So that the loop asks this object for every decision.
    lossless, trees, exact_when_greedy = False, True, False

    def __init__(self, rule: Rule) -> None:
        self.rule, self.rounds, self.rejecting = rule, 0, 0
        self.couples = rule.couples

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        decision = decided(self.rule, draft, scores, rng)
        above, path = draft.parent_rows(), decision.path
        elders = (above[:, :, None] == above[:, None, :]).tril(-1).any(2).gather(1, path)
        inside = torch.arange(path.shape[1]) < decision.accepted[:, None]
        rejected = (elders & inside).any(1) | (decision.reached > decision.accepted)
        self.rounds += len(rejected)
        self.rejecting += int(rejected.sum())
        return decision


def decode(
    drafter: Drafter, rule: Rule, *, rows: int, seed: int = 0, case: Case = SHORT
) -> tuple[Fit, Counts]:
    fitted, runs = decode_runs(drafter, rule, rows=rows, seed=seed, case=case)
    return fitted, sum((run.counts for run in runs), Counts.zero())


def decode_runs(
    drafter: Drafter,
    rule: Rule,
    *,
    rows: int,
    seed: int = 0,
    case: Case = SHORT,
    policy: str | Policy | None = None,
) -> tuple[Fit, list[Decoded]]:
    decoder = case.decoder(drafter, rule, policy=policy)
    runs = []
    for begin in range(0, rows, BATCH):
        places = range(begin, min(begin + BATCH, rows))
        prompts = [case.prompts[place % len(case.prompts)] for place in places]
        runs.append(decoder.decode(prompts, case.new, seed=seed, row_ids=places))
    return fit_texts([text for run in runs for text in run.outputs], case), runs


class Priced(Worth):
    """Drafts are as deep as they may be, and their nodes have this price, whatever a pass takes."""

    def __init__(self, max_depth: int, price: float) -> None:
        super().__init__(max_depth)
        self.price = price

    def depths(self) -> np.ndarray:
        super().depths()
        for source in self._sources:
            source.asks, source.depth = False, self.max_depth
        return np.full(self.rows, self.max_depth)

    def _price(self) -> float:
        return self.price


class FixedDraft(Drafter):
    """The same draft everywhere, whatever the text; a chain unless there are parents."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self.tokens, self.parents = list(tokens), parents

    @property
    def branches(self) -> bool:
        return self.parents is not None

    def max_nodes(self, gamma: int) -> int:
        return len(self.tokens)

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, *rest: Any) -> Draft:
        rows = len(contexts.lengths)
        return Draft(
            torch.tensor([self.tokens]).expand(rows, -1),
            np.full(rows, len(self.tokens)),
            parents=None if self.parents is None else torch.tensor([self.parents]).expand(rows, -1),
        )


class Remembering(Drafter):
    """Drafts what it saw each row emit in the decode before this one. drawn: from a q that prefers
    these tokens. remembers: whether it says that it learns."""

    def __init__(self, vocab: int, *, drawn: bool, remembers: bool = True) -> None:
        self.vocab, self.drawn, self.remembers = vocab, drawn, remembers
        self.last = self.now = np.zeros((BATCH, 32), dtype=np.int64)

    @property
    def learns(self) -> bool:
        return self.remembers

    def siblings(self, sampling: Sampling) -> Siblings:
        return "independent" if self.drawn else "chosen"

    def start(self, contexts: Contexts) -> None:
        self.last, self.now = self.now, np.zeros_like(self.now)
        self.rows = np.arange(len(contexts.lengths))

    def observe(self, verification: Verification) -> None:
        tokens = verification.contexts.tokens[:, : self.now.shape[1]]
        self.now[self.rows, : tokens.shape[1]] = tokens

    def keep_rows(self, rows: np.ndarray) -> None:
        self.rows = self.rows[rows]

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: CounterRNG
    ) -> Draft:
        columns = contexts.lengths[:, None] + np.arange(limits.max_depth)
        tokens = torch.as_tensor(self.last[self.rows[:, None], columns])
        if not self.drawn:
            return Draft(tokens, limits.depths.copy())
        q = (torch.nn.functional.one_hot(tokens, self.vocab) + 1 / self.vocab) / 2
        drawn = draw(q, noise.uniforms(CounterRNG.DRAFT, 0, tokens.shape[1]))
        return Draft(drawn, limits.depths.copy(), q)


class Pairs(Shape):
    """Two children of every node: drawn with or without replacement, or chosen: the likeliest token
    and the third, which leaves the second to be drawn after a rejection."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings

    def siblings(self, sampling: Sampling) -> Siblings:
        return self._siblings

    def max_nodes(self, gamma: int) -> int:
        return 2 ** (gamma + 1) - 2

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, noise: CounterRNG) -> Draft:
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        q: list[Tensor] = []
        logits = growth.first()[:, None]
        layer = torch.full((growth.rows, 1), -1)  # the nodes whose children come next
        nodes = 0
        for depth in range(limits.max_depth):
            probs = sampling.probs(logits)  # [B, n, V]
            drawn = self._pair(probs, noise, 2 * nodes)
            tokens.append(drawn)
            parents.append(layer.repeat_interleave(2, dim=1))
            q.append(growth.over_vocabulary(probs))
            layer = nodes + torch.arange(drawn.shape[1]).expand(growth.rows, -1)
            nodes += drawn.shape[1]
            if depth + 1 < limits.max_depth:
                logits = growth.extend(drawn, parents[-1])
        chosen = self._siblings == "chosen"
        draft = Draft(
            growth.ids(torch.cat(tokens, 1)),
            np.full(growth.rows, nodes),
            None if chosen else torch.cat(q, 1),
            torch.cat(parents, 1),
            drawn="distinct" if self._siblings == "distinct" else "independent",
        )
        draft.limit_depth(limits.depths)
        return draft

    def _pair(self, probs: Tensor, noise: CounterRNG, place: int) -> Tensor:
        """int64 [B, 2n]"""
        if self._siblings == "chosen":
            return probs.topk(3, dim=-1).indices[..., ::2].flatten(1)
        count = probs.shape[1]
        first = draw(probs, noise.uniforms(CounterRNG.DRAFT, place, count))
        if self._siblings == "distinct":
            probs = probs.scatter(2, first[..., None], 0.0)
        second = draw(probs, noise.uniforms(CounterRNG.DRAFT, place + count, count))
        return torch.stack([first, second], -1).flatten(1)


def small_lm(siblings: Siblings | None = None, case: Case = SHORT) -> SmallLMDrafter:
    """A drafter near the target: of chains, or of pairs of such siblings."""
    return SmallLMDrafter(case.model(0.2), shape=None if siblings is None else Pairs(siblings))


def parallel_lm(siblings: Siblings | None = None, case: Case = SHORT) -> ParallelLMDrafter:
    """The same with all tokens drafted in one pass. Its mask token is a row of padding."""
    lm = padded(case.model(0.2), case.vocab + 1, std=0.5)
    mark_parallel(lm.config, case.vocab)
    shape = None if siblings is None else Pairs(siblings)
    return ParallelLMDrafter(lm, shape=shape, vocab_size=case.vocab)


def merged(*others: Drafter, case: Case = SHORT) -> SeveralDrafters:
    """One tree of that drafter's chains and those of others."""
    return SeveralDrafters([*others, small_lm(case=case)])


def lookup_and_cascade(case: Case = LONGER) -> list[Drafter]:
    """Two drafters of chains to ask in turn. Where the first part of the cascade is shorter than in
    other rows, tokens of its second part have other rows of q than their own."""
    cascade = HorizontalCascade(NgramDrafter(1, 1), small_lm(case=case), depth=3)
    return [NgramDrafter(2, 3), cascade]


def looked_up(case: Case = SHORT) -> RestDrafter:
    """A drafter with a datastore of a few texts, some with the prompts of the case in front."""
    texts = np.random.default_rng(0).integers(0, case.vocab, (20, case.new + 4)).tolist()
    documents = [[*prompt, *text] for prompt in case.prompts for text in texts] + texts
    with tempfile.TemporaryDirectory() as directory:
        write_datastore(Path(directory), documents)
        # What is mapped stays readable after the files are deleted.
        store = Datastore(Path(directory))
    return RestDrafter(store, RestOptions(min_n=1, tree_nodes=8))
