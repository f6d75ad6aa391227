"""The round trip: does an engine use an exported drafter, and as well as our own loop does?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decode.drafters import Drafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.target.identity import require_same_vocabulary
from decode.target.loading import Target
from decode.trace import TraceStep
from train.export.engines import ENGINES, Counting, Engine, EngineRun, Task
from train.export.source import made_for
from train.export.write import check_export, reload

# Above chance: with 2,000 drafted tokens the standard error of a share is at most 0.011.
TOLERANCE = 0.03
MIN_DRAFTED = 2000
BATCH = 8


@dataclass(frozen=True)
class Verified:
    """drafted, accepted: by our loop, counted as the engine counts. equal: the share of prompts
    whose text is the same with the drafter as without it, in the engine; equal_within_rounding: or
    differs first where two tokens were as good as equally likely. failures: what is wrong."""

    engine: str
    run: EngineRun
    gamma: int
    prompts: int
    drafted: int
    accepted: int
    equal: float
    equal_within_rounding: float
    failures: list[str]

    @property
    def engine_efficiency(self) -> float | None:
        return _share(self.run.accepted_tokens, self.run.drafted_tokens)

    @property
    def our_efficiency(self) -> float | None:
        return _share(self.accepted, self.drafted)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; speedup: the engine's own, plain seconds over drafted seconds."""
        return {
            "engine": self.engine,
            "version": self.run.version,
            "gamma": self.gamma,
            "prompts": self.prompts,
            "engine_drafted": self.run.drafted_tokens,
            "engine_accepted": self.run.accepted_tokens,
            "engine_efficiency": self.engine_efficiency,
            "our_drafted": self.drafted,
            "our_accepted": self.accepted,
            "our_efficiency": self.our_efficiency,
            "equal": self.equal,
            "equal_within_rounding": self.equal_within_rounding,
            "plain_seconds": self.run.plain_seconds,
            "drafted_seconds": self.run.drafted_seconds,
            "speedup": self.run.plain_seconds / self.run.drafted_seconds,
            "failures": self.failures,
        }


def engine_for(name: str, layout: str) -> Engine:
    """The engine, if it reads this layout and is installed; UserError with what to do if not."""
    engine = ENGINES[name]
    if layout not in engine.formats:
        fitting = [other for other in ENGINES if layout in ENGINES[other].formats]
        raise UserError(
            f"{name} reads {' or '.join(engine.formats)}, and this export is {layout}; verify it "
            f"with {' or '.join(fitting) or 'another engine'}, or export it as {engine.formats[0]}"
        )
    missing = engine.missing()
    if missing:
        raise UserError(f"{missing}. Install it with: {engine.install}")
    return engine


def verify(
    name: str, task: Task, *, min_drafted: int = MIN_DRAFTED, tolerance: float = TOLERANCE
) -> Verified:
    """Run the prompts in the engine and in our loop, greedily at the same γ, and compare.

    Raises UserError for an unsound export, an engine that does not read it, is not installed or
    breaks. What is found wrong of the drafter itself is in `failures`.
    """
    record = check_export(task.export)
    engine = engine_for(name, record["layout"])
    require_same_vocabulary(
        made_for(record["drafter"]), task.target.fingerprint, f"the target of {task.export}"
    )
    deepest = record["facts"].get("deepest")
    if deepest is not None and task.gamma > deepest:
        raise UserError(f"gamma is {task.gamma}, and {task.export} drafts at most {deepest} tokens")
    run = engine.run(task)
    task.say("our own loop")
    drafter = reload(task.export, record, task.target)
    drafted, accepted = count_ours(task, drafter, engine.counting)
    equal, close = agreement(task.target, task.prompts, run.plain, run.drafted, engine.rounding)
    failures = []
    theirs, ours = _share(run.accepted_tokens, run.drafted_tokens), _share(accepted, drafted)
    if not run.drafted_tokens:
        failures.append(f"{name} drafted nothing: it ignored the drafter")
    elif run.drafted_tokens < min_drafted:
        failures.append(
            f"{name} drafted {run.drafted_tokens} tokens, too few to judge by; {min_drafted} are "
            "needed: give more prompts, or more tokens"
        )
    if theirs is not None and ours is not None and abs(theirs - ours) > tolerance:
        failures.append(
            f"draft efficiency is {theirs:.3f} in {name} and {ours:.3f} in our loop; they may "
            f"differ by {tolerance}"
        )
    if close < 1:
        failures.append(
            f"{1 - close:.0%} of the texts differ from {name}'s own without the drafter by more "
            "than rounding"
        )
    return Verified(
        name, run, task.gamma, len(task.prompts), drafted, accepted, equal, close, failures
    )


def count_ours(task: Task, drafter: Drafter, counting: Counting) -> tuple[int, int]:
    """Tokens that our loop drafts and accepts on the same prompts, counted as `counting` says."""
    target = task.target
    decoder = Decoder(
        target.model,
        drafter,
        eos_token_ids=target.eos_token_ids,
        gamma=task.gamma,
        first_target=not counting.first_drafted,
    )
    eos = set(target.eos_token_ids)
    drafted = accepted = 0
    # So much room that a draft which begins within a text is γ long.
    room = task.max_new_tokens + (task.gamma if counting.past_length else 0)
    lengths: dict[int, int] = {}  # of the texts so far

    def count(step: TraceStep) -> None:
        nonlocal drafted, accepted
        for row in step:
            tokens = [token.token for token in row.drafted]
            kept = sum(token.verdict == "accepted" for token in row.drafted)
            length = lengths.get(row.row, int(decoder.first_target))
            lengths[row.row] = length + kept + 1
            if length >= task.max_new_tokens:
                continue
            first_eos = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
            if counting.stops_at_eos:
                tokens = tokens[: first_eos + 1]
            if not counting.past_end:
                block = [*tokens[:kept], row.next_token]
                end = next((i + 1 for i, token in enumerate(block) if token in eos), None)
                tokens = tokens[:end]
                kept = min(kept, len(tokens))
            drafted += len(tokens)
            accepted += kept

    for begin in range(0, len(task.prompts), BATCH):
        lengths.clear()
        decoder.decode(task.prompts[begin : begin + BATCH], room, on_step=count)
    return drafted, accepted


@torch.inference_mode()
def agreement(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    rounding: float,
) -> tuple[float, float]:
    """The share of prompts whose two texts are equal, and of those where they are so up to a choice
    between two tokens whose logits lie closer than `rounding` times the largest, by our target."""
    same = close = 0
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        if list(text) == list(other):
            same += 1
            continue
        pairs = zip(text, other, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))
        ids = torch.tensor([[*prompt, *text[:at]]], device=target.device)
        logits = target.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        # Where one goes on and the other ended, the other said an end of text that is not shown.
        ended = logits[list(target.eos_token_ids)].max() if target.eos_token_ids else -torch.inf
        a, b = (logits[t[at]] if at < len(t) else ended for t in (text, other))
        gap = torch.as_tensor(a - b).abs()
        close += bool(gap <= rounding * logits.abs().max())
    return same / len(prompts), (same + close) / len(prompts)


def _share(part: int, of: int) -> float | None:
    return part / of if of else None
