"""Promises 21 and 22: sampled text has exactly the target's distribution, and these tests can tell.

First the rules alone, by enumeration: probabilities that are multiples of 1/4 and a grid of
uniforms make every outcome's probability a fraction that is counted, not estimated. Then the whole
loop, by the joint distribution of several tokens of many texts.

Shapes: B rows, N drafted nodes, V vocabulary.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from decode.draft import Draft
from decode.drafters import Drafter
from decode.loop import Decoder
from decode.rules import RULES, Rule, Verdict
from decode.rules.speculative import SpeculativeSampling
from decode.sampling import Noise, Sampling
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
        verdict = rule.verify(draft, logits, PLAIN, GridNoise(grid[:, :2], following))
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
            draft, logits.expand(len(grid), -1, -1), PLAIN, GridNoise(grid, grid)
        )
        joint = np.zeros((TOKENS,) * 3)
        add_outcomes(joint, p, draft, verdict, 1 / len(grid))
        np.testing.assert_allclose(joint, p.joint(), atol=1e-12)
        assert {0, 1, 2} == set(verdict.accepted.tolist())


def test_a_residual_of_nothing_falls_back_to_p() -> None:
    """p = q rejects nothing but by rounding; whatever it rejects then must still be drawn from p."""
    p = np.array([0.5, 0.5, 0.0])
    draft = Draft(
        torch.tensor([[2]]), np.array([1]), torch.tensor([[[0.5, 0.5, 0.0]]])
    )  # token 2 cannot be drawn from this q, so it is rejected and leaves a residual of zeros
    noise = GridNoise(np.array([[0.5]]), np.array([[0.75, 0.75]]))
    verdict = SpeculativeSampling().verify(draft, logits_of(np.stack([p, p]))[None], PLAIN, noise)
    assert (verdict.accepted.item(), verdict.next_token.item()) == (0, 1)


# --- the whole loop, sampled ----------------------------------------------------------------------

VOCAB = 8
NEW = 4  # the prefill's token, and three of verification passes: two drafted and a bonus
SHAPE: dict[str, Any] = {"vocab": VOCAB, "layers": 1, "hidden": 8, "heads": 1, "kv_heads": 1}
PROMPT = [5, 3, 6, 5, 3, 7, 5, 3]
SAMPLING = Sampling(temperature=0.9, top_k=7, top_p=0.98)
ROWS = 500_000
BATCH = 50_000
SEEDS = 20

model = functools.cache(tiny_model)


def target() -> Any:
    return model("llama", seed=0, **SHAPE)


def other() -> Any:
    return model("llama", seed=3, **SHAPE)


@functools.cache
def exact_joint() -> np.ndarray:
    """float64 [V]*NEW: each text's probability, from plain forwards and transformers' warpers."""
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
        logits = target()(ids).logits[:, len(PROMPT) - 1 :].double()  # [V³, NEW, V]
    probs = torch.stack([warpers(ids, logits[:, i]).softmax(-1) for i in range(NEW)], 1)
    joint = probs[:, NEW - 1]
    for i in range(NEW - 1):
        joint = joint * probs[:, i].gather(1, texts[:, i : i + 1])
    return joint.reshape((VOCAB,) * NEW).numpy()


@dataclass
class Fit:
    """How counts of texts fit the exact joint: χ² over bins that expect 5 or more, and a pool."""

    chi2: float
    df: int
    impossible: int  # texts that have probability 0

    @property
    def passes(self) -> bool:
        # χ² has mean df and variance 2·df: ten standard deviations, never met by chance.
        return self.impossible == 0 and self.chi2 < self.df + 10 * (2 * self.df) ** 0.5


def fit(counts: np.ndarray) -> Fit:
    expected = exact_joint() * counts.sum()
    large = expected >= 5
    seen = np.append(counts[large], counts[~large & (expected > 0)].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 5:
        seen, wanted = seen[:-1], wanted[:-1]
    chi2 = float(((seen - wanted) ** 2 / wanted).sum())
    return Fit(chi2, len(wanted) - 1, int(counts[expected == 0].sum()))


def sample(
    drafter: Drafter, rule: str | Rule, *, rows: int = ROWS, seed: int = 0, batch: int = BATCH
) -> tuple[np.ndarray, Counts]:
    """How often each text was decoded, [V]*NEW, and the loop's own counts."""
    name = rule if isinstance(rule, str) else "speculative"
    decoder = Decoder(target(), drafter, gamma=NEW, rule=name, sampling=SAMPLING)
    if isinstance(rule, Rule):
        decoder.rule = rule
    texts = np.zeros((VOCAB,) * NEW, dtype=np.int64)
    counts = Counts.zero()
    for begin in range(0, rows, batch):
        places = range(begin, min(begin + batch, rows))
        run = decoder.decode([PROMPT] * len(places), NEW, seed=seed, row_ids=places)
        np.add.at(texts, tuple(np.array(run.outputs).T), 1)
        counts = counts + run.counts
    return texts, counts
