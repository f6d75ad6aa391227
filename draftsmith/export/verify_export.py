"""The round trip: does an engine use an exported drafter, and as well as our own loop?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.measure.same_text import identical
from decode.model.loading import Target
from decode.model.same_target import require_same_target
from decode.verification import Verification
from draftsmith.export import MIN_DRAFTED
from draftsmith.export.acceptance import Acceptance
from draftsmith.export.engines import ENGINES, Counting, Engine, EngineRun, EngineTask
from draftsmith.export.export_directory import check_export, reload_export
from train.base.platforms import require_posix
from train.engines.counters import DraftCounts

BATCH = 8
# Two logits that 16 bits may swap, relative to the largest: four steps of bfloat16's 8 bits.
HALF_ROUNDING = 4 * torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class ExportVerification:
    """The results of a verification.

    our_drafted, our_accepted: tokens in our loop, counted as the engine counts. equal: the share of
    prompts whose text in the engine is the same with the drafter as without it.
    equal_within_rounding: also counts texts whose first difference is at two tokens with almost
    equal logits. failures: why the engine does not use the drafter as our loop does."""

    engine: str
    run: EngineRun
    gamma: int
    prompts: int
    our_drafted: int
    our_accepted: int
    equal: float
    equal_within_rounding: float
    failures: list[str]

    @property
    def engine_efficiency(self) -> float | None:
        return _share(self.run.accepted_tokens, self.run.drafted_tokens)

    @property
    def our_efficiency(self) -> float | None:
        return _share(self.our_accepted, self.our_drafted)

    @property
    def speedup(self) -> float:
        """The engine's seconds without the drafter over those with it."""
        return self.run.plain_seconds / self.run.drafted_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return {
            "engine": self.engine,
            "version": self.run.version,
            "gamma": self.gamma,
            "prompts": self.prompts,
            "engine_drafted": self.run.drafted_tokens,
            "engine_accepted": self.run.accepted_tokens,
            "engine_efficiency": self.engine_efficiency,
            "our_drafted": self.our_drafted,
            "our_accepted": self.our_accepted,
            "our_efficiency": self.our_efficiency,
            "equal": self.equal,
            "equal_within_rounding": self.equal_within_rounding,
            "plain_seconds": self.run.plain_seconds,
            "drafted_seconds": self.run.drafted_seconds,
            "speedup": self.speedup,
            "loads": [asdict(load) for load in self.run.loads],
            "failures": self.failures,
        }


def require_engine(name: str, python: str | None = None) -> Engine:
    """Return the engine. Raises UserError with advice if it is not installed, or on a system
    without process groups. python: that of its environment; None: where draftsmith looks."""
    require_posix(f"--verify {name}")
    engine = ENGINES[name]
    if missing := engine.missing(python):
        raise UserError(f"{missing}. Install it with: {engine.install}")
    return engine


def engine_for(name: str, layout: str, python: str | None = None) -> Engine:
    """As `require_engine`; also raises UserError if the engine does not read this layout."""
    engine = ENGINES[name]
    if layout in engine.unverified:
        raise UserError(f"this export is {layout}: {engine.unverified[layout]}")
    if layout not in engine.formats:
        fitting = [other for other in ENGINES if layout in ENGINES[other].formats]
        raise UserError(
            f"{name} reads {' or '.join(engine.formats)}, but this export is {layout}; verify it "
            f"with {' or '.join(fitting) or 'another engine'}, or export it as {engine.formats[0]}"
        )
    return require_engine(name, python)


