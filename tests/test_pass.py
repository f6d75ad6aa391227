"""PaSS: the target drafts from trained embeddings of look-ahead tokens."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draft import Contexts, Draft, Limits
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.forward.lean_forward import LeanForward
from decode.model.forward.prepare_model import prepare
from decode.model.loading import Target
from decode.shapes.static import Static
from distill.losses import WeightedLoss
from heads.head_training import HeadTraining
from heads.heads_directory import build_heads
from heads.options import HeadOptions
from heads.pass_heads import PassDrafter
from tests.contract import moved_heads
from tests.test_distill import batch_of
from tests.test_drafters import drafted
from tests.tiny import VOCAB, tiny_target
from tests.trained_heads import check_training_is_plain, features_of

TOKENS = 3
OPTIONS = {"type": "pass", "tokens": TOKENS}
PROMPTS = [[5, 17, 250, 9, 42], [7], [30] * 9]
# Lean, embeddings that are scaled, and transformers' forward with learnt positions.
FAMILIES = ("llama", "gemma", "gpt2")


@functools.cache
def target(family: str = "llama") -> Target:
    return tiny_target(family)


def make(family: str = "llama", moved: float = 0.5, **options: Any) -> Any:
    """Look-ahead embeddings that differ from each other."""
    heads = moved_heads(OPTIONS | options, target(family), by=moved)
    heads.borrow(target(family).model, torch.float32)
    return heads


def plain_logits(heads: Any, model: Any, text: Tensor, depth: int) -> Tensor:
    """[depth, V]: of the tokens after `text`, int64 [L], by one causal pass without a cache."""
    embedded = model.get_input_embeddings()(text)
    fed = torch.cat([embedded, heads.lookahead[: depth - 1]])[None]
    with torch.no_grad():
        logits: Tensor = model(inputs_embeds=fed, use_cache=False).logits
    return logits[0, len(text) - 1 :]


class Checked(PassDrafter):
    """Checks each draft against `plain_logits`."""

    drafts = 0

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        assert self.lm is not None
        draft = super().draft(contexts, limits, sampling, rng)
        for row, tokens in enumerate(drafted(draft)):
            if tokens:
                text = torch.as_tensor(contexts.tokens[row, : contexts.lengths[row]])
                logits = plain_logits(self.heads, self.lm.model, text, len(tokens))
                assert draft.q is not None
                q = draft.q[row, : len(tokens)]
                torch.testing.assert_close(q, sampling.probs(logits), rtol=1e-3, atol=1e-5)
                self.drafts += 1
        return draft


@pytest.mark.parametrize("family", FAMILIES)
def test_each_place_has_the_q_of_a_plain_pass(family: str) -> None:
    """In ragged batches, after any verdict. The first place is the target's own distribution, so
    its tokens are accepted."""
    model = target(family).model
    assert isinstance(prepare(model), LeanForward) == (family != "gpt2")
    drafter = Checked(make(family), VOCAB)
    run = Decoder(model, drafter, gamma=TOKENS + 1, sampling=Sampling(1.0)).decode(PROMPTS, 16)
    assert drafter.drafts >= 12
    for step in run.steps:
        assert (step.accepted >= np.minimum(step.depths, 1)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_predicts_what_a_plain_pass_does(family: str) -> None:
    heads, model = make(family).eval(), target(family).model
    batch = batch_of([(4, 6), (3, 9), (1, 3)])
    plain = functools.partial(plain_logits, heads, model)
    count = check_training_is_plain(heads, model, batch, plain)
    # A head reads the token before the last one of a text, so prompts of one token lose a draft.
    longest = [(6, 0), (9, 0), (3, 1)]
    depths = range(1, TOKENS + 2)
    assert count == sum(max(n - d + 1 - lost, 0) for n, lost in longest for d in depths)


def test_training_reaches_every_embedding_and_nothing_else() -> None:
    heads = make(keep=0.5, keep_min=0.1)
    batch = batch_of([(4, 40), (3, 30)])
    ids, loss_mask = batch["input_ids"], batch["loss_mask"]
    module = HeadTraining(heads, WeightedLoss({"forward_kl": 1.0}), target().model)
    seen = features_of(target().model, heads, ids)
    assert dict(module.named_parameters()).keys() == {"heads.lookahead"}
    loss, sums = module(ids, loss_mask, seen, heads.loss_weights(0.0))
    loss.backward()
    assert (heads.lookahead.grad.abs().amax(1) > 0).all()
    named = dict(zip(module.sums, sums.tolist(), strict=True))
    counts = [named[f"head{depth}/tokens"] for depth in range(1, TOKENS + 2)]
    assert counts == [0, 20 + 15, 10 + 7, 5 + 3]
    # Answers of one token have no place for a look-ahead token, and still give a gradient.
    short = batch_of([(4, 1), (3, 1)])
    seen = features_of(target().model, heads, short["input_ids"])
    loss, _ = module(short["input_ids"], short["loss_mask"], seen, heads.loss_weights(0.0))
    heads.lookahead.grad = None
    loss.backward()
    assert not heads.lookahead.grad.any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="the tree is 5 deep, but the heads draft 4 tokens"):
        PassDrafter(make(), VOCAB, Static(widths=[1] * 5))
    # The trial of trees needs weights, also where only the shapes of the heads are made.
    assert build_heads(HeadOptions.of(OPTIONS), tiny_target(seed=2), None, "meta").depth == 4
    with pytest.raises(UserError, match=r"a sliding window of 8 tokens.*or train other heads"):
        build_heads(HeadOptions.of(OPTIONS), tiny_target("mistral", sliding_window=8), None)
