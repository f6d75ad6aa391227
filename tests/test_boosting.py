"""Boost-tuned drafters: the weights of tokens, and what two drafters cover together."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.opening.directory import open_drafter
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from distill.settings import ParallelConfig
from distill.students.parallel_student import ParallelDistillation
from tests.stages import (
    DRAFTER,
    make_stage,
    plan_stage,
    run_stage,
    stage_context,
    with_examples,
)
from tests.test_distill import batch_of
from tests.tiny import VOCAB, tiny_llama, tiny_target
from train.data.chat_tokens import Sample
from train.data.read import Example
from train.loop.boosting import ReadingSettings, TokenWeights, guesses
from train.measure.ranks import Ranks
from train.settings.training import BoostConfig

NOUNS = ("dog", "fox", "sea", "shell")
# What follows a noun: the first in three of five cases, the second in the others.
AFTER = {"dog": ("sells", "jumps"), "fox": ("two", "of"), "sea": ("a", "it"), "shell": ("of", "a")}


def ambiguous(split: str, count: int) -> list[Example]:
    """Text in which two words can follow a noun. One guess per place cannot be right in all."""
    draws = random.Random(split)
    found = []
    for i in range(count):
        words = []
        for _ in range(5):
            noun = draws.choice(NOUNS)
            words += [noun, AFTER[noun][draws.random() < 0.4]]
        turns = (
            {"role": "user", "content": "the"},
            {"role": "assistant", "content": " ".join(words)},
        )
        found.append(Example(f"{split}-{i}", turns, "the", None, None, f"{split}.jsonl:{i + 1}"))
    return found


def hits(directory: Path, target: Any, samples: list[Sample]) -> list[Tensor]:
    """Of each sample, bool [n]: which predicted tokens the drafter's greedy guess is, row by row
    and from the logits of a plain forward."""
    drafter: Any = open_drafter(str(directory), target)
    found = []
    for sample in samples:
        ids = torch.tensor([sample.tokens])
        logits = drafter.lm.model(ids, use_cache=False).logits[0, :-1]
        if drafter.vocabulary is not None:
            full = torch.full((len(logits), VOCAB), -torch.inf)
            logits = full.index_copy_(1, drafter.vocabulary, logits)
        right = logits[:, :VOCAB].argmax(-1) == ids[0, 1:]
        found.append(right[torch.tensor(sample.mask[1:])])
    return found


class Share(Ranks):
    """A rank that hears nothing of the others."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_weights_are_those_of_guesses_one_by_one(context: Any) -> None:
    """Ragged batches, chunks, a draft vocabulary, and a token that only one of two guesses."""
    first = make_stage("distill", "first", **DRAFTER, draft_vocabulary=40)
    second = make_stage("distill", "second", **(DRAFTER | {"drafter": {"layers": [1]}}))
    paths = [Path(str(run_stage(context, stage).drafter)) for stage in (first, second)]
    samples = context.corpus.samples("data")
    one, two = (hits(path, context.target, samples) for path in paths)
    right = [a | b for a, b in zip(one, two, strict=True)]
    assert any((a ^ b).any() for a, b in zip(one, two, strict=True))

    config = BoostConfig(missed_by=["first", "second"], hit_weight=0.25)
    reading = ReadingSettings(torch.device("cpu"), VOCAB, tokens_per_batch=70, chunk=7)
    # Of two ranks, each reads a share, and both get the whole.
    shares = [guesses(paths, samples, reading, Share(rank, 2)) for rank in (0, 1)]
    found = guesses(paths, samples, reading)
    assert np.array_equal(shares[0] | shares[1], found)
    assert all((found & ~share).any() for share in shares)
    weights = TokenWeights(config, samples, found)
    every = torch.cat(right)
    assert weights.missed == pytest.approx(1 - every.double().mean().item())
    mean = torch.where(every, 0.25, 1.0).mean()
    named = [samples[i].id for i in (3, 0)]
    expected = torch.where(torch.cat([right[3], right[0]]), 0.25, 1.0) / mean
    torch.testing.assert_close(weights.of(named, torch.device("cpu")), expected)


