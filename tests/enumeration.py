"""Every outcome of a verification rule with its probability, without drawing anything.

A drafted token stays while its uniform is below a threshold, which depends on what became of the
others. Bisection finds the thresholds from outside, for every way the others can go, and their
products are the probabilities of the outcomes. So the output's whole distribution is known, to the
rounding of the float32 probabilities, whatever a rule does inside.

Shapes: M drafts, N valid nodes, V = TOKENS, P = 2ᴺ patterns of nodes that pass or fail.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts, Draft, Siblings
from decode.draw import sampling
from decode.draw.constraint import Constraint, Guide
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.rules import Rule
from decode.verdict import Scores
from decode.verification import Verification
from tests.tiny import verify

TOKENS = 3
PLAIN = Sampling(temperature=1.0)
# (accept [R, N], next [R]) → the rule's verdict on R drafts with these uniforms.
Judge = Callable[[np.ndarray, np.ndarray], Verification]
HALVINGS = 22  # thresholds to 2⁻²²
LOW, HIGH = 0.0, 1 - 2.0**-53


def by_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draws as `decode.draw.sampling.draw` does, but as the inverse of the cumulative distribution:
    so its law is seen from few uniforms."""
    cdf = weights.double().cumsum(-1)
    total = cdf[..., -1:]
    point = torch.minimum(uniform[..., None] * total, torch.nextafter(total, -total))
    return torch.searchsorted(cdf, point, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)


@functools.cache
def _drawing() -> list[ModuleType]:
    """The modules that draw."""
    modules = [module for name, module in sys.modules.items() if name.startswith("decode.")]
    return [module for module in modules if vars(module).get("draw") is sampling.draw]


@contextmanager
def drawing_by_cdf() -> Iterator[None]:
    """Inside this context, rules and shapes draw by `by_cdf`."""
    with ExitStack() as patches:
        for module in _drawing():
            patches.enter_context(patch.object(module, "draw", by_cdf))
        yield


class SetNoise(CounterRNG):
    """Uniforms set by hand: accept [B, N], next [B, n]."""

    def __init__(self, accept: np.ndarray, following: np.ndarray) -> None:
        self.accept, self.following = accept, following

    def uniforms(self, stream: int, first: int, count: int) -> Tensor:
        assert stream == CounterRNG.ACCEPT
        return torch.as_tensor(self.accept[:, first : first + count])

    def of_text(self, depths: Tensor) -> Tensor:
        numbers = torch.as_tensor(self.following)
        # One number, for a rule that draws one token.
        return numbers if numbers.shape[1] == 1 else numbers.gather(1, depths)


