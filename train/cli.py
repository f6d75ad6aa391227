"""The command line: `draftsmith train | evaluate | generate | export | inspect` and more."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from decode.errors import UserError

app = typer.Typer(
    help="Trains drafters for speculative decoding and measures what they are worth.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

TargetOption = Annotated[
    str, typer.Option(help="hub id, directory, GGUF file, or embedded:smollm2-135m")
]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="none, ngram, store, a drafter directory, a smaller model's id or path, or several "
        "with + between them"
    ),
]
GammaOption = Annotated[
    int | None,
    typer.Option(help="how many tokens a draft is deep; default 4, or as the drafter's own tree"),
]
TemperatureOption = Annotated[float, typer.Option(help="0: greedy")]
TopKOption = Annotated[int, typer.Option(help="0: off")]
TopPOption = Annotated[float, typer.Option(help="1: off")]
MinPOption = Annotated[float, typer.Option(help="0: off")]
PenaltyOption = Annotated[float, typer.Option("--repetition-penalty", help="1: off")]
DraftTemperatureOption = Annotated[
    float | None, typer.Option(help="the drafter's temperature; default the target's")
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        help="verification rule: NAME or NAME:option=value,…; default speculative, for trees "
        "multi_round"
    ),
]
PolicyOption = Annotated[
    str, typer.Option(help="draft-length policy: NAME or NAME:option=value,…; most is --gamma")
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        help="shape of the drafts: NAME or NAME:option=value,…; default the tree that the drafter "
        "is stored with, or a chain"
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")]
# Tokens of a draft where nothing says otherwise.
GAMMA = 4
TokensOption = Annotated[int, typer.Option(help="length limit of an answer, in tokens")]


def shows_errors(command: Callable[..., None]) -> Callable[..., None]:
    """User errors become one message on stderr and exit status 2."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            errors = Console(stderr=True, highlight=False, soft_wrap=True)
            errors.print(f"error: {error}", markup=False)
            raise typer.Exit(2) from None

    return run


@app.command()
@shows_errors
def train(
    config: Annotated[Path, typer.Argument(help="a run config (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value …")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the resolved plan and stop")
    ] = False,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="go on with a run although its settings or its number of ranks changed",
        ),
    ] = False,
) -> None:
    """Run the stages of a config; a run that exists goes on where it was.

    `accelerate launch -m train CONFIG` is the same on several processes. SIGTERM and Ctrl-C stop
    training after a checkpoint, with exit status 143.
    """
    # Nothing heavy is imported before the config is known to be sound.
    from train.config import load_config

    settings = load_config(config, overrides or [])

    import torch

    from train import engines
    from train.console import Reporter
    from train.run import Run
    from train.stopping import EXIT_STATUS, Stopped

    quieten()
    accelerator = engines.start(
        cpu=settings.target.device == "cpu",
        mixed_precision=settings.precision,
        log_with=settings.trackers or None,
        project_dir=str(settings.run_dir / "logs"),
    )
    if accelerator.device.type == "cpu":
        share = max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        torch.set_num_threads(settings.threads or share)
    reporter = Reporter(silent=not accelerator.is_main_process)
    run = Run(settings, accelerator, reporter, allow_changes)
    try:
        if dry_run:
            print_plan(run, reporter)
            return
        report = run.execute()
        if accelerator.is_main_process:
            print_report(run, report)
    except Stopped as stopped:
        reporter.say(f"{stopped}; the same command goes on from there")
        raise typer.Exit(EXIT_STATUS) from None
    finally:
        accelerator.end_training()


def print_plan(run: Any, reporter: Any) -> None:
    """The resolved config's stages, with what each trains, writes and needs."""
    table = Table(title=f"plan of {run.directory}")
    for column in ("stage", "kind", "what", "trained", "tokens", "memory"):
        table.add_column(column)
    for name, kind, plan in run.plan():
        table.add_row(
            name,
            kind,
            plan.what,
            f"{plan.trained_parameters / 1e6:.1f}M" if plan.trained_parameters else "–",
            f"{plan.tokens:,}" if plan.tokens else "–",
            f"≈ {plan.memory_bytes / 2**30:.1f} GiB" if plan.memory_bytes else "–",
        )
    reporter.table(table)


