"""The prompts of `benchmarks.online` and `benchmarks.routed`: their options, files and settings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.shared.online_runs import DOMAINS, FAMILIES, Settings
from decode.base.artifact import write_file
from decode.base.errors import UserError
from train.data.read import Example, read_examples


@dataclass(frozen=True)
class DomainOptions:
    """Options of both benchmarks: the prompts, and how many are served."""

    data: Annotated[Path | None, typer.Option(help="holds maths, code and general.jsonl")] = None
    maths: Annotated[Path | None, typer.Option(help="prompts of the first domain")] = None
    code: Annotated[Path | None, typer.Option(help="prompts of the second")] = None
    general: Annotated[Path | None, typer.Option(help="prompts of the third")] = None
    quick: Annotated[bool, typer.Option("--quick", help="short answers, fewer requests")] = False
    requests: Annotated[int | None, typer.Option(help="per domain; default 400, quick 100")] = None

    @property
    def files(self) -> dict[str, Path]:
        """The file of each domain. Raises UserError if neither it nor a directory is named."""
        files = {}
        for domain in DOMAINS:
            file = getattr(self, domain)
            if file is None and self.data is None:
                raise UserError(
                    f"no prompts for the domain {domain}; give --data DIR or --{domain}"
                )
            files[domain] = file or (self.data or Path()) / f"{domain}.jsonl"
        return files


def make_settings(
    options: DomainOptions,
    runs: Path,
    temperature: float = 0.0,
    families: Sequence[str] = FAMILIES,
    seed: int = 0,
) -> Settings:
    """Return the settings, with the defaults of the options. Both benchmarks prepare their prompts
    in the same directory, of each seed others."""
    quick = options.quick
    size = options.requests or (100 if quick else 400)
    directory = runs / ("online-quick-data" if quick else "online-data") / str(size)
    if seed:
        directory = directory.with_name(f"{size}-seed{seed}")
    return Settings(quick, runs, directory.absolute(), size, temperature, tuple(families), seed)


def prepare(files: dict[str, Path], directory: Path, sizes: dict[str, int], seed: int = 0) -> None:
    """Write each domain's prompts for offline distillation and for serving, if they do not exist.
    Each seed has the next rows of the files.

    Raises UserError if an input file is missing, broken or too short.
    """
    for domain, file in files.items():
        if all((directory / f"{domain}-{split}.jsonl").exists() for split in sizes):
            continue
        rows = (seed + 1) * sum(sizes.values())
        examples, _ = read_examples(str(file), limit=rows)
        prompts = [example for example in examples if example.messages is not None]
        if len(prompts) < rows:
            raise UserError(
                f"{file} has {len(prompts)} prompts among its first {rows} rows; "
                f"expected prompts in all of the first {rows} rows"
            )
        begin = rows - sum(sizes.values())
        for split, count in sizes.items():
            lines = [_line(domain, e) for e in prompts[begin : begin + count]]
            write_file(directory / f"{domain}-{split}.jsonl", "".join(lines))
            begin += count


def _line(domain: str, example: Example) -> str:
    # Leave out the answers in the data: all arms learn from the target's own answers.
    assert example.messages is not None
    turns = list(example.messages)
    while turns[-1]["role"] == "assistant":
        turns.pop()
    return json.dumps({"id": f"{domain} {example.id}", "messages": turns, "kind": domain}) + "\n"
