"""`evaluate` and `generate`: measure a drafter, and decode with one."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from decode.errors import UserError
from train.cli.options import (
    Decoding,
    DrafterOption,
    Loading,
    TokensOption,
    takes_groups,
)
from train.cli.shared import app, quieten, shows_errors


@app.command()
@shows_errors
@takes_groups
def evaluate(
    *,
    loading: Loading,
    drafter: DrafterOption,
    prompts: Annotated[Path, typer.Option(help="JSONL file with prompt or messages")],
    decoding: Decoding,
    max_new_tokens: TokensOption = 64,
    batch_size: Annotated[int, typer.Option(help="rows decoded together for acceptance")] = 16,
    timed_prompts: Annotated[int, typer.Option(help="prompts that time is measured on")] = 8,
    timed_batch_size: Annotated[
        int, typer.Option(help="prompts that are timed together; divides --timed-prompts")
    ] = 1,
    limit: Annotated[int | None, typer.Option(help="use only so many prompts")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
    steps_file: Annotated[
        Path | None, typer.Option("--steps", help="write every step here, as JSON")
    ] = None,
) -> None:
    """Measure a drafter: acceptance on all prompts, time on a few, beside plain decoding."""
    import heads  # noqa: F401  (makes its drafters known)
    from decode.artifact import write_file
    from decode.drafters.directory import open_drafter
    from decode.measure.evaluation import EvaluationProtocol
    from decode.measure.evaluation import evaluate as measure
    from train.console import Reporter
    from train.data.chat import prompt_tokens
    from train.data.read import read_examples, spread
    from train.report.notes import footnotes
    from train.report.table import table
    from train.run import describe_process
    from train.run_evaluation import drift_of

    quieten()
    protocol = EvaluationProtocol(
        **decoding.settings,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        timed_prompts=timed_prompts,
        timed_tokens=max_new_tokens,
        timed_batch_size=timed_batch_size,
        seed=decoding.seed,
    )
    examples, _ = read_examples(str(prompts))
    reporter = Reporter()
    loaded = loading.load()
    which = open_drafter(drafter, loaded)
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
        "config": {"target": {"model": loading.target}, "evaluation": {"gamma": decoding.gamma}},
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
@takes_groups
def generate(
    *,
    loading: Loading,
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads standard input")],
    drafter: DrafterOption = "ngram",
    decoding: Decoding,
    stop: Annotated[
        list[str] | None, typer.Option(help="a string that ends the answer; may be given again")
    ] = None,
    max_new_tokens: TokensOption = 256,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="print each step's draft with p, q and the verdict")
    ] = False,
) -> None:
    """Answer one prompt, streaming the text as it becomes certain."""
    import torch

    import heads  # noqa: F401  (makes its drafters known)
    from decode.drafters.directory import open_drafter
    from decode.settings import DecodeSettings
    from decode.stops import StopStrings
    from decode.text import TextPieces
    from decode.trace import TraceStep, format_trace
    from train.data.chat import prompt_tokens
    from train.data.read import Example

    quieten()
    asked = sys.stdin.read() if prompt == "-" else prompt
    if not asked.strip():
        raise UserError("the prompt is empty; say what to answer")
    settings = DecodeSettings(**decoding.settings)
    loaded = loading.load()
    message = {"role": "user", "content": asked}
    example = Example("prompt", (message,), asked, None, None, "the command line")
    ids = prompt_tokens(example, loaded.tokenizer, system)
    stops = StopStrings(loaded.tokenizer, stop) if stop else None
    which = open_drafter(drafter, loaded)
    decoder, _ = settings.decoder(loaded, which, ids, stop=stops)

    pieces = TextPieces(loaded.tokenizer, lambda piece: typer.echo(piece, nl=False))

    def stream(_: int, tokens: list[int]) -> None:
        pieces.put(torch.tensor(tokens))

    def show(step: TraceStep) -> None:
        typer.echo(format_trace(step, loaded.tokenizer))

    done = decoder.decode(
        [ids],
        max_new_tokens,
        seed=decoding.seed,
        on_tokens=None if trace else stream,
        on_step=show if trace else None,
    )
    if trace:
        pieces.put(torch.tensor(done.outputs[0]))
    pieces.end()
    counts, seconds = done.counts, done.timing.total
    drafts = decoder.drafter.describe_drafts(decoder.policy.most)
    gamma = decoding.gamma
    if gamma is not None and decoder.drafter.deepest(gamma) != gamma:
        drafts += f" (γ {gamma} is for drafts that have no depth of their own)"
    typer.echo(
        f"\n[{len(done.outputs[0])} tokens in {seconds:.2f} s, {counts.tokens_per_step:.2f} tokens "
        f"per step, acceptance rate {counts.acceptance_rate:.2f}; drafts: {drafts}; rule "
        f"{settings.for_drafter(which).rule}]",
        err=True,
    )
