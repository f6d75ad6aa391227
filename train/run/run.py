"""A run: its directory, the work already done in it, and the order of work.

runs/NAME/config.json          the resolved config
          data/                the rows of the splits (`train.run.run_data`)
          texts/               texts as tokens (`train.data.text_files`)
          provenance.json      versions, git commit, machine, command line of every start
          stages/NN-STAGE/     the stage's results; done.json once it is complete
          evaluations/ROW/     the figures of one drafter, and the settings that measured it
          data.json, data_notes.json     the splits' hashes, and what was left out of them
          logs/                curves.jsonl, and the lines and the progress that the console
                               shows; tensorboard
          report.json, report.html
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from decode.base.artifact import recover, remove_directory, require_space, write_file
from decode.base.errors import UserError
from decode.model.cache.requirements import require_decoding, require_trees
from decode.model.chat_template import set_template_args
from decode.model.loading import Target, load_target
from decode.model.pretrained import decoder_start
from decode.model.without_weights import load_model_config
from train.base.console import Reporter
from train.base.directory_lock import LOCK_FILE, DirectoryLock
from train.base.provenance import TIME, describe_process
from train.base.run_files import TEXT, TEXTS, read_record, stage_directory
from train.base.shared_disk import require_shared
from train.base.stage import StageInputs, StagePlan, StageResult, StageWork
from train.base.time_left import TimeLeft
from train.base.tracking.trackers import start_trackers
from train.data.corpus import Corpus
from train.data.read import Example, spread
from train.data.template import set_moment
from train.data.text_files import Texts
from train.loop.accelerator import precision_in_words
from train.loop.compiling import compiling
from train.loop.meters.peak_memory import peak_memory, restart_peak
from train.loop.trainer import CHECKPOINTS
from train.measure.machine import product_speed
from train.measure.ranks import Ranks
from train.report.format_figures import format_share
from train.report.report_files import NOTES_FILE, make_report
from train.run.config import RunConfig, differences, dump_config
from train.run.config_checks import validate_config
from train.run.run_data import RunData, RunReader, open_rows
from train.run.run_evaluation import RunEvaluation
from train.run.run_parts import run_parts
from train.settings.schema import StageConfig
from train.stages import STAGES

Splits = dict[str, Sequence[Example]]

DONE = "done.json"  # of a finished stage
CONFIG = "config.json"
PROVENANCE = "provenance.json"
DATA = "data"  # the directory of the rows that were read
DIRECTORIES = ("stages", "evaluations", "logs")
# What a start may leave in the directory if it is killed before it writes config.json.
KILLED_START = {*DIRECTORIES, DATA, TEXTS, "data.json", NOTES_FILE, LOCK_FILE}
OCCUPIED = "wait until it ends, stop it, or give this run another name (name=...)"


@dataclass
class Run:
    """One run directory, and this process (or rank) working in it."""

    config: RunConfig
    accelerator: Accelerator
    reporter: Reporter
    # Continue a run that began with other settings or another number of ranks. The data must be the
    # same.
    allow_changes: bool = False
    # For a plan: the number of processes. None: those that run now.
    processes: int | None = None
    # The target, if the caller has it already.
    loaded: Target | None = None
    # The number of steps of each training to profile. None: no profile.
    profile_steps: int | None = None
    # What `read_data` changed in the splits, in sentences.
    data_notes: list[str] = field(default_factory=list)

    # The date and time that chat templates write: the run's first start.
    _moment: datetime = field(default_factory=lambda: datetime.now().replace(microsecond=0))

    def __post_init__(self) -> None:
        # `target` may be read after the accelerator has ended.
        self._rank_device = self.accelerator.device
        data, ranks = self.config.data, Ranks.of(self.accelerator)
        self._texts = Texts(
            on_bad=data.on_bad,
            max_bad_rate=data.max_bad_rate,
            ranks=ranks,
            say=self.reporter.say,
            bar=partial(self.reporter.bar, whole=False),
        )

    @property
    def directory(self) -> Path:
        return self.config.run_dir

    def stage_directory(self, name: str) -> Path:
        """The directory of the stage with this name. It exists once the stage has begun."""
        index = [stage.name for stage in self.config.stages].index(name)
        return stage_directory(self.directory, name, index)

    @property
    def drafters(self) -> dict[str, Path]:
        """The drafter directories of the stages that are finished and made one, by stage, in the
        order of the stages."""
        directories = {stage.name: self.stage_directory(stage.name) for stage in self.config.stages}
        return {
            name: directory / "drafter"
            for name, directory in directories.items()
            if (directory / DONE).exists() and (directory / "drafter").is_dir()
        }

    @property
    def report(self) -> dict[str, Any]:
        """report.json: the config, provenance, the stages' summaries, and in `rows` the figures of
        every drafter (`train.measure.figures`). Raises UserError if the run has none yet."""
        try:
            return json.loads((self.directory / "report.json").read_text("utf-8"))
        except OSError as error:
            raise UserError(
                f"run {self.directory} has no report ({error.strerror}); finish the run first"
            ) from error

    @property
    def target(self) -> Target:
        """The target, loaded on first use: a finished run does not need it."""
        if self.loaded is None:
            settings = self.config.target
            self.reporter.say(f"loading target {settings.model}")
            kinds = {stage.kind for stage in self.config.stages}
            rank_device, device = self._rank_device, settings.device
            if settings.device_map is not None and self.accelerator.num_processes > 1:
                raise UserError(
                    "target.device_map places the target in one process, but "
                    f"{self.accelerator.num_processes} were launched; launch one, or leave it out"
                )
            if device == "auto" and settings.device_map is None:
                # Under a launcher each rank has its own device.
                device = str(rank_device) if rank_device.type == "cuda" else rank_device.type
            self.loaded = load_target(
                settings.model,
                dtype=settings.dtype,
                device=device,
                device_map=settings.device_map,
                max_memory=settings.max_memory,
                revision=settings.revision,
                trust_remote_code=settings.trust_remote_code,
                encoder=all(STAGES[kind].with_encoder for kind in kinds),
                sharded=settings.sharded,
                chat_template_args=settings.chat_template_args,
            )
        set_moment(self.loaded.tokenizer, self._moment)
        return self.loaded

    @cached_property
    def _tokenizer(self) -> Any:
        """The target's tokenizer, without its weights if they are not loaded yet: a finished run
        never needs them."""
        if self.loaded is not None:
            return self.target.tokenizer
        settings = self.config.target
        _, tokenizer = load_model_config(
            settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        set_template_args(tokenizer, settings.chat_template_args)
        set_moment(tokenizer, self._moment)
        return tokenizer

    def prompts(self, examples: Sequence[Example]) -> list[list[int]]:
        """Token ids of each example's prompt, written with the target's chat template."""
        return self.corpus({}).prompts(examples)

    def corpus(self, examples: Splits, earlier: Mapping[str, Path] | None = None) -> Corpus:
        """These splits, written with the target's tokenizer. earlier: the directories of stages."""
        target, data = self.target, self.config.data
        if not self._texts.tokenizer:
            self._texts.tokenizer = target.fingerprint.tokenizer_sha256
            self._texts.positions, self._texts.vocab_size = target.max_positions, target.vocab_size
        return Corpus(
            examples,
            target.tokenizer,
            data.system,
            earlier or {},
            decoder_start(target.model) if target.has_encoder else None,
            target.eos_token_ids,
            self._texts,
        )

    def execute(self) -> dict[str, Any]:
        """Do the work that is not done yet. Returns the report (see `train.report`), or {} on ranks
        other than the main process. Raises UserError, also if another process works in the run's
        directory."""
        missing = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
        with DirectoryLock(self.directory, OCCUPIED) as lock:
            try:
                return self._execute(lock)
            finally:
                # A run that cannot begin leaves no directory behind.
                if lock.held and missing and not (self.directory / CONFIG).exists():
                    shutil.rmtree(self.directory, ignore_errors=True)
                    for path in missing[1:]:
                        with suppress(OSError):  # another run is in it
                            path.rmdir()

    def _occupy(self, lock: DirectoryLock) -> None:
        """Take the run's directory, which is made if there is none. Raises UserError if it is
        occupied, or no run."""
        directory = self.directory
        found = {path.name for path in directory.iterdir()} if directory.exists() else set()
        if CONFIG not in found and found - KILLED_START:
            raise UserError(
                f"{directory} exists, but is not a run of draftsmith (it has no {CONFIG}); "
                "give this run another name or output_dir"
            )
        make_directory(directory)
        lock.take()
        recover(directory / DATA, alone=True)

    def _execute(self, lock: DirectoryLock) -> dict[str, Any]:
        set_seed(self.config.seed)
        ranks = Ranks.of(self.accelerator)
        ranks.main_only(lambda: self._occupy(lock))
        require_shared(self.directory, ranks)
        self._moment = ranks.main_only(self._first_start)
        self._texts.directory = self.directory / TEXTS
        # Rank 0 reads the sources, unless an earlier start did so; all ranks use its tables.
        stored = ranks.main_only(lambda: self._reader().stored(self.directory / DATA))
        data, fingerprints = open_rows(stored)
        examples: Splits = {**data.splits}
        self._say_read(data)
        ranks.main_only(lambda: self._require_same_run(fingerprints))
        unfinished = self._require_ready(examples)
        ranks.main_only(lambda: self.prepare(fingerprints, stored))
        if unfinished:
            self.reporter.say(self.precision_in_words)
        start_trackers(
            self.accelerator,
            self.config.tracking,
            self.config.name,
            self.directory / "logs",
            dump_config(self.config),
        )
        finished: dict[str, Path] = {}
        evaluation = RunEvaluation(
            self.config,
            lambda: self.target,
            self.prompts,
            examples,
            lambda split: self.corpus(examples).asked(split),
            self.accelerator,
            self.reporter,
        )
        evaluation.baselines()
        last: tuple[str, Path, Path | None] | None = None
        for settings in self.config.stages:
            directory = ranks.main_only(partial(self.stage_directory, settings.name))
            outcome = self._stage(settings, directory, finished, examples)
            finished[settings.name] = directory
            evaluated = self.config.evaluation.stages
            if outcome.drafter is not None and (evaluated is None or settings.name in evaluated):
                last = settings.name, outcome.drafter, outcome.target
                evaluation.drafter(*last)
        if last is not None:
            evaluation.combined(*last)
        report: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            self._drop_texts()
            report = make_report(self.directory)
        self.accelerator.wait_for_everyone()
        return report

    def plan(self, examples: Splits | None = None) -> list[tuple[str, str, StagePlan]]:
        """(stage, kind, plan) for every stage. Writes nothing. examples: what `read_data` returned;
        None: it is called."""
        examples = self.read_data() if examples is None else examples
        require_decoding(self.target.model)
        plans: dict[str, StagePlan] = {}
        for settings in self.config.stages:
            directory = self.directory / "stages" / settings.name
            inputs = self._inputs(settings, directory, {}, examples)
            plans[settings.name] = STAGES[settings.kind](settings, inputs).plan(plans)
        return [(stage.name, stage.kind, plans[stage.name]) for stage in self.config.stages]

    @property
    def precision_in_words(self) -> str:
        """In what the run's matrix products are computed."""
        precision = self.accelerator.mixed_precision
        return precision_in_words(self._rank_device, precision, self.target.dtype)

    def _require_ready(self, examples: Splits) -> bool:
        """Check everything that could stop a stage or the evaluation of its drafter, before the
        first stage: a run must not fail after hours for a reason that was known at the start.
        Returns whether a stage is not done."""
        records = [self.stage_directory(stage.name) / DONE for stage in self.config.stages]
        if Ranks.of(self.accelerator).main_only(lambda: all(map(Path.exists, records))):
            return False
        settings, target = self.config.evaluation, self.target
        asked = self.corpus(examples).asked(settings.split)
        self.prompts(spread(asked, settings.prompts))
        protocol = settings.protocol()
        if protocol.branches:
            require_trees(target.model)
        plans = self.plan(examples)
        Ranks.of(self.accelerator).main_only(lambda: self._require_space(plans))
        named = {name: plan for name, _, plan in plans}
        self.reporter.time_left = TimeLeft(run_parts(self.config, named, examples, target.model))
        return True

    def _require_space(self, plans: Sequence[tuple[str, str, StagePlan]]) -> None:
        """Raise UserError if the disk lacks space for what the stages have not written yet."""
        needed = 0
        for name, _, plan in plans:
            directory = self.stage_directory(name)
            if not (directory / DONE).exists():
                written = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())
                needed += max(0, plan.disk_bytes - written)
        require_space(self.directory, needed, "all stages, with answers at full length,")

    def _require_same_run(self, fingerprints: dict[str, str]) -> None:
        """If the run directory exists, check that it belongs to this config and data."""
        stored = self.directory / CONFIG
        resolved = dump_config(self.config)
        if stored.exists():
            changed = differences(
                _in_todays_format(json.loads(stored.read_text(encoding="utf-8"))), resolved
            )
            if changed and not self.allow_changes:
                raise UserError(
                    f"run {self.directory} was started with other settings:\n  "
                    + "\n  ".join(changed)
                    + "\nUse those settings again, give this run another name (name=...), move the "
                    "old run's directory away, or accept the changes with --allow-changes."
                )
            for line in changed:
                self.reporter.say(f"changed since the run began: {line}")
            self._require_data_unchanged(fingerprints)

    def prepare(self, fingerprints: dict[str, str], rows: Path) -> None:
        """Fill the run directory, or clean up an existing one. fingerprints: the fingerprints of
        the splits. rows: the directory of their rows; those of an earlier start are deleted."""
        for other in {*rows.parent.iterdir()} - {rows}:
            remove_directory(other)
        for parent in DIRECTORIES:
            make_directory(self.directory / parent)
        self.reporter.follow(self.directory / "logs")
        for parent in ("stages", "evaluations"):
            recover(self.directory / parent, alone=True)
        stored = self.directory / "data.json"
        if stored.exists() and json.loads(stored.read_text(encoding="utf-8")) != fingerprints:
            for stage in self.config.stages:  # no other kind has begun
                (self.stage_directory(stage.name) / DONE).unlink(missing_ok=True)
        write_file(self.directory / "data.json", json.dumps(fingerprints, indent=2))
        write_file(self.directory / NOTES_FILE, json.dumps(self.data_notes, indent=2))
        resolved = dump_config(self.config)
        write_file(self.directory / CONFIG, json.dumps(resolved, indent=2))
        starts, start = self._starts(), describe_process()
        if not starts:
            start["time"] = self._moment.astimezone().strftime(TIME)
        write_file(self.directory / PROVENANCE, json.dumps([*starts, start], indent=2))

    def _starts(self) -> list[dict[str, Any]]:
        """What earlier starts noted of themselves."""
        file = self.directory / PROVENANCE
        return read_record(file) if file.exists() else []

    def _first_start(self) -> datetime:
        """When this run was started first. Now, for a new run."""
        starts = self._starts()
        return _without_zone(starts[0]["time"]) if starts else self._moment

    def read_data(self) -> Splits:
        """The rows by split, in memory; see `RunReader.read`. Writes nothing."""
        data = self._reader().read()
        self._say_read(data)
        return {**data.splits}

    def _reader(self) -> RunReader:
        return RunReader(self.config.data, self.config.seed, lambda: self._tokenizer)

    def _say_read(self, data: RunData) -> None:
        self.data_notes = data.notes
        for line in (*data.read, *data.notes):
            self.reporter.say(line)

    def _require_data_unchanged(self, now: dict[str, str]) -> None:
        stored = read_record(self.directory / "data.json")
        changed = [split for split in {**stored, **now} if stored.get(split) != now.get(split)]
        begun = [
            stage.name
            for stage in self.config.stages
            if stage.kind != "generate" and self.stage_directory(stage.name).exists()
        ]
        if changed and (begun or not self.allow_changes or changed != ["train"]):
            reason = f"stage {begun[0]} has begun with it" if begun else "figures are of it"
            way_out = (
                "or go on with --allow-changes, which keeps the answers to prompts that are the "
                "same, "
                if changed == ["train"] and not begun
                else f"({reason}) "
            )
            raise UserError(
                f"the data of {', '.join(changed)} changed since run {self.directory} began; "
                f"restore it, {way_out}or start a run with another name"
            )
        for split in changed:
            self.reporter.say(f"changed since the run began: the data of {split}")

    def _inputs(
        self, settings: StageConfig, directory: Path, earlier: dict[str, Path], examples: Splits
    ) -> StageInputs:
        earlier, stages = dict(earlier), self.config.stages
        return StageInputs(
            self.target,
            self.accelerator,
            self.reporter,
            directory,
            earlier,
            self.corpus(examples, earlier),
            self.config.name,
            allow_changes=self.allow_changes,
            processes=self.processes,
            sharded=self.config.target.sharded,
            profile_steps=self.profile_steps,
            later=stages[stages.index(settings) + 1 :],
        )

    def _stage(
        self, settings: StageConfig, directory: Path, earlier: dict[str, Path], examples: Splits
    ) -> StageResult:
        done = directory / DONE

        def read() -> dict[str, Any] | None:
            return json.loads(done.read_text(encoding="utf-8")) if done.exists() else None

        if stored := Ranks.of(self.accelerator).main_only(read):
            self.reporter.say(f"stage {settings.name}: done")
            summary = stored["summary"]
            # Those of a training are of all its starts.
            seconds = (summary.get("training") or summary).get("training_seconds")
            seconds = seconds or summary.get("seconds")
            self.reporter.time_left.skip(settings.kind, settings.name, seconds)
            drafter = directory / "drafter" if stored["drafter"] else None
            target = directory / "target" if stored.get("target") else None
            self._drop_checkpoints(directory)
            return StageResult(drafter, stored["summary"], target)
        self.reporter.say(f"stage {settings.name} ({settings.kind})")
        self.reporter.time_left.begin(settings.kind, settings.name)
        begin = time.perf_counter()
        own_peak = restart_peak()
        if self.accelerator.is_main_process:
            make_directory(directory)
            recover(directory, alone=True)
        self.accelerator.wait_for_everyone()
        # Seed again for each stage, not only at the start of the process: an earlier stage that is
        # already done draws no random numbers.
        set_seed(self.config.seed)
        inputs = self._inputs(settings, directory, earlier, examples)
        with compiling():
            outcome = STAGES[settings.kind](settings, inputs).run()
        outcome.summary["seconds"] = time.perf_counter() - begin
        # The peak of the process would be that of whatever ran before.
        outcome.summary["peak_memory_bytes"] = peak_memory() if own_peak else None
        outcome.summary |= self._speed_reached(outcome.work)
        if self.accelerator.is_main_process:
            record = {
                "drafter": outcome.drafter is not None,
                "target": outcome.target is not None,
                "settings": settings.model_dump(mode="json"),
                "summary": outcome.summary,
            }
            write_file(done, json.dumps(record, indent=2))
            self._drop_checkpoints(directory)
        self.accelerator.wait_for_everyone()
        return outcome

    def _matrix_speed(self, dtype: torch.dtype) -> float:
        """Of this rank, measured once per start. 0 if that fails, for example without memory: a
        finished stage must not fail with it."""
        with suppress(RuntimeError):
            return _product_speed(self._rank_device, dtype)
        return 0.0

    def _speed_reached(self, work: StageWork | None) -> dict[str, float]:
        """The FLOP/s of all ranks until the last one ends a stage, and their share of the matrix
        speed that all ranks measure together. {} if one of both is not known. Also says them."""
        if work is None:
            return {}
        ranks = Ranks.of(self.accelerator)
        flops, seconds = zip(*ranks.gather((work.flops, work.seconds)), strict=True)
        if not sum(flops) or not all(limits := ranks.gather(self._matrix_speed(work.dtype))):
            return {}
        speed = sum(flops) / max(seconds) / 1e12
        share = 1e12 * speed / sum(limits)
        self.reporter.say(
            f"  {speed:.3g} model TFLOP/s, {format_share(share)} of the matrix speed measured here"
        )
        return {"model_tflops_per_second": speed, "matrix_speed_share": share}

    def _drop_texts(self) -> None:
        """Delete the texts of other data or answers, unless this start asked for none at all."""
        records = self.directory.glob(f"stages/*/{TEXT}")
        used = {read_record(record)["text"] for record in records}
        if asked := self._texts.names:
            for text in self.directory.glob(f"{TEXTS}/*"):
                if text.name not in used | asked:
                    remove_directory(text)

    def _drop_checkpoints(self, stage: Path) -> None:
        """Delete the checkpoints of a finished stage: nothing reads them again."""
        if self.accelerator.is_main_process and (stage / CHECKPOINTS).is_dir():
            remove_directory(stage / CHECKPOINTS)


_product_speed = cache(product_speed)


def _without_zone(time: str) -> datetime:
    return datetime.strptime(time, TIME).replace(tzinfo=None)


def _in_todays_format(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored config in today's format. Settings that did not exist when it was written get their
    defaults, which match the earlier behaviour. A config that this version cannot read is returned
    unchanged."""
    try:
        return dump_config(validate_config(stored, base_dir=Path()))
    except UserError:
        return stored


def make_directory(path: Path) -> None:
    """Create a directory with its parents. Raises UserError with its name if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {path}: {error.strerror}") from error
