"""Evaluates a run's drafters: the baselines before the first stage, each trained drafter after its
stage, and the last trained drafter once more, combined with an untrained drafter."""

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from decode.base.artifact import (
    CorruptArtifact,
    ReadFailure,
    manifest_sha256,
    verify_directory,
    write_directory,
)
from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.base.registry import Choice
from decode.model.loading import Target
from decode.opening.directory import (
    DRAFTER_FILE,
    describe_drafter,
    open_drafter,
    partition_drafters,
)
from train.base.console import Reporter
from train.base.run_files import (
    BEFORE,
    EVALUATION,
    EVALUATIONS,
    START,
    read_record,
    stored_rows,
)
from train.base.stage import StagePlan
from train.base.time_left import EVALUATING
from train.data.read import Example, spread
from train.loop.trained_target import load_like
from train.measure.evaluation import evaluate, help_evaluate
from train.measure.figures import Evaluation
from train.measure.intervals import product_of_ratios
from train.measure.ranks import Ranks
from train.measure.timed_prompts import fastest_gamma, generated_batches
from train.run.config import RunConfig, differences, dump_config

SAMPLES = 3
# Settings that say which rows there are, not how one is measured.
ROWS = ("stages", "baselines", "in_turn", "in_one_tree")
# Number of prompts for choosing a baseline's γ, unless a timed batch has more.
GAMMA_PROMPTS = 4
# Figures that trackers get, beside the speed-up.
LOGGED = ("acceptance_rate", "tokens_per_step", "c", "v")


@dataclass(frozen=True)
class ReportRow:
    """A drafter to evaluate, and its row in the report.

    label: for the row's directory and its logged figures. stage: as the report shows it. kind: the
    drafter's kind; a drafter with kind == spec is a baseline. stage and kind together are unique.
    spec: the drafter's name or directory, as a user gives it. target: the directory of the
    drafter's new target; None: the run's target. drafter: the directory of the trained drafter.
    """

    label: str
    stage: str
    kind: str
    spec: str
    target: Path | None = None
    drafter: Path | None = None