def print_report(run: Any, report: dict[str, Any]) -> None:
    """The table of all drafters, what holds for all of its rows, and where the report is."""
    from train.report import footnotes, table

    run.reporter.table(table(report))
    for line in footnotes(report):
        run.reporter.say(line)
    run.reporter.say(f"report: {run.directory / 'report.html'}")


@app.command()
@shows_errors
def evaluate(
    target: TargetOption,
    drafter: DrafterOption,
    prompts: Annotated[Path, typer.Option(help="JSONL file with prompt or messages")],
    rule: RuleOption = None,
    policy: PolicyOption = "fixed",
    shape: ShapeOption = None,
    gamma: GammaOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    draft_temperature: DraftTemperatureOption = None,
    max_new_tokens: TokensOption = 64,
    batch_size: Annotated[int, typer.Option(help="rows decoded together for acceptance")] = 16,
    timed_prompts: Annotated[int, typer.Option(help="prompts that time is measured on")] = 8,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
    steps_file: Annotated[
        Path | None, typer.Option("--steps", help="write every step here, as JSON")
    ] = None,
) -> None:
    """Measure a drafter: acceptance on all prompts, time on a few, beside plain decoding."""
    from dataclasses import replace

    import heads  # noqa: F401  (makes its drafters known)
    from decode.artifact import write_file
    from decode.measure import Protocol
    from decode.measure import evaluate as measure
    from decode.sampling import Sampling
    from decode.store import open_drafter
    from decode.target import load_target
    from train.console import Reporter
    from train.data.chat import prompt_tokens
    from train.data.read import read_examples, spread
    from train.evaluate import drift_of
    from train.report import footnotes, table
    from train.run import describe_process

    quieten()
    protocol = Protocol(
        gamma=gamma or GAMMA,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        rule=rule,
        policy=policy,
        shape=shape,
        draft_temperature=draft_temperature,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        timed_prompts=timed_prompts,
        timed_tokens=max_new_tokens,
        seed=seed,
    )
    examples, _ = read_examples(str(prompts))
    reporter = Reporter()
    loaded = load_target(target, dtype=dtype, device=device)
    which = open_drafter(drafter, loaded)
    protocol = replace(protocol, gamma=gamma or usual_depth(which, shape))
    chosen = [prompt_tokens(e, loaded.tokenizer) for e in spread(examples, limit)]
    with reporter.bar("evaluating", len(chosen)) as bar:

        def progress(what: str, done: int, of: int) -> None:
            bar.resize(of)
            bar.update(done, what=f"evaluating: {what}")

        found = measure(loaded, which, chosen, protocol, progress)
    figures = found.to_dict() | {"drift": drift_of(drafter)}
    report = {
        "name": "evaluate",
        "rows": [{"stage": "–", "drafter": drafter, "order": 0, "evaluation": figures}],
        "provenance": [describe_process()],
        "config": {"target": {"model": target}},
    }
    reporter.table(table(report))
    for line in footnotes(report):
        reporter.say(line)
    if json_file:
        write_file(json_file, json.dumps(report, indent=2))
    if steps_file:
        write_file(steps_file, json.dumps(found.steps_to_dict()))


