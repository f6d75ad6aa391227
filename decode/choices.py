"""Draws one of some texts from the target's law under the condition that the answer is one of them.

Masked decoding (`decode.grammars`) has another law: it does not look ahead to where a token leads
(2605.07698). For a few choices the condition can be computed, because all of them can be scored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.drafters.lookup.lookup_tree import MOST_NODES, LookupTree, as_draft
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, draw
from decode.loop.rows import token_ids
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.requirements import require_trees
from decode.model.loading import Target
from decode.verdict import Scores


@dataclass(frozen=True)
class ChosenText:
    """The text that was drawn, its place among the choices, and the law: float64 [C], the
    probability of each choice."""

    text: str
    index: int
    probs: np.ndarray


def choose(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str],
    *,
    sampling: Sampling = Sampling(1.0),  # noqa: B008  (frozen)
    seed: int = 0,
) -> list[ChosenText]:
    """One of these texts as the answer to each prompt (token ids), drawn with p(text) ∝ the product
    of the probabilities of its tokens and of an end after them, as the target's tokenizer cuts it.

    All choices are scored in one pass, as one token tree. sampling: the target's law of a token.
    Greedy: the likeliest choice at temperature 1. The draw of prompt i depends on the seed and i.

    Raises UserError unless there are different texts, if they have too many tokens, if the sampling
    gives none of them a chance or has a grammar, for a target with an encoder or without an end of
    texts, and as `require_trees`.
    """
    prompts, chains = token_ids(prompts), _chains(target, texts, sampling)
    require_trees(target.model)
    tree, leaves = _trie(chains)
    lm, found = CachedLM(target.model), []
    for row, prompt in enumerate(prompts):
        scores = _logs(lm, prompt, tree, leaves, sampling.warmed, target.eos_token_ids)
        if not scores.isfinite().any():
            raise UserError(
                f"none of the choices has a chance after prompt {row}; use a sampling with weaker "
                "filters"
            )
        probs = scores.softmax(0)
        uniform = CounterRNG(seed, torch.tensor([row])).of_text(torch.zeros(1, 1).long())[0, 0]
        index = int(probs.argmax() if sampling.greedy else draw(probs, uniform))
        found.append(ChosenText(texts[index], index, probs.numpy()))
    return found


def _chains(target: Target, texts: Sequence[str], sampling: Sampling) -> list[list[int]]:
    """The tokens of each choice."""
    if isinstance(texts, str) or not texts or not all(isinstance(x, str) and x for x in texts):
        raise UserError(f"the choices are {texts!r:.80}; expected a list of texts")
    if len({*texts}) < len(texts):
        raise UserError(f"a choice comes twice in {texts!r:.80}; expected different texts")
    if target.has_encoder or not target.eos_token_ids or sampling.grammar is not None:
        raise UserError(
            "choices are scored for a target without an encoder, with an EOS id, under a sampling "
            "without a grammar; use Grammars.choice otherwise"
        )
    chains = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if (count := sum(map(len, chains))) > MOST_NODES:
        raise UserError(f"the choices have {count} tokens; expected at most {MOST_NODES}")
    return chains


def _trie(chains: Sequence[Sequence[int]]) -> tuple[Draft, list[list[int]]]:
    """The choices as one tree, and the nodes of each of them from the root down."""
    tree, paths = LookupTree(), []
    for chain in chains:
        path = [-1]
        for token in chain:
            path.append(tree.child(token, path[-1]))
        paths.append(path[1:])
    places = tree.places()
    return as_draft([tree], True), [places[path].tolist() for path in paths]


def _logs(
    lm: CachedLM,
    prompt: Sequence[int],
    tree: Draft,
    paths: Sequence[Sequence[int]],
    sampling: Sampling,
    ends: Sequence[int],
) -> Tensor:
    """float64 [C] on the host: the log-probability of each choice with an end after it."""
    contexts = Contexts.of([prompt], len(prompt))
    lm.reset(1, len(prompt) + int(tree.sizes[0]))
    if len(prompt) > 1:
        ids = to_device(contexts.tokens[:, :-1], lm.device)
        lm.read(ids, np.zeros(1, dtype=np.int64), contexts.lengths - 1)
    draft = tree.to(lm.device)
    probs = Scores(lm.verify(contexts, draft), sampling, draft, contexts).probs()[0].double().cpu()
    tokens, above = tree.tokens[0], tree.parent_rows()[0]
    logs = probs[above, tokens].log()
    end = probs[:, list(ends)].sum(1).log()
    return torch.stack([logs[path].sum() + end[path[-1] + 1] for path in map(list, paths)])
