"""Two runs of the pipeline, compared: texts, weights, figures, and the export in vLLM."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import format_interval
from benchmarks.shared.pipeline_runs import PipelineRun
from decode.drafters import DRAFTERS
from decode.loop.decoding import Decoder
from decode.measure.evaluation import evaluate
from decode.measure.figures import Evaluation
from decode.measure.intervals import ratio_of_totals
from decode.model.loading import Target
from decode.opening.directory import open_drafter
from decode.settings import EvaluationProtocol
from draftsmith.export import ExportOptions
from draftsmith.export.engines import EngineTask
from draftsmith.export.export_directory import check_export, export_drafter
from draftsmith.export.verify_export import verify_export
from train.data.corpus import read_answers

# Both runs see the same batches. Two ranks add the gradients of two parts of a batch, and the norm
# of a gradient is a sum over two parts of each tensor: float32 sums in another order. Training
# amplifies this: AdamW divides a gradient by its own size, so an entry whose gradient is little
# more than rounding moves by the learning rate in another direction. So the losses of the first
# steps agree to rounding, and later ones less and less. A wrong gradient shows in the first steps.
FIRST_STEPS = 5
LOSS = 1e-5  # relative, of each of the first steps
WEIGHTS = 1e-2  # ‖two − one‖ ÷ ‖one‖ of each tensor
AGREEMENT = 0.01  # absolute
LEAST_DRAFTED = 50


@dataclass(frozen=True)
class Check:
    """One comparison. values: of the run in one process, and of the other. bound: what they keep.
    holds: whether they do."""

    what: str
    values: Sequence[str]
    bound: str
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def compare_answers(one: PipelineRun, two: PipelineRun, stage: str) -> Check:
    """The token ids of a generate stage's answers."""
    texts = [
        {(a["id"], a["sample"]): a["tokens"] for a in read_answers(run.stage(stage))}
        for run in (one, two)
    ]
    same = sum(tokens == texts[1].get(key) for key, tokens in texts[0].items())
    counts = [f"{len(rows)}, {sum(map(len, rows.values()))} tokens" for rows in texts]
    holds = same == len(texts[0]) == len(texts[1])
    return Check(f"{stage}: answers", counts, f"identical ids: {same}", holds)


def compare_training(one: PipelineRun, two: PipelineRun, stage: str) -> list[Check]:
    """Losses of all steps, figures on the dev slice, and the drafter's weights."""
    trainings = [run.summary(stage)["training"] for run in (one, two)]
    losses = [np.array([entry["loss"] for entry in t["history"]]) for t in trainings]
    steps = f"{len(losses[0])} steps, last {losses[0][-1]:.4f}", f"last {losses[1][-1]:.4f}"
    apart, all_steps = _relative(*(x[:FIRST_STEPS] for x in losses)), _relative(*losses)
    bound = f"first {FIRST_STEPS} steps {apart:.1e} ≤ {LOSS:g} relative; all {all_steps:.1e}"
    checks = [Check("loss", steps, bound, apart <= LOSS)]
    dev = [{k: v for k, v in t["dev"][-1].items() if k != "step"} for t in trainings]
    names = [name for name in dev[0] if name.endswith("top1")]
    apart = max(abs(dev[0][name] - dev[1][name]) for name in names)
    cells = [", ".join(f"{100 * figures[name]:.1f}%" for name in names) for figures in dev]
    checks.append(Check("dev agreement", cells, f"{apart:.1e} ≤ {AGREEMENT:g}", apart <= AGREEMENT))
    weights = [_weights(run.stage(stage) / "drafter") for run in (one, two)]
    difference = weight_difference(*weights)
    number = f"{sum(w.numel() for w in weights[0].values()) / 1e6:.1f}M"
    apart = difference["relative"]
    bound = f"{apart:.1e} ≤ {WEIGHTS:g} relative; largest entry {difference['largest']:.1e}"
    return [*checks, Check("weights", [number, number], bound, apart <= WEIGHTS)]


