"""Online distillation beside the thread that decodes: a service learns from what it verifies.

A thread of low priority learns in rounds (`train.online.learning`), by default only while no text
waits or runs. The decoding thread gets the weights of a kept round between two passes.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError

from decode.base.errors import UserError, nearest
from decode.base.paths import from_home
from decode.base.registry import Choice
from decode.drafters import Drafter
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoding
from decode.model.loading import Target
from decode.opening.directory import describe_drafter
from decode.verification import Verification
from distill.losses import WeightedLoss
from distill.replay.online_student import OnlineStudent
from distill.teacher.top_k_cache import describe_teacher
from draftsmith.net.few_lines import server_logger
from draftsmith.serve.batching.request_batcher import RequestBatcher
from draftsmith.serve.batching.requests import AnswerChoice, DecodeRequest, Refusal
from heads.kinds import HEADS
from heads.online_heads import require_learns
from train.base.console import Reporter
from train.base.directory_lock import DirectoryLock
from train.online.learners import Learning
from train.online.learning import LearningRound, Online
from train.online.stream_progress import StreamProgress, Versions
from train.settings.online_config import OnlineConfig

logger = server_logger(__name__)

KEPT_VERSIONS = 2  # on disk
KEPT_ROUNDS = 100  # in the saved progress
CHUNK = 256  # tokens whose logits are in memory at a time
POLL_SECONDS = 0.2


class ServiceLearnConfig(OnlineConfig):
    """The rounds and their data, and when and where a service learns."""

    idle_seconds: float = Field(2.0, ge=0)
    """A round begins after these seconds without a text; 0: at any time."""
    threads: int = Field(1, ge=1)
    """Threads of the CPU, for learning."""
    device: str | None = None
    """None: the target's."""


