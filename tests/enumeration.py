"""Every outcome of a verification rule with its probability, without drawing anything.

A drafted token stays while its uniform is below a threshold, which depends on what became of the
others. Bisection finds the thresholds from outside, for every way the others can go, and their
products are the probabilities of the outcomes. So the output's whole distribution is known, to the
rounding of the float32 probabilities, whatever a rule does inside.

Shapes: M drafts, N valid nodes, V = TOKENS, P = 2ᴺ patterns of nodes that pass or fail.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft, Siblings
from decode.rules import Rule, Verdict
from decode.sampling import Noise, Sampling
from decode.scores import Scores

TOKENS = 3
PLAIN = Sampling(temperature=1.0)
# (accept [R, N], next [R]) → the rule's verdict on R drafts with these uniforms.
Judge = Callable[[np.ndarray, np.ndarray], Verdict]
HALVINGS = 22  # thresholds to 2⁻²²
LOW, HIGH = 0.0, 1 - 2.0**-53


class SetNoise(Noise):
    """Uniforms set by hand: accept [B, N], next [B, n]."""

    def __init__(self, accept: np.ndarray, following: np.ndarray) -> None:
        self.streams = {Noise.ACCEPT: accept, Noise.NEXT: following}

    def uniforms(self, stream: int, first: int, count: int) -> Tensor:
        return torch.as_tensor(self.streams[stream][:, first : first + count])

    def of_text(self, depths: Tensor) -> Tensor:
        return torch.as_tensor(self.streams[Noise.NEXT]).gather(1, depths)


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
    q: Contextual | None,
    parents: Sequence[int],
    siblings: Siblings,
    tokens: Sequence[int] = (),
) -> Enumerated:
    """What a rule makes of drafts at most two deep, all that can be drawn from q.

    parents: of the nodes, breadth-first; siblings: how the drafter draws; tokens: what it chooses.
    """
    drafts, chances = _drafts(q, parents, siblings, tokens)
    thresholds = _Probe(rule, p, q, parents, siblings).run(drafts, chances)
    return thresholds


def _drafts(
    q: Contextual | None, parents: Sequence[int], siblings: Siblings, tokens: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [M, N] and [M]: the drafts that can come about, and how probable each is."""
    if q is None:
        return np.array([tokens], dtype=np.int64).reshape(1, len(parents)), np.ones(1)
    drafts, chances = [], []
    for draft in itertools.product(range(TOKENS), repeat=len(parents)):
        chance = 1.0
        for node, parent in enumerate(parents):
            weights = q(*_context(draft, parents, parent)).copy()
            if siblings == "distinct":
                weights[[draft[i] for i in range(node) if parents[i] == parent]] = 0
                weights /= weights.sum()
            chance *= weights[draft[node]]
            if not chance:
                break
        if chance:
            drafts.append(draft)
            chances.append(chance)
    return np.array(drafts, dtype=np.int64).reshape(len(drafts), len(parents)), np.array(chances)


