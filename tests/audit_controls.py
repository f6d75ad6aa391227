"""Servers with an error each, which `draftsmith audit` must find over HTTP. `python -m
tools.audit_controls` audits all of them."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from decode.draft import Contexts, Draft, Limits
from decode.drafters import Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.drafters.sparse import SparseDrafter
from decode.draw.random_numbers import CounterRNG
from decode.draw.sampling import Sampling, argmax, draw
from decode.loop.rows import RowSettings
from decode.model.loading import Target
from decode.rules import RULES, Rule
from decode.rules.speculative import SpeculativeSampling
from decode.settings import DecodeSettings
from decode.text_stream import AnswerText
from decode.verdict import Decision, Scores
from draftsmith.auditing.entry import AuditOptions, audit
from draftsmith.auditing.findings import Audit
from draftsmith.auditing.texts import ROUNDINGS
from draftsmith.auditing.tiny import tiny_model as calm_model
from draftsmith.serve.batching import requests
from draftsmith.serve.batching.requests import AnswerChoice, DecodeRequest
from tests.mutants import (
    BonusOffByOne,
    ChoosingDrafter,
    ClampedRatio,
    ColdDrafter,
    DroppingDrafter,
    FirstReject,
    NeverCopied,
    PlainSpeculative,
    SharedStreams,
    StaleCache,
    WrongResidualRow,
    path_one_slot_off,
    processors_see_the_row,
)
from tests.service import serving
from tests.tiny import as_target, moved, near_drafter, tiny_target

PROMPTS = np.random.default_rng(0).integers(3, 300, (16, 6)).tolist()
PENALISED = Sampling(1.0, repetition_penalty=1.8)
COUNTED = Sampling(1.0, presence_penalty=1.4, frequency_penalty=0.9)
PLAIN, CHAIN = Sampling(1.0), DecodeSettings(gamma=3)
FILTERED = Sampling(1.5, top_p=0.8)
ROWS = 32


class BiasedBonus(PlainSpeculative):
    """Draws the token after a whole acceptance at 0.7 times the temperature."""

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        decision = super().decide(draft, scores, rng)
        rows = torch.arange(len(decision.accepted))
        sharper = scores.probs()[rows, decision.accepted] ** (1 / 0.7)
        whole = decision.accepted == torch.as_tensor(draft.sizes)
        again = draw(sharper, rng.of_next(decision.accepted))
        return replace(decision, next_token=torch.where(whole, again, decision.next_token))


class SwappingDrafter(SmallLMDrafter):
    """As a drafter that learns: it takes other weights, and then its own, before each draft."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        own = dict(copy.deepcopy(self.lm.model).named_parameters())
        self.versions = {name: weight * 1.2 for name, weight in own.items()}, own

    def draft(
        self, contexts: Contexts, limits: Limits, sampling: Sampling, rng: CounterRNG
    ) -> Draft:
        for weights in self.versions:
            self.take_weights(weights)
        return super().draft(contexts, limits, sampling, rng)


