"""Evaluates a run's drafters: the baselines before the first stage, each trained drafter after its
stage, and the last trained drafter once more, in turn with an untrained drafter."""

import json
from pathlib import Path

from decode.artifact import CorruptArtifact, verify_directory, write_directory
from decode.drafters.directory import DRAFTER_FILE, describe_drafter, open_drafter
from decode.errors import UserError
from decode.measure.evaluation import Evaluation, evaluate, fastest_gamma
from decode.registry import Choice
from train.data.read import Example, spread
from train.resources import Resources
from train.stage import Outcome
from train.training.backbone import load_like

SAMPLES = 3
# Number of prompts for choosing a baseline's γ, unless a timed batch has more.
GAMMA_PROMPTS = 4


def evaluate_baselines(run: Resources, examples: dict[str, list[Example]]) -> None:
    """Add a row for each untrained drafter, at its best γ, chosen on the dev split.

    Without a dev split the run's γ is used: choosing γ on the evaluation prompts would flatter the
    baseline. A policy other than `fixed` chooses γ itself.
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
        if _is_missing(run, order, name):
            _evaluate(run, order, name, "before", name, name, best_gamma(name), examples)
        run.accelerator.wait_for_everyone()


def evaluate_drafter(
    run: Resources, index: int, stage: str, outcome: Outcome, examples: dict[str, list[Example]]
) -> None:
    """Add a row for a stage's drafter. If the stage saved the drafter's start, add a row for that
    first. A drafter for a new target is compared with plain decoding of that new target."""
    directory = outcome.drafter
    assert directory is not None
    gamma = run.config.evaluation.gamma
    order = len(run.config.evaluation.baselines) + 2 * index
    start = directory.parent / "start"
    kind = describe_drafter(directory)["kind"]
    if start.exists():
        label = f"{stage}-start"
        if _is_missing(run, order, label):
            row = f"{stage} (start)"
            _evaluate(run, order, label, row, kind, str(start), gamma, examples)
        run.accelerator.wait_for_everyone()
    if _is_missing(run, order + 1, stage):
        _evaluate(
            run, order + 1, stage, stage, kind, str(directory), gamma, examples, outcome.target
        )
    run.accelerator.wait_for_everyone()


def evaluate_in_turn(
    run: Resources, stage: str, outcome: Outcome, examples: dict[str, list[Example]]
) -> None:
    """Add a row for each untrained drafter of `in_turn`, followed by the drafter of the run's last
    evaluated stage.

    These rows are extra. If the settings do not fit a pair of drafters (such as a policy that
    watches a chain, with a tree), the row is left out with a message.
    """
    directory = outcome.drafter
    assert directory is not None
    settings = run.config.evaluation
    kind = describe_drafter(directory)["kind"]
    first = len(settings.baselines) + 2 * len(run.config.stages)
    for order, name in enumerate(settings.in_turn, first):
        label = f"{name}+{stage}"
        if _is_missing(run, order, label):
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


def _directory(run: Resources, order: int, label: str) -> Path:
    return run.directory / "evaluations" / f"{order:02d}-{label}"


def _is_missing(run: Resources, order: int, label: str) -> bool:
    """Whether this rank evaluates (the main process) and the row does not exist yet."""
    directory = _directory(run, order, label)
    if not run.accelerator.is_main_process:
        return False
    if directory.exists():
        verify_directory(directory)
        return False
    return True


def _evaluate(
    run: Resources,
    order: int,
    label: str,
    stage: str,
    kind: str,
    spec: str,
    gamma: int,
    examples: dict[str, list[Example]],
    new_target: Path | None = None,
) -> None:
    """kind: the kind of drafter; a drafter with kind == spec is a baseline. new_target: the
    directory of the drafter's new target; None: the run's target."""
    settings = run.config.evaluation
    target = run.target
    if new_target is not None:
        verify_directory(new_target)
        target = load_like(target, new_target)
    evaluated = spread(examples[settings.split], settings.prompts)
    prompts = run.prompts(evaluated)
    drafter = open_drafter(spec, target)
    with run.reporter.bar("evaluating", len(prompts)) as bar:

        def progress(what: str, done: int, of: int) -> None:
            bar.resize(of)
            bar.update(done, what=f"evaluating {stage}: {what}")

        protocol = settings.protocol(gamma, trained=spec != kind)
        evaluation = evaluate(target, drafter, prompts, protocol, progress)
    record = {
        "stage": stage,
        "drafter": kind,
        "order": order,
        "evaluation": evaluation.to_dict() | {"drift": drift_of(spec)},
        "samples": _samples(run, evaluation, evaluated),
    }

    def fill(directory: Path) -> None:
        (directory / "evaluation.json").write_text(json.dumps(record, indent=2))

    write_directory(_directory(run, order, label), fill)


def drift_of(spec: str) -> dict[str, float] | None:
    """The drift of a drafter's target from the original target, as its stage measured it.

    spec: as a user names the drafter. None if its stage did not measure it.
    """
    path = Path(spec).expanduser()
    _, plus, others = spec.partition("+")
    if plus and not path.exists():
        return drift_of(others.removeprefix("+"))
    if not (path / DRAFTER_FILE).exists():
        return None
    drift: dict[str, float] | None = describe_drafter(path)["provenance"].get("drift")
    return drift


def _samples(
    run: Resources, evaluation: Evaluation, examples: list[Example]
) -> list[dict[str, str]]:
    texts = []
    for index in spread(range(len(examples)), SAMPLES):
        example = examples[index]
        prompt = example.prompt or (example.messages[-1]["content"] if example.messages else "")
        answer = run.target.tokenizer.decode(evaluation.outputs[index], skip_special_tokens=True)
        texts.append({"prompt": prompt, "drafted": answer})
    return texts