def _context(draft: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    return () if node < 0 else (*_context(draft, parents, parents[node]), int(draft[node]))


class _Probe:
    def __init__(
        self,
        rule: Rule,
        p: Contextual,
        q: Contextual | None,
        parents: Sequence[int],
        siblings: Siblings,
    ) -> None:
        self.rule, self.p, self.q, self.siblings = rule, p, q, siblings
        self.parents, self.nodes = list(parents), len(parents)
        # Rules for trees are shown a chain as a tree, or they might take another way.
        self.is_chain = not rule.trees

    def run(self, drafts: np.ndarray, chances: np.ndarray) -> Enumerated:
        nodes = self.nodes
        patterns = np.array(list(itertools.product([False, True], repeat=nodes)), dtype=bool)
        patterns = patterns.reshape(2**nodes, nodes)
        # thresholds[m, pattern, i]: below it node i passes, where the others go as the pattern says
        thresholds = np.zeros((len(drafts), 2**nodes, nodes))
        for i in range(nodes):
            which = np.flatnonzero(~patterns[:, i])
            found = self._threshold(drafts, patterns[which], i)
            thresholds[:, which, i] = found
            thresholds[:, which + 2 ** (nodes - 1 - i), i] = found
        weight = np.where(patterns, thresholds, 1 - thresholds).prod(2) * chances[:, None]

        draft_of, pattern_of = np.nonzero(weight)
        drafts, weight = drafts[draft_of], weight[draft_of, pattern_of]
        accept = np.where(patterns[pattern_of], LOW, HIGH)
        below = self._next_cdf(drafts, accept)
        verdict = self._judge(drafts)(accept, np.zeros(len(drafts)))
        return self._pool(drafts, weight, verdict, np.diff(below, axis=1))

    def _threshold(self, drafts: np.ndarray, patterns: np.ndarray, i: int) -> np.ndarray:
        """[M, P']: up to where node i passes. 0 where it makes no difference."""
        shape = (len(drafts), len(patterns))
        accept = np.tile(np.where(patterns, LOW, HIGH), (len(drafts), 1))
        judge = self._judge(np.repeat(drafts, len(patterns), axis=0))

        def ends(at: np.ndarray | float) -> np.ndarray:
            accept[:, i] = at
            verdict = judge(accept, np.zeros(len(accept)))
            path = verdict.path.numpy()
            inside = np.arange(path.shape[1]) < verdict.accepted.numpy()[:, None]
            # The accepted nodes as a number; they are fewer than eight.
            return (np.where(inside, path + 1, 0) * 8 ** np.arange(path.shape[1])).sum(1)

        passed = ends(LOW)
        low, high = np.zeros(len(accept)), np.ones(len(accept))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            same = ends(middle) == passed
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        return np.where(ends(HIGH) == passed, 0.0, (low + high) / 2).reshape(shape)

    def _next_cdf(self, drafts: np.ndarray, accept: np.ndarray) -> np.ndarray:
        """[M', V+1]: the next token is below v while its uniform is below this."""
        judge = self._judge(drafts)
        cdf = np.zeros((len(drafts), TOKENS + 1))
        cdf[:, -1] = 1
        for v in range(1, TOKENS):
            low, high = np.zeros(len(drafts)), np.ones(len(drafts))
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                less = judge(accept, middle).next_token.numpy() < v
                low, high = np.where(less, middle, low), np.where(less, high, middle)
            # Thresholds of 0 and 1 are met exactly, so that what must not be drawn has no chance.
            cdf[:, v] = np.where(low == 0, 0.0, np.where(high == 1, 1.0, (low + high) / 2))
        return cdf

    def _judge(self, drafts: np.ndarray) -> Judge:
        """The rule on rows of drafts [R, N], each with a node of padding, which would pass if it
        were judged."""
        rows = len(drafts)
        unique, back = np.unique(drafts, axis=0, return_inverse=True)
        back = back.reshape(-1)
        padded = np.concatenate([unique, np.ones((len(unique), 1), dtype=np.int64)], 1)
        parents = [*self.parents, self.nodes - 1]
        logits = np.stack(
            [
                [self.p(*_context(d, parents, node)) for node in range(-1, self.nodes)]
                for d in unique
            ]
        )
        # The row after the padding is nothing the rule may look at.
        logits = np.concatenate([logits, np.full_like(logits[:, :1], 1 / TOKENS)], 1)
        q, q_rows = None, None
        if self.q is not None:
            # As shapes store it: a row for each node that has children.
            inner = sorted({-1, *self.parents})
            q = np.stack([[self.q(*_context(d, parents, node)) for node in inner] for d in unique])
            q = torch.as_tensor(q[back], dtype=torch.float32)
            at = [inner.index(node) for node in self.parents]
            q_rows = torch.tensor([[*at, 0]]).expand(rows, -1)
        draft = Draft(
            torch.as_tensor(padded[back]),
            np.full(rows, self.nodes),
            q,
            None if self.is_chain else torch.tensor([parents]).expand(rows, -1),
            q_rows,
            self.siblings == "distinct",
        )
        scores = Scores(logits_of(logits)[torch.as_tensor(back)], PLAIN)

        def judge(accept: np.ndarray, following: np.ndarray) -> Verdict:
            padded = np.concatenate([accept, np.zeros((rows, 1))], 1)
            return self.rule.verify(draft, scores, SetNoise(padded, following[:, None]))

        return judge

    def _pool(
        self, drafts: np.ndarray, weight: np.ndarray, verdict: Verdict, following: np.ndarray
    ) -> Enumerated:
        joint = np.zeros((TOKENS,) * 3)
        paths = verdict.path.numpy()
        accepted = verdict.accepted.numpy()
        for row in range(len(drafts)):
            path = tuple(int(drafts[row, node]) for node in paths[row, : accepted[row]])
            add_outcome(joint, self.p, path, following[row], float(weight[row]))
        return Enumerated(joint, float((weight * (accepted + 1)).sum()))


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
