"""`online`: a drafter serves a stream of prompts and learns from what the target rejects
(Online Speculative Decoding, 2310.07177)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.cache.requirements import require_trees
from decode.opening.directory import save_drafter
from decode.rules import RULES
from distill.losses import WeightedLoss
from distill.replay.online_student import OnlineStudent
from distill.replay.replay_buffer import bytes_per_draft, bytes_per_position
from distill.students.student_start import choose_trained, start_model, start_provenance
from distill.teacher.linear_logits import require_linear_logits
from distill.teacher.top_k_cache import describe_teacher
from heads.online_heads import require_learns
from train.base.stage import (
    STAGES,
    ReportSection,
    Stage,
    StageMemory,
    StagePlan,
    StagePlot,
    StageResult,
)
from train.data.read import Example, select, spread, values
from train.loop.estimates import (
    PROMPTS_MEASURED,
    activation_bytes,
    decoding_memory,
    optimizer_bytes,
    prompt_length,
    training_disk_bytes,
)
from train.measure.ranks import Ranks
from train.online.learners import Learning
from train.online.learning import Online
from train.online.serving import Serving
from train.online.stream_progress import History, StreamProgress, Versions
from train.report.plots.line_plots import stream_plot
from train.settings.drafter_stages import (
    heads_stage,
)
from train.settings.online_config import OnlineConfig, OnlineStageConfig
from train.settings.schema import StageConfig

STREAM = "Acceptance over the stream, by windows of requests in their order."


@STAGES.register("online")
class OnlineStage(Stage[OnlineStageConfig]):
    """Serves the stream, learns between requests or in the background, and writes the last version
    to `drafter/`.

    Under `accelerate launch` every rank decodes its share of each batch and records it. The
    gradients are summed over the ranks. So no rank idles while another decodes, all ranks have the
    same weights, and they learn the same as one rank with these batches would. With every engine,
    each rank has the complete drafter and the complete learning copy; drafters are small.
    """

    @classmethod
    def check(cls, config: OnlineStageConfig, earlier: Sequence[StageConfig]) -> None:
        rule = RULES[config.rule]
        if config.drafter.stage is None:
            return
        heads: Any = heads_stage(config.drafter.stage, earlier)
        if heads is None:
            return
        require_learns(heads.heads.type)
        if heads.tree is not None and config.sampling.temperature and not rule.trees:
            raise UserError(
                f"stage {config.name}: the heads of {heads.name} draft in a tree, but the rule "
                f"{config.rule} judges only chains; set rule: multi_round, or leave tree out of "
                f"{heads.name}"
            )

    def plan(self, plans: Mapping[str, StagePlan]) -> StagePlan:
        config, stream = self.config, self._stream()
        count = len(stream)
        self._device()
        what = f"serves {count} requests of at most {config.max_new_tokens} tokens"
        if config.learning is None:
            what += "; learns nothing"
        else:
            what += f"; {_schedule_in_words(config.learning)}"
            what += " in the background" * config.background
        tokens = count * config.max_new_tokens
        memory = self._serving_memory(stream)
        if config.drafter.stage is not None:
            start = plans[config.drafter.stage]
            # The drafter's weights and its training are those of the stage that it comes from.
            memory += replace(start.memory, target=0, states=0, logits=0)
            trained, disk = start.trained_parameters, start.disk_bytes
            return StagePlan(what, trained, tokens, memory, disk, drafters=1)
        model, _ = start_model(config.drafter, self.target, self.earlier)
        require_linear_logits(model)
        choose_trained(model, embeddings=config.train_embeddings)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        layers, learning = model.config.get_text_config().num_hidden_layers, config.learning
        memory += StageMemory(
            # Drafter and learning copy; the last version's weights.
            weights=8 * model.num_parameters() + 4 * trained,
            # With the last version's two moments.
            optimizer=optimizer_bytes(trained, average=False) + 8 * trained,
            activations=activation_bytes(model, layers, learning.tokens_per_batch, 4)
            if learning
            else 0,
        )
        disk = training_disk_bytes(model.num_parameters(), trained, average=False)
        return StagePlan(what, trained, tokens, memory, disk, drafters=1)

    def _serving_memory(self, stream: Sequence[Example]) -> StageMemory:
        """What serving takes beside the drafter: the target with keys and values, the records, and
        the logits of a verification and of a learning step."""
        config, learning = self.config, self.config.learning
        examples = spread(stream, PROMPTS_MEASURED)
        serving = decoding_memory(
            self.target,
            self.target_bytes,
            rows=-(-config.batch_size // self.processes),
            prompt=prompt_length(self.corpus, examples),
            new=config.max_new_tokens,
            width=config.gamma + 1,
        )
        if learning is None:
            return serving
        return serving + StageMemory(
            states=round(learning.buffer_mib * 2**20),
            logits=2 * 4 * config.chunk_tokens * self.target.vocab_size,
        )

    def run(self) -> StageResult:
        versions = Versions(
            self.directory, self.target, self.reporter, keep=self.config.keep_versions
        )
        serving = self._prepare(versions)
        serving.serve()
        return self._save(serving)

    def _prepare(self, versions: Versions) -> Serving:
        """The stream with its drafter, at the newest saved progress or at the start."""
        stream = self._stream()
        history = History(self.directory / "history.jsonl")
        saved = Ranks.of(self.accelerator).main_only(lambda: _saved(versions, history))
        if saved is not None:
            self._require_same_ranks(saved)
            self.reporter.say(
                f"  continuing after {saved.served} of {len(stream)} requests, "
                f"version {saved.version}"
            )
        student, drafter = self._learner(None if saved is None else versions.path(saved.version))
        target = self.target
        if drafter.branches:
            require_trees(target.model)
        online = self._online(student, drafter)
        serving = Serving(
            self.config,
            stream,
            self.corpus.prompts,
            target,
            drafter,
            student,
            online,
            versions,
            saved or StreamProgress(self.accelerator.num_processes),
            history,
            self.origin | {"start": start_provenance(self.config.drafter, self.earlier)},
            self.accelerator,
            self.reporter,
        )
        if saved is None:
            serving.save_version()
        elif online is not None:
            versions.resume(online, saved, self.accelerator.process_index)
        return serving

    def _save(self, serving: Serving) -> StageResult:
        """Write the last version as the stage's drafter."""
        progress, student, online = serving.progress, serving.student, serving.online
        if self.accelerator.is_main_process:
            provenance = serving.provenance | {
                "served": progress.served,
                "version": progress.version,
                "rounds": [entry for entry in serving.history.read("round") if entry["kept"]],
            }
            save_drafter(
                self.directory / "drafter",
                student.kind,
                student.write,
                target=self.target,
                provenance=provenance,
            )
        self.accelerator.wait_for_everyone()
        summary = Ranks.of(self.accelerator).main_only(lambda: progress.summary(serving.history))
        summary |= {"parameters": student.parameter_count}
        if online is not None:
            summary |= self._buffer_figures(online)
        return StageResult(self.directory / "drafter", summary)

    @classmethod
    def show(cls, summary: dict[str, Any], number: int) -> ReportSection:
        """The figures, and a plot of the stream by windows."""
        figures = {k: v for k, v in summary.items() if k not in ("windows", "rounds")}
        name = f"stream-{number}"
        plot = stream_plot(name, summary.get("windows") or [], summary.get("rounds") or [])
        return ReportSection(figures, [StagePlot(name, STREAM, plot)])

    def _stream(self) -> Sequence[Example]:
        config = self.config
        stream = self.corpus.answerable(config.split, config.name)
        if config.kinds is not None:
            kinds = values(stream, "kind")
            if missing := sorted(set(config.kinds) - set(kinds)):
                known = ", ".join(sorted({kind for kind in kinds if kind is not None})) or "none"
                raise UserError(
                    f"stage {config.name} serves prompts of the kinds {', '.join(missing)}, but no "
                    f"row of {config.split} is of these kinds; kinds in its rows: {known}"
                )
            chosen = [row for row, kind in enumerate(kinds) if kind in config.kinds]
            stream = select(stream, chosen)
        return stream[: config.prompts]

    def _device(self) -> torch.device:
        """The device for learning. Raises UserError if it is not available."""
        config, ranks = self.config, self.accelerator.num_processes
        if ranks > 1 and (config.background or config.device):
            raise UserError(
                f"stage {config.name}: {ranks} ranks always learn between requests and on their "
                "own devices; leave background and device out, or launch one process"
            )
        if config.device is None:
            return self.accelerator.device
        try:
            return torch.zeros(1, device=config.device).device
        # AssertionError: raised by a torch without support for that kind of device.
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"stage {config.name} cannot learn on device {config.device!r}: {error}"
            ) from error

    def _require_same_ranks(self, progress: StreamProgress) -> None:
        ranks = self.accelerator.num_processes
        if progress.ranks == ranks:
            return
        if not self.allow_changes:
            raise UserError(
                f"stage {self.config.name} began with {progress.ranks} ranks, but now there are "
                f"{ranks}. Each rank's replay buffer has the records of its share of the requests. "
                "Launch the same number of ranks, or accept the change with --allow-changes: the "
                "records of missing ranks are then lost."
            )
        progress.ranks = ranks

    def _learner(self, version: Path | None) -> tuple[OnlineStudent, Drafter]:
        """The learning copy and the decoding drafter, from a saved version or from the start."""
        config, target = self.config, self.target
        learning = Learning(
            self._device(),
            WeightedLoss(config.losses),
            config.learning.max_length if config.learning else None,
            config.chunk_tokens,
            config.train_embeddings,
        )
        if version is not None:
            return learning.of_directory(version, target)
        if config.drafter.stage is not None:
            return learning.of_directory(self.earlier[config.drafter.stage] / "drafter", target)
        # Random weights must not depend on what ran before this stage.
        torch.manual_seed(config.seed)
        return learning.of_model(*start_model(config.drafter, target, self.earlier), target)

    def _online(self, student: OnlineStudent, drafter: Drafter) -> Online | None:
        learning, target, accelerator = self.config.learning, self.target, self.accelerator
        if learning is None:
            return None
        # Not float16: its small gradients would need a loss scaler.
        lower = accelerator.mixed_precision == "bf16"
        ids = None if student.ids is None else student.ids.to(target.device)
        return Online(
            drafter,
            student,
            learning,
            describe_teacher(target, k=learning.k, temperature=1.0, vocabulary=ids),
            vocab_size=target.token_count,
            vocabulary=ids,
            eos_token_ids=target.eos_token_ids,
            directory=self.directory / f"rank-{accelerator.process_index}",
            reduce=partial(accelerator.reduce, reduction="sum"),
            autocast=partial(torch.autocast, student.device.type, torch.bfloat16, lower),
        )

    def _buffer_figures(self, online: Online) -> dict[str, Any]:
        target, student = self.target, online.student
        figures = {
            "buffer_bytes": online.buffer.nbytes,
            "buffered_positions": online.buffer.position_count,
            "bytes_per_position": bytes_per_position(online.collector.k, target.token_count),
        }
        if student.heads:
            figures["bytes_per_position"] += 1
            whole = student.whole_text
            each = bytes_per_draft(student.features, target.dtype, whole_text=whole)
            figures["bytes_per_text_token" if whole else "bytes_per_draft"] = each
        return figures


def _saved(versions: Versions, history: History) -> StreamProgress | None:
    """The newest saved progress, with the history up to it."""
    versions.recover(alone=True)
    saved = versions.load()
    history.cut(0 if saved is None else saved.logged)
    if saved is not None and not saved.logged:
        # Earlier versions had no history; all rounds were in the progress.
        for entry in saved.rounds:
            history.append("round", entry)
    return saved


def _schedule_in_words(learning: OnlineConfig) -> str:
    """Such as '4 steps every 16 requests or 100 rejected tokens'."""
    limits = {"requests": learning.every_requests, "rejected tokens": learning.every_rejected}
    when = [f"{count} {name}" for name, count in limits.items() if count is not None]
    return f"{learning.steps} steps every {' or '.join(when)}"
