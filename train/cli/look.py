"""`coverage` and `inspect`: look at a text before training and at a drafter after it."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from decode.errors import UserError
from train.cli.options import TargetOption
from train.cli.shared import app, quieten, shows_errors


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
    from decode.target.loading import load_target
    from distill.vocabulary import coverage as covered
    from train.console import Reporter
    from train.data.chat import to_sample
    from train.data.corpus import read_answers
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
    from decode.drafters.directory import describe_drafter
    from decode.trees.stored import stored_shape

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
