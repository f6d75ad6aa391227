"""`evaluate`, `generate`, `merge` and `inspect` a drafter; `coverage` of a draft vocabulary."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from decode.base.errors import UserError
from draftsmith.cli.command import (
    DecodeOptions,
    DrafterOption,
    DraftersOption,
    FiguresOption,
    LimitOption,
    Loading,
    TargetOption,
    TokensOption,
    numbers,
    prompt_grammars,
    read_schema,
    table,
    tokenized_prompts,
    write_json,
)
from draftsmith.cli.edge import Verifying, edge_client, remote_target
from train.base.console import quieten


def evaluate(
    *,
    loading: Loading,
    drafters: DraftersOption,
    prompts: Annotated[Path, typer.Option(help="JSONL file with prompt or messages")],
    decoding: DecodeOptions,
    max_new_tokens: TokensOption = 64,
    batch_size: Annotated[int, typer.Option(help="prompts decoded together for acceptance")] = 16,
    timed_prompts: Annotated[int, typer.Option(help="number of prompts to time")] = 8,
    timed_batch_size: Annotated[
        int, typer.Option(help="prompts timed together; must divide --timed-prompts")
    ] = 1,
    limit: LimitOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
    steps_file: Annotated[
        Path | None,
        typer.Option("--steps", help="write every step here, as JSON; for one drafter"),
    ] = None,
) -> None:
    """Measure drafters: acceptance on all prompts, time on a few, beside plain decoding."""
    if steps_file and len(drafters) > 1:
        raise UserError(
            f"--steps writes the steps of one drafter, and {len(drafters)} are named; use one "
            "command for each"
        )
    import heads.kinds  # noqa: F401  (registers its drafters)
    from decode.base.artifact import write_file
    from decode.opening.directory import open_drafter
    from decode.settings import EvaluationProtocol
    from train.base.console import Reporter
    from train.base.provenance import describe_process
    from train.data.read import read_examples
    from train.measure.evaluation import evaluate as measure
    from train.report.drafter_table import drafter_table
    from train.report.format_figures import MISSING
    from train.report.report_summary import footnotes
    from train.run.run_evaluation import drift_of

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
    target = loading.load(*drafters, encoder=True)
    # All of them before the first measurement: a wrong name or option must not cost a figure.
    opened = {name: open_drafter(name, target) for name in drafters}
    for opened_drafter in opened.values():
        protocol.decoder(target, opened_drafter)
    ids = tokenized_prompts(examples, target, limit)
    grammars = prompt_grammars(examples, target, limit)
    evaluations = {}
    with reporter.bar("evaluating", len(ids)) as bar:
        for name, opened_drafter in opened.items():

            def progress(what: str, done: int, total: int, name: str = name) -> None:
                bar.resize(total)
                bar.update(done, what=f"evaluating {name}: {what}")

            evaluations[name] = measure(
                target, opened_drafter, ids, protocol, progress, grammars=grammars
            )
    report = {
        "name": "evaluate",
        "rows": [
            {
                "stage": MISSING,
                "drafter": name,
                "order": number,
                "evaluation": evaluation.to_dict() | {"drift": drift_of(name)},
            }
            for number, (name, evaluation) in enumerate(evaluations.items(), 1)
        ],
        "provenance": [describe_process()],
        "config": {"target": {"model": loading.target}, "evaluation": {"gamma": decoding.gamma}},
    }
    reporter.table(drafter_table(report))
    for line in footnotes(report):
        reporter.say(line)
    write_json(json_file, report)
    if steps_file:
        (evaluation,) = evaluations.values()
        write_file(steps_file, json.dumps(evaluation.steps_to_dict()))


def generate(
    *,
    loading: Loading,
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads standard input")],
    drafter: DrafterOption = "ngram",
    decoding: DecodeOptions,
    stop: Annotated[
        list[str] | None, typer.Option(help="a string that ends the answer; repeatable")
    ] = None,
    max_new_tokens: TokensOption = 256,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="a file with a JSON Schema that the answer fits"),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="print each step's draft with p, q and the verdict")
    ] = False,
    verifying: Verifying,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write text, counts, times and steps here")
    ] = None,
) -> None:
    """Answer one prompt, streaming the text as it becomes certain. With --verifier, draft here and
    verify on a server."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UserError("the prompt is empty; give some text")
    verifying.check(trace)
    import torch

    import heads.kinds  # noqa: F401  (registers its drafters)
    from decode.grammars import Grammars
    from decode.opening.directory import open_drafter
    from decode.settings import DecodeSettings
    from decode.text import TextPieces
    from decode.text_stream import StopStrings, text_of
    from decode.trace import format_trace
    from train.data.chat_tokens import prompt_tokens
    from train.data.read import Example

    quieten()
    settings = DecodeSettings(**decoding.settings)
    schema_text = read_schema(schema)
    link = verifying.link()
    if link is None:
        target = loading.load(drafter, encoder=True, only_decodes=True)
    else:
        target = remote_target(link, loading)
    if schema_text is not None:
        grammar = Grammars.of(target).json_schema(schema_text)
        settings = replace(settings, sampling=replace(settings.sampling, grammar=grammar))
    message = {"role": "user", "content": text}
    example = Example("prompt", (message,), text, None, None, "the command line")
    ids = prompt_tokens(example, target.tokenizer, system, encoder=target.has_encoder)
    stops = StopStrings(target.tokenizer, stop) if stop else None
    opened_drafter = open_drafter(drafter, target)
    client = None if link is None else edge_client(link, opened_drafter, settings, stops)
    if client is None:
        decoder, _ = settings.decoder(target, opened_drafter, ids, stop=stops)
    else:
        decoder = client.decoder

    pieces = TextPieces(target.tokenizer, lambda piece: typer.echo(piece, nl=False))

    def print_tokens(_: int, tokens: list[int]) -> None:
        pieces.put(torch.tensor(tokens))

    if trace:
        decoder.observers.append(
            lambda verification: typer.echo(format_trace(verification, target.tokenizer))
        )
    decoded = (client or decoder).decode(
        [ids],
        max_new_tokens,
        seed=decoding.seed,
        on_tokens=None if trace else print_tokens,
    )
    if trace:
        pieces.put(torch.tensor(decoded.outputs[0]))
    pieces.end()
    counts, seconds = decoded.counts, decoded.timing.total
    drafts = decoder.drafter.describe_drafts(decoder.policy.max_depth)
    gamma = decoding.gamma
    if gamma is not None and decoder.drafter.max_depth(gamma) != gamma:
        drafts += f" (γ {gamma} does not apply, because the drafter sets the depth)"
    rule = settings.for_drafter(opened_drafter).rule if link is None else link.welcome["rule"]
    rate = counts.acceptance_rate
    accepted = "no drafts" if math.isnan(rate) else f"acceptance rate {rate:.2f}"
    typer.echo(
        f"\n[{len(decoded.outputs[0])} tokens in {seconds:.2f} s, {counts.tokens_per_step:.2f} "
        f"tokens per step, {accepted}; drafts: {drafts}; rule {rule}]",
        err=True,
    )
    answer = {"text": text_of(target.tokenizer, decoded.outputs[0]), **decoded.to_dict()}
    write_json(json_file, answer)
    if client is not None:
        verifying.report(client, lambda line: typer.echo(line, err=True))
        client.close()


