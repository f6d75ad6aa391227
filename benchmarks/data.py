"""Measures what a long text costs: memory of a rank, rows a second, padding and balance of batches.

    python -m benchmarks.data [--quick] [--json FILE] [--conversations N] [--tokens-per-batch N]
                              [--ranks N] [--work DIRECTORY]

The text is made up: conversations of four messages in a .jsonl file, and samples of made-up tokens
of the lengths that conversations have. A process reads the file, splits dev and test off the first
20,000 conversations, leaves repeated prompts out and hashes them. Then it opens the samples, goes
through all of them once, and through some batches as one of several ranks. Its memory is compared
with that of a process that keeps all rows as Python lists. That one gets at most 20,000
conversations, and both are compared per conversation. Tokenising is not measured: it depends on the
tokenizer.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks.common import (
    JsonOption,
    describe_machine,
    in_fresh_process,
    rows_table,
    run_command,
    start_benchmark,
    start_process,
    write_json,
)
from train.data.batches import Batches, RankText, collate, padding_share
from train.data.chat_tokens import Sample
from train.data.read import Example, ReadSettings, data_fingerprint, read_sources
from train.data.sources import sources_of
from train.data.splits import split_off, without_duplicates
from train.data.stored_samples import PART, StoredSamples, sizes
from train.data.text_files import write_samples
from train.loop.meters.peak_memory import peak_memory
from train.run.run import make_directory

LISTS = 20_000  # conversations that are kept as lists, and that the slower passes read
BATCHES = 500  # that are read
HELD_OUT = 200  # prompts of dev and of test
WORDS, SENTENCES = 2000, 8192  # different ones
PART_SAMPLES = 16_384
VOCABULARY, LONGEST = 150_000, 2048
PADDINGS = (4096, 16_384, 65_536)  # tokens per batch


def main(
    quick: Annotated[bool, typer.Option("--quick", help="20,000 conversations")] = False,
    json_file: JsonOption = None,
    conversations: Annotated[int, typer.Option(min=100)] = 1_000_000,
    tokens_per_batch: Annotated[int, typer.Option(min=1)] = 16_384,
    ranks: Annotated[int, typer.Option(min=1, help="that share the batches")] = 8,
    work: Annotated[Path | None, typer.Option(help="keep the text here for the next time")] = None,
) -> None:
    """Measure the memory and the speed of a long text, and the padding of its batches."""
    reporter = start_benchmark()
    count = min(conversations, LISTS) if quick else conversations
    few = min(count, LISTS)
    held: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        for name, rows in {"lists": few, "draftsmith": count}.items():
            reporter.say(f"{name}: {rows:,} conversations")
            paths = text_paths(folder, rows)
            held[name] = in_fresh_process(
                "benchmarks.data:hold_text",
                **paths,
                tokens_per_batch=tokens_per_batch,
                ranks=ranks,
                lists=name == "lists",
            )
            reporter.table(rows_table("Memory of a rank", [_memory_row(name, held[name])]))
        batches = in_fresh_process(
            "benchmarks.data:batch_figures", samples=paths["samples"], ranks=ranks
        )
    ratio = held["lists"]["bytes_a_row"] / held["draftsmith"]["bytes_a_row"]
    figures = {
        "conversations": count,
        "tokens_per_batch": tokens_per_batch,
        "held": held,
        "memory_vs_lists": ratio,
        "batches": batches,
        "machine": describe_machine(),
    }
    speeds = held["draftsmith"]["rows_a_second"]
    reporter.table(rows_table("Rows a second", [{k: f"{v:,.0f}" for k, v in speeds.items()}]))
    reporter.table(rows_table("Batches", [_batch_row(entry) for entry in batches]))
    reporter.say(f"as lists, a conversation takes {ratio:.1f} times as much memory")
    if json_file is not None:
        write_json(json_file, figures)


def _memory_row(name: str, figures: dict[str, Any]) -> dict[str, str]:
    return {
        "kept as": name,
        "conversations": f"{figures['rows']:,}",
        "at the start": f"{figures['start_bytes'] / 1e6:,.0f} MB",
        "private": f"{figures['private_bytes'] / 1e6:,.0f} MB",
        "files in memory": f"{figures['mapped_bytes'] / 1e6:,.0f} MB",
        "peak, both": f"{figures['peak_bytes'] / 1e6:,.0f} MB",
        "private bytes a conversation": f"{figures['bytes_a_row']:,.0f}",
    }


def _batch_row(figures: dict[str, Any]) -> dict[str, str]:
    return {
        "tokens per batch": f"{figures['tokens_per_batch']:,}",
        "padding": f"{figures['padding_share']:.2%}",
        f"longest rank of {figures['ranks']} over the mean": f"{figures['imbalance']:.3f}",
    }


def text_paths(folder: Path, count: int) -> dict[str, str]:
    """The paths of `text` and `samples` of a folder, which are made unless they are complete."""
    paths = {"text": str(folder / f"{count}.jsonl"), "samples": str(folder / f"{count}")}
    complete = folder / f"{count}.complete"
    if not complete.exists():
        make_directory(folder)
        in_fresh_process("benchmarks.data:make_text", **paths, count=count)
        complete.touch()
    return paths


def make_text(text: str, samples: str, count: int) -> None:
    """Write conversations to the file `text` and samples to the directory `samples`."""
    start_process()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnopr"), 5)) for _ in range(WORDS)]
    sentences = [
        " ".join(words[i] for i in rng.integers(0, WORDS, 8 + number % 9))
        for number in range(SENTENCES)
    ]
    with open(text, "w", encoding="utf-8") as file:
        for row in range(count):
            chosen = rng.integers(0, SENTENCES, 4 + min(40, int(rng.lognormal(2.3, 0.7)))).tolist()
            asked, answer, again, *rest = (sentences[i] for i in chosen)
            turns = (asked, answer, again, ". ".join(rest))
            messages = [
                {"role": ("user", "assistant")[turn % 2], "content": content}
                for turn, content in enumerate(turns)
            ]
            file.write(json.dumps({"id": f"conversation-{row}", "messages": messages}) + "\n")
    for number, first in enumerate(range(0, count, PART_SAMPLES)):
        part = made_up_samples(first, min(PART_SAMPLES, count - first))
        write_samples(Path(samples), number, part)


def made_up_samples(first: int, count: int) -> Iterator[Sample]:
    """Samples of random tokens, whose lengths have a heavy tail."""
    rng = np.random.default_rng(first)
    lengths = np.minimum(20 + rng.lognormal(5.1, 0.8, count), LONGEST).astype(int)
    for number, length in enumerate(lengths.tolist(), start=first):
        tokens = rng.integers(0, VOCABULARY, length).tolist()
        prompt = 1 + length // 3
        mask = [False] * prompt + [True] * (length - prompt)
        yield Sample(f"conversation-{number}", tokens, mask)


def open_samples(directory: str) -> StoredSamples:
    """The samples that `make_text` wrote."""
    return StoredSamples(Path(directory), len(list(Path(directory).glob(f"{PART}*"))))


def hold_text(
    text: str, samples: str, tokens_per_batch: int, ranks: int, lists: bool
) -> dict[str, Any]:
    """Read a text, then its samples, and measure the memory of this process. lists: keep all rows
    as Python lists."""
    import datasets  # noqa: F401  # before the first measurement

    start_process()
    start = private_memory()
    seconds: dict[str, float] = {}
    examples: Sequence[Example]
    with _timed(seconds, "reading"):
        file = Path(samples) / f"rows-{lists}.arrow"
        examples, _ = read_sources([text], [*sources_of([text], Path())], ReadSettings(), file)
        if lists:
            examples = list(examples)
    rows = len(examples)
    first = examples[:LISTS]
    with _timed(seconds, "splitting off"):
        splits = split_off(first, ["dev", "test"], count=HELD_OUT, seed=0)
    with _timed(seconds, "duplicates"):
        without_duplicates(splits["train"], [*splits["dev"], *splits["test"]])
    with _timed(seconds, "hashing"):
        data_fingerprint(first)
    stored: Sequence[Sample] = open_samples(samples)
    if lists:
        stored = list(stored)
    with _timed(seconds, "making batches"):
        lengths, _ = sizes(stored)
        batches = Batches(lengths, tokens_per_batch=tokens_per_batch, seed=0, epoch=0)
    with _timed(seconds, "reading samples in order"):
        for _ in stored:
            pass
    rank = RankText(0, stored, batches, 0, ranks)
    numbers = range(min(BATCHES, len(rank)))
    with _timed(seconds, "reading batches"):
        used = sum(len(collate(rank.batch(number), 0)["ids"]) for number in numbers)
    counts = dict.fromkeys(("splitting off", "duplicates", "hashing"), len(first))
    counts["reading batches"] = used
    speeds = {name: counts.get(name, rows) / value for name, value in seconds.items()}
    private = private_memory()
    return {
        "rows": rows,
        "start_bytes": start,
        "private_bytes": private,
        "mapped_bytes": psutil.Process().memory_info().rss - private,
        "peak_bytes": peak_memory("cpu"),
        "bytes_a_row": (private - start) / rows,
        "rows_a_second": speeds,
    }


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of this context."""
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin


