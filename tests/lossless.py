"""The whole loop, sampled: many texts against the exact joint distribution of several tokens.

Shapes: B rows, n nodes at one depth, N drafted nodes, V vocabulary.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from decode.contexts import Contexts, Limits
from decode.draft import Draft, Siblings
from decode.drafters import Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.growth import Growth
from decode.loop import Decoder
from decode.rules import Rule, Verdict
from decode.sampling import Noise, Sampling, draw
from decode.scores import Scores
from decode.shapes import Shape
from decode.stats import Counts
from tests.tiny import tiny_model

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


class Watched(Rule):
    """A rule, counting the rounds in which it rejected a token and so came to a residual."""

    lossless, trees = True, True

    def __init__(self, rule: Rule) -> None:
        self.rule, self.rounds, self.rejecting = rule, 0, 0

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        verdict = self.rule.verify(draft, scores, noise)
        above = draft.parent_rows()
        elders = (above[:, :, None] == above[:, None, :]).tril(-1).any(2).gather(1, verdict.path)
        inside = torch.arange(elders.shape[1]) < verdict.accepted[:, None]
        rejected = (elders & inside).any(1) | (verdict.reached > verdict.accepted)
        self.rounds += len(rejected)
        self.rejecting += int(rejected.sum())
        return verdict


def decode(drafter: Drafter, rule: Rule, *, rows: int, seed: int = 0) -> tuple[Fit, Counts]:
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


class FixedDraft(Drafter):
    """The same draft everywhere, whatever the text; a chain unless there are parents."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self.tokens, self.parents = list(tokens), parents

    @property
    def branches(self) -> bool:
        return self.parents is not None

    def most_nodes(self, gamma: int) -> int:
        return len(self.tokens)

    def start(self, contexts: Contexts) -> None:
        return None

    def draft(self, contexts: Contexts, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        rows = len(contexts.lengths)
        return Draft(
            torch.tensor([self.tokens]).expand(rows, -1),
            np.full(rows, len(self.tokens)),
            parents=None if self.parents is None else torch.tensor([self.parents]).expand(rows, -1),
        )


class Pairs(Shape):
    """Two children of every node: drawn with or without replacement, or chosen: the likeliest token
    and the third, which leaves the second to be drawn after a rejection."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings

    def siblings(self, sampling: Sampling) -> Siblings:
        return self._siblings

    def most_nodes(self, gamma: int) -> int:
        return 2 ** (gamma + 1) - 2

    def grow(self, growth: Growth, limits: Limits, sampling: Sampling, noise: Noise) -> Draft:
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        q: list[Tensor] = []
        logits = growth.first()[:, None]
        layer = torch.full((growth.rows, 1), -1)  # the nodes whose children come next
        nodes = 0
        for depth in range(limits.deepest):
            probs = sampling.probs(logits)  # [B, n, V]
            drawn = self._pair(probs, noise, 2 * nodes)
            tokens.append(drawn)
            parents.append(layer.repeat_interleave(2, dim=1))
            q.append(growth.whole(probs))
            layer = nodes + torch.arange(drawn.shape[1]).expand(growth.rows, -1)
            nodes += drawn.shape[1]
            if depth + 1 < limits.deepest:
                logits = growth.extend(drawn, parents[-1])
        chosen = self._siblings == "chosen"
        draft = Draft(
            torch.cat(tokens, 1),
            np.full(growth.rows, nodes),
            None if chosen else torch.cat(q, 1),
            torch.cat(parents, 1),
            drawn="distinct" if self._siblings == "distinct" else "independent",
        )
        draft.limit_depth(limits.depths)
        return draft

    def _pair(self, probs: Tensor, noise: Noise, place: int) -> Tensor:
        """int64 [B, 2n]"""
        if self._siblings == "chosen":
            return probs.topk(3, dim=-1).indices[..., ::2].flatten(1)
        count = probs.shape[1]
        first = draw(probs, noise.uniforms(Noise.DRAFT, place, count))
        if self._siblings == "distinct":
            probs = probs.scatter(2, first[..., None], 0.0)
        second = draw(probs, noise.uniforms(Noise.DRAFT, place + count, count))
        return torch.stack([first, second], -1).flatten(1)


def small_lm(siblings: Siblings | None = None) -> Drafter:
    """A drafter near the target: of chains, or of pairs of such siblings."""
    return SmallLMDrafter(model(0.2), shape=None if siblings is None else Pairs(siblings))