class Contextual:
    """A random distribution over TOKENS for each context of up to two tokens.

    parts: probabilities are multiples of 1/parts. least: how many tokens have a chance at least.
    """

    def __init__(self, random: np.random.Generator, least: int = 1, parts: int = 8) -> None:
        splits = [
            p
            for p in itertools.product(range(parts + 1), repeat=TOKENS)
            if sum(p) == parts and np.count_nonzero(p) >= least
        ]
        self.table = {
            context: np.array(splits[random.integers(len(splits))]) / parts
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


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Of two distributions of the same texts."""
    return float(np.abs(one - other).sum() / 2)


def logits_of(probs: np.ndarray) -> Tensor:
    with np.errstate(divide="ignore"):
        return torch.as_tensor(np.log(probs), dtype=torch.float32)


@dataclass
class Enumerated:
    """joint: [V, V, V], the distribution of three tokens. emitted: tokens a round, expected."""

    joint: np.ndarray
    emitted: float


def enumerate_rule(
    rule: Rule,
    p: Contextual,
    q: Contextual | Sequence[Contextual] | None,
    parents: Sequence[int],
    siblings: Siblings,
    tokens: Sequence[int] = (),
    grammar: Constraint | None = None,
    masked: Contextual | None = None,
) -> Enumerated:
    """What a rule makes of drafts at most two deep, all that can be drawn from q.

    parents: of the nodes, breadth-first; siblings: how the drafter draws; tokens: what it chooses.
    q: for mixed siblings several, which nodes are drawn from in turn. grammar: it masks the
    target's logits, which are those of p. masked: p under it.
    """
    draft, chances = _drafts(q, parents, siblings, tokens)
    return _Probe(rule, p, draft, grammar, masked).run(chances)


def enumerate_drafts(rule: Rule, p: Contextual, draft: Draft, chances: np.ndarray) -> Enumerated:
    """The same of drafts that are given, at most two deep: each row of `draft` with its chance,
    float [M]."""
    return _Probe(rule, p, draft).run(chances)


def _drafts(
    q: Contextual | Sequence[Contextual] | None,
    parents: Sequence[int],
    siblings: Siblings,
    tokens: Sequence[int],
) -> tuple[Draft, np.ndarray]:
    """The drafts that can come about, a row each, and how probable each is, [M]."""
    count = len(parents)
    if q is None:
        return _draft(np.array([tokens], dtype=np.int64).reshape(1, count), parents), np.ones(1)
    sources = [q] if isinstance(q, Contextual) else list(q)

    def own(draft: Sequence[int], node: int) -> np.ndarray:
        return sources[node % len(sources)](*_context(draft, parents, parents[node]))

    drafts, chances = [], []
    for draft in itertools.product(range(TOKENS), repeat=count):
        chance = 1.0
        for node, parent in enumerate(parents):
            weights = own(draft, node).copy()
            if siblings == "distinct":
                weights[[draft[i] for i in range(node) if parents[i] == parent]] = 0
                weights /= weights.sum()
            chance *= weights[draft[node]]
            if not chance:
                break
        if chance:
            drafts.append(draft)
            chances.append(chance)
    if siblings == "mixed":  # a row of q for each node
        q_rows = list(range(count))
        stored = [[own(draft, node) for node in q_rows] for draft in drafts]
    else:  # as shapes store it: for each node that has children
        inner = sorted({-1, *parents})
        q_rows = [inner.index(parent) for parent in parents]
        stored = [[sources[0](*_context(d, parents, node)) for node in inner] for d in drafts]
    made = _draft(np.array(drafts, dtype=np.int64).reshape(len(drafts), count), parents)
    made.q = torch.as_tensor(np.array(stored), dtype=torch.float32)
    made.q_rows = torch.tensor([q_rows], dtype=torch.int64).expand(len(drafts), -1)
    made.drawn = "independent" if siblings == "chosen" else siblings
    return made, np.array(chances)


def _draft(tokens: np.ndarray, parents: Sequence[int]) -> Draft:
    above = torch.tensor([list(parents)], dtype=torch.int64).expand(len(tokens), -1)
    return Draft(torch.as_tensor(tokens), np.full(len(tokens), len(parents)), parents=above)


def _context(draft: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    return () if node < 0 else (*_context(draft, parents, parents[node]), int(draft[node]))


def enumerate_chains(
    rule: Rule, p: Contextual, q: Contextual, depth: int, longest: int
) -> dict[tuple[int, ...], float]:
    """The tokens that one round emits, at most `longest`, each text with its probability, for
    chains of this depth, 1 or 2, drawn from q."""
    draft, chances = _drafts(q, range(-1, depth - 1), "independent", ())
    texts: dict[tuple[int, ...], float] = {}
    for path, following, weight in _Probe(rule, p, draft).outcomes(chances):
        for token in np.flatnonzero(following):
            text = (*path, int(token))[:longest]
            texts[text] = texts.get(text, 0.0) + weight * float(following[token])
    return texts


class _Probe:
    """Asks the rule about rows of a draft, each with one more node of padding, which would pass if
    it were judged."""

    def __init__(
        self,
        rule: Rule,
        p: Contextual,
        draft: Draft,
        grammar: Constraint | None = None,
        masked: Contextual | None = None,
    ) -> None:
        self.rule, self.p, self.grammar = rule, masked or p, grammar
        rows, self.nodes = draft.tokens.shape
        self.tokens = draft.tokens.numpy()
        parents = (draft.parent_rows() - 1).numpy()
        # What follows the padding is nothing the rule may look at.
        probs = np.full((rows, self.nodes + 2, TOKENS), 1 / TOKENS)
        for row in range(rows):
            for node in range(-1, int(draft.sizes[row])):
                probs[row, node + 1] = p(*_context(self.tokens[row], parents[row], node))
        self.logits = logits_of(probs)
        one = torch.ones(rows, 1, dtype=torch.int64)
        above = torch.cat([torch.as_tensor(parents), (self.nodes - 1) * one], 1)
        q_rows = torch.cat([draft.rows_of_q(), 0 * one], 1)
        # Rules for trees are shown a chain as a tree, or they might take another way.
        self.padded = Draft(
            torch.cat([draft.tokens, one], 1),
            draft.sizes,
            draft.q,
            above if rule.trees else None,
            None if draft.q is None else q_rows,
            draft.drawn,
        )

    def run(self, chances: np.ndarray) -> Enumerated:
        joint, emitted = np.zeros((TOKENS,) * 3), 0.0
        for path, following, weight in self.outcomes(chances):
            add_outcome(joint, self.p, path, following, weight)
            emitted += weight * (len(path) + 1)
        return Enumerated(joint, emitted)

    def outcomes(self, chances: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray, float]]:
        """Accepted tokens, the law of the token after them, [V], and their probability."""
        nodes = self.nodes
        patterns = np.array(list(itertools.product([False, True], repeat=nodes)), dtype=bool)
        patterns = patterns.reshape(2**nodes, nodes)
        thresholds = self._thresholds(len(chances), patterns)
        weight = np.where(patterns, thresholds, 1 - thresholds).prod(2) * chances[:, None]

        draft_of, pattern_of = np.nonzero(weight)
        accept = np.where(patterns[pattern_of], LOW, HIGH)
        below = self._next_cdf(draft_of, accept)
        verdict = self._judge(draft_of)(accept, np.zeros(len(draft_of)))
        weight, following = weight[draft_of, pattern_of], np.diff(below, axis=1)
        paths, accepted = verdict.nodes, verdict.accepted
        for row, draft in enumerate(self.tokens[draft_of]):
            path = tuple(int(draft[node]) for node in paths[row, : accepted[row]])
            yield path, following[row], float(weight[row])

    def _thresholds(self, rows: int, patterns: np.ndarray) -> np.ndarray:
        """[M, P, N]: up to where node i passes, where the others go as the pattern says. 0 where it
        makes no difference."""
        found = np.zeros((rows, *patterns.shape))
        if not self.nodes:
            return found
        # All at once: a call of the rule costs more than its rows.
        pattern, node = np.nonzero(~patterns)
        accept = np.tile(np.where(patterns[pattern], LOW, HIGH), (rows, 1))
        judge = self._judge(np.repeat(np.arange(rows), len(pattern)))
        places = np.arange(len(accept)), np.tile(node, rows)

        def ends(at: np.ndarray | float) -> np.ndarray:
            accept[places] = at
            verdict = judge(accept, np.zeros(len(accept)))
            path = verdict.nodes
            inside = np.arange(path.shape[1]) < verdict.accepted[:, None]
            # The accepted nodes as a number; they are fewer than eight.
            return (np.where(inside, path + 1, 0) * 8 ** np.arange(path.shape[1])).sum(1)

        passed = ends(LOW)
        low, high = np.zeros(len(accept)), np.ones(len(accept))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            same = ends(middle) == passed
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        at = np.where(ends(HIGH) == passed, 0.0, (low + high) / 2).reshape(rows, -1)
        found[:, pattern, node] = at
        found[:, pattern + 2 ** (self.nodes - 1 - node), node] = at
        return found

    def _next_cdf(self, rows: np.ndarray, accept: np.ndarray) -> np.ndarray:
        """[M', V+1]: the next token is below v while its uniform is below this."""
        inner = TOKENS - 1
        judge, accept = self._judge(np.tile(rows, inner)), np.tile(accept, (inner, 1))
        tokens = np.repeat(np.arange(1, TOKENS), len(rows))
        low, high = np.zeros(len(tokens)), np.ones(len(tokens))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            less = judge(accept, middle).next_token < tokens
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        # Thresholds of 0 and 1 are met exactly, so that what must not be drawn has no chance.
        at = np.where(low == 0, 0.0, np.where(high == 1, 1.0, (low + high) / 2))
        cdf = np.zeros((len(rows), TOKENS + 1))
        cdf[:, 1:TOKENS] = at.reshape(inner, -1).T
        cdf[:, -1] = 1
        return cdf

    def _judge(self, rows: np.ndarray) -> Judge:
        """The rule on these rows, int [R]."""
        at, whole = torch.as_tensor(rows), self.padded
        draft = Draft(
            whole.tokens[at],
            whole.sizes[rows],
            None if whole.q is None else whole.q[at],
            None if whole.parents is None else whole.parents[at],
            None if whole.q_rows is None else whole.q_rows[at],
            whole.drawn,
        )
        contexts = Contexts.of([(0,)] * len(rows), 1)
        if self.grammar is not None:
            contexts.guides = [Guide(self.grammar, 1) for _ in rows]
        scores = Scores(self.logits[at], PLAIN, draft, contexts)

        def judge(accept: np.ndarray, following: np.ndarray) -> Verification:
            padded = np.concatenate([accept, np.zeros((len(rows), 1))], 1)
            with drawing_by_cdf():
                return verify(self.rule, draft, scores, SetNoise(padded, following[:, None]))

        return judge


def add_outcome(
    joint: np.ndarray, p: Contextual, path: tuple[int, ...], following: np.ndarray, weight: float
) -> None:
    """Add accepted tokens and one drawn from `following`, those missing to three from p."""
    for token in np.flatnonzero(following):
        text = (*path, int(token))
        chance = weight * following[token]
        if len(text) == 3:
            joint[text] += chance
        elif len(text) == 2:
            joint[text] += chance * p(*text)
        else:
            for y in range(TOKENS):
                joint[text[0], y] += chance * p(text[0])[y] * p(text[0], y)
