"""Promises 21 and 22: sampled text has exactly the target's distribution, and these tests can tell.

First the rules alone, by enumeration: probabilities that are multiples of 1/4 and a grid of
uniforms make every outcome's probability a fraction that is counted, not estimated. Then the whole
loop, by the joint distribution of several tokens of many texts.

Shapes: B rows, N drafted nodes, V vocabulary.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from decode.draft import Draft
from decode.drafters import Contexts, Drafter, Limits
from decode.drafters.ngram import NgramDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop import Decoder
from decode.rules import RULES, Rule, Verdict
from decode.rules.speculative import SpeculativeSampling
from decode.sampling import Noise, Sampling, draw
from decode.scores import Scores
from decode.stats import Counts
from tests.tiny import tiny_model

PLAIN = Sampling(temperature=1.0)

# --- the rules alone, enumerated ------------------------------------------------------------------

TOKENS = 3
# With p and q multiples of 1/4, p/q and the steps of a residual's CDF are multiples of 1/12, and
# the middles of twelfths stand for all uniforms: (i + 1/2)/12 for [i/12, (i + 1)/12).
GRID = (np.arange(12) + 0.5) / 12


class GridNoise(Noise):
    """Uniforms set by hand: accept [B, N], next [B, N+1]."""

    def __init__(self, accept: np.ndarray, following: np.ndarray) -> None:
        self.streams = {Noise.ACCEPT: accept, Noise.NEXT: following}

    def uniforms(self, stream: int, first: int, count: int) -> Tensor:
        return torch.as_tensor(self.streams[stream][:, first : first + count])

    def of_text(self, depths: Tensor) -> Tensor:
        return torch.as_tensor(self.streams[Noise.NEXT]).gather(1, depths)


class Contextual:
    """A random distribution over TOKENS for each context of up to two tokens, in quarters."""

    def __init__(self, random: np.random.Generator) -> None:
        parts = [p for p in itertools.product(range(5), repeat=TOKENS) if sum(p) == 4]
        self.table = {
            context: np.array(parts[random.integers(len(parts))]) / 4
            for depth in range(3)
            for context in itertools.product(range(TOKENS), repeat=depth)
        }

    def __call__(self, *context: int) -> np.ndarray:
        return self.table[context]

    def joint(self) -> np.ndarray:
        """[V, V, V]: the probability of each text of three tokens."""
        joint = np.zeros((TOKENS,) * 3)
        for x, y in itertools.product(range(TOKENS), repeat=2):
            joint[x, y] = self()[x] * self(x)[y] * self(x, y)
        return joint


def logits_of(probs: np.ndarray) -> Tensor:
    with np.errstate(divide="ignore"):
        return torch.as_tensor(np.log(probs), dtype=torch.float32)


def add_outcomes(
    joint: np.ndarray, p: Contextual, draft: Draft, verdict: Verdict, weight: float
) -> None:
    """Add each row's emitted tokens to the joint of three, the missing ones drawn from p."""
    path_tokens = draft.tokens.gather(1, verdict.path)
    for accepted, following, path in zip(
        verdict.accepted.tolist(), verdict.next_token.tolist(), path_tokens.tolist(), strict=True
    ):
        text = (*path[:accepted], following)
        if len(text) == 3:
            joint[text] += weight
        elif len(text) == 2:
            joint[text] += weight * p(*text)
        else:
            for y in range(TOKENS):
                joint[text[0], y] += weight * p(text[0])[y] * p(text[0], y)