def merge(
    adapter: Annotated[Path, typer.Argument(help="the directory of an adapter")],
    out: Annotated[Path, typer.Option(help="the new drafter directory")],
) -> None:
    """Write an adapter and its base as one drafter."""
    from draftsmith.export.export_directory import vacant
    from draftsmith.export.merged import write_merged

    write_merged(adapter, vacant(out, "--out"))
    typer.echo(f"merged into {out}")


def inspect(
    drafter: Annotated[Path, typer.Argument(help="a drafter directory")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the description here")
    ] = None,
) -> None:
    """Check a drafter directory against its manifest and describe it."""
    from decode.opening.directory import describe_drafter
    from decode.shapes.static import stored_shape

    description = describe_drafter(drafter)
    base = description.get("base")  # of an adapter
    config = {} if base else json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    files = [*drafter.glob("*.safetensors"), *drafter.glob("*.npy")]
    size = sum(file.stat().st_size for file in files)
    sizes = ", ".join(
        f"{key} {config[key]}"
        for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "max_n")
        if key in config
    )
    sizes = f"an adapter on the {base['kind']} drafter {base['path']}" if base else sizes
    what = "tokens and suffixes" if description["kind"] == "rest" else "weights"
    typer.echo(f"{drafter}: complete, {size / 1e6:.1f} MB of {what} ({sizes})")
    shape, nodes = stored_shape(drafter), config.get("tree_nodes")
    plain = f"tree of at most {nodes} nodes" if nodes else "chain"
    drafts = shape.describe() if shape else plain
    typer.echo(f"drafts in a {drafts} by default")
    typer.echo(json.dumps(description, indent=2))
    write_json(json_file, {"bytes": size, "drafts": drafts, **description})