def verify_export(
    name: str, task: EngineTask, *, min_drafted: int = MIN_DRAFTED
) -> ExportVerification:
    """Run the prompts in the engine and in our loop, greedily at the same γ, and compare.

    Raises UserError if the export is unsound, or if the engine does not read it, is not installed
    or breaks. Problems with the drafter itself are in `failures`.
    """
    record = check_export(task.export)
    engine = engine_for(name, record["layout"], task.python)
    require_same_target(record["drafter"]["target"], task.target, str(task.export))
    max_depth = record["facts"].get("max_depth")
    if max_depth is not None and task.gamma > max_depth:
        raise UserError(
            f"gamma is {task.gamma}, but {task.export} drafts at most {max_depth} tokens"
        )
    run = engine.run(task)
    task.say("our own loop")
    drafter = reload_export(task.export, record, task.target)
    drafted, accepted = count_drafts(task, drafter, engine.counting)
    rounding = engine.rounding
    if task.target.dtype != torch.float32:
        rounding = max(rounding, HALF_ROUNDING)
    equal, close = identical(
        task.target, task.prompts, run.plain_texts, run.drafted_texts, rounding=rounding
    )
    verification = ExportVerification(
        name, run, task.gamma, len(task.prompts), drafted, accepted, equal, close, []
    )
    failures = verification.failures
    if not run.drafted_tokens:
        failures.append(f"{name} drafted nothing: it ignored the drafter")
    elif run.drafted_tokens < min_drafted:
        failures.append(
            f"{name} drafted only {run.drafted_tokens} tokens; at least {min_drafted} are needed "
            "for a verdict: give more prompts, or more tokens per prompt"
        )
    theirs = DraftCounts(run.drafted_tokens, run.accepted_tokens)
    # Greedy texts of one target: what chance may change is in the tolerance.
    acceptance = Acceptance(theirs, DraftCounts(drafted, accepted), task.gamma, 1.0, 0.0)
    if run.drafted_tokens and drafted and acceptance.fault:
        failures.append(f"{name}: {acceptance.fault}{_cause(theirs, acceptance.ours, task.gamma)}")
    if close < 1:
        failures.append(
            f"{1 - close:.0%} of the texts differ from {name}'s texts without the drafter by more "
            "than rounding"
        )
    return verification


def _cause(theirs: DraftCounts, ours: DraftCounts, gamma: int) -> str:
    """The way to the cause of an acceptance that is less than ours."""
    if (theirs.rate or 0.0) >= (ours.rate or 0.0):
        return ""
    return (
        ". To find the cause, start the engine as a server with this export, and run: draftsmith "
        f"diagnose URL --target MODEL --drafter DIRECTORY --gamma {gamma}, with the directory of "
        "the drafter that was exported"
    )


@dataclass(frozen=True)
class OwnLoop:
    """Our own loop with the drafter of a running engine, as `count_drafts` takes it."""

    target: Target
    drafter: Drafter
    prompts: Sequence[Sequence[int]]
    gamma: int
    max_new_tokens: int


def count_drafts(
    task: EngineTask | OwnLoop,
    drafter: Drafter,
    counting: Counting,
    sampling: Sampling | None = None,
) -> tuple[int, int]:
    """Return the numbers of tokens that our loop drafts and accepts, counted as in `counting`.
    sampling: None is greedy."""
    target = task.target
    eos = set(target.eos_token_ids)
    drafted = accepted = 0
    # Enough room for a draft of γ tokens wherever in a text it begins.
    room = task.max_new_tokens + (task.gamma if counting.past_length else 0)
    lengths: dict[int, int] = {}  # of the texts so far

    def count(verification: Verification) -> None:
        nonlocal drafted, accepted
        for place, row in enumerate(verification.rows.tolist()):
            tokens = verification.draft.tokens[place, : verification.drafted[place]].tolist()
            right = int(verification.accepted[place])
            length = lengths.get(row, int(not counting.first_drafted))
            lengths[row] = length + right + 1
            if length >= task.max_new_tokens:
                continue
            first_eos = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
            if counting.stops_at_eos:
                tokens = tokens[: first_eos + 1]
            if not counting.past_end:
                block = verification.block[place, : right + 1].tolist()
                end = next((i + 1 for i, token in enumerate(block) if token in eos), None)
                tokens = tokens[:end]
                right = min(right, len(tokens))
            drafted += len(tokens)
            accepted += right

    decoder = Decoder(
        target.model,
        drafter,
        eos_token_ids=target.eos_token_ids,
        gamma=task.gamma,
        first_target=not counting.first_drafted,
        observers=[count],
        sampling=sampling,
        draft_sampling=Sampling() if counting.chooses else None,
    )
    for begin in range(0, len(task.prompts), BATCH):
        lengths.clear()
        decoder.decode(task.prompts[begin : begin + BATCH], room, seed=begin)
    return drafted, accepted


def _share(part: int, total: int) -> float | None:
    return part / total if total else None
