"""The summary of a training stage, and its part in the report."""

from typing import Any

from train.plots.line_plots import agreement_plot, loss_plot
from train.report.format_figures import format_share
from train.stage import ReportSection, Stage, StagePlot
from train.training.trainer import TrainingProgress

LOSS = "Training loss. Bold: running mean over a tenth of the steps."
DEV = "Agreement with the target on text it wrote for dev prompts."


def describe(progress: TrainingProgress) -> dict[str, Any]:
    """A training's progress as JSON values, for the key `training` of its stage's summary."""
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "training_seconds": progress.seconds,
        "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else None,
        "history": progress.history,
        "dev": progress.dev,
        "clock": progress.clock,
    }


class TrainedStage(Stage):
    """A stage whose summary has `training`, and `losses` by name."""

    @classmethod
    def show(cls, summary: dict[str, Any], number: int) -> ReportSection:
        """The training's figures, then the other figures, and the training's curves."""
        # Summaries of earlier versions lack some of these keys.
        others = dict(summary)
        training = dict(others.pop("training", None) or {})
        history, dev = (training.pop(key, None) or [] for key in ("history", "dev"))
        clock = training.pop("clock", None) or {}
        losses = loss_plot(f"loss-{number}", history, summary.get("losses") or [])
        return ReportSection(
            _in_short(history, dev, clock) | training | others,
            [
                StagePlot(f"loss-{number}", LOSS, losses),
                StagePlot(f"dev-{number}", DEV, agreement_plot(f"dev-{number}", dev)),
            ],
        )


def _in_short(
    history: list[dict[str, Any]], dev: list[dict[str, Any]], clock: dict[str, float]
) -> dict[str, str]:
    """The first and last loss, the last figures on the dev slice, and the time by activity."""
    figures = {}
    losses = [entry["loss"] for entry in history if entry.get("loss") is not None]
    if losses:
        figures["loss"] = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    for name, value in (dev[-1] if dev else {}).items():
        if name != "step":
            figures[f"dev {name.replace('_', ' ')}"] = f"{value:.3f}"
    if clock:
        whole = sum(clock.values())
        shares = sorted(clock.items(), key=lambda item: -item[1])
        figures["time in"] = ", ".join(f"{part} {format_share(t / whole)}" for part, t in shares)
    return figures
