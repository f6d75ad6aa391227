"""The cycle of learning beside an engine.

    wait      until there are enough new records, or the engine accepts less than it once did
    collect   the tenant's records become rows to learn from and rows to judge with
    train     a run, from the serving drafter
    judge     both drafters on the held-out rows
    export    the new drafter in the engine's layout, measured and, if asked, verified
    start     a second engine with it, which must accept something
    switch    the recorder sends new requests there
    drain     the old engine's answers end, and it is stopped
    watch     the new engine's counters against the old one's; if they are worse, or if the new
              engine stops answering, the same way back

The state is saved after each step, and each step can be done twice. So a kill costs at most one
step, and a run of stages goes on from its newest checkpoint.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.model.loading import Target
from decode.opening.directory import describe_drafter
from draftsmith.auditing.verify_export import engine_for_drafter, verify_export
from draftsmith.export import ExportOptions
from draftsmith.export.engine_kinds import EngineTask
from draftsmith.export.export_directory import (
    Measuring,
    export_drafter,
)
from draftsmith.learn.learn_config import LearnConfig
from draftsmith.learn.learn_state import CycleOutcome, LearnState, RateWindow, Step, Swap
from draftsmith.learn.record.records import LEARNT_FILE, Records
from draftsmith.learn.swap import EngineProcesses, RecorderSwitch
from draftsmith.learn.training_run import (
    HELD_OUT,
    Gain,
    TrainingRun,
    run_settings,
    split_by_time,
    usable,
)
from train.base.console import Reporter
from train.data.text_files import NoSamples
from train.engines.child_process import NoAnswer
from train.engines.counters import DraftCounts, read_counters, served_models, smoke_counts
from train.run.config import RunConfig

SMOKE_PROMPTS, SMOKE_TOKENS = 4, 32
KEPT_VERSIONS = 3
MOST_STARTS = 3  # of a new engine that ends again before the switch


class TenantLearner:
    """One tenant's learner. engine_key: the key that the engines ask for. sleep: that of `time`,
    for tests."""

    def __init__(
        self,
        config: LearnConfig,
        engines: EngineProcesses,
        recorder: RecorderSwitch,
        reporter: Reporter,
        accelerator: Callable[[RunConfig], Accelerator],
        *,
        engine_key: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config, self.engines, self.recorder = config, engines, recorder
        self.reporter, self._accelerator = reporter, accelerator
        self._engine_key, self._sleep = engine_key, sleep
        self.directory = Path(config.directory)
        self.state = LearnState.load(self.directory)
        self._records = Records(Path(config.records))
        self._target: Target | None = None
        self._said: set[str] = set()  # reasons against records

    # --- what a command calls ---------------------------------------------------------------------

    def once(self) -> CycleOutcome | None:
        """Finish the current cycle, or do one if it is due. Returns how it ended; None: none was
        due. Raises UserError; the next call goes on with the step that failed."""
        if self.state.step == "wait" and not self._due():
            return None
        ended = len(self.state.history)
        while len(self.state.history) == ended:
            self.step()
        return self.state.history[-1]

    def follow(self) -> None:
        """Do one cycle after the other until the process ends. An engine or a recorder that stops
        answering is asked again. Raises UserError for what does not pass, such as a recorder that
        does not answer at the start."""
        self.reporter.say(f"requests go to {self.recorder.serving}")
        silent = False
        while True:
            try:
                idle, silent = self.once() is None, False
            except NoAnswer as error:
                if not silent:  # once, not at every look
                    self.reporter.say(f"{error}; it is asked again until it answers")
                idle = silent = True
            if idle:
                self._sleep(self.config.poll_seconds)

    def describe(self) -> list[str]:
        """What the next step would be, and why, in lines. Changes nothing."""
        state, window = self.state, self.state.window
        figures = self.figures()
        best = None if state.best is None else state.best.rate
        lines = [
            f"serving: version {figures['serving']}, {figures['drafter']}",
            f"records: {figures['new_records']} new; a cycle begins at "
            f"{self.config.trigger.records}",
            f"accepted ÷ drafted: {_rate(window.first)} in the first window, "
            f"{_rate(window.newest)} in the newest; the best version had {_rate(best)}, and a "
            f"cycle begins at a drop of {self.config.trigger.drop}",
            f"next step: {figures['step']}",
        ]
        lines += [f"not learnt from: {x}: {n} records" for x, n in figures["left_out"].items()]
        return lines + [f"version {x.version}: {x.reason}" for x in state.history[-3:]]

    def figures(self) -> dict[str, Any]:
        """The state as JSON values: the version that serves and its drafter, the number of new
        records that can be learnt from and of those that cannot, by the reason, accepted ÷ drafted
        in the first and the newest window (None: no drafts yet), the best version, the next step,
        and all cycles (`CycleOutcome`). Changes nothing."""
        state, window = self.state, self.state.window
        new, left_out = self._usable(state.newest)
        return {
            "serving": state.serving,
            "drafter": str(self._drafter(state.serving)),
            "new_records": len(new),
            "left_out": dict(left_out),
            "best": None if state.best is None else state.best.model_dump(),
            "first_window": window.first,
            "newest_window": window.newest,
            "step": state.step,
            "cycles": [cycle.model_dump() for cycle in state.history],
        }

    def step(self) -> None:
        """Do the current step and save the state."""
        step: Callable[[], Step] = getattr(self, f"_{self.state.step}")
        self.reporter.say(f"learning: {self.state.step}")
        self.state.step = step()
        self.state.save(self.directory)
        if self.state.step == "wait":
            self._tidy()

    # --- the steps: each returns the next one -----------------------------------------------------

    def _wait(self) -> Step:
        self._tidy()
        return "collect"

    def _collect(self) -> Step:
        state = self.state
        version = state.versions + 1
        # Records may have been deleted since the cycle was due, or all of them.
        records = self._usable()[0][-self.config.max_records :]
        work = self._directory(version) / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(mode=0o700)  # it gets what people wrote
        training, judging = self._run(version).write(records)
        ids = json.dumps([record["id"] for record in records])
        write_file(self._directory(version) / LEARNT_FILE, ids)
        state.versions = version
        state.cycle_newest = records[-1]["time"] if records else state.newest
        state.cycle = CycleOutcome(
            version=version, kept=False, reason="", records=training, held_out=judging
        )
        if not training or not judging:
            return self._finish(
                False,
                f"too few records: {training} are left to learn from, and {judging} that fit the "
                "target's context to judge with; more are waited for",
            )
        return "train"

    def _train(self) -> Step:
        version = self._cycle.version
        try:
            self._run(version).train(self._drafter(version))
        except NoSamples as error:
            return self._finish(False, f"{error} More records are waited for.")
        return "judge"

    def _judge(self) -> Step:
        cycle, run = self._cycle, self._run(self._cycle.version)
        serving = run.drafts(self._drafter(self.state.serving))
        gain = Gain.of(serving, run.drafts(self._drafter(cycle.version)))
        cycle.serving, cycle.candidate = gain.before, gain.after
        cycle.gain = (gain.low, gain.high)
        self.reporter.say(f"draft efficiency of the new drafter: {gain}")
        if gain.low <= self.config.min_gain:
            return self._finish(False, f"not better for certain: {gain}")
        return "export"

    def _export(self) -> Step:
        version = self._cycle.version
        for number in {self.state.serving, version}:
            out = self._directory(number) / "export"
            if number == version or not out.exists():
                shutil.rmtree(out, ignore_errors=True)
                try:
                    self._write_export(self._drafter(number), out)
                except UserError as error:
                    return self._finish(False, f"version {number} is not exported: {error}")
        if self.config.verify is not None:
            failures = self._verify(self._directory(version) / "export", self.config.verify)
            if failures:
                return self._finish(False, f"the engine does not use it: {'; '.join(failures)}")
        self.state.swap = Swap(old=self.state.serving, new=version)
        return "start"

    def _start(self) -> Step:
        swap = self._swap
        swap.starts += 1
        directory = self._directory(swap.new)
        try:
            swap.url = self.engines.start(directory, directory / "export")
            if not swap.back:
                self._require_acceptance(swap.url)
        except UserError as error:
            self.engines.stop(directory)
            if swap.back:  # nobody else can answer requests, so this is tried again
                raise NoAnswer(f"version {swap.new} does not come back: {error}") from error
            return self._finish(False, f"its engine was not taken: {error}")
        return "switch"

    def _switch(self) -> Step:
        swap, window = self._swap, self.state.window
        serving = self.recorder.serving
        if serving != swap.url:
            swap.old_url = serving
            swap.before = window.newest
            try:
                counts = self._counters(serving)
                self.state.read(counts, self.config.trigger.window)
                swap.before = window.rate(counts)
            except NoAnswer as error:  # all the more it is time to switch
                self.reporter.say(f"the old engine has ended: {error}")
            try:
                swap.begin = self._counters(swap.url)
            except UserError as error:
                if swap.starts >= MOST_STARTS and not swap.back:
                    self.engines.stop(self._directory(swap.new))
                    return self._finish(False, f"its engine ended {swap.starts} times: {error}")
                self.reporter.say(f"the new engine ended meanwhile: {error}")
                return "start"
            swap.time = time.time()
            # Saved first: after a kill behind the switch, the old engine is still known.
            self.state.save(self.directory)
            self.recorder.switch(swap.url)
        self.state.serving = swap.new
        self.state.window = RateWindow()
        return "drain"

    def _drain(self) -> Step:
        swap = self._swap
        if not self.recorder.drain(swap.old_url, self.config.engine.drain_seconds, self._sleep):
            self.reporter.say(f"{swap.old_url} still answers; it is stopped all the same")
        if not self.engines.stop(self._directory(swap.old)):
            self.reporter.say(
                f"{swap.old_url} is no process of draftsmith learn; stop it if it still runs"
            )
        return self._finish(False, self._cycle.reason) if swap.back else "watch"

    def _watch(self) -> Step:
        swap, cycle, limits = self._swap, self._cycle, self.config.watch
        cycle.before, answered = swap.before, time.time()
        while True:
            try:
                counts = self._counters(swap.url)
            except NoAnswer as error:
                if time.time() - answered >= limits.silent_seconds:
                    return self._roll_back(str(error))
            else:
                answered, passed = time.time(), counts - swap.begin
                self.state.read(counts, self.config.trigger.window)
                if passed.drafted >= limits.drafted or answered - swap.time > limits.seconds:
                    break
            self._sleep(self.config.poll_seconds)
        cycle.after = passed.rate if passed.drafted >= limits.drafted else None
        if cycle.after is None or cycle.before is None:
            return self._finish(True, "kept; too little traffic to compare")
        rates = f"{cycle.after:.3f} in the engine after {cycle.before:.3f}"
        if cycle.after + limits.tolerance < cycle.before:
            return self._roll_back(rates)
        return self._finish(True, f"kept: {rates}")

    def _roll_back(self, reason: str) -> Step:
        """Go back to the version before."""
        self._cycle.reason = f"rolled back: {reason}"
        self.state.swap = Swap(old=self._swap.new, new=self._swap.old, back=True)
        return "start"

    # --- what they share --------------------------------------------------------------------------

    def _finish(self, kept: bool, reason: str) -> Step:
        """End the cycle."""
        state, cycle = self.state, self._cycle
        cycle.kept, cycle.reason, cycle.time = kept, reason, time.time()
        state.history.append(cycle)
        state.newest, state.cycle, state.swap = state.cycle_newest, None, None
        self.reporter.say(f"version {cycle.version}: {reason}")
        return "wait"

    def _tidy(self) -> None:
        """Delete the copies of records of all cycles that ended, and all drafters but the serving
        one, the best one and the KEPT_VERSIONS newest that served. This is done once the state says
        so: a step that is done again needs its files."""
        served = [cycle.version for cycle in self.state.history if cycle.kept]
        needed = {self.state.serving, *served[-KEPT_VERSIONS:]}
        if self.state.best is not None:
            needed.add(self.state.best.version)
        for version in (cycle.version for cycle in self.state.history):
            for name in ("work",) if version in needed else ("work", "drafter", "export"):
                shutil.rmtree(self._directory(version) / name, ignore_errors=True)

    def _due(self) -> bool:
        """Take a reading of the counters, and say whether a cycle is due."""
        state, trigger, held_out = self.state, self.config.trigger, self.config.held_out
        state.read(self._counters(self.recorder.serving), trigger.window)
        if self.config.model is None:
            state.models = served_models(self.recorder.serving, self._engine_key)
        state.save(self.directory)
        new, left_out = self._usable(state.newest)
        for reason in sorted(left_out.keys() - self._said):
            self.reporter.say(f"{left_out[reason]} new records are not learnt from: {reason}")
        self._said |= left_out.keys()
        dropped = state.drop >= trigger.drop and len(new) >= min(held_out, trigger.records)
        if len(new) < trigger.records and not dropped:
            return False
        # Traffic that repeats what is held out has nothing to learn from yet.
        records, _ = self._usable()
        return len(records) > held_out and bool(split_by_time(records, held_out)[0])

    def _counters(self, url: str) -> DraftCounts:
        return read_counters(url, self._engine_key).counts

    def _usable(self, after: float = 0.0) -> tuple[list[dict[str, Any]], Counter[str]]:
        """The records that are newer than `after`, as `usable` gives them."""
        models = self.state.models if self.config.model is None else [self.config.model]
        return usable(self._records.read(after), models)

    def _require_acceptance(self, url: str) -> None:
        """Ask the new engine for a few answers. An engine that cannot use a drafter answers all the
        same, and only its counters tell. Raises UserError if it accepts nothing."""
        rows = (
            (self._directory(self._cycle.version) / "work" / HELD_OUT)
            .read_text(encoding="utf-8")
            .splitlines()
        )
        messages = [json.loads(row)["messages"][:-1] for row in rows[:SMOKE_PROMPTS]]
        counts = smoke_counts(url, messages, SMOKE_TOKENS, self._engine_key)
        if not counts.accepted:
            raise UserError(f"it accepted none of {counts.drafted:.0f} drafted tokens")

    def _write_export(self, drafter: Path, out: Path) -> None:
        run = self._run(self._cycle.version)
        measuring = Measuring(
            lambda target: run.prompts(), self.config.max_new_tokens, target=run.run.target
        )
        options = ExportOptions(target=run.run.config.target.model, gamma=self.config.gamma)
        export_drafter(
            drafter, self.config.form, out, options, measuring=measuring, say=self.reporter.say
        )

    def _verify(self, export: Path, engine: str) -> list[str]:
        run = self._run(self._cycle.version)
        task = EngineTask(
            run.run.target,  # it is in memory already
            run.run.config.target.model,
            export,
            run.prompts(),
            self.config.gamma,
            self.config.max_new_tokens,
            self.reporter.say,
        )
        return verify_export(engine, task).failures

    def _run(self, version: int) -> TrainingRun:
        run = TrainingRun(
            self.config,
            self._directory(version) / "work",
            self._drafter(self.state.serving),
            f"version-{version}",
            self.reporter,
            self._accelerator,
            self._target,
        )
        self._target = run.run.target
        return run

    def _directory(self, version: int) -> Path:
        return self.directory / "versions" / str(version)

    def _drafter(self, version: int) -> Path:
        return self._directory(version) / "drafter" if version else Path(self.config.drafter)

    @property
    def _cycle(self) -> CycleOutcome:
        assert self.state.cycle is not None
        return self.state.cycle

    @property
    def _swap(self) -> Swap:
        assert self.state.swap is not None
        return self.state.swap


def require_ready(config: LearnConfig) -> None:
    """Raise UserError for what would stop a cycle after hours: a damaged drafter, a run that does
    not fit, an engine to verify with that is not installed or does not read the export."""
    drafter = Path(config.drafter)
    describe_drafter(drafter)
    run_settings(config, Path(config.directory), drafter, "version-1")
    if config.verify is not None:
        engine_for_drafter(config.verify, drafter, config.form)


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.3f}"
