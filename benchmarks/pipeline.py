"""Is a run that two ranks make, killed on its way, the same as that of one process?

    python -m benchmarks.pipeline [--quick] [--json FILE] [--kills N] [--seed S] [--processes N]
                                  [--config FILE] [--runs DIR]

The config (by default configs/recipes/pipeline_smollm2.yaml) runs twice: in one process, and by two
ranks under FSDP2, which are killed with SIGKILL at random times and started again. vLLM answers the
prompts, and a run starts it by itself. Then both runs are compared: the answers' token ids, losses,
figures on dev text, weights, and what both drafters accept. The ranks' drafter is exported and runs
in vLLM. The exit status is 1 if a bound is broken. --quick: the target is the first layers of the
embedded one, and texts are short.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from accelerate import Accelerator

import heads  # noqa: F401  (registers its drafters)
from benchmarks.common import (
    TARGET,
    JsonOption,
    describe_machine,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from benchmarks.shared.pipeline_checks import (
    compare_answers,
    compare_drafters,
    compare_training,
    verify_in_vllm,
)
from benchmarks.shared.pipeline_runs import ROOT, Kill, PipelineRun, draw_places
from decode.base.errors import UserError
from decode.model.loading import load_target
from draftsmith.export.verify_export import require_engine
from train.base.console import Reporter
from train.data.read import spread
from train.run.config import load_config
from train.run.run import Run, make_directory

CONFIG = ROOT / "configs" / "recipes" / "pipeline_smollm2.yaml"
LAYERS = 7  # the fewest of which EAGLE-3 reads three
QUICK = (
    "evaluation.prompts=8",
    "evaluation.max_new_tokens=16",
    "stages.answers.prompts=48",
    "stages.answers.max_new_tokens=16",
    "stages.answers.part_prompts=6",
    "stages.dev-answers.prompts=8",
    "stages.dev-answers.max_new_tokens=16",
    "stages.dev-answers.part_prompts=4",
    "stages.eagle3.draft_vocabulary=1000",
    "stages.eagle3.tokens_per_pass=256",
    "stages.eagle3.dev.samples=8",
    "stages.eagle3.loop.tokens_per_batch=128",
)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a small target and short texts")] = False,
    json_file: JsonOption = None,
    kills: Annotated[int, typer.Option(min=0, help="kills of the second run")] = 3,
    seed: Annotated[int, typer.Option(help="of the times of the kills")] = 0,
    processes: Annotated[int, typer.Option(min=2, help="ranks of the second run")] = 2,
    config: Annotated[Path, typer.Option(help="the run config; of one trained drafter")] = CONFIG,
    runs: Annotated[
        Path | None, typer.Option(help="a new directory for both runs; default: a temporary one")
    ] = None,
) -> None:
    """Run the pipeline twice, compare, and verify the export."""
    require_engine("vllm")
    reporter = start_benchmark()
    with tempfile.TemporaryDirectory() as temporary:
        work = (runs or Path(temporary)).resolve()
        make_directory(work)
        if any(work.iterdir()):
            raise UserError(f"--runs {work} is not empty; name a new directory")
        overrides = list(QUICK) if quick else []
        if quick:
            overrides.append(f"target.model={save_quick_target(work / 'target')}")
        one = PipelineRun(config, "one", work, overrides)
        two = PipelineRun(config, "two", work, overrides)
        reporter.say("one process")
        alone = one.unbroken(1)
        seconds = one.seconds_by_phase()
        reporter.say(f"  {alone:.0f} s; {format_phases(seconds)}")
        places = draw_places(seconds, kills, np.random.default_rng(seed))
        reporter.say(f"{processes} ranks under FSDP2, killed {kills} times")
        done = two.killed(processes, places)
        again = two.seconds_by_phase()
        reporter.say(f"  {format_phases(again)}")
        figures = compare(config, overrides, one, two, work, reporter)
    if done:
        reporter.table(kills_table(done))
    rows = [
        {
            "": check["what"],
            "one process": check["values"][0],
            "ranks": check["values"][1],
            "bound": check["bound"],
            "holds": "yes" if check["holds"] else "NO",
        }
        for check in figures["checks"]
    ]
    reporter.table(rows_table("the run of one process, and that of the ranks", rows, left=4))
    if json_file:
        write_json(
            json_file,
            {
                "benchmark": "pipeline",
                "process": describe_machine(),
                "quick": quick,
                "processes": processes,
                "seconds": {"alone": alone, "one": seconds, "two": again},
                "kills": [kill.to_dict() for kill in done],
                **figures,
            },
        )
    left_behind = sum(kill.left_behind for kill in done)
    if left_behind:
        reporter.say(f"{left_behind} processes outlived the command that was killed")
    if left_behind or len(done) < kills or not all(row["holds"] for row in figures["checks"]):
        raise typer.Exit(1)


def compare(
    config: Path,
    overrides: list[str],
    one: PipelineRun,
    two: PipelineRun,
    work: Path,
    reporter: Reporter,
) -> dict[str, Any]:
    """All checks of two finished runs, and the results of the verification in vLLM."""
    settings = load_config(config, overrides)
    run = Run(settings, Accelerator(cpu=True), reporter)
    split = settings.evaluation.split
    prompts = run.prompts(spread(run.read_data()[split], settings.evaluation.prompts))
    (trained,) = (stage.name for stage in settings.stages if stage.kind in ("heads", "distill"))
    checks = [
        compare_answers(one, two, stage.name)
        for stage in settings.stages
        if stage.kind == "generate"
    ]
    checks += compare_training(one, two, trained)
    protocol = settings.evaluation.protocol()
    reporter.say("both drafters in one process")
    checks += compare_drafters(one, two, trained, run.target, prompts, protocol)
    reporter.say("the ranks' drafter in vLLM")
    check, verification = verify_in_vllm(
        two.stage(trained) / "drafter",
        settings.target.model,
        run.target,
        prompts,
        protocol.max_new_tokens,
        work / "export",
    )
    rows = [check.to_dict() for check in [*checks, check]]
    return {"checks": rows, "verification": verification}


def save_quick_target(directory: Path) -> Path:
    """The embedded target without its later layers, as a model directory. It says little that makes
    sense, but has the tokenizer and the template."""
    target = load_target(TARGET, dtype="float32")
    target.model.model.layers = target.model.model.layers[:LAYERS]
    target.model.config.num_hidden_layers = LAYERS
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return directory


def format_phases(seconds: dict[str, float]) -> str:
    """'answers 30 s, eagle3 12 s'."""
    return ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())


def kills_table(kills: list[Kill]) -> Any:
    """Where each kill was, and what it cost."""
    return rows_table(
        "SIGKILL for the process group of the command",
        [
            {
                "killed in": kill.phase,
                "after": f"{kill.seconds:.1f} s",
                "since the last saved result": f"{kill.lost:.1f} s",
                "until the next start worked": f"{kill.restart:.1f} s",
            }
            for kill in kills
        ],
    )


if __name__ == "__main__":
    run_command(main)