@dataclass
class RunEvaluation:
    """The evaluations of one run. The acceptance run of a row is spread over all ranks. The main
    process measures times alone, while the other ranks wait.

    load_target: returns the run's target, loaded on first use. prompts: writes examples as token
    ids. asked: the examples of a split whose prompts can be answered.
    """

    config: RunConfig
    load_target: Callable[[], Target]
    prompts: Callable[[Sequence[Example]], list[list[int]]]
    examples: dict[str, Sequence[Example]]
    asked: Callable[[str], Sequence[Example]]
    accelerator: Accelerator
    reporter: Reporter

    def baselines(self) -> None:
        """Add a row for each untrained drafter, at its best γ, chosen on the dev split."""
        for name in self.config.evaluation.baselines:
            row = ReportRow(name, BEFORE, name, name)
            self._add(row, partial(self._best_gamma, name))

    def drafter(self, stage: str, directory: Path, target: Path | None) -> None:
        """Add a row for a stage's drafter. If the stage saved the drafter before its training
        (`start/`), add a row for that first. A drafter for a new target is compared with plain
        decoding of that new target.

        target: the directory of the drafter's new target; None: the run's target.
        """
        start = directory.parent / "start"
        kind = describe_drafter(directory)["kind"]
        if Ranks.of(self.accelerator).main_only(start.exists):
            row = ReportRow(f"{stage}-start", f"{stage}{START}", kind, str(start), drafter=start)
            self._add(row)
        self._add(ReportRow(stage, stage, kind, str(directory), target, directory))

    def combined(self, stage: str, directory: Path, target: Path | None) -> None:
        """Add a row for each untrained drafter of `in_turn` and of `in_one_tree`, combined with the
        drafter of the run's last evaluated stage. Arguments as of `drafter`.

        These rows are extra. If the settings do not fit a pair of drafters (such as a policy that
        watches a chain, with a tree), the row is left out with a message.
        """
        settings = self.config.evaluation
        kind = describe_drafter(directory)["kind"]
        pairs = [(name, "+") for name in settings.in_turn]
        pairs += [(name, "++") for name in settings.in_one_tree]
        for name, plus in pairs:
            label, spec = f"{name}{plus}{stage}", f"{name}{plus}{directory}"
            try:
                self._add(ReportRow(label, label, f"{name}{plus}{kind}", spec, target, directory))
            except (CorruptArtifact, ReadFailure):
                raise
            except UserError as error:
                self.reporter.say(f"{label} is not evaluated: {error}")
                self.accelerator.wait_for_everyone()

    def _best_gamma(self, name: str) -> int:
        """The best γ of an untrained drafter on dev prompts.

        Without a dev split the run's γ is used: choosing γ on the evaluation prompts would flatter
        the baseline. A policy other than `fixed` chooses γ itself.
        """
        settings = self.config.evaluation
        if (
            "dev" not in self.examples
            or len(settings.baseline_gammas) < 2
            or Choice.of(settings.policy) != Choice("fixed")
        ):
            return settings.gamma
        target = self.load_target()
        count = max(GAMMA_PROMPTS, settings.timed_batch_size)
        prompts = self.prompts(spread(self.asked("dev"), count))
        self.reporter.say(f"choosing γ for {name} on dev prompts")
        protocol = settings.protocol(trained=False)
        drafter = open_drafter(name, target)
        return fastest_gamma(target, drafter, prompts, settings.baseline_gammas, protocol)

    def _add(self, row: ReportRow, gamma: Callable[[], int] | None = None) -> None:
        """Evaluate a row, unless that was done with the same settings. gamma: returns the row's γ;
        None: the run's γ. Every rank must call this."""
        ranks = Ranks.of(self.accelerator)

        def needed() -> Path | None:
            found = stored_rows(self.config.run_dir).get((row.stage, row.kind))
            # A stage may have the name of an untrained drafter.
            name = f"{BEFORE}-{row.label}" if row.stage == BEFORE else row.label
            if found is not None:
                verify_directory(found)
                if not self._changed(row, found):
                    seconds = read_record(found / EVALUATION).get("seconds")
                    self.reporter.time_left.skip(EVALUATING, name, seconds)
                    return None
            self.reporter.time_left.begin(EVALUATING, name)
            return found or self.config.run_dir / EVALUATIONS / name

        begin = time.perf_counter()
        directory = ranks.main_only(needed)
        if directory is not None:
            if gamma and "dev" in self.examples:
                self.asked("dev")  # all ranks together
            chosen = ranks.main_only(gamma or (lambda: self.config.evaluation.gamma))
            self._evaluate(row, directory, chosen, ranks, begin)
        self.accelerator.wait_for_everyone()

    def _changed(self, row: ReportRow, found: Path) -> bool:
        """Whether a stored row was measured with other settings. Also says so."""
        # Earlier versions stored no settings. A setting that they did not have keeps its meaning.
        stored = json.loads((found / EVALUATION).read_text(encoding="utf-8")).get("settings") or {}
        changed = differences(stored, _known(stored, self._settings(row)))
        if changed:
            self.reporter.say(f"{row.stage} is evaluated again: {'; '.join(changed)}")
        return bool(changed)

    def _settings(self, row: ReportRow) -> dict[str, Any]:
        """What a row's figures depend on, beside the data, which cannot change."""
        config = dump_config(self.config)
        evaluation = {k: v for k, v in config["evaluation"].items() if k not in ROWS}
        if row.kind != row.spec:
            del evaluation["baseline_gammas"]
        return {
            "drafter": row.drafter and manifest_sha256(row.drafter),
            "evaluation": evaluation,
            "target": config["target"],
            "data": {"system": config["data"]["system"]},
        }

    def _evaluate(
        self, row: ReportRow, directory: Path, gamma: int, ranks: Ranks, begin: float
    ) -> None:
        """begin: when the work for this row began, by `time.perf_counter`."""
        settings, target = self.config.evaluation, self.load_target()
        if row.target is not None:
            verify_directory(row.target)
            target = load_like(target, row.target)
        examples = spread(self.asked(settings.split), settings.prompts)
        prompts = self.prompts(examples)
        drafter = open_drafter(row.spec, target)
        protocol = settings.protocol(gamma, trained=row.spec != row.kind)
        over_generate = ranks.main_only(lambda: self._plain_over_generate(row))
        if over_generate is not None:
            protocol = replace(protocol, generate=False)
        if not ranks.is_main:
            help_evaluate(target, drafter, prompts, protocol, ranks)
            return
        with self.reporter.bar("evaluating", len(prompts), whole=False) as bar:

            def progress(what: str, done: int, of: int) -> None:
                bar.resize(of)
                bar.update(done, what=f"evaluating {row.stage}: {what}")

            evaluation = evaluate(target, drafter, prompts, protocol, progress, ranks)
        figures = evaluation.to_dict() | {"drift": drift_of(row.spec)}
        if over_generate is not None and figures["speedup"] is not None:
            figures["plain_vs_generate"] = over_generate
            figures["vs_generate"] = product_of_ratios(figures["speedup"], over_generate)
        record: dict[str, Any] = {
            "stage": row.stage,
            "drafter": row.kind,
            "settings": self._settings(row),
            "seconds": time.perf_counter() - begin,
            "tokens": evaluation.decoded_tokens,
            "evaluation": figures,
            "samples": self._samples(evaluation, examples),
        }
        text = json.dumps(record, indent=2)
        write_directory(
            directory, lambda path: (path / EVALUATION).write_text(text, encoding="utf-8")
        )
        self._log(row.label, record["evaluation"])

    def _log(self, label: str, evaluation: dict[str, Any]) -> None:
        """Log the main figures of a drafter, where the figures of trainings are logged."""
        place = "evaluation/" + re.sub(r"[^\w./ -]", "_", label)  # mlflow takes no other characters
        values = {key: evaluation[key] for key in LOGGED}
        values["speedup"] = evaluation["speedup"] and evaluation["speedup"]["value"]
        figures = {key: float(value) for key, value in values.items() if value is not None}
        step = self.reporter.log_figures(place, 1, figures)
        self.accelerator.log({f"{place}/{key}": value for key, value in figures.items()}, step)

    def _plain_over_generate(self, row: ReportRow) -> dict[str, float] | None:
        """`plain_vs_generate` of a row that was measured with the same settings. Both loops run the
        same layers in each row, and `generate()` is by far the slower one, so a run times it once.
        None: this row times it."""

        def shared(settings: dict[str, Any]) -> dict[str, Any]:
            evaluation = dict(settings.get("evaluation") or {})
            evaluation.pop("baseline_gammas", None)
            return settings | {"drafter": None, "evaluation": evaluation}

        if not self.config.evaluation.generate:
            return None
        now = shared(self._settings(row))
        for found in stored_rows(self.config.run_dir).values():
            record = json.loads((found / EVALUATION).read_text(encoding="utf-8"))
            ratio: dict[str, float] | None = record["evaluation"].get("plain_vs_generate")
            if ratio and shared(record.get("settings") or {}) == now:
                return ratio
        return None

    def _samples(self, evaluation: Evaluation, examples: Sequence[Example]) -> list[dict[str, str]]:
        tokenizer = self.load_target().tokenizer
        texts = []
        for index in spread(range(len(examples)), SAMPLES):
            example = examples[index]
            prompt = example.prompt or (example.messages[-1]["content"] if example.messages else "")
            answer = tokenizer.decode(evaluation.outputs[index], skip_special_tokens=True)
            texts.append({"prompt": prompt, "drafted": answer})
        return texts


