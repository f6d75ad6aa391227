"""The round trip: does an engine use an exported drafter, and as well as our own loop?

The engine is started as a stage of a run starts it, and asked what an audit asks.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decode.base.errors import UserError
from decode.base.install_command import install_command
from decode.draw.sampling import Sampling
from decode.model.same_target import require_same_target
from draftsmith.auditing.asking import ask_texts
from draftsmith.auditing.audit_options import AuditOptions
from draftsmith.auditing.findings import Finding, Judgement
from draftsmith.auditing.questions import Questions
from draftsmith.export.engine_kinds import ENGINES, Engine, EngineTask
from draftsmith.export.export_directory import check_export, planned_layout, reload_export
from draftsmith.export.file_schema import read_json
from draftsmith.export.formats.readers import KNOWN, READERS, release_of, require_read
from draftsmith.export.trained_drafter import TrainedDrafter
from train.base.platforms import require_posix
from train.engines.counters import DraftCounts
from train.settings.server_config import ServerConfig


@dataclass(frozen=True)
class LoadSpeed:
    """Tokens a second at `requests` requests at a time, greedily, without and with the drafter."""

    requests: int
    plain: float
    drafted: float


@dataclass(frozen=True)
class ExportVerification:
    """The results of a verification.

    findings: an audit's, of greedy answers with the drafter. theirs, ours: drafted and accepted
    tokens of the engine, and of our loop, counted as the engine counts. loads: the speeds. cause:
    why the engine accepts less than our loop; "": it does not."""

    engine: str
    version: str
    gamma: int
    prompts: int
    findings: list[Finding]
    loads: list[LoadSpeed]
    cause: str = ""

    @property
    def theirs(self) -> DraftCounts:
        return _counts(self.findings, "drafted", "accepted")

    @property
    def ours(self) -> DraftCounts:
        return _counts(self.findings, "our_drafted", "our_accepted")

    @property
    def failures(self) -> list[str]:
        """Why the engine does not use the drafter as our loop does."""
        failures = []
        for finding in self.findings:
            if finding.verdict is Judgement.EQUAL:
                continue
            verdict = f"{finding.verdict}: {finding.group}, {finding.name}: {finding.detail}"
            if finding.figures and self.cause:
                verdict += f". {self.cause}"
            failures.append(verdict)
        if not any(finding.figures for finding in self.findings):
            failures.append(f"{self.engine} does not say what it drafted")
        return failures

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return {
            "engine": self.engine,
            "version": self.version,
            "gamma": self.gamma,
            "prompts": self.prompts,
            "engine_drafted": int(self.theirs.drafted),
            "engine_accepted": int(self.theirs.accepted),
            "engine_efficiency": self.theirs.rate,
            "our_drafted": int(self.ours.drafted),
            "our_accepted": int(self.ours.accepted),
            "our_efficiency": self.ours.rate,
            "loads": [asdict(load) for load in self.loads],
            "findings": [asdict(finding) for finding in self.findings],
            "failures": self.failures,
        }


def require_engine(name: str, python: str | None = None) -> Engine:
    """Return the engine. Raises UserError with advice if it is not installed, or on a system
    without process groups. python: that of its environment; None: where draftsmith looks."""
    require_posix(f"--verify {name}")
    engine = ENGINES[name]
    if find_spec("httpx2") is None:
        raise UserError(f"an engine is asked with httpx2; run {install_command('serve')}")
    if engine.version(python) is None:
        raise UserError(f"{name} is not installed. Install it with: {engine.install}")
    return engine


def engine_for(
    name: str, layout: str, python: str | None = None, used: Iterable[str] = ()
) -> Engine:
    """As `require_engine`; also raises UserError if the engine does not read this layout, in the
    installed release and with the options of heads that are used."""
    engine = ENGINES[name]
    reads = READERS[layout].get(name)
    if reads is not None and not reads.ran:
        raise UserError(
            f"this export is {layout}: {KNOWN[name].title} reads it {reads.note}, and that never "
            "ran here; measure it with --prompts in our own loop"
        )
    if reads is None:
        known = [other for other in READERS if name in READERS[other] and READERS[other][name].ran]
        fitting = [other for other, reads in READERS[layout].items() if reads.ran]
        raise UserError(
            f"{name} reads {' or '.join(known)}, but this export is {layout}; verify it "
            f"with {' or '.join(fitting) or 'another engine'}, or export it as {known[0]}"
        )
    require_read(name, layout, used, f"this {layout} export")
    engine = require_engine(name, python)
    installed = str(engine.version(python))
    if reads.until is not None and release_of(installed) > release_of(reads.until):
        raise UserError(
            f"{name} {installed} is installed, and it reads {layout} up to {reads.until}; verify "
            "it with such a release (--engine-python)"
        )
    return engine


def engine_for_drafter(name: str, drafter: Path, form: str, python: str | None = None) -> Engine:
    """As `engine_for`, of a drafter directory that will be exported as `form`."""
    used = TrainedDrafter.open(drafter).used_options
    return engine_for(name, planned_layout(drafter, form), python, used)


def engine_for_export(name: str, export: Path, layout: str, python: str | None = None) -> Engine:
    """As `engine_for`, of a directory that was exported in this layout."""
    settings = read_json(export / "config.json") or {}
    return engine_for(name, layout, python, [key for key, value in settings.items() if value])


def verify_export(
    name: str, task: EngineTask, diagnosed: Callable[[ServerConfig], str] | None = None
) -> ExportVerification:
    """Ask the engine for greedy answers with the drafter, judge each token by the target, and
    compare what it accepts with our own loop at the same γ. Also measure its speed at the task's
    loads, without and with the drafter.

    diagnosed: says why a running engine accepts less; None: the command that does is said.

    Raises UserError if the export is unsound, or if the engine does not read it, is not installed
    or breaks; the engine's log is then kept. Problems with the drafter itself are in `failures`.
    """
    record = check_export(task.export)
    engine = engine_for_export(name, task.export, record["layout"], task.python)
    require_same_target(record["drafter"]["target"], task.target, str(task.export))
    drafter = reload_export(task.export, record, task.target)
    options = AuditOptions(
        sampling=Sampling(),
        max_new_tokens=task.max_new_tokens,
        engine_dtype=engine.computes_in(task),
    )
    # One text at a time, as our own loop is counted.
    one = ServerConfig(url="http://127.0.0.1", protocol=engine.protocol, concurrency=1)
    questions = Questions(
        (), task.target, task.prompts, options, one, task.say, drafter, task.gamma,
        engine.log_probabilities,
    )  # fmt: skip
    questions.require()
    version = engine.version(task.python) or ""
    directory = Path(tempfile.mkdtemp(prefix="draftsmith-verify-"))
    speeds = []
    findings: list[Finding] = []
    cause = ""
    for drafts in (False, True) if task.loads else (True,):
        task.say(f"starting {name} {version} {'with' if drafts else 'without'} the drafter")
        with engine.serving(task, drafts, directory) as url:
            if drafts:
                findings = replace(questions, urls=(url,)).greedy()
                if _accepts_less(findings):
                    cause = _cause(one.model_copy(update={"url": [url]}), task, diagnosed)
            speeds.append([_speed(url, load, task, one) for load in task.loads])
    shutil.rmtree(directory)
    loads = [LoadSpeed(*each) for each in zip(task.loads, *speeds, strict=True)]
    return ExportVerification(name, version, task.gamma, len(task.prompts), findings, loads, cause)


def _counts(findings: Sequence[Finding], *names: str) -> DraftCounts:
    figures = next((x.figures for x in findings if x.figures), {})
    return DraftCounts(*(figures.get(name, 0) for name in names))


def _accepts_less(findings: Sequence[Finding]) -> bool:
    theirs = _counts(findings, "drafted", "accepted").rate or 0.0
    ours = _counts(findings, "our_drafted", "our_accepted").rate or 0.0
    differs = any(x.figures and x.verdict is not Judgement.EQUAL for x in findings)
    return differs and 0 < theirs < ours


def _cause(
    config: ServerConfig, task: EngineTask, diagnosed: Callable[[ServerConfig], str] | None
) -> str:
    """Why the running engine accepts less, or how to find out."""
    command = (
        "To find the cause, start the engine as a server with this export, and run: draftsmith "
        f"diagnose URL --target MODEL --drafter DIRECTORY --gamma {task.gamma}, with the directory "
        "of the drafter that was exported"
    )
    if diagnosed is None:
        return command
    try:
        return f"The cause, by draftsmith diagnose: {diagnosed(config)}"
    except UserError as error:
        return f"{command}. It was not found here: {error}"


def _speed(url: str, load: int, task: EngineTask, config: ServerConfig) -> float:
    """Tokens a second if `load` requests come at a time. Few prompts come several times."""
    asked = config.model_copy(update={"concurrency": load})

    def speed(prompts: Sequence[Sequence[int]], samples: int, tokens: int) -> float:
        return ask_texts(
            url, task.target, prompts, Sampling(), asked,
            samples=samples, max_new_tokens=tokens, seed=0,
        ).speed  # fmt: skip

    speed(task.prompts[:1], 1, 4)  # warm-up
    return speed(task.prompts, -(-load // len(task.prompts)), task.max_new_tokens)
