"""Servers with an error each, which `draftsmith audit` must find over HTTP.

`python -m tests.audit_controls` audits each of them and the same servers without the error, and
prints what finds it, with its p-value. `--texts` says how many answers the transform gets. Then it
does the same by enumeration (`tests.audit_laws`), and audits honest servers with many seeds.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters import Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.sampling import CounterRNG, Sampling, argmax, draw
from decode.loop.rows import RowSettings
from decode.rules import RULES, Rule
from decode.rules.speculative import SpeculativeSampling
from decode.settings import DecodeSettings
from decode.verdict import Decision, Scores
from draftsmith.auditing.entry import AuditOptions, audit
from draftsmith.auditing.findings import Audit, Finding, Verdict
from draftsmith.auditing.report import written_p
from draftsmith.serve.batching.requests import DecodeRequest
from tests.audit_laws import LAW_CONTROLS
from tests.mutants import (
    BonusOffByOne,
    ChoosingDrafter,
    ClampedRatio,
    ColdDrafter,
    DroppingDrafter,
    FirstReject,
    PlainSpeculative,
    SharedStreams,
    WrongResidualRow,
    path_one_slot_off,
    processors_see_the_row,
)
from tests.service import serving
from tests.tiny import near_drafter, tiny_target

PROMPTS = np.random.default_rng(0).integers(3, 300, (16, 6)).tolist()
PENALISED = Sampling(1.0, repetition_penalty=1.8)
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


class SharedStreamsOfChains(SharedStreams):
    def __init__(self) -> None:
        self.rule = SpeculativeSampling()


@contextmanager
def one_seed() -> Iterator[None]:
    """Every request is drawn with the same random numbers."""
    of_request = DecodeRequest.settings

    def settings(self: DecodeRequest, seed: int, *rest: Any, **named: Any) -> RowSettings:
        return of_request(self, 0, *rest, **named)

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
def rule(name: str, kind: type[Rule]) -> Iterator[None]:
    """A rule is another one."""
    with mock.patch.dict(RULES._parts, {name: kind}):
        yield


@dataclass(frozen=True)
class ServedControl:
    """faulty: what drafts with the error. ends: whether texts end at their end."""

    name: str
    breaking: Callable[[], AbstractContextManager[None]] = nullcontext
    faulty: Callable[[], Drafter] = near_drafter
    sampling: Sampling = PLAIN
    settings: DecodeSettings = CHAIN
    ends: bool = True

    def audit(self, texts: int, *, broken: bool, seed: int = 0) -> Audit:
        """An audit with this number of sampled answers of 32 tokens. broken: with the error."""
        target = tiny_target()
        served = target if self.ends or not broken else replace(target, eos_token_ids=())
        drafter = self.faulty() if broken else near_drafter()
        sampling = self.sampling if texts else replace(self.sampling, temperature=0.0)
        samples = max(1, texts // len(PROMPTS))
        options = AuditOptions(sampling=sampling, samples=samples, max_new_tokens=32, seed=seed)
        with (
            self.breaking() if broken else nullcontext(),
            serving(served, drafter, self.settings, max_rows=ROWS) as running,
        ):
            return audit(running.url, target, PROMPTS, options, concurrency=ROWS)


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
    ServedControl("one seed for all requests", one_seed),
    ServedControl("top-p before temperature", filters_before_temperature, sampling=FILTERED),
    ServedControl("text after its end", ends=False),
]


def found_by(audited: Audit) -> list[Finding]:
    return [finding for finding in audited.findings if finding.verdict is Verdict.WRONG]


def honest(seeds: int) -> list[Audit]:
    """Audits of a server without an error, each with other random numbers: half by the transform,
    half by enumeration."""
    plain = replace(CONTROLS[0], name="honest")
    found = [plain.audit(64, broken=False, seed=seed) for seed in range(seeds // 2)]
    by_law = LAW_CONTROLS[0]
    return found + [by_law.audit(broken=False, seed=seed) for seed in range(seeds - seeds // 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=20, help="honest servers")
    chosen = parser.parse_args()
    print("error", "without it", "with it", "found by", "p", "seconds", sep=" | ")
    without: dict[tuple[str, str], Audit] = {}
    for control in CONTROLS:
        begin = time.monotonic()
        broken = control.audit(chosen.texts, broken=True)
        seconds = time.monotonic() - begin
        alike = str(control.sampling), str(control.settings)
        if alike not in without:
            without[alike] = control.audit(chosen.texts, broken=False)
        _print(control.name, without[alike], broken, seconds)
    for by_law in LAW_CONTROLS:
        begin = time.monotonic()
        broken = by_law.audit(broken=True)
        _print(by_law.name, by_law.audit(broken=False), broken, time.monotonic() - begin)
    passed = [found.verdict is Verdict.EQUAL for found in honest(chosen.seeds)]
    print(f"honest servers that pass: {sum(passed)} of {len(passed)}")


def _print(name: str, without: Audit, broken: Audit, seconds: float) -> None:
    found = sorted(found_by(broken), key=lambda finding: finding.p or 0.0)
    tests = [finding for finding in found if finding.p is not None]
    print(
        name,
        without.verdict,
        broken.verdict,
        ", ".join(f"{x.group} {x.name}" for x in found),
        written_p(tests[0]) if tests else "",
        f"{seconds:.0f}",
        sep=" | ",
        flush=True,
    )


if __name__ == "__main__":
    main()