@app.command()
@shows_errors
def generate(
    target: TargetOption,
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads standard input")],
    drafter: DrafterOption = "ngram",
    rule: RuleOption = None,
    policy: PolicyOption = "fixed",
    shape: ShapeOption = None,
    gamma: GammaOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    draft_temperature: DraftTemperatureOption = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="a string that ends the answer; may be given again")
    ] = None,
    max_new_tokens: TokensOption = 256,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="print each step's draft with p, q and the verdict")
    ] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: int = 0,
) -> None:
    """Answer one prompt, streaming the text as it becomes certain."""
    from dataclasses import replace

    import torch

    import heads  # noqa: F401  (makes its drafters known)
    from decode.sampling import Sampling
    from decode.settings import DecodeSettings
    from decode.stops import StopStrings
    from decode.store import open_drafter
    from decode.target import load_target
    from decode.text import TextPieces
    from decode.trace import TraceStep, format_trace
    from train.data.chat import prompt_tokens
    from train.data.read import Example

    quieten()
    asked = sys.stdin.read() if prompt == "-" else prompt
    if not asked.strip():
        raise UserError("the prompt is empty; say what to answer")
    settings = DecodeSettings(
        gamma=gamma or GAMMA,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        rule=rule,
        policy=policy,
        shape=shape,
        draft_temperature=draft_temperature,
    )
    loaded = load_target(target, dtype=dtype, device=device)
    message = {"role": "user", "content": asked}
    example = Example("prompt", (message,), asked, None, None, "the command line")
    ids = prompt_tokens(example, loaded.tokenizer, system)
    stops = StopStrings(loaded.tokenizer, stop) if stop else None
    which = open_drafter(drafter, loaded)
    settings = replace(settings, gamma=gamma or usual_depth(which, shape))
    decoder, _ = settings.decoder(loaded, which, ids, stop=stops)

    pieces = TextPieces(loaded.tokenizer, lambda piece: typer.echo(piece, nl=False))

    def stream(_: int, tokens: list[int]) -> None:
        pieces.put(torch.tensor(tokens))

    def show(step: TraceStep) -> None:
        typer.echo(format_trace(step, loaded.tokenizer))

    done = decoder.decode(
        [ids],
        max_new_tokens,
        seed=seed,
        on_tokens=None if trace else stream,
        on_step=show if trace else None,
    )
    if trace:
        pieces.put(torch.tensor(done.outputs[0]))
    pieces.end()
    counts, seconds = done.counts, done.timing.total
    typer.echo(
        f"\n[{len(done.outputs[0])} tokens in {seconds:.2f} s, {counts.tokens_per_step:.2f} tokens "
        f"per step, acceptance rate {counts.acceptance_rate:.2f}; drafts: "
        f"{decoder.drafter.describe_drafts()}; rule {settings.for_drafter(which).rule}]",
        err=True,
    )


