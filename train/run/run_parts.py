"""The parts of a run with the FLOPs that they are planned to take, for what is left of its time."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from distill.flops import layers_flops
from train.base.stage import StagePlan
from train.base.time_left import EVALUATING, RunPart
from train.data.read import Example
from train.run.config import RunConfig
from train.run.run_evaluation import planned_evaluation, planned_rows


def run_parts(
    config: RunConfig,
    plans: Mapping[str, StagePlan],
    examples: Mapping[str, Sequence[Example]],
    model: PreTrainedModel,
) -> list[RunPart]:
    """The stages, and the evaluated drafters. plans: of all stages by name. model: the target."""
    output = model.get_output_embeddings()
    token = layers_flops(model, trained=False).per_token
    token += 2 * sum(weight.numel() for weight in output.parameters())
    kinds = {stage.name: stage.kind for stage in config.stages}
    stages = [
        RunPart(kinds[name], name, plan.tokens * _token_flops(plan, token), plan.max_seconds)
        for name, plan in plans.items()
    ]
    rows = planned_rows(config, plans)
    flops = token * planned_evaluation(config, plans, examples).tokens / max(1, len(rows))
    return stages + [RunPart(EVALUATING, name, flops) for name in rows]


def _token_flops(plan: StagePlan, target: float) -> float:
    """Of one of its tokens. target: those of the target's pass."""
    return plan.runs_target * target + (plan.training_flops or 6 * plan.trained_parameters)