def _known(stored: Any, now: Any) -> Any:
    """`now` without the settings that a stored record does not have."""
    if not isinstance(stored, dict) or not isinstance(now, dict):
        return now
    return {key: _known(value, now.get(key)) for key, value in stored.items()}


def planned_rows(config: RunConfig, plans: Mapping[str, StagePlan]) -> list[str]:
    """The directories of the rows that a run will have, by name. plans: of all stages by name."""
    settings = config.evaluation
    rows = [f"{BEFORE}-{name}" for name in settings.baselines]
    judged = [
        name
        for name, plan in plans.items()
        if plan.drafters and (settings.stages is None or name in settings.stages)
    ]
    for name in judged:
        rows += [f"{name}-start"] * (plans[name].drafters - 1) + [name]
    for name in judged[-1:]:
        rows += [f"{first}+{name}" for first in settings.in_turn]
        rows += [f"{first}++{name}" for first in settings.in_one_tree]
    return rows


def planned_evaluation(
    config: RunConfig, plans: Mapping[str, StagePlan], examples: Mapping[str, Sequence[Example]]
) -> StagePlan:
    """The evaluations of a run: their drafters, and the tokens that they decode at most, without
    those for choosing a baseline's γ. plans: of all stages by name."""
    settings = config.evaluation
    count = len(planned_rows(config, plans))
    if not count:
        return StagePlan("no drafter")
    prompts = len(examples[settings.split])
    prompts = min(prompts, settings.prompts or prompts)
    size = settings.timed_batch_size
    timed = min(settings.timed_prompts, prompts // size * size)
    # Each row plainly and with drafts, and one by `generate()` too.
    texts = timed * 2 * count + settings.generate * size * len(generated_batches(timed // size))
    return StagePlan(
        f"{count} drafters on {prompts} prompts of {settings.split}, {2 * timed} timed texts each",
        tokens=count * prompts * settings.max_new_tokens + texts * settings.timed_tokens,
    )


def drift_of(spec: str) -> dict[str, float] | None:
    """The drift of a drafter's target from the original target, as its stage measured it.

    spec: the drafter's name or directory, as a user gives it. Returns None if its stage did not
    measure the drift.
    """
    path = from_home(spec)
    first, plus, others = partition_drafters(spec)
    if plus:
        return drift_of(first) or drift_of(others)
    if not os.path.exists(path / DRAFTER_FILE):
        return None
    return describe_drafter(path)["provenance"].get("drift")