@app.command()
@shows_errors
def calibrate(
    target: TargetOption,
    drafter: DrafterOption,
    prompts: Annotated[Path, typer.Option(help="JSONL file with prompts of the dev split")],
    thresholds: Annotated[str, typer.Option(help="θ to try")] = "0.15,0.20,0.25,0.30,0.35",
    acceptance: Annotated[str, typer.Option(help="acceptance to be within")] = "0.6,0.8",
    policy: PolicyOption = "fixed",
    gamma: GammaOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    draft_temperature: DraftTemperatureOption = None,
    max_new_tokens: TokensOption = 64,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = 32,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: int = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Choose θ of the rule `threshold`, which is LOSSY, on dev prompts: of those whose acceptance
    is within bounds the one with the lowest latency."""
    import heads  # noqa: F401  (makes its drafters known)
    from decode.artifact import write_file
    from decode.calibrate import calibrate_threshold
    from decode.sampling import Sampling
    from decode.settings import DecodeSettings
    from decode.shapes.chain import Chain
    from decode.stats import finite
    from decode.store import open_drafter
    from decode.target import load_target
    from train.console import Reporter
    from train.data.chat import prompt_tokens
    from train.data.read import read_examples, spread
    from train.report import number

    quieten()
    tried, bounds = numbers("thresholds", thresholds), numbers("acceptance", acceptance)
    if len(bounds) != 2:
        raise UserError(f"acceptance is {acceptance!r}; expected two numbers, such as 0.6,0.8")
    settings = DecodeSettings(
        gamma=gamma or GAMMA,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        rule={"name": "threshold", "threshold": tried[0]},
        policy=policy,
        draft_temperature=draft_temperature,
    )
    examples, _ = read_examples(str(prompts))
    reporter = Reporter()
    loaded = load_target(target, dtype=dtype, device=device)
    which = open_drafter(drafter, loaded)
    if which.branches:
        which = which.with_shape(Chain())  # what the rule judges
    chosen = [prompt_tokens(e, loaded.tokenizer) for e in spread(examples, limit)]
    with reporter.bar("calibrating", len(chosen)) as bar:
        found = calibrate_threshold(
            loaded,
            which,
            chosen,
            settings,
            thresholds=tried,
            within=(bounds[0], bounds[1]),
            max_new_tokens=max_new_tokens,
            seed=seed,
            progress=lambda done: bar.update(done, what="calibrating"),
        )
    table = Table(title=f"rule threshold, LOSSY, on {len(chosen)} dev prompts")
    for column in ("θ", "acceptance rate", "draft efficiency", "tokens/step", "ms/token"):
        table.add_column(column, justify="right")
    for trial in found.trials:
        figures = (
            trial.acceptance_rate,
            trial.draft_efficiency,
            trial.tokens_per_step,
            trial.ms_per_token,
        )
        mark = " ←" if trial is found.chosen else ""
        table.add_row(f"{trial.threshold:g}{mark}", *(number(finite(value)) for value in figures))
    reporter.table(table)
    reporter.say(found.verdict)
    if json_file:
        write_file(json_file, json.dumps(found.to_dict(), indent=2))


def usual_depth(drafter: Any, shape: str | None) -> int:
    """γ where none is asked for: the depth of the drafter's own tree, if that is drafted in."""
    own = None if shape else getattr(drafter, "shape", None)
    return getattr(own, "depth", None) or GAMMA


@app.command()
@shows_errors
def calibrate_tree(
    target: TargetOption,
    drafter: Annotated[str, typer.Option(help="a drafter directory; with --out any model")],
    prompts: Annotated[Path, typer.Option(help="JSONL file with prompts of the dev split")],
    method: Annotated[
        str,
        typer.Option(
            help="calibrated: by acceptance at each depth (Medusa); sequoia: by dynamic programming"
        ),
    ] = "calibrated",
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="so many nodes (sequoia: at most); default as many as pay at the measured costs",
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="how deep at most")] = 6,
    width: Annotated[int, typer.Option(min=1, help="of the likeliest tokens of each node")] = 8,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: PenaltyOption = 1.0,
    max_new_tokens: TokensOption = 64,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = 32,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: int = 0,
    out: Annotated[
        Path | None, typer.Option(help="write the tree to this file, not to the drafter")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Choose the tree that a drafter drafts in by what the target accepts on dev prompts, and
    store it with the drafter, whose default shape it is from then on."""
    import heads  # noqa: F401  (makes its drafters known)
    from decode.sampling import Sampling
    from train.calibrate_tree import Asked, run
    from train.console import Reporter

    quieten()
    asked = Asked(
        target=target,
        drafter=drafter,
        prompts=prompts,
        method=method,
        nodes=nodes,
        depth=depth,
        width=width,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        max_new_tokens=max_new_tokens,
        limit=limit,
        dtype=dtype,
        device=device,
        seed=seed,
        out=out,
        json_file=json_file,
    )
    run(asked, Reporter())


def numbers(what: str, text: str) -> list[float]:
    """Numbers with commas between them; UserError where they are something else."""
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"{what} are {text!r}; expected numbers with commas") from None


@app.command()
@shows_errors
def coverage(
    target: TargetOption,
    text: Annotated[
        Path, typer.Argument(help="JSONL file with responses, or a generate stage's directory")
    ],
    sizes: Annotated[str, typer.Option(help="draft vocabularies to try, in tokens")] = (
        "1000,2000,4000,8000,16000,32000"
    ),
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Show how much of a text a reduced draft vocabulary covers, by its size."""
    from dataclasses import asdict

    from decode.artifact import write_file
    from decode.target import load_target
    from distill.vocabulary import coverage as covered
    from train.answers import read_answers
    from train.console import Reporter
    from train.data.chat import to_sample
    from train.data.read import read_examples

    quieten()
    try:
        wanted = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise UserError(f"sizes are {sizes!r}; expected whole numbers with commas") from None
    loaded = load_target(target, device="cpu")
    if text.is_dir():
        texts = [answer["tokens"] for answer in read_answers(text)]
    else:
        examples, _ = read_examples(str(text))
        samples = [to_sample(example, loaded.tokenizer) for example in examples]
        texts = [
            [token for token, response in zip(s.tokens, s.mask, strict=True) if response]
            for s in samples
        ]
    fitting = [size for size in wanted if size < loaded.vocab_size]
    found = covered([tokens for tokens in texts if tokens], fitting, loaded.vocab_size)
    table = Table(title=f"{text}: {sum(map(len, texts)):,} tokens")
    for column in ("draft vocabulary", "covered", "covered of unseen text"):
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(f"{row.size:,}", f"{row.of_text:.2%}", f"{row.of_unseen:.2%}")
    Reporter().table(table)
    if json_file:
        write_file(json_file, json.dumps([asdict(row) for row in found], indent=2))


@app.command()
@shows_errors
def inspect(drafter: Annotated[Path, typer.Argument(help="a drafter directory")]) -> None:
    """Check a drafter directory against its manifest and print what it is."""
    from decode.store import describe_drafter
    from decode.stored_tree import stored_shape

    description = describe_drafter(drafter)
    config = json.loads((drafter / "config.json").read_text())
    size = sum(file.stat().st_size for file in drafter.glob("*.safetensors"))
    shape = ", ".join(
        f"{key} {config[key]}"
        for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
        if key in config
    )
    typer.echo(f"{drafter}: whole, {size / 1e6:.1f} MB of weights ({shape})")
    stored = stored_shape(drafter)
    typer.echo(f"drafts in a {stored.describe() if stored else 'chain'} by default")
    typer.echo(json.dumps(description, indent=2))


@app.command()
@shows_errors
def export(
    drafter: Annotated[
        Path, typer.Argument(help="a drafter directory; without --format, an export")
    ],
    form: Annotated[
        str | None,
        typer.Option("--format", help="a layout (hf, gguf, medusa) or its engine"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the directory to write; not yet there")] = None,
    target: Annotated[
        str | None, typer.Option(help="default: the one the drafter was trained for")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="check an export against its format's schema")
    ] = False,
    verify: Annotated[
        str | None,
        typer.Option(help="run it in this engine: transformers, llama-server, vllm, openvino"),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="upload it to this repository (org/name)")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file with held-out prompts, to measure and to verify on"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = None,
    max_new_tokens: TokensOption = 64,
    gamma: Annotated[
        int | None, typer.Option(help="tokens of a draft; default that of its evaluation, or 4")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="of the weights; default as they are stored")
    ] = None,
    data_licence: Annotated[
        str | None, typer.Option(help="licence of the training data, for the README")
    ] = None,
    min_drafted: Annotated[
        int, typer.Option(help="how many tokens an engine must have drafted to be judged")
    ] = 2000,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write what --verify found here")
    ] = None,
) -> None:
    """Write a drafter in a layout that inference engines read, and prove that they use it.

    Exit status 1: --verify found that the engine does not use the drafter as our loop does.
    """
    from train.console import Reporter
    from train.export.command import Asked, run

    quieten()
    asked = Asked(
        source=drafter,
        form=form,
        out=out,
        target=target,
        check=check,
        engine=verify,
        repository=push_to_hub,
        prompts=prompts,
        limit=limit,
        max_new_tokens=max_new_tokens,
        gamma=gamma,
        dtype=dtype,
        data_licence=data_licence,
        min_drafted=min_drafted,
        json_file=json_file,
    )
    if not run(asked, Reporter()):
        raise typer.Exit(1)


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def quieten() -> None:
    """Keep libraries from writing between our lines what users can do nothing about."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # At every checkpoint of a tied model it tells that the tied weight is kept once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def main() -> None:
    """The entry point of the `draftsmith` command."""
    app()


if __name__ == "__main__":
    main()
