"""Judges drafters within a run: before the first stage, after every stage that made one, and the
last one once more in turn with an untrained drafter."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from decode.artifact import CorruptArtifact, verify_directory, write_directory
from decode.drafters.directory import DRAFTER_FILE, describe_drafter, open_drafter
from decode.errors import UserError
from decode.measure.evaluation import Evaluation, evaluate, fastest_gamma
from decode.registry import Choice
from train.backbone import load_like
from train.data.read import Example, spread
from train.stage import Outcome

if TYPE_CHECKING:
    from train.run import Run

SAMPLES = 3
# Prompts on which a baseline's γ is chosen, or as many as one timed batch has.
GAMMA_PROMPTS = 4


def evaluate_baselines(run: "Run", examples: dict[str, list[Example]]) -> None:
    """A row for each untrained drafter, at its own best γ, chosen on the dev split.

    Without a dev split the run's γ is used: a γ chosen on the prompts it is reported on would
    flatter the baseline. A policy that is not `fixed` chooses γ itself.
    """
    settings = run.config.evaluation

    def best_gamma(name: str) -> int:
        protocol = settings.protocol(trained=False)
        if (
            "dev" not in examples
            or len(settings.baseline_gammas) < 2
            or Choice.of(settings.policy) != Choice("fixed")
        ):
            return settings.gamma
        count = max(GAMMA_PROMPTS, settings.timed_batch_size)
        prompts = run.prompts(spread(examples["dev"], count))
        run.reporter.say(f"choosing γ for {name} on dev prompts")
        return fastest_gamma(
            run.target,
            open_drafter(name, run.target),
            prompts,
            settings.baseline_gammas,
            protocol,
        )

    for order, name in enumerate(settings.baselines):
        if _must_do(run, order, name):
            _evaluate(run, order, name, "before", name, name, best_gamma(name), examples)
        run.accelerator.wait_for_everyone()


def evaluate_drafter(
    run: "Run", index: int, stage: str, outcome: Outcome, examples: dict[str, list[Example]]
) -> None:
    """A row for the drafter a stage made, after one for what it started from, if it kept that. One
    that is for a new target is judged on that, beside its plain decoding."""
    directory = outcome.drafter
    assert directory is not None
    gamma = run.config.evaluation.gamma
    order = len(run.config.evaluation.baselines) + 2 * index
    start = directory.parent / "start"
    kind = describe_drafter(directory)["kind"]
    if start.exists():
        label = f"{stage}-start"
        if _must_do(run, order, label):
            shown = f"{stage} (start)"
            _evaluate(run, order, label, shown, kind, str(start), gamma, examples)
        run.accelerator.wait_for_everyone()
    if _must_do(run, order + 1, stage):
        _evaluate(
            run, order + 1, stage, stage, kind, str(directory), gamma, examples, outcome.target
        )
    run.accelerator.wait_for_everyone()


def evaluate_in_turn(
    run: "Run", stage: str, outcome: Outcome, examples: dict[str, list[Example]]
) -> None:
    """A row for the drafter of a run's last judged stage behind each untrained one of `in_turn`.

    These rows are an extra: settings that a pair of drafters cannot have (a policy that watches a
    chain, with a tree) leave the row out and say so.
    """
    directory = outcome.drafter
    assert directory is not None
    settings = run.config.evaluation
    kind = describe_drafter(directory)["kind"]
    first = len(settings.baselines) + 2 * len(run.config.stages)
    for order, name in enumerate(settings.in_turn, first):
        label = f"{name}+{stage}"
        if _must_do(run, order, label):
            spec = f"{name}+{directory}"
            try:
                _evaluate(
                    run,
                    order,
                    label,
                    label,
                    f"{name}+{kind}",
                    spec,
                    settings.gamma,
                    examples,
                    outcome.target,
                )
            except CorruptArtifact:
                raise
            except UserError as error:
                run.reporter.say(f"{label} is not evaluated: {error}")
        run.accelerator.wait_for_everyone()


def _directory(run: "Run", order: int, label: str) -> Path:
    return run.directory / "evaluations" / f"{order:02d}-{label}"


def _must_do(run: "Run", order: int, label: str) -> bool:
    """Whether this is the rank that evaluates, and the row is not there yet."""
    directory = _directory(run, order, label)
    if not run.accelerator.is_main_process:
        return False
    if directory.exists():
        verify_directory(directory)
        return False
    return True


def _evaluate(
    run: "Run",
    order: int,
    label: str,
    stage: str,
    kind: str,
    spec: str,
    gamma: int,
    examples: dict[str, list[Example]],
    moved: Path | None = None,
) -> None:
    """kind: the kind of drafter; one that is its own spec is a baseline. moved: the directory of
    its own target; None: the run's."""
    settings = run.config.evaluation
    target = run.target
    if moved is not None:
        verify_directory(moved)
        target = load_like(target, moved)
    chosen = spread(examples[settings.split], settings.prompts)
    prompts = run.prompts(chosen)
    drafter = open_drafter(spec, target)
    with run.reporter.bar("evaluating", len(prompts)) as bar:

        def progress(what: str, done: int, of: int) -> None:
            bar.resize(of)
            bar.update(done, what=f"evaluating {stage}: {what}")

        protocol = settings.protocol(gamma, trained=spec != kind)
        found = evaluate(target, drafter, prompts, protocol, progress)
    record = {
        "stage": stage,
        "drafter": kind,
        "order": order,
        "evaluation": found.to_dict() | {"drift": drift_of(spec)},
        "samples": _samples(run, found, chosen),
    }

    def fill(target: Path) -> None:
        (target / "evaluation.json").write_text(json.dumps(record, indent=2))

    write_directory(_directory(run, order, label), fill)


def drift_of(spec: str) -> dict[str, float] | None:
    """How far the target of a drafter (by what a user names it) has moved from the one it was
    trained from, as its stage measured it; None where it did not."""
    path = Path(spec).expanduser()
    _, plus, others = spec.partition("+")
    if plus and not path.exists():
        return drift_of(others.removeprefix("+"))
    if not (path / DRAFTER_FILE).exists():
        return None
    found: dict[str, float] | None = describe_drafter(path)["provenance"].get("drift")
    return found


def _samples(run: "Run", found: Evaluation, examples: list[Example]) -> list[dict[str, str]]:
    texts = []
    for index in spread(range(len(examples)), SAMPLES):
        example = examples[index]
        asked = example.prompt or (example.messages[-1]["content"] if example.messages else "")
        answer = run.target.tokenizer.decode(found.outputs[index], skip_special_tokens=True)
        texts.append({"prompt": asked, "drafted": answer})
    return texts