class LossyChoice(SpeculativeSampling):
    """Accepts the runner-up, and commits it, wherever it is below the likeliest token by less than
    what the audit allows for rounding in bfloat16."""

    lossless, exact_when_greedy = False, False

    def decide(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Decision:
        logits = scores.logits.float()
        eps = torch.finfo(torch.bfloat16).eps
        allowance = 0.75 * ROUNDINGS * eps * logits.abs().amax(-1, keepdim=True)
        two, ids = logits.topk(2, dim=-1)
        gap = two[..., :1] - two[..., 1:]
        raised = torch.where(gap < allowance, 2 * gap + 1e-4, 0.0)
        return super().decide(
            draft, Scores(logits.scatter_add(-1, ids[..., 1:], raised), scores.sampling), rng
        )


def calm_target() -> Target:
    """A tiny target that rounding to 16 bits moves as little as it moves real models."""
    return as_target(calm_model(vocab_size=300, initializer_range=0.05, eos_token_id=2))


def calm_drafter() -> Drafter:
    return SmallLMDrafter(moved(calm_target().model, 0.01, seed=3))


def _old_q() -> Drafter:
    from tests.test_online import OldQ  # takes seconds to import

    return near_drafter(type("SwappingOldQ", (SwappingDrafter, OldQ), {}))


def _target_itself(kind: type[SmallLMDrafter]) -> Callable[[], Drafter]:
    return lambda: kind(tiny_target().model)


class SharedStreamsOfChains(SharedStreams):
    def __init__(self) -> None:
        self.rule = SpeculativeSampling()


@contextmanager
def one_seed() -> Iterator[None]:
    """Every request is drawn with the same random numbers."""
    of_request = DecodeRequest.settings

    def settings(self: DecodeRequest, choice: AnswerChoice) -> RowSettings:
        return replace(of_request(self, choice), seed=0)

    with mock.patch.object(DecodeRequest, "settings", settings):
        yield


@contextmanager
def filters_before_temperature() -> Iterator[None]:
    """Top-p keeps the tokens that it would keep at temperature 1. The audit, which runs in the main
    thread, is right."""
    probs = Sampling.probs

    def wrong(self: Sampling, logits: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            return probs(self, logits)
        kept = probs(replace(self, temperature=1.0), logits) > 0
        return probs(replace(self, top_p=1.0), logits.float().masked_fill(~kept, -torch.inf))

    with mock.patch.object(Sampling, "probs", wrong), mock.patch.object(Sampling, "pick", _picked):
        yield


def _picked(self: Sampling, logits: Tensor, uniform: Tensor) -> Tensor:
    return argmax(logits) if self.greedy else draw(self.probs(logits), uniform)


@contextmanager
def text_after_stops() -> Iterator[None]:
    """Stop strings end the decode with their block, and the text is not cut."""

    class Whole(AnswerText):
        def __init__(self, tokenizer: Any, stops: Sequence[str], **options: Any) -> None:
            super().__init__(tokenizer, (), **options)
            self._search = AnswerText(tokenizer, stops, **options)

        def cut(self, tokens: Sequence[int]) -> int | None:
            super().cut(tokens)
            self._search.add(tokens)
            self.stopped = self._search.stopped
            return None if self.stopped is None else len(tokens)

    with mock.patch.object(requests, "AnswerText", Whole):
        yield


@contextmanager
def text_dropped_before_stops() -> Iterator[None]:
    """Two characters before a stop string are dropped with it."""

    class Short(AnswerText):
        def take(self, *, ended: bool = False) -> str:
            text = super().take(ended=ended)
            return text[:-2] if self.stopped else text

    with mock.patch.object(requests, "AnswerText", Short):
        yield


@contextmanager
def rule(name: str, kind: type[Rule]) -> Iterator[None]:
    """A rule is another one."""
    with mock.patch.dict(RULES._parts, {name: kind}):
        yield


@dataclass(frozen=True)
class ServedControl:
    """sound, faulty: what drafts without and with the error. counted: whether our own loop's
    acceptance, without the error, is compared. ends: whether texts end at their end. half: whether
    the server computes in bfloat16."""

    name: str
    breaking: Callable[[], AbstractContextManager[None]] = nullcontext
    faulty: Callable[[], Drafter] = near_drafter
    sound: Callable[[], Drafter] = near_drafter
    sampling: Sampling = PLAIN
    settings: DecodeSettings = CHAIN
    counted: bool = False
    ends: bool = True
    half: bool = False

    def audit(self, texts: int, *, broken: bool, seed: int = 0) -> Audit:
        """An audit with this number of sampled answers of 32 tokens. broken: with the error."""
        target = calm_target() if self.half else tiny_target()
        served = target if self.ends or not broken else replace(target, eos_token_ids=())
        if self.half:
            served = replace(target, model=copy.deepcopy(target.model).bfloat16())
        drafter = self.faulty() if broken else self.sound()
        own = self.sound() if self.counted else None
        sampling = self.sampling if texts else replace(self.sampling, temperature=0.0)
        samples = max(1, texts // len(PROMPTS))
        # Other prompts too, for other greedy answers.
        rng = np.random.default_rng(seed)
        prompts = rng.integers(3, 300, (32, 6)).tolist() if self.half else PROMPTS
        options = AuditOptions(
            sampling=sampling,
            samples=samples,
            max_new_tokens=64 if self.half and sampling.greedy else 32,
            seed=seed,
            engine_dtype="bfloat16" if self.half else None,
        )
        with (
            self.breaking() if broken else nullcontext(),
            serving(served, drafter, self.settings, max_rows=ROWS) as running,
        ):
            return audit(
                running.url, target, prompts, options, drafter=own, gamma=3, concurrency=ROWS
            )


HALF = {"half": True, "sound": calm_drafter, "faulty": calm_drafter}


def _rule(name: str, kind: type[Rule], of: str = "speculative") -> ServedControl:
    return ServedControl(name, partial(rule, of, kind), settings=DecodeSettings(gamma=3, rule=of))


def _drafter(name: str, kind: type[SmallLMDrafter]) -> ServedControl:
    return ServedControl(name, faulty=partial(near_drafter, kind))


CONTROLS = [
    _drafter("q of another temperature", ColdDrafter),
    _drafter("q of a draw, but the likeliest token is drafted", ChoosingDrafter),
    _drafter("drawn tokens dropped for their own q", DroppingDrafter),
    # Found by enumeration only: see docs/results/audit.md.
    _rule("residual of the wrong row", WrongResidualRow),
    _rule("bonus of the wrong row", BonusOffByOne),
    _rule("biased bonus", BiasedBonus),
    _rule("q clamped from below", ClampedRatio),
    _rule("block ends at the first rejection", FirstReject, "block"),
    ServedControl(
        "accepted by the numbers it was drawn with",
        partial(rule, "speculative", SharedStreamsOfChains),
    ),
    ServedControl(
        "path committed one slot off",
        path_one_slot_off,
        settings=DecodeSettings(rule="multi_round", shape="static:widths=[2,2,1]"),
    ),
    ServedControl("penalty not along the path", processors_see_the_row, sampling=PENALISED),
    ServedControl("counted penalty not along the path", processors_see_the_row, sampling=COUNTED),
    ServedControl(
        "q of the weights before the last swap",
        faulty=_old_q,
        sound=partial(near_drafter, SwappingDrafter),
    ),
    ServedControl(
        "drafter's cache stale after full acceptance",
        faulty=_target_itself(StaleCache),
        sound=_target_itself(SmallLMDrafter),
        sampling=Sampling(),
        counted=True,
    ),
    ServedControl(
        "a part of the cache without the newest tokens",
        faulty=partial(NeverCopied, budget=140),
        sound=partial(SparseDrafter, budget=140),
        sampling=Sampling(),
        counted=True,
    ),
    ServedControl("text after a stop string", text_after_stops, sampling=Sampling()),
    ServedControl("text dropped at a stop string", text_dropped_before_stops, sampling=Sampling()),
    ServedControl("one seed for all requests", one_seed),
    ServedControl("top-p before temperature", filters_before_temperature, sampling=FILTERED),
    ServedControl("text after its end", ends=False),
    ServedControl(
        "runner-up accepted within the rounding of bfloat16",
        partial(rule, "speculative", LossyChoice),
        sampling=Sampling(),
        **HALF,
    ),
]