def private_memory() -> int:
    """The bytes in memory that no other process shares and no file backs; all bytes if the system
    does not tell them apart."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def batch_figures(samples: str, ranks: int) -> list[dict[str, Any]]:
    """The padding of the batches of one epoch, and how much longer the longest rank's part of a
    batch is than the mean: both in positions, that is rows times the longest row."""
    start_process()
    lengths = open_samples(samples).lengths
    figures = []
    for tokens_per_batch in PADDINGS:
        batches = Batches(lengths, tokens_per_batch=tokens_per_batch, seed=0, epoch=0)
        padding = padding_share(map(batches.batch, range(len(batches))), lengths)
        figures.append(
            {
                "tokens_per_batch": tokens_per_batch,
                "padding_share": padding,
                "ranks": ranks,
                "imbalance": imbalance(batches, lengths, ranks),
            }
        )
    return figures


def imbalance(batches: Batches, lengths: np.ndarray, ranks: int) -> float:
    """The sum over batches of the longest rank's positions, over that of the ranks' mean."""
    longest = mean = 0.0
    for number in range(len(batches)):
        rows = [batches.batch(number)[rank::ranks] for rank in range(ranks)]
        positions = [len(part) * int(lengths[part].max(initial=0)) for part in rows]
        longest, mean = longest + max(positions), mean + sum(positions) / ranks
    return longest / mean


if __name__ == "__main__":
    run_command(main)