def verified_joint(rule: Rule, p: Contextual, q: Contextual | None, size: int) -> np.ndarray:
    """The joint of three tokens that a rule makes of 2-token drafts of which `size` are valid.

    q None: one and the same draft is chosen always.
    """
    joint = np.zeros((TOKENS,) * 3)
    grid = np.stack(np.meshgrid(GRID, GRID, GRID, indexing="ij"), -1).reshape(-1, 3)
    rows = len(grid)
    following = np.repeat(grid[:, 2:], 3, axis=1)
    for x, y in [(1, 2)] if q is None else itertools.product(range(TOKENS), repeat=2):
        chance = 1.0 if q is None else float(q()[x] * q(x)[y])
        if chance == 0:
            continue
        logits = logits_of(np.stack([p(), p(x), p(x, y)])).expand(rows, -1, -1)
        declared = None
        if q is not None:
            stacked = np.stack([q(), q(x)]).astype(np.float32)
            declared = torch.as_tensor(stacked).expand(rows, -1, -1)
        tokens = torch.tensor([[x, y]]).expand(rows, -1)
        draft = Draft(tokens, np.full(rows, size), declared)
        verdict = rule.verify(draft, Scores(logits, PLAIN), GridNoise(grid[:, :2], following))
        add_outcomes(joint, p, draft, verdict, chance / rows)
    return joint


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("chosen", [False, True])
def test_speculative_sampling_by_enumeration(chosen: bool, size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(4):
        p, q = Contextual(random), Contextual(random)
        found = verified_joint(SpeculativeSampling(), p, None if chosen else q, size)
        # Sums of some thousand float64 terms.
        np.testing.assert_allclose(found, p.joint(), atol=1e-12)


# Breadth-first: two children of the root, two of the first, one of the second.
TREE_TOKENS, TREE_PARENTS = (0, 2, 1, 2, 0), (-1, -1, 0, 0, 1)


def test_exact_match_by_enumeration_on_trees() -> None:
    random = np.random.default_rng(0)
    # p alone is compared with uniforms here, so fourths do.
    fourths = (np.arange(4) + 0.5) / 4
    grid = np.stack(np.meshgrid(*[fourths] * 6, indexing="ij"), -1).reshape(-1, 6)
    for _ in range(3):
        p = Contextual(random)
        contexts: list[tuple[int, ...]] = [()]
        for token, parent in zip(TREE_TOKENS, TREE_PARENTS, strict=True):
            contexts.append((*contexts[parent + 1], token))
        logits = logits_of(np.stack([p(*context) for context in contexts]))
        draft = Draft(
            torch.tensor([TREE_TOKENS]).expand(len(grid), -1),
            np.full(len(grid), 5),
            parents=torch.tensor([TREE_PARENTS]).expand(len(grid), -1),
        )
        verdict = RULES["exact"]().verify(
            draft, Scores(logits.expand(len(grid), -1, -1), PLAIN), GridNoise(grid, grid)
        )
        joint = np.zeros((TOKENS,) * 3)
        add_outcomes(joint, p, draft, verdict, 1 / len(grid))
        np.testing.assert_allclose(joint, p.joint(), atol=1e-12)
        assert 2 in verdict.accepted.tolist()


def test_a_residual_of_nothing_falls_back_to_p() -> None:
    """p = q rejects nothing but by rounding; what it rejects then must still be drawn from p."""
    p = np.array([0.5, 0.5, 0.0])
    draft = Draft(
        torch.tensor([[2]]), np.array([1]), torch.tensor([[[0.5, 0.5, 0.0]]])
    )  # token 2 cannot be drawn from this q, so it is rejected and leaves a residual of zeros
    noise = GridNoise(np.array([[0.5]]), np.array([[0.75, 0.75]]))
    verdict = SpeculativeSampling().verify(
        draft, Scores(logits_of(np.stack([p, p]))[None], PLAIN), noise
    )
    assert (verdict.accepted.item(), verdict.next_token.item()) == (0, 1)


# --- the whole loop, sampled ----------------------------------------------------------------------

VOCAB = 16
HEAD = 2  # the first tokens are likely ones; every other has a probability near 0.003
PROMPT = (0, 2, 1, 0, 1)
NEW = 4  # the prefill's token, then two drafted ones and a bonus
SAMPLING = Sampling(temperature=0.8, top_k=VOCAB - 1, top_p=0.998)
ROWS = 500_000
BATCH = 50_000
SEEDS = 20


@functools.cache
def model(apart: float) -> Any:
    """A tiny llama with few likely tokens and many rare ones; `apart` moves its weights randomly.

    What an error does to a distribution shows in likely tokens, or in many equally rare ones; over
    texts that are spread evenly it would drown in the noise of thousands of bins.
    """
    shape: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 1, "kv_heads": 1, "tie": False}
    lm = tiny_model("llama", vocab=VOCAB, seed=10, **shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter += apart * torch.randn(parameter.shape, generator=generator)
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


def small_lm() -> Drafter:
    return SmallLMDrafter(model(0.2))


@functools.cache
def exact_joint() -> np.ndarray:
    """float64 [V, V, V]: the joint of the tokens after the first, from plain forwards of all texts
    and transformers' own warpers."""
    warpers = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(SAMPLING.temperature),
            transformers.TopKLogitsWarper(SAMPLING.top_k),
            transformers.TopPLogitsWarper(SAMPLING.top_p),
        ]
    )
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=NEW - 1)))
    ids = torch.cat([torch.tensor([PROMPT]).expand(len(texts), -1), texts], 1)
    with torch.inference_mode():
        logits = model(0.0)(ids).logits[:, len(PROMPT) - 1 :].double()  # [V³, NEW, V]
    probs = torch.stack([warpers(ids, logits[:, i]).softmax(-1) for i in range(NEW)], 1)
    joint = probs[:, NEW - 1]
    for i in range(NEW - 1):
        joint = joint * probs[:, i].gather(1, texts[:, i : i + 1])
    return joint.reshape((VOCAB,) * NEW).sum(0).numpy()