@pytest.mark.parametrize("copies", [1, 3])
def test_the_loss_is_weighted_token_by_token(copies: int) -> None:
    """The weighted loss is linear in the weights; in a drafter of one pass, a token has its weight
    in all copies."""
    batch = batch_of([(4, 6), (9, 2)])
    terms = WeightedLoss({"cross_entropy": 1.0})
    module: Any = Distillation(tiny_llama(layers=1), terms, chunk=3)
    if copies > 1:
        parallel = ParallelConfig(tokens=copies)
        module = ParallelDistillation(tiny_llama(layers=1), terms, parallel, VOCAB - 1, chunk=3)
    module.eval()
    weights = torch.rand(8, generator=torch.Generator().manual_seed(0))
    loss, sums = module(**batch, weights=weights)
    plain, unweighted = module(**batch)
    torch.testing.assert_close(sums, unweighted)
    of_tokens = [module(**batch, weights=row)[0] for row in torch.eye(8)]
    assert sum(of_tokens).item() == pytest.approx(plain.item(), rel=1e-5)
    expected = torch.stack(of_tokens) @ weights.double()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.thorough  # `test_killed_stages` trains one in the gate
def test_boosted_drafters_cover_more_than_drafters_trained_alike(context: Any) -> None:
    """Alike, both guess the likelier word after a noun. Boosted, the second guesses the other."""
    context = with_examples(context, train=ambiguous("train", 60), dev=ambiguous("dev", 12))
    # All that differs between the second and the third is the weights.
    settings = {
        "losses": {"cross_entropy": 1.0},
        "drafter": {"layers": [0]},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "loop": {"epochs": 10, "tokens_per_batch": 400},
    }
    first = make_stage("distill", "first", **settings)
    other = settings | {"loop": settings["loop"] | {"seed": 1}, "drafter": {"layers": [1]}}
    alike = make_stage("distill", "alike", first, **other)
    boosted = make_stage("distill", "boosted", first, **other, boost={"missed_by": "first"})
    plan_stage(context, boosted, first=plan_stage(context, first))
    outcomes = [run_stage(context, stage) for stage in (first, alike, boosted)]
    samples = context.corpus.samples("data", "dev")
    one, two, three = (
        torch.cat(hits(Path(str(outcome.drafter)), context.target, samples)) for outcome in outcomes
    )
    assert outcomes[2].summary["missed_share"] > 0.1
    assert (one | three).float().mean() > (one | two).float().mean() + 0.05


def test_earlier_drafters_that_do_not_fit_are_refused(context: Any, tmp_path: Path) -> None:
    first = make_stage("distill", "first", **DRAFTER)
    heads = make_stage("heads", "heads", heads={"type": "medusa", "heads": 2})
    parallel = make_stage("distill", "parallel", **DRAFTER, parallel={"tokens": 3})

    def boosted(*names: str, **settings: Any) -> Any:
        boost = {"missed_by": list(names)}
        return make_stage(
            "distill", "next", first, heads, parallel, **(DRAFTER | settings), boost=boost
        )

    with pytest.raises(UserError, match="no earlier stage 'frist' of kind distill or online"):
        boosted("first", "frist")
    with pytest.raises(UserError, match="no earlier stage 'heads'"):
        boosted("heads")
    with pytest.raises(UserError, match="names parallel, whose drafter is heads, drafts in par"):
        boosted("parallel")
    with pytest.raises(UserError, match="on_policy cannot be set here: boost compares"):
        boosted("first", on_policy={"fraction": 1.0}, loop={"max_steps": 2})
    trained = run_stage(context, heads).drafter
    with pytest.raises(UserError, match="of the kind medusa; expected a small language model"):
        plan_stage(context, boosted(str(trained)))
    wider = stage_context(tmp_path / "wider", tiny_target(vocab=VOCAB + 8))
    one_pass = replace(wider, directory=tmp_path)
    trained = run_stage(one_pass, make_stage("distill", "wide", **DRAFTER)).drafter
    assert plan_stage(context, boosted(str(trained))).tokens > 0  # padded to another size