@dataclass(frozen=True)
class LearnOptions:
    """How a service learns.

    source: the requests it learns from: those with `store: true`, or all. directory: for versions
    and records, to continue after a restart; None: in memory only.
    """

    config: ServiceLearnConfig = field(default_factory=ServiceLearnConfig)
    source: Literal["store", "all"] = "store"
    directory: Path | None = None

    @classmethod
    def of(
        cls, options: str, source: Literal["store", "all"] = "store", directory: Path | None = None
    ) -> "LearnOptions":
        """From `option=value,…`. Raises UserError for an unknown option or a value that does not
        fit.

        >>> config = LearnOptions.of("steps=8,threads=2").config
        >>> config.steps, config.threads
        (8, 2)
        """
        try:
            config = ServiceLearnConfig.model_validate(Choice.of(f"learning:{options}").options)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(key) for key in first["loc"])
            unknown = first["type"] == "extra_forbidden"
            message = "is no option of learning" if unknown else first["msg"]
            hint = nearest(name, ServiceLearnConfig.model_fields) if unknown else ""
            raise UserError(f"{name or 'options'} of learning: {message}.{hint}") from None
        return cls(config, source, directory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from learning in the directory, inside a `with`. Raises UserError
        if one does."""
        if self.directory is None:
            yield
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot learn in {self.directory}: {error.strerror}") from error
        with DirectoryLock(self.directory, "choose another directory for learning") as lock:
            lock.take()
            yield

    def versions(self, target: Target) -> Versions | None:
        """The versions on disk."""
        if self.directory is None:
            return None
        return Versions(self.directory, target, Reporter(), keep=KEPT_VERSIONS)


def open_learning_drafter(
    name: str, target: Target, options: LearnOptions
) -> tuple[OnlineStudent, Drafter]:
    """The copy that learns and the drafter that decodes, from a drafter directory, or from the last
    version that an earlier service learnt from it. Raises UserError for a drafter that cannot
    learn, and for versions of another one."""
    path, versions = from_home(name), options.versions(target)
    if not path.is_dir():
        raise UserError(
            f"the drafter {name!r} cannot learn; expected the directory of a small language model "
            "or of heads that draftsmith has trained"
        )
    kind = describe_drafter(path)["kind"]
    if kind in HEADS:
        require_learns(kind)
    if versions is not None:
        versions.recover()
        saved = versions.load()
        if saved is not None:
            start, path = str(path.resolve()), versions.path(saved.version)
            began = describe_drafter(path)["provenance"]["start"]
            if began != start:
                raise UserError(
                    f"{options.directory} has versions of the drafter {began}, but this service "
                    f"begins with {start}; choose another directory for learning"
                )
    asked = options.config.device
    try:
        device = torch.zeros(1, device=asked or target.device).device
    # AssertionError: raised by a torch without support for that kind of device.
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"cannot learn on device {asked!r}: {error}") from error
    learning = Learning(
        device,
        WeightedLoss({"forward_kl": 1.0}),
        options.config.max_length,
        CHUNK,
        embeddings=False,
    )
    return learning.of_directory(path, target)


def _bent_by(request: DecodeRequest) -> str | None:
    """The first setting with which a request's texts do not follow the target's own distribution:
    a grammar masks it, a penalty or a bias changes it, or the text goes on after its end. None:
    they follow it."""
    if request.job.ignore_eos:
        return "ignore_eos"
    # How a token is drawn from that distribution does not change it.
    drawn = replace(request.job.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    usual = vars(Sampling())
    return next((name for name, value in vars(drawn).items() if value != usual[name]), None)


class ServiceLearner:
    """Records what the target rejects, learns from it, and gives the drafter new versions. Texts
    whose request bends the target's distribution are left out.

    drafter: the one that decodes, with its final shape; name: what settings call it. student: the
    copy that learns. Both come from `open_learning_drafter`. learning: False: nothing is recorded
    or learnt. Raises UserError if the student's weights do not fit the drafter, or the records on
    disk do not fit the target.
    """

    def __init__(
        self,
        drafter: Drafter,
        student: OnlineStudent,
        target: Target,
        name: str,
        options: LearnOptions,
    ) -> None:
        self.drafter, self.name, self.options, self.target = drafter, name, options, target
        self.learning = True
        ids = None if student.ids is None else student.ids.to(target.device)
        config = options.config
        self.online = Online(
            drafter,
            student,
            config,
            describe_teacher(target, k=config.k, temperature=1.0, vocabulary=ids),
            vocab_size=target.token_count,
            vocabulary=ids,
            eos_token_ids=target.eos_token_ids,
            directory=options.directory,
            chosen=True,
        )
        self._versions = options.versions(target)
        self._progress = StreamProgress(ranks=1)
        self._batcher: RequestBatcher  # set by `start`
        self._texts: dict[int, AnswerChoice] = {}  # those that run on after the last pass, by row
        self._rounds = 0  # since the start of the service
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._restore()

    def start(self, batcher: RequestBatcher) -> None:
        """Begin to learn for this batcher, which has `observe` among its decoder's observers."""
        self._batcher = batcher
        batcher.drafter_version = self.online.version
        batcher.metrics.drafter_version.set_function(lambda: batcher.drafter_version)
        self._thread.start()

    def live(self) -> dict[str, int]:
        """Figures of this moment for `/live`."""
        version = self._batcher.drafter_version
        return {"drafter_version": version, "learning_rounds": self._rounds}

    def close(self, seconds: float) -> None:
        """Wait for the round that runs, for these seconds at most, and save. Then nothing is
        learnt any more."""
        self._closing.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning("a round of learning runs on; its records since the last save are lost")
        else:
            self._save()

    # --- called in the decoding thread ------------------------------------------------------------

    def observe(self, verification: Verification) -> None:
        """Record a pass, as an observer of the decode."""
        collector = self.online.collector
        texts = {row: self._batcher.text_of(row) for row in verification.rows.tolist()}
        for row, text in self._texts.items():
            if texts.get(row) is not text:  # it was given up, or has lost its row
                collector.leave(row)
        for row, text in texts.items():
            if self._texts.get(row) is not text:
                self._join(row, text.request)
        if self.learning:
            self.online.observe(verification)
        for row in verification.rows[verification.ended].tolist():
            collector.leave(row)
            del texts[row]
        self._texts = texts

    def _join(self, row: int, request: DecodeRequest) -> None:
        if not self.learning or not (request.job.store or self.options.source == "all"):
            return
        if bent := _bent_by(request):
            self._batcher.metrics.not_learnt(bent)
        else:
            self.online.collector.join(row)

    def swap(self, decoding: Decoding) -> None:
        """Give the drafter its newest version, if it drafts."""
        self._batcher.drafter_version = 0  # another drafter has the weights it was loaded with
        if decoding.decoder.drafter is self.drafter:
            self.online.swap()
            self._batcher.drafter_version = self.online.version

    # --- the learning thread ----------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self.options.config.threads)
        with suppress(AttributeError, OSError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while not self._closing.wait(POLL_SECONDS):
            try:
                self._attempt()
            except Refusal:
                return  # the service ends
            except Exception:
                logger.exception("learning has failed and is off now")
                self.learning = False
                self._count("failed")

    def _attempt(self) -> None:
        """One round, if it is time."""
        online = self.online
        online.gather(ended=True)
        idle = self._batcher.idle_seconds >= self.options.config.idle_seconds
        if not (self.learning and idle and online.due()):
            return
        learnt = online.learn()
        if learnt is None:
            return
        self._count("kept" if learnt.kept else "undone")
        self._note(learnt)
        self._save()
        if learnt.kept:
            self._batcher.between(self.swap).result()

    def _count(self, result: str) -> None:
        self._rounds += 1
        self._batcher.metrics.learnt(result)

    # --- on disk ----------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Continue from the last save, whose weights the student has. Without one, write version
        0."""
        if self._versions is None:
            return
        self._versions.recover()
        saved = self._versions.load()
        if saved is None:
            self._save_version()
        else:
            self._progress = saved
            self._versions.resume(self.online, saved)

    def _note(self, learnt: LearningRound) -> None:
        """Record a round, and write its version."""
        rounds = self._progress.rounds
        rounds.append(asdict(learnt) | {"served": self.online.collector.requests})
        del rounds[:-KEPT_ROUNDS]
        if learnt.kept:
            self._save_version()

    def _save_version(self) -> None:
        if self._versions is None:
            return
        progress, online = self._progress, self.online
        provenance: dict[str, Any] = {
            "start": str(from_home(self.name).resolve()),
            "settings": self.options.config.model_dump(
                mode="json", include={*OnlineConfig.model_fields}
            ),
        }
        progress.version, progress.served = online.version, online.collector.requests
        self._versions.save_version(progress, online.student, online, provenance)

    def _save(self) -> None:
        """Bring the directory up to date."""
        if self._versions is None:
            return
        progress, online = self._progress, self.online
        progress.buffers = [online.commit()]
        progress.version, progress.served = online.version, online.collector.requests
        progress.online = [online.state()]
        for numbers in self._versions.save_progress(progress):
            online.forget(numbers)
