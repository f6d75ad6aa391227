"""`online`: a drafter serves a stream of prompts and learns from what the target rejects
(Online Speculative Decoding, 2310.07177)."""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from pydantic import Field
from transformers import PreTrainedModel

from decode.drafters.small_lm import SmallLMDrafter
from decode.errors import UserError
from decode.loop import Decoder
from decode.rules import RULES
from decode.sampling import Sampling
from decode.stats import finite
from decode.store import save_drafter
from decode.vocabulary import ReducedVocabulary
from distill.cache import describe_teacher
from distill.losses import Terms
from distill.online import SmallLMStudent
from distill.replay import bytes_per_position
from train.data.chat import prompt_tokens
from train.data.read import Example
from train.online import Online, OnlineConfig
from train.schema import StageConfig, closest_stage
from train.stage import STAGES, Outcome, Plan, Stage, StageContext
from train.stopping import Stopped, StopRequest
from train.student import DRAFTER_STAGES, StudentConfig, choose_trained, make_student
from train.versions import Versions

# Of a request: verification passes, tokens they emitted, positions reached, tokens accepted.
COUNTS = ("steps", "emitted", "reached", "accepted")


class OnlineStageConfig(StageConfig):
    """split: whose prompts are served, in their order; prompts: so many of them. They are decoded
    batch_size at a time with gamma, rule, temperature, top_k and top_p.

    learning: when and what is learnt; null: nothing, the drafter stays as it is. losses: as of a
    `distill` stage. train_embeddings: off, token embeddings and output layer stay as they are.
    keep_versions: so many of the newest stay on disk. window: requests in a row of the summary.
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
    chunk_tokens: int = Field(256, ge=1)
    keep_versions: int = Field(2, ge=1)
    window: int = Field(32, ge=1)


@dataclass
class Progress:
    """Where the stream stands; stored with every save.

    served: requests that were answered. version: of the weights that decode. counts: of every
    request, see COUNTS. batches: [requests served after it, seconds of decoding]. rounds: as
    `train.online.Round`, each with the requests `served` before it. seconds: by activity.
    online: as of `Online.state`, and buffers: [first, next] of both, for each rank.
    """

    ranks: int
    served: int = 0
    version: int = 0
    counts: list[list[int]] = field(default_factory=list)
    batches: list[tuple[int, float]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    online: list[dict[str, int]] = field(default_factory=list)
    buffers: list[list[int]] = field(default_factory=list)

    def spend(self, activity: str, begin: float) -> float:
        """Add the seconds since `begin`."""
        passed = time.perf_counter() - begin
        self.seconds[activity] = self.seconds.get(activity, 0.0) + passed
        return passed


@STAGES.register("online")
class OnlineStage(Stage):
    """Serves the stream, learns in between, and writes the last version to `drafter/`.

    Under `accelerate launch` every rank decodes its share of each batch and keeps records of that,
    and the gradients are added up: no rank idles while another decodes, all have the same weights,
    and what is learnt is what one rank with such batches would learn. Each rank holds drafter and
    learning copy whole, whatever the engine; drafters are small.
    """

    Config = OnlineStageConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: OnlineStageConfig = self.config
        if settings.drafter.stage is not None:
            closest_stage(settings.drafter.stage, earlier, *DRAFTER_STAGES)
        Terms(settings.losses)
        RULES[settings.rule]

    def plan(self, context: StageContext) -> Plan:
        settings: OnlineStageConfig = self.config
        stream = self._stream(context)
        learning = settings.learning
        what = f"serves {len(stream)} requests of at most {settings.max_new_tokens} tokens"
        if learning is None:
            what += "; learns nothing"
        else:
            when = [
                f"{count} {name}"
                for count, name in (
                    (learning.every_requests, "requests"),
                    (learning.every_rejected, "rejected tokens"),
                )
                if count is not None
            ]
            what += f"; {learning.steps} steps every {' or '.join(when)}"
        tokens = len(stream) * settings.max_new_tokens
        target = sum(p.numel() * p.element_size() for p in context.target.model.parameters())
        if settings.drafter.stage is not None:
            begun = context.plans[settings.drafter.stage]
            return Plan(what, begun.trained_parameters, tokens, begun.memory_bytes)
        model, _ = make_student(settings.drafter, context)
        choose_trained(model, embeddings=settings.train_embeddings)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # Drafter and copy; gradients, AdamW's two moments and the last version's three.
        memory = 8 * model.num_parameters() + 24 * trained + target
        return Plan(what, trained, tokens, memory)

    def run(self, context: StageContext) -> Outcome:
        settings: OnlineStageConfig = self.config
        stream = self._stream(context)
        accelerator = context.accelerator
        versions = Versions(
            context.directory, context.target, context.reporter, keep=settings.keep_versions
        )
        if accelerator.is_main_process:
            versions.recover()
        accelerator.wait_for_everyone()
        found = versions.load()
        number, at = 0, Progress(accelerator.num_processes)
        if found is not None:
            number, at = found[0], Progress(**found[1])
            self._require_same_ranks(context, at)
            model, vocabulary = versions.student(at.version)
            context.reporter.say(
                f"  going on after {at.served} of {len(stream)} requests, version {at.version}"
            )
        else:
            # Random weights are the stage's own, whatever ran before it.
            torch.manual_seed(settings.seed)
            model, vocabulary = make_student(settings.drafter, context)
        choose_trained(model, embeddings=settings.train_embeddings)
        student, drafter = self._student(context, model, vocabulary)
        online = self._online(context, student, drafter, vocabulary)
        if found is None:
            self._save_version(context, versions, student, online, at)
        elif online is not None:
            self._resume(context, online, at, versions)
        decoder = Decoder(
            context.target.model,
            drafter,
            eos_token_ids=context.target.eos_token_ids,
            gamma=settings.gamma,
            rule=settings.rule,
            sampling=Sampling(settings.temperature, settings.top_k, settings.top_p),
            observers=[online.observe] if online else [],
        )
        request = StopRequest()
        saved = at.served
        with request.listening(), context.reporter.bar("serving", len(stream)) as bar:
            bar.update(at.served)
            while at.served < len(stream):
                stopping = self._serve(context, decoder, online, stream, at, request)
                learnt = online is not None and self._learn(context, online, stream, at, versions)
                last = at.served == len(stream)
                if learnt or stopping or last or at.served - saved >= settings.window:
                    number, saved = number + 1, at.served
                    self._save(context, versions, online, at, number)
                bar.update(at.served, f"acceptance {_rate(at.counts[-settings.window :]):.2f}")
                if stopping:
                    raise Stopped(f"stopped after {at.served} of {len(stream)} requests")
        if accelerator.is_main_process:
            provenance = self._provenance(context, at) | {
                "version": at.version,
                "rounds": [entry for entry in at.rounds if entry["kept"]],
            }

            def write(directory: Any) -> None:
                student.write(directory)
                context.target.tokenizer.save_pretrained(directory)

            save_drafter(
                context.directory / "drafter",
                student.kind,
                write,
                target=context.target,
                provenance=provenance,
            )
        accelerator.wait_for_everyone()
        return Outcome(context.directory / "drafter", self._summary(at, student, online))

    def _stream(self, context: StageContext) -> list[Example]:
        settings: OnlineStageConfig = self.config
        if settings.split not in context.examples:
            raise UserError(
                f"stage {settings.name} serves split {settings.split}, which data lacks; set "
                f"data.{settings.split}, or another split"
            )
        prompts = [e for e in context.examples[settings.split] if e.messages is not None]
        if not prompts:
            raise UserError(
                f"stage {settings.name}: the {settings.split} split has no prompts to answer, only "
                "text; give rows with prompt or messages"
            )
        return prompts[: settings.prompts]

    def _require_same_ranks(self, context: StageContext, at: Progress) -> None:
        now = context.accelerator.num_processes
        if at.ranks == now:
            return
        if not context.allow_changes:
            raise UserError(
                f"stage {self.config.name} was begun by {at.ranks} ranks, not {now}, whose replay "
                "buffers each hold a share of the requests. Launch as before, or allow it with "
                "--allow-changes: missing ranks' records are then lost."
            )
        at.ranks = now

    def _student(
        self, context: StageContext, model: PreTrainedModel, vocabulary: ReducedVocabulary | None
    ) -> tuple[SmallLMStudent, SmallLMDrafter]:
        """The copy that learns and the drafter that decodes."""
        settings: OnlineStageConfig = self.config
        target, accelerator = context.target, context.accelerator
        served = copy.deepcopy(model).requires_grad_(False).eval()
        served.to(target.device, target.dtype)
        ids = None if vocabulary is None else vocabulary.ids
        drafter = SmallLMDrafter(served, None if ids is None else ids.to(target.device))
        student = SmallLMStudent(
            model.to(accelerator.device),
            Terms(settings.losses),
            vocabulary,
            max_length=settings.learning.max_length if settings.learning else None,
            pad_id=target.tokenizer.pad_token_id or 0,
            chunk=settings.chunk_tokens,
        )
        return student, drafter

    def _online(
        self,
        context: StageContext,
        student: SmallLMStudent,
        drafter: SmallLMDrafter,
        vocabulary: ReducedVocabulary | None,
    ) -> Online | None:
        settings: OnlineStageConfig = self.config
        if settings.learning is None:
            return None
        target, accelerator = context.target, context.accelerator
        ids = None if vocabulary is None else vocabulary.ids.to(target.device)
        return Online(
            drafter,
            student,
            settings.learning,
            describe_teacher(target, k=settings.learning.k, temperature=1.0, vocabulary=ids),
            vocab_size=target.vocab_size,
            vocabulary=ids,
            eos_token_ids=target.eos_token_ids,
            directory=context.directory / f"rank-{accelerator.process_index}",
            reduce=partial(accelerator.reduce, reduction="sum"),
        )

    def _resume(
        self, context: StageContext, online: Online, at: Progress, versions: Versions
    ) -> None:
        rank = context.accelerator.process_index
        if rank < len(at.online):
            first, following, first_held, following_held = at.buffers[rank]
            online.buffer.restore(context.target, first=first, end=following)
            online.held_out.restore(context.target, first=first_held, end=following_held)
        if at.online:
            state = at.online[min(rank, len(at.online) - 1)]
            online.resume(state, versions.moments(at.version))

    def _serve(
        self,
        context: StageContext,
        decoder: Decoder,
        online: Online | None,
        stream: list[Example],
        at: Progress,
        request: StopRequest,
    ) -> bool:
        """Answer the next batch; whether some rank was asked to stop."""
        settings: OnlineStageConfig = self.config
        accelerator, target = context.accelerator, context.target
        rank, world = accelerator.process_index, accelerator.num_processes
        count = min(settings.batch_size, len(stream) - at.served)
        begin = time.perf_counter()
        mine = list(range(rank, count, world))
        shared = torch.zeros(count + 1, len(COUNTS), dtype=torch.float64)
        if mine:
            numbers = [at.served + i for i in mine]
            prompts = [prompt_tokens(stream[i], target.tokenizer, context.system) for i in numbers]
            if online:
                online.collector.begin(numbers)
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

    def _learn(
        self,
        context: StageContext,
        online: Online,
        stream: list[Example],
        at: Progress,
        versions: Versions,
    ) -> bool:
        """Learn where it is due; whether a round came of it."""
        if not online.due():
            return False
        begin = time.perf_counter()
        found = online.learn()
        online.swap()
        at.spend("learning", begin)
        if found is None:
            return False
        requests = sorted(set(gather_object(found.requests)))
        at.rounds.append(
            asdict(found) | {"served": at.served, "requests": [stream[i].id for i in requests]}
        )
        at.version = online.version
        if found.kept:
            begin = time.perf_counter()
            self._save_version(context, versions, online.student, online, at)
            at.spend("saving", begin)
        return True

    def _save_version(
        self,
        context: StageContext,
        versions: Versions,
        student: Any,
        online: Online | None,
        at: Progress,
    ) -> None:
        if not context.accelerator.is_main_process:
            return
        provenance = self._provenance(context, at) | {
            "version": at.version,
            "round": at.rounds[-1] if at.rounds else None,
        }
        moments = online.moments() if online else {}
        versions.save_version(at.version, student, moments, provenance)

    def _provenance(self, context: StageContext, at: Progress) -> dict[str, Any]:
        return {
            "stage": self.config.name,
            "run": context.run_name,
            "settings": self.config.model_dump(mode="json"),
            "start": self.config.drafter.provenance(context),
            "served": at.served,
        }

    def _save(
        self,
        context: StageContext,
        versions: Versions,
        online: Online | None,
        at: Progress,
        number: int,
    ) -> None:
        begin = time.perf_counter()
        if online is not None:
            online.gather()
            for buffer in (online.buffer, online.held_out):
                buffer.commit()
            own = [x for b in (online.buffer, online.held_out) for x in (b.first, b.next)]
            at.buffers = gather_object([own])
            at.online = gather_object([online.state()])
        if context.accelerator.is_main_process:
            versions.save_progress(number, asdict(at))
        context.accelerator.wait_for_everyone()
        at.spend("saving", begin)

    def _summary(
        self, at: Progress, student: SmallLMStudent, online: Online | None
    ) -> dict[str, Any]:
        settings: OnlineStageConfig = self.config
        kept = sum(entry["kept"] for entry in at.rounds)
        seconds = sum(at.seconds.values())
        emitted = sum(row[1] for row in at.counts)
        found: dict[str, Any] = {
            "requests": at.served,
            "acceptance_rate": finite(_rate(at.counts)),
            "tokens": emitted,
            "tokens_per_second": emitted / seconds,
            "decoding_seconds": at.seconds.get("decoding", 0.0),
            "learning_seconds": at.seconds.get("learning", 0.0),
            "saving_seconds": at.seconds.get("saving", 0.0),
            "versions_kept": kept,
            "versions_rolled_back": len(at.rounds) - kept,
            "optimizer_steps": at.rounds[-1]["steps"] if at.rounds else 0,
            "parameters": student.model.num_parameters(),
            "windows": _windows(at, settings.window),
            "rounds": at.rounds,
        }
        if online is not None:
            buffer = online.buffer
            found |= {
                "buffer_bytes": buffer.nbytes,
                "buffered_positions": buffer.positions,
                "bytes_per_position": bytes_per_position(
                    online.collector.k, student.model.config.get_text_config().vocab_size
                ),
            }
        return found


def _rate(counts: Sequence[Sequence[int]]) -> float:
    """Accepted / reached over some requests."""
    reached, accepted = (sum(row[i] for row in counts) for i in (2, 3))
    return accepted / reached if reached else float("nan")


def _windows(at: Progress, size: int) -> list[dict[str, Any]]:
    """The stream in windows of whole batches, each of at least `size` requests but the last:
    requests from `first` on, their figures, and the seconds with learning included."""
    found, first, seconds = [], 0, 0.0
    learning = [(entry["served"], entry["seconds"]) for entry in at.rounds]
    for served, spent in at.batches:
        seconds += spent + sum(s for place, s in learning if place == served)
        if served - first < size and served < at.served:
            continue
        rows = at.counts[first:served]
        steps, emitted = (sum(row[i] for row in rows) for i in (0, 1))
        found.append(
            {
                "first": first,
                "requests": served - first,
                "acceptance_rate": finite(_rate(rows)),
                "tokens_per_step": emitted / steps if steps else None,
                "tokens_per_second": emitted / seconds,
            }
        )
        first, seconds = served, 0.0
    return found
