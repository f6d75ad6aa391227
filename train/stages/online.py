"""`online`: a drafter serves a stream of prompts and learns from what the target rejects
(Online Speculative Decoding, 2310.07177)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from decode.drafters import Drafter
from decode.drafters.directory import save_drafter
from decode.errors import UserError
from decode.loop import require_prompts
from decode.rules import RULES
from decode.target.cached_model import require_trees
from distill.losses import WeightedLoss
from distill.replay.buffer import bytes_per_draft, bytes_per_position
from distill.replay.learner import OnlineStudent
from distill.teacher.top_k_cache import describe_teacher
from heads.online_learner import require_learns
from train.data.chat import prompt_tokens
from train.data.read import Example
from train.online.learners import Learning, heads_stage
from train.online.learning import Online
from train.online.serving import OnlineStageConfig, Serving
from train.online.stream_progress import StreamProgress, Versions
from train.plots import lines
from train.schema import StageConfig
from train.stage import STAGES, Outcome, ReportSection, Stage, StageContext, StagePlan, StagePlot
from train.training.student_and_teacher import choose_trained, make_student

STREAM = "Acceptance over the stream, by windows of requests in their order."


@STAGES.register("online")
class OnlineStage(Stage):
    """Serves the stream, learns between requests or in the background, and writes the last version
    to `drafter/`.

    Under `accelerate launch` every rank decodes its share of each batch and records it. The
    gradients are summed over the ranks. So no rank idles while another decodes, all ranks have the
    same weights, and they learn the same as one rank with these batches would. With every engine,
    each rank has the complete drafter and the complete learning copy; drafters are small.
    """

    Config = OnlineStageConfig

    def check(self, earlier: Sequence[StageConfig]) -> None:
        settings: OnlineStageConfig = self.config
        WeightedLoss(settings.losses)
        rule = RULES[settings.rule]
        if settings.drafter.stage is None:
            return
        heads: Any = heads_stage(settings.drafter.stage, earlier)
        if heads is None:
            return
        require_learns(heads.heads.type)
        if settings.train_embeddings:
            raise UserError(
                f"stage {settings.name}: heads are trained whole, so train_embeddings would do "
                "nothing; leave it out"
            )
        if heads.tree is not None and settings.temperature and not rule.trees:
            raise UserError(
                f"stage {settings.name}: the heads of {heads.name} draft in a tree, and the rule "
                f"{settings.rule} judges chains only; set rule: multi_round, or leave tree out of "
                f"{heads.name}"
            )

    def plan(self, context: StageContext) -> StagePlan:
        settings: OnlineStageConfig = self.config
        stream = self._stream(context)
        self._device(context)
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
            what += " in the background" * settings.background
        tokens = len(stream) * settings.max_new_tokens
        target = sum(p.numel() * p.element_size() for p in context.target.model.parameters())
        if settings.drafter.stage is not None:
            begun = context.plans[settings.drafter.stage]
            return StagePlan(what, begun.trained_parameters, tokens, begun.memory_bytes)
        model, _ = make_student(settings.drafter, context)
        choose_trained(model, embeddings=settings.train_embeddings)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # Drafter and learning copy; gradients and AdamW's two moments; the last version's weights
        # and two moments.
        memory = 8 * model.num_parameters() + 24 * trained + target
        return StagePlan(what, trained, tokens, memory)

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
        number, at = 0, StreamProgress(accelerator.num_processes)
        if found is not None:
            number, at = found[0], StreamProgress(**found[1])
            self._require_same_ranks(context, at)
            context.reporter.say(
                f"  going on after {at.served} of {len(stream)} requests, version {at.version}"
            )
        student, drafter = self._learner(context, versions.path(at.version) if found else None)
        target = context.target
        prompts = [prompt_tokens(x, target.tokenizer, context.system) for x in stream]
        require_prompts(prompts, target.max_positions, target.vocab_size)
        if drafter.branches:
            require_trees(target.model)
        online = self._online(context, student, drafter)
        serving = Serving(settings, context, stream, student, drafter, online, versions, at, number)
        if found is None:
            serving.save_version()
        elif online is not None:
            self._resume(context, online, at, versions)
        serving.serve()
        if accelerator.is_main_process:
            provenance = serving.provenance() | {
                "version": at.version,
                "rounds": [entry for entry in at.rounds if entry["kept"]],
            }
            save_drafter(
                context.directory / "drafter",
                student.kind,
                student.write,
                target=context.target,
                provenance=provenance,
            )
        accelerator.wait_for_everyone()
        summary = at.summary(settings.window) | {"parameters": student.parameter_count}
        if online is not None:
            summary |= self._buffer_figures(context, online)
        return Outcome(context.directory / "drafter", summary)

    @classmethod
    def show(cls, summary: dict[str, Any], number: int) -> ReportSection:
        """The figures, and a plot of the stream by windows."""
        figures = {k: v for k, v in summary.items() if k not in ("windows", "rounds")}
        name = f"stream-{number}"
        drawn = lines.stream(name, summary.get("windows") or [], summary.get("rounds") or [])
        return ReportSection(figures, [StagePlot(name, STREAM, drawn)])

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

    def _device(self, context: StageContext) -> torch.device:
        """The device for learning. Raises UserError if it is not available."""
        settings: OnlineStageConfig = self.config
        ranks = context.accelerator.num_processes
        if ranks > 1 and (settings.background or settings.device):
            raise UserError(
                f"stage {settings.name}: {ranks} ranks learn together, between requests and each "
                "on its own device; leave background and device out, or launch one process"
            )
        if settings.device is None:
            return context.accelerator.device
        try:
            return torch.zeros(1, device=settings.device).device
        # AssertionError: raised by a torch without support for that kind of device.
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"stage {settings.name} cannot learn on device {settings.device!r}: {error}"
            ) from error

    def _require_same_ranks(self, context: StageContext, at: StreamProgress) -> None:
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

    def _learner(self, context: StageContext, version: Any | None) -> tuple[OnlineStudent, Drafter]:
        """The learning copy and the decoding drafter, of a saved version or of the start."""
        settings: OnlineStageConfig = self.config
        how = Learning(
            self._device(context),
            WeightedLoss(settings.losses),
            settings.learning.max_length if settings.learning else None,
            settings.chunk_tokens,
            settings.train_embeddings,
        )
        if version is not None:
            return how.of_directory(version, context.target)
        if settings.drafter.stage is not None:
            path = context.outcomes[settings.drafter.stage] / "drafter"
            return how.of_directory(path, context.target)
        # Random weights must not depend on what ran before this stage.
        torch.manual_seed(settings.seed)
        return how.of_model(*make_student(settings.drafter, context), context.target)

    def _online(
        self, context: StageContext, student: OnlineStudent, drafter: Drafter
    ) -> Online | None:
        settings: OnlineStageConfig = self.config
        if settings.learning is None:
            return None
        target, accelerator = context.target, context.accelerator
        # Not float16: its small gradients would need a loss scaler.
        lower = accelerator.mixed_precision == "bf16"
        ids = None if student.ids is None else student.ids.to(target.device)
        return Online(
            drafter,
            student,
            settings.learning,
            describe_teacher(target, k=settings.learning.k, temperature=1.0, vocabulary=ids),
            vocab_size=target.token_count,
            vocabulary=ids,
            eos_token_ids=target.eos_token_ids,
            directory=context.directory / f"rank-{accelerator.process_index}",
            reduce=partial(accelerator.reduce, reduction="sum"),
            autocast=partial(torch.autocast, student.device.type, torch.bfloat16, lower),
        )

    def _resume(
        self, context: StageContext, online: Online, at: StreamProgress, versions: Versions
    ) -> None:
        rank = context.accelerator.process_index
        if rank < len(at.online):
            first, following, first_held, following_held = at.buffers[rank]
            online.buffer.restore(context.target, first=first, end=following)
            online.held_out.restore(context.target, first=first_held, end=following_held)
        if at.online:
            state = at.online[min(rank, len(at.online) - 1)]
            online.resume(state, versions.moments(at.version))

    @staticmethod
    def _buffer_figures(context: StageContext, online: Online) -> dict[str, Any]:
        target, student = context.target, online.student
        found = {
            "buffer_bytes": online.buffer.nbytes,
            "buffered_positions": online.buffer.positions,
            "bytes_per_position": bytes_per_position(online.collector.k, target.token_count),
        }
        if student.heads:
            found["bytes_per_position"] += 1
            found["bytes_per_draft"] = bytes_per_draft(student.features, target.dtype)
        return found