def weight_difference(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> dict[str, float]:
    """`relative`: the largest ‖two − one‖ ÷ ‖one‖ of a tensor. `largest`: of an entry, absolute.
    Raises ValueError if names or shapes differ."""
    if {k: v.shape for k, v in one.items()} != {k: v.shape for k, v in two.items()}:
        raise ValueError("the two drafters have other tensors")
    pairs = [(one[name].double(), two[name].double()) for name in one]
    return {
        "relative": max(float((b - a).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs),
        "largest": max(float((b - a).abs().max()) for a, b in pairs),
    }


def compare_drafters(
    one: PipelineRun,
    two: PipelineRun,
    stage: str,
    target: Target,
    prompts: list[list[int]],
    protocol: EvaluationProtocol,
) -> list[Check]:
    """Both drafters in this process: their texts beside plain decoding's, and their tokens per
    step. And the evaluation by two ranks, beside that of the same drafter here."""
    plain = Decoder(target.model, DRAFTERS["none"](), eos_token_ids=target.eos_token_ids).decode(
        prompts, protocol.max_new_tokens
    )
    drafters = [open_drafter(str(run.stage(stage) / "drafter"), target) for run in (one, two)]
    here = [evaluate(target, drafter, prompts, protocol) for drafter in drafters]
    texts = [
        sum(a == b for a, b in zip(plain.outputs, found.outputs, strict=True)) for found in here
    ]
    checks = [
        Check(
            "texts as plain decoding's",
            [f"{same} of {len(prompts)}" for same in texts],
            "all",
            min(texts) == len(prompts),
        )
    ]
    ratios = [tokens_per_step(found) for found in here]
    cells = [format_interval(ratio, 3) for ratio in ratios]
    apart = abs(ratios[0]["value"] - ratios[1]["value"]) / ratios[0]["value"]
    holds = ratios[0].get("low", 0.0) <= ratios[1]["value"] <= ratios[0].get("high", math.inf)
    bound = f"{apart:.1e} relative; inside the interval"
    checks.append(Check("tokens per step", cells, bound, holds))
    for run, found, name in zip((one, two), here, ("one process", "ranks"), strict=True):
        stored, now = run.evaluation(), found.to_dict()
        keys = ("steps", "emitted", "drafted", "reached", "accepted")
        counts = [" / ".join(str(figures[key]) for key in keys) for figures in (now, stored)]
        what = f"counts by {name} ({stored['ranks']}), measured again by one"
        checks.append(Check(what, counts, "identical", counts[0] == counts[1]))
    return checks


def tokens_per_step(evaluation: Evaluation) -> dict[str, float]:
    """Emitted tokens ÷ verification passes of the acceptance run, with its 95% interval
    over prompts."""
    tokens, passes = np.zeros((2, len(evaluation.outputs)))
    for step in evaluation.steps:
        np.add.at(tokens, step.rows, step.emitted)
        np.add.at(passes, step.rows, 1)
    ratio = ratio_of_totals(tokens, passes)
    assert ratio is not None, "an evaluation has steps"
    return ratio


def verify_in_vllm(
    drafter: Path, spec: str, target: Target, prompts: list[list[int]], tokens: int, out: Path
) -> tuple[Check, dict[str, Any]]:
    """Export a drafter, and run it in vLLM and in our loop. Returns the check of both counts, and
    all results. Raises UserError as `verify_export` does."""
    export_drafter(drafter, "vllm", out, ExportOptions(target=spec))
    task = EngineTask(target, spec, out, prompts, check_export(out)["gamma"], tokens)
    verification = verify_export("vllm", task, min_drafted=LEAST_DRAFTED)
    run, ours = verification.run, (verification.our_drafted, verification.our_accepted)
    theirs = run.drafted_tokens, run.accepted_tokens
    counts = [f"{accepted} of {drafted}" for drafted, accepted in (ours, theirs)]
    holds = ours == theirs and not verification.failures
    check = Check(f"accepted in our loop, and in vLLM {run.version}", counts, "identical", holds)
    return check, verification.to_dict()


def _weights(drafter: Path) -> dict[str, Tensor]:
    return {
        k: v for file in sorted(drafter.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def _relative(one: np.ndarray, two: np.ndarray) -> float:
    return float(np.max(np.abs(two - one) / np.abs(one))) if len(one) == len(two) else np.inf
