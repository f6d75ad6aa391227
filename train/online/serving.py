"""Serves the stream of an `online` stage: answers requests, learns in rounds, saves progress."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from decode.drafters import Drafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from distill.replay.online_student import OnlineStudent
from train.base.console import Reporter
from train.data.read import Example, select
from train.loop.checkpoint import Stopped, StopRequest
from train.measure.ranks import Ranks
from train.online.learning import LearningRound, Online
from train.online.stream_progress import COUNTS, History, StreamProgress, Versions, rate, summed
from train.settings.online_config import OnlineStageConfig


class Background:
    """Runs rounds of `Online.learn`, one at a time, beside the decoding thread.

        with Background(online) as background:
            decoder = Decoder(target.model, drafter, observers=[online.observe, background.swap])
            for prompt in requests:
                decoder.decode([prompt], 128)
                background.ended()
                if online.due():
                    background.begin()

    As an observer, `swap` gives the drafter new weights between two passes, as soon as they exist.
    Leaving the context waits for the current round.
    """

    def __init__(self, online: Online) -> None:
        self.online = online
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._round: Future[LearningRound | None] | None = None

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    @property
    def busy(self) -> bool:
        """Whether a round has begun that `ended` has not returned yet."""
        return self._round is not None

    def begin(self) -> None:
        """Begin a round, unless one is running."""
        if self._round is None:
            self._round = self._pool.submit(self.online.learn)

    def ended(self, *, wait: bool = False) -> LearningRound | None:
        """The result of a round that has ended. wait: wait for the current round.

        None if no round has ended, or if it had nothing to learn from. Raises the round's exception
        if it failed.
        """
        if self._round is None or not (wait or self._round.done()):
            return None
        ended, self._round = self._round, None
        return ended.result()

    def swap(self, _: object = None) -> None:
        """`Online.swap`, as an observer."""
        self.online.swap()


@dataclass
class Serving:
    """Serves a stream of requests with a drafter that learns from it.

    stream: the requests. prompts: the token ids of some, made when they are served. drafter: the
    decoding drafter. student: the learning copy. online: connects the two; None: no
    learning. progress: the progress in the stream. history: its windows and rounds. provenance: the
    provenance of a saved drafter, without its progress.
    """

    config: OnlineStageConfig
    stream: Sequence[Example]
    prompts: Callable[[Sequence[Example]], list[list[int]]]
    target: Target
    drafter: Drafter
    student: OnlineStudent
    online: Online | None
    versions: Versions
    progress: StreamProgress
    history: History
    provenance: dict[str, Any]
    accelerator: Accelerator
    reporter: Reporter

    def serve(self) -> None:
        """Answer the rest of the stream. If any rank was asked to stop, saves everything and raises
        Stopped."""
        config, progress, online = self.config, self.progress, self.online
        learner = Background(online) if online is not None and config.background else nullcontext()
        stop_request = StopRequest()
        saved = progress.served
        count = len(self.stream)
        with (
            learner as background,
            stop_request.listening(),
            self.reporter.bar("serving", count) as bar,
        ):
            decoder = self._decoder(background)
            bar.update(progress.served)
            while progress.served < count:
                stopping = self._serve(decoder, stop_request)
                ending = stopping or progress.served == count
                begin = time.perf_counter()
                learnt = self._learn(background, wait=ending)
                if online is not None and learnt is not None:
                    self._note(online, learnt, progress.spend("learning", begin))
                shown = f"acceptance {rate(summed(progress.window.counts)):.2f}"
                window = progress.close_window(config.window, ending=progress.served == count)
                self._log("window", window)
                due = ending or learnt is not None or progress.served - saved >= config.window
                # A save during a round would be incomplete; save when the round has ended.
                if due and not (background and background.busy):
                    self._save()
                    saved = progress.served
                if background and online and online.due() and not ending:
                    background.begin()
                bar.update(progress.served, shown)
                if stopping:
                    raise Stopped(f"stopped after {progress.served} of {count} requests")

    def _decoder(self, background: Background | None) -> Decoder:
        config = self.config
        observers: list[Any] = [self.online.observe] if self.online else []
        observers += [background.swap] if background else []
        decoder = Decoder(
            self.target.model,
            self.drafter,
            eos_token_ids=self.target.eos_token_ids,
            gamma=config.gamma,
            rule=config.rule,
            sampling=config.sampling.build(),
            observers=observers,
        )
        # Each request of a stream has numbers of its own, so a run that goes on draws the same.
        decoder.numbers_repeat = False
        return decoder

    def _serve(self, decoder: Decoder, stop_request: StopRequest) -> bool:
        """Answer the next batch. Returns whether any rank was asked to stop."""
        config, progress, accelerator = self.config, self.progress, self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        count = min(config.batch_size, len(self.stream) - progress.served)
        begin = time.perf_counter()
        rows = list(range(rank, count, world))  # of the batch, for this rank
        shared = torch.zeros(count + 1, len(COUNTS), dtype=torch.float64)
        if rows:
            numbers = [progress.served + row for row in rows]
            prompts = self.prompts(select(self.stream, numbers))
            if self.online:
                self.online.collector.begin(numbers)
            tally = decoder.decode(
                prompts, config.max_new_tokens, seed=config.seed, row_ids=numbers
            ).tally
            by_row = (tally.steps, tally.emitted, tally.reached.sum(1), tally.accepted.sum(1))
            shared[rows] = torch.stack([torch.as_tensor(x) for x in by_row], 1).double()
        shared[-1] = float(stop_request.received)
        *counts, stop = accelerator.reduce(shared.to(accelerator.device), "sum").tolist()
        progress.add([[int(x) for x in row] for row in counts], progress.spend("decoding", begin))
        return bool(stop[0])

    def _learn(self, background: Background | None, *, wait: bool) -> LearningRound | None:
        """Learn a round now if one is due, or collect one that ended in the background. Swap the
        weights, and return the round, if any."""
        learnt = None
        if background is not None:
            learnt = background.ended(wait=wait)
        elif self.online is not None and self.online.due():
            learnt = self.online.learn()
        if self.online is not None:
            self.online.swap()
        return learnt

    def _note(self, online: Online, learnt: LearningRound, waited: float) -> None:
        """Record a round. waited: how many seconds requests waited for it."""
        progress = self.progress
        numbers = sorted(set(gather_object(learnt.requests)))
        ids = [self.stream[number].id for number in numbers]
        entry = {"served": progress.served, "waited": waited, "requests": ids}
        progress.rounds = [asdict(learnt) | entry]
        progress.window.seconds += waited
        self._log("round", progress.rounds[0])
        progress.version = online.version
        if learnt.kept:
            begin = time.perf_counter()
            self.save_version()
            progress.spend("saving", begin)

    def _log(self, kind: str, entry: dict[str, Any] | None) -> None:
        if entry is not None and self.accelerator.is_main_process:
            self.history.append(kind, entry)

    def save_version(self) -> None:
        """Save the learning copy's weights as version `progress.version`."""
        if self.accelerator.is_main_process:
            self.versions.save_version(self.progress, self.student, self.online, self.provenance)

    def _save(self) -> None:
        progress, online = self.progress, self.online
        begin = time.perf_counter()
        if online is not None:
            progress.buffers = gather_object([online.commit()])
            progress.online = gather_object([online.state()])

        def save() -> list[list[int]]:
            progress.logged = self.history.size()
            return self.versions.save_progress(progress)

        rank, oldest = self.accelerator.process_index, Ranks.of(self.accelerator).main_only(save)
        if online is not None and rank < len(oldest):
            online.forget(oldest[rank])
        self.accelerator.wait_for_everyone()
        progress.spend("saving", begin)