def coverage(
    target: TargetOption,
    text: Annotated[
        Path, typer.Argument(help="JSONL file with responses, or a generate stage's directory")
    ],
    sizes: Annotated[str, typer.Option(help="draft vocabularies to try, in tokens")] = (
        "1000,2000,4000,8000,16000,32000"
    ),
    drafter: Annotated[
        str | None,
        typer.Option(help="a model with another tokenizer: show which tokens it shares instead"),
    ] = None,
    json_file: FiguresOption = None,
) -> None:
    """Show how much of a text a reduced draft vocabulary covers, by its size, or how much of it is
    in the tokens that a drafter with another tokenizer shares."""
    vocabulary_sizes = numbers(sizes, "sizes", int)
    from dataclasses import asdict

    from decode.drafters.tokenizers.token_texts import shared_coverage
    from decode.model.loading import load_target
    from decode.model.without_weights import load_tokenizer
    from distill.choose_vocabulary import coverage as vocabulary_coverage
    from train.base.console import Reporter
    from train.data.answer_files import read_answers
    from train.data.chat_tokens import to_samples
    from train.data.read import read_examples

    quieten()
    other = None if drafter is None else load_tokenizer(drafter)
    loaded = load_target(target, device="cpu")
    if text.is_dir():
        texts = [answer["tokens"] for answer in read_answers(text)]
    else:
        examples, _ = read_examples(str(text))
        samples = [s for example in examples for s in to_samples(example, loaded.tokenizer)]
        texts = [
            [token for token, response in zip(s.tokens, s.mask, strict=True) if response]
            for s in samples
        ]
    texts = [tokens for tokens in texts if tokens]
    if other is None:
        reduced_sizes = [size for size in vocabulary_sizes if size < loaded.vocab_size]
        shares = vocabulary_coverage(texts, reduced_sizes, loaded.vocab_size)
        figures = [asdict(row) for row in shares]
        rows = [[f"{row.size:,}", f"{row.of_text:.2%}", f"{row.of_unseen:.2%}"] for row in shares]
        columns: tuple[str, ...] = ("draft vocabulary", "covered", "covered of unseen text")
    else:
        tokenizer, identity = other
        ours = loaded.tokenizer, loaded.vocab_size
        shared = shared_coverage(texts, ours, (tokenizer, identity.vocab_size))
        figures = [asdict(shared)]
        of = (shared.of_target, shared.of_drafter, shared.of_text)
        rows = [[f"{shared.tokens:,}", *(f"{share:.2%}" for share in of)]]
        columns = ("shared tokens", "of the target's", "of the drafter's", "of the text")
    title = f"{text}: {sum(map(len, texts)):,} tokens"
    Reporter().table(table(title, columns, rows, left=0))
    write_json(json_file, figures)
