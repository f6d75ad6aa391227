"""Serves the stream of an `online` stage: answers requests, learns in rounds, saves progress."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from pydantic import Field, model_validator

from decode.drafters import Drafter
from decode.loop import Decoder
from decode.sampling import Sampling
from distill.replay.learner import OnlineStudent
from train.data.chat import prompt_tokens
from train.data.read import Example
from train.online.learning import Online, OnlineConfig, Round
from train.online.stream_progress import COUNTS, StreamProgress, Versions, rate
from train.schema import StageConfig
from train.stage import StageContext
from train.training.checkpoint import Stopped, StopRequest
from train.training.student_and_teacher import StudentConfig


class OnlineStageConfig(StageConfig):
    """split, prompts: serve this many prompts of this split, in order (None: all). They are decoded
    batch_size at a time with gamma, rule, temperature, top_k and top_p.

    drafter: as in a `distill` stage; its `stage` may also be a heads stage. learning: the schedule
    and the data of learning; null: the drafter does not learn. losses: as in a `distill` stage.
    train_embeddings: if off, a small language model's token embeddings and output layer are frozen.
    Heads are always trained completely. background: learn in a thread while requests are served.
    Timing then decides which version drafts a request, so a second run may differ.
    device: where to learn, such as cuda:1; null: the stage's device. keep_versions: how many of the
    newest versions stay on disk. window: the number of requests per window of the summary.
    """

    kind: Literal["online"] = "online"
    drafter: StudentConfig
    split: Literal["stream", "train", "dev"] = "stream"
    prompts: int | None = Field(None, ge=1)
    batch_size: int = Field(8, ge=1)
    gamma: int = Field(4, ge=1)
    rule: str = "speculative"
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(128, ge=2)
    seed: int = 0
    learning: OnlineConfig | None = OnlineConfig()
    losses: dict[str, Any] = {"forward_kl": 1.0}
    train_embeddings: bool = False
    background: bool = False
    device: str | None = None
    chunk_tokens: int = Field(256, ge=1)
    keep_versions: int = Field(2, ge=1)
    window: int = Field(32, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "OnlineStageConfig":
        if self.learning is None and (self.background or self.device):
            raise ValueError("background and device say how to learn, and learning is null")
        return self


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
        self._round: Future[Round | None] | None = None

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

    def ended(self, *, wait: bool = False) -> Round | None:
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
    """Serves a stream with a drafter that learns from it.

    student: the learning copy. drafter: the decoding drafter. online: connects the two; None: no
    learning. at: the progress in the stream. saves: how often the progress was saved.
    """

    settings: OnlineStageConfig
    context: StageContext
    stream: list[Example]
    student: OnlineStudent
    drafter: Drafter
    online: Online | None
    versions: Versions
    at: StreamProgress
    saves: int

    def serve(self) -> None:
        """Answer the rest of the stream. If any rank was asked to stop, saves everything and raises
        Stopped."""
        with ExitStack() as stack:
            background = None
            if self.online is not None and self.settings.background:
                background = stack.enter_context(Background(self.online))
            self._serve_all(background)

    def _serve_all(self, background: Background | None) -> None:
        settings, at, online = self.settings, self.at, self.online
        observers: list[Any] = [online.observe] if online else []
        decoder = Decoder(
            self.context.target.model,
            self.drafter,
            eos_token_ids=self.context.target.eos_token_ids,
            gamma=settings.gamma,
            rule=settings.rule,
            sampling=Sampling(settings.temperature, settings.top_k, settings.top_p),
            observers=[*observers, *([background.swap] if background else [])],
        )
        request = StopRequest()
        saved = at.served
        with request.listening(), self.context.reporter.bar("serving", len(self.stream)) as bar:
            bar.update(at.served)
            while at.served < len(self.stream):
                stopping = self._serve(decoder, request)
                last = at.served == len(self.stream)
                begin = time.perf_counter()
                found = self._learn(background, wait=stopping or last)
                if online is not None and found is not None:
                    self._note(online, found, at.spend("learning", begin))
                due = found is not None or stopping or last
                # A save during a round would be incomplete; save when the round has ended.
                whole = background is None or not background.busy
                if whole and (due or at.served - saved >= settings.window):
                    self._save()
                    saved = at.served
                if background and online and online.due() and not (stopping or last):
                    background.begin()
                bar.update(at.served, f"acceptance {rate(at.counts[-settings.window :]):.2f}")
                if stopping:
                    raise Stopped(f"stopped after {at.served} of {len(self.stream)} requests")

    def _serve(self, decoder: Decoder, request: StopRequest) -> bool:
        """Answer the next batch. Returns whether any rank was asked to stop."""
        settings, context, at = self.settings, self.context, self.at
        accelerator, target = context.accelerator, context.target
        rank, world = accelerator.process_index, accelerator.num_processes
        count = min(settings.batch_size, len(self.stream) - at.served)
        begin = time.perf_counter()
        mine = list(range(rank, count, world))
        shared = torch.zeros(count + 1, len(COUNTS), dtype=torch.float64)
        if mine:
            numbers = [at.served + i for i in mine]
            asked = [self.stream[i] for i in numbers]
            prompts = [prompt_tokens(x, target.tokenizer, context.system) for x in asked]
            if self.online:
                self.online.collector.begin(numbers)
            done = decoder.decode(
                prompts, settings.max_new_tokens, seed=settings.seed, row_ids=numbers
            )
            tally = done.tally
            by_row = (tally.steps, tally.emitted, tally.reached.sum(1), tally.accepted.sum(1))
            shared[mine] = torch.stack([torch.as_tensor(x) for x in by_row], 1).double()
        shared[-1] = float(request.asked)
        *rows, stop = accelerator.reduce(shared.to(accelerator.device), "sum").tolist()
        at.counts += [[int(x) for x in row] for row in rows]
        at.served += count
        at.batches.append((at.served, at.spend("decoding", begin)))
        return bool(stop[0])

    def _learn(self, background: Background | None, *, wait: bool) -> Round | None:
        """Learn a round now if one is due, or collect one that ended in the background. Swap the
        weights, and return the round, if any."""
        found = None
        if background is not None:
            found = background.ended(wait=wait)
        elif self.online is not None and self.online.due():
            found = self.online.learn()
        if self.online is not None:
            self.online.swap()
        return found

    def _note(self, online: Online, found: Round, waited: float) -> None:
        """Record a round. waited: how many seconds requests waited for it."""
        at = self.at
        requests = sorted(set(gather_object(found.requests)))
        at.rounds.append(
            asdict(found)
            | {
                "served": at.served,
                "waited": waited,
                "requests": [self.stream[i].id for i in requests],
            }
        )
        at.version = online.version
        if found.kept:
            begin = time.perf_counter()
            self.save_version()
            at.spend("saving", begin)

    def save_version(self) -> None:
        """Save the learning copy's weights as version `at.version`."""
        if not self.context.accelerator.is_main_process:
            return
        at = self.at
        provenance = self.provenance() | {
            "version": at.version,
            "round": at.rounds[-1] if at.rounds else None,
        }
        moments = self.online.moments() if self.online else {}
        self.versions.save_version(at.version, self.student, moments, provenance)

    def provenance(self) -> dict[str, Any]:
        """The provenance of a drafter that is saved now."""
        return {
            "stage": self.settings.name,
            "run": self.context.run_name,
            "settings": self.settings.model_dump(mode="json"),
            "start": self.settings.drafter.provenance(self.context),
            "served": self.at.served,
        }

    def _save(self) -> None:
        at, online = self.at, self.online
        begin = time.perf_counter()
        self.saves += 1
        if online is not None:
            online.gather()
            for buffer in (online.buffer, online.held_out):
                buffer.commit()
            own = [x for b in (online.buffer, online.held_out) for x in (b.first, b.next)]
            at.buffers = gather_object([own])
            at.online = gather_object([online.state()])
        if self.context.accelerator.is_main_process:
            self.versions.save_progress(self.saves, asdict(at))
        self.context.accelerator.wait_for_everyone()
        at.spend("saving", begin)
