"""Online distillation: a drafter that learns from what the target rejects (2310.07177).

`observe` records the target's distributions while it verifies. `learn` takes a few optimizer steps
on these records and judges the result. `swap` gives the accepted weights to the decoding drafter. A
server calls them request by request:

    online = Online(drafter, student, OnlineConfig(), made_with)
    decoder = Decoder(target.model, drafter, observers=[online.observe])
    for prompt in requests:
        decoder.decode([prompt], 128)
        if online.due() and online.learn():
            online.swap()

Call `observe` and `swap` in the decoding thread, between two passes or two decodes. `learn` touches
neither the drafter nor the loop, so it may run in another thread and on another device.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.drafters import Drafter
from decode.model.loading import Target
from decode.verification import Verification
from distill.replay.online_student import OnlineStudent
from distill.replay.rejections import Collector
from distill.replay.replay_buffer import Record, ReplayBuffer, describe_heads
from train.loop.optimizer import make_optimizer
from train.loop.optimizer_step import take_step
from train.online.replayed_batches import by_length, replayed_batches
from train.settings.online_config import OnlineConfig

# Sums a tensor over the processes that learn together; every process must call it.
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LearningRound:
    """One call of `Online.learn`.

    number: from 1. version: the version of the weights after the round. kept: whether the candidate
    was kept.
    before, after: the expected acceptance Σ min(p, q) at temperature 1 on the held-out tokens, with
    the previous version and with the candidate (None: it was not finite). steps: optimizer steps in
    total, without those of rejected candidates. positions: the number of recorded tokens that the
    candidate learnt from. requests: the requests of these tokens. loss: the mean loss per token at
    the first and the last step. problem: why the candidate was not kept.
    """

    number: int
    version: int
    kept: bool
    before: float
    after: float | None
    steps: int
    positions: int
    held_out: int
    requests: list[int]
    loss: list[float] | None
    seconds: float
    problem: str | None


class Online:
    """A decoding drafter, its learning copy (student), and the replay buffers.

    made_with: from `distill.teacher.top_k_cache.describe_teacher`, with this config's k.
    directory: where the buffers are stored on disk; None: in memory only. reduce: sums over
    processes. All processes then call `due`, `learn` and `swap` in the same order, each with its
    own requests, and have the same weights. autocast: makes the context for the copy's forward
    passes, for matrix products in another precision; the weights keep theirs. chosen: as for
    `distill.replay.rejections.Collector`.

    Raises UserError if the drafter cannot take the student's weights, or if parameter groups match
    nothing.
    """

    def __init__(
        self,
        drafter: Drafter,
        student: OnlineStudent,
        settings: OnlineConfig,
        made_with: dict[str, Any],
        *,
        vocab_size: int,
        vocabulary: Tensor | None = None,
        eos_token_ids: Sequence[int] = (),
        directory: Path | None = None,
        reduce: Reduce = lambda tensor: tensor,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        chosen: bool = False,
    ) -> None:
        student.require_fits(drafter)
        self.drafter, self.student, self.settings = drafter, student, settings
        self.reduce, self.autocast = reduce, autocast
        self.collector = Collector(
            settings.k,
            vocab_size,
            accepted=settings.accepted,
            holdout_every=settings.holdout_every,
            vocabulary=vocabulary,
            eos_token_ids=eos_token_ids,
            captured_layers=student.captured_layers,
            text_states=student.text_states(drafter),
            seed=settings.seed,
            chosen=chosen,
        )
        made_with = made_with | {"k": self.collector.k}
        if student.heads:
            made_with |= describe_heads(student.heads, student.captured_layers)
        max_bytes = int(settings.buffer_mib * 2**20)
        self.buffer, self.held_out = (
            ReplayBuffer(max_bytes, made_with, directory / name if directory else None)
            for name in ("buffer", "held-out")
        )
        self.optimizer = make_optimizer(student.module, settings.optimizer)
        self.version = self.round = self.steps = 0
        self._swapped = 0  # the version that the drafter has
        self._learnt = 0  # records below this number already existed in an earlier round
        self._requests = self._rejections = 0  # the collector's counts at the last round
        self._kept = self._snapshot()

    # Called by a server.

    def observe(self, verification: Verification) -> None:
        """Record a verification pass; an observer of `decode.loop.decoding.Decoder`."""
        self.collector(verification)

    def due(self) -> bool:
        """Whether it is time to learn."""
        requests = self.collector.requests - self._requests
        rejections = self.collector.rejections - self._rejections
        totals = self._sum([requests, rejections])
        limits = (self.settings.every_requests, self.settings.every_rejected)
        return any(
            limit is not None and total >= limit
            for total, limit in zip(totals, limits, strict=True)
        )

    def learn(self) -> LearningRound | None:
        """Take a few optimizer steps and judge them on held-out requests. Undo them if the expected
        acceptance falls. Returns None if there are no records yet to learn from or to judge on.

        A loss or gradient that is not finite ends the round, and its steps are undone.
        """
        # An observer would call this in the loop's inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            self.gather()
            self._requests, self._rejections = self.collector.requests, self.collector.rejections
            return self._learn()

    def swap(self) -> bool:
        """Give the decoding drafter all weights of the newest kept version, even while `learn`
        runs. Returns False if the drafter already has that version."""
        version, weights = self.version, self._kept[0]
        if version == self._swapped:
            return False
        self.student.hand_over(weights, self.drafter)
        self._swapped = version
        return True

    def gather(self, *, ended: bool = False) -> None:
        """Move the recorded tokens into the buffers; `learn` does that too. ended: only those of
        texts that have ended."""
        records, held_out = self.collector.take(ended=ended)
        self.buffer.add(records)
        self.held_out.add(held_out)
        self.held_out.keep_newest(self.settings.holdout_requests)

    def commit(self) -> list[int]:
        """Write the buffers' new records to disk. Returns their numbers, for `restore`."""
        self.gather()
        for buffer in (self.buffer, self.held_out):
            buffer.commit()
        return [self.buffer.first, self.buffer.next, self.held_out.first, self.held_out.next]

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete records on disk from before a `commit` that returned these numbers."""
        first, _, first_held, _ = numbers
        self.buffer.forget(first)
        self.held_out.forget(first_held)

    def restore(self, target: Target, numbers: Sequence[int]) -> int:
        """Read the buffers that `commit` stored. Returns how many of their records are missing."""
        first, end, first_held, end_held = numbers
        self.buffer.restore(target, first=first, end=end)
        self.held_out.restore(target, first=first_held, end=end_held)
        return end - first + end_held - first_held - len(self.buffer) - len(self.held_out)

    # Internals.

    def _learn(self) -> LearningRound | None:
        begin = time.perf_counter()
        batches = self._batches()
        longest = self.student.longest_text
        held_out = [piece for record in self.held_out for piece in record.pieces(longest)]
        counts = [sum(len(r.positions) for r in batch) for batch in [*batches, held_out]]
        sums = self._sum([float(sum(counts[:-1])), float(counts[-1])])
        positions, judged = (int(x) for x in sums)
        if not positions or not judged:
            return None
        self.round += 1
        before = 1 - self._lost(held_out) / judged
        losses: list[float] = []
        problem = None
        step = self.steps
        for number in range(self.settings.steps):
            loss, norm = self._step(batches[number] if number < len(batches) else [], step)
            if loss is None:
                continue  # no process has a text left
            if not math.isfinite(loss) or not math.isfinite(norm):
                problem = f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite"
                break
            losses.append(loss)
            step += 1
        after: float | None = None
        if problem is None:
            after = 1 - self._lost(held_out) / judged
            if not math.isfinite(after):
                problem, after = "the expected acceptance is not finite", None
            elif after < before:
                problem = f"expected acceptance on held-out requests fell to {after:.4f}"
        if problem is None:
            # The weights first: a swap in another thread must never pair the new version number
            # with the old weights.
            self._kept = self._snapshot()
            self.version, self.steps = self.version + 1, step
        else:
            self._restore(self._kept)
        self._learnt = self.buffer.next
        return LearningRound(
            self.round,
            self.version,
            problem is None,
            before,
            after,
            self.steps,
            positions,
            judged,
            sorted({record.request for batch in batches for record in batch}),
            [losses[0], losses[-1]] if losses else None,
            time.perf_counter() - begin,
            problem,
        )

    def _batches(self) -> list[list[Record]]:
        """At most `steps` batches: records since the last round, then older ones."""
        settings = self.settings
        return replayed_batches(
            list(self.buffer),
            max(self._learnt - self.buffer.first, 0),
            steps=settings.steps,
            tokens_per_batch=settings.tokens_per_batch,
            longest_text=self.student.longest_text,
            key=f"{settings.seed} {self.round}",
        )

    def _step(self, records: list[Record], step: int) -> tuple[float | None, float]:
        """Take optimizer step `step` on all processes' records, only if loss and gradient are
        finite. Returns the mean loss and the gradient's norm."""
        total = 0.0
        if records:
            with self.autocast():
                loss, _ = self.student.loss(records)
            loss.backward()
            total = float(loss.detach())
        total, count = self._sum([total, float(sum(len(r.positions) for r in records))])
        if not count:
            return None, 0.0
        if not math.isfinite(total):
            self.optimizer.zero_grad()
            return total / count, math.nan
        norm, _ = take_step(
            self.optimizer,
            self.settings.optimizer,
            step=step,
            total=0,
            clip=partial(self._sum_and_clip, count),
        )
        return total / count, norm

    def _sum_and_clip(self, count: float, maximum: float) -> float:
        """Replace each gradient by its sum over all processes, divided by `count`, and clip the
        gradients by their global norm. Returns the norm before clipping."""
        parameters = list(self.student.trained().values())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self.reduce(torch.cat([g.flatten() for g in gradients])) / count
        norm = float(flat.norm())
        flat *= min(1.0, maximum / (norm + 1e-6))
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return norm

    def _lost(self, records: list[Record]) -> float:
        """Σ TV over the held-out tokens of all processes."""
        lost = 0.0
        for batch in by_length(records, self.settings.tokens_per_batch):
            with self.autocast():
                lost += float(self.student.expected_rejections(batch))
        return self._sum([lost])[0]

    def _sum(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.student.device)
        return self.reduce(tensor).tolist()

    @torch.no_grad()
    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        weights = {name: p.detach().clone() for name, p in self.student.trained().items()}
        return weights, copy.deepcopy(self.optimizer.state_dict())

    @torch.no_grad()
    def _restore(self, kept: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
        weights, state = kept
        for name, parameter in self.student.trained().items():
            parameter.copy_(weights[name])
        self.optimizer.load_state_dict(copy.deepcopy(state))
        self.optimizer.zero_grad()

    # A restart needs these besides the weights. The student saves the weights.

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, by weight and name."""
        return {
            f"{name} {key}": value
            for name, parameter in self.student.trained().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def state(self) -> dict[str, int]:
        """The counts, as JSON values. The buffers' counts are `ReplayBuffer.first` and `next`."""
        return {
            "version": self.version,
            "round": self.round,
            "steps": self.steps,
            "learnt": self._learnt,
            "requests": self.collector.requests,
            "rejections": self.collector.rejections,
            "requests_learnt": self._requests,
            "rejections_learnt": self._rejections,
        }

    def resume(self, state: dict[str, int], moments: dict[str, Tensor]) -> None:
        """Continue from `state`. The student and the drafter already have that version's
        weights."""
        self.version, self.round = state["version"], state["round"]
        self.steps, self._learnt = state["steps"], state["learnt"]
        self._swapped = self.version
        self.collector.requests = state["requests"]
        self.collector.rejections = state["rejections"]
        self._requests, self._rejections = state["requests_learnt"], state["rejections_learnt"]
        # By name: in other groups of `optimizer.groups` a weight has another number.
        names = {id(p): name for name, p in self.student.trained().items()}
        numbered = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        state_by_number: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            name, _, of = key.rpartition(" ")
            number = int(name) if name.isdecimal() else numbered.index(name)  # of earlier versions
            state_by_number.setdefault(number, {})[of] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state_by_number})
        self._kept = self._snapshot()