@dataclass
class Fit:
    """How texts fit the exact joint: χ² over bins that expect 5 or more, all others pooled."""

    chi2: float
    df: int
    impossible: int  # how many texts have probability 0

    @property
    def passes(self) -> bool:
        # χ² has mean df and variance 2·df: ten standard deviations, never met by chance.
        return self.impossible == 0 and self.chi2 < self.df + 10 * (2 * self.df) ** 0.5


def fit(texts: np.ndarray) -> Fit:
    """texts: int [B, 3]."""
    counts = np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(texts.T), 1)
    expected = exact_joint() * len(texts)
    large = expected >= 5
    found = np.append(counts[large], counts[~large & (expected > 0)].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 5:
        found, wanted = found[:-1], wanted[:-1]
    chi2 = float(((found - wanted) ** 2 / wanted).sum())
    return Fit(chi2, len(wanted) - 1, int(counts[expected == 0].sum()))


def decode(drafter: Drafter, rule: str | Rule, *, rows: int, seed: int = 0) -> tuple[Fit, Counts]:
    decoder = Decoder(
        model(0.0),
        drafter,
        gamma=3,
        rule=rule,
        sampling=SAMPLING,
    )
    texts: list[list[int]] = []
    counts = Counts.zero()
    for begin in range(0, rows, BATCH):
        places = range(begin, min(begin + BATCH, rows))
        run = decoder.decode([PROMPT] * len(places), NEW, seed=seed, row_ids=places)
        texts += run.outputs
        counts = counts + run.counts
    return fit(np.array(texts)[:, 1:]), counts


class FixedTree(Drafter):
    """The same tree everywhere, whatever the text: likely and unlikely tokens at each depth."""

    TOKENS, PARENTS = (5, 0, 9, 3, 1, 0), (-1, -1, 0, 0, 1, 1)

    branches = True

    def most_nodes(self, gamma: int) -> int:
        return len(self.TOKENS)

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        rows = len(contexts.lengths)
        return Draft(
            torch.tensor([self.TOKENS]).expand(rows, -1),
            np.full(rows, len(self.TOKENS)),
            parents=torch.tensor([self.PARENTS]).expand(rows, -1),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule", "rows"),
    [
        ("small_lm", "speculative", ROWS),
        ("ngram", "speculative", ROWS),
        # This rule emits the target's own draws, so there is less to go wrong.
        ("small_lm", "exact", ROWS // 2),
        ("tree", "exact", ROWS // 2),
    ],
)
def test_texts_have_the_targets_distribution(drafter: str, rule: str, rows: int) -> None:
    which = {"small_lm": small_lm, "ngram": lambda: NgramDrafter(1, 2), "tree": FixedTree}[drafter]
    found, counts = decode(which(), rule, rows=rows)
    assert found.passes, found
    # Bins enough, and all branches: text after a rejection, and the bonus after a whole draft.
    assert found.df > 100
    assert (counts.reached.sum() - counts.accepted.sum()) / counts.steps >= 0.2
    assert counts.by_accepted[2] / counts.steps >= 0.05


# --- errors that the test above must find ---------------------------------------------------------


class ColdDrafter(SmallLMDrafter):
    """Draws at 0.95 times the temperature, and declares the q of the temperature asked for."""

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        cold = replace(sampling, temperature=0.95 * sampling.temperature)
        draft = super().draft(contexts, limits, cold, noise)
        assert draft.q is not None
        asked = draft.q**0.95
        draft.q = asked / asked.sum(-1, keepdim=True)
        return draft


class PlainSpeculative(SpeculativeSampling):
    """The rule once more, in other words, with places to go wrong in."""

    def judged_q(self, q_x: Tensor) -> Tensor:
        return q_x

    def residual_row(self, accepted: Tensor) -> Tensor:
        return accepted

    def bonus_row(self, accepted: Tensor) -> Tensor:
        return accepted

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        rows, nodes = draft.tokens.shape
        p = scores.probs()
        q = draft.q
        if q is None:
            q = torch.nn.functional.one_hot(draft.tokens, p.shape[2]).float()
        uniforms = noise.uniforms(Noise.ACCEPT, 0, nodes)
        accepted = torch.zeros(rows, dtype=torch.int64)
        going = torch.ones(rows, dtype=torch.bool)
        all_rows = torch.arange(rows)
        sizes = torch.as_tensor(draft.sizes)
        for i in range(nodes):
            token = draft.tokens[:, i]
            p_x, q_x = p[all_rows, i, token].double(), q[all_rows, i, token].double()
            going = going & (i < sizes) & (uniforms[:, i] * self.judged_q(q_x) < p_x)
            accepted += going
        weights = p[all_rows, self.bonus_row(accepted)]
        if nodes:
            row = accepted.clamp(max=nodes - 1)
            left = (p[all_rows, row] - q[all_rows, self.residual_row(row)]).clamp(min=0)
            rejected = (accepted < sizes) & (left.sum(1) > 0)
            fallen = (accepted < sizes) & ~rejected
            weights = torch.where(rejected[:, None], left, weights)
            weights = torch.where(fallen[:, None], p[all_rows, row], weights)
        following = draw(weights, noise.uniforms(Noise.NEXT, 0, 1)[:, 0])
        path = torch.arange(nodes).expand(rows, -1)
        return Verdict(path, accepted, torch.minimum(accepted + 1, sizes), following)


class ClampedRatio(PlainSpeculative):
    def judged_q(self, q_x: Tensor) -> Tensor:
        return q_x.clamp(min=1e-2)


class WrongResidualRow(PlainSpeculative):
    """Subtracts the q of the first position, wherever the rejection was."""

    def residual_row(self, accepted: Tensor) -> Tensor:
        return torch.zeros_like(accepted)


class BonusOffByOne(PlainSpeculative):
    """After full acceptance draws from the distribution that judged the last drafted token."""

    def bonus_row(self, accepted: Tensor) -> Tensor:
        return (accepted - 1).clamp(min=0)


@pytest.mark.parametrize("chosen", [False, True])
def test_the_rule_to_break_is_the_rule(chosen: bool) -> None:
    """So the errors below differ from what is tested above by nothing but the error."""
    generator = torch.Generator().manual_seed(0)
    rows, nodes = 20_000, 3
    logits = torch.randn(rows, nodes + 1, VOCAB, generator=generator) * 2
    q = SAMPLING.probs(torch.randn(rows, nodes, VOCAB, generator=generator) * 2)
    tokens = draw(q, torch.rand(rows, nodes, generator=generator, dtype=torch.float64))
    sizes = torch.randint(0, nodes + 1, (rows,), generator=generator).numpy()
    draft = Draft(tokens, sizes, None if chosen else q)
    noise = Noise(0, torch.arange(rows))
    ours = SpeculativeSampling().verify(draft, Scores(logits, SAMPLING), noise)
    plain = PlainSpeculative().verify(draft, Scores(logits, SAMPLING), noise)
    for name in ("accepted", "reached", "next_token"):
        assert torch.equal(getattr(ours, name), getattr(plain, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule", "rows"),
    [
        # Fewer rows than above suffice, so the test above finds these errors all the more.
        (ColdDrafter, SpeculativeSampling, 70_000),
        (SmallLMDrafter, WrongResidualRow, 10_000),
        (SmallLMDrafter, BonusOffByOne, 20_000),
        (SmallLMDrafter, ClampedRatio, 25_000),
    ],
)
def test_errors_are_found(
    drafter: type[SmallLMDrafter], rule: type[SpeculativeSampling], rows: int
) -> None:
    fits = [decode(drafter(model(0.2)), rule(), rows=rows, seed=seed)[0] for seed in range(SEEDS)]
    assert sum(not found.passes for found in fits) >= 19, fits
