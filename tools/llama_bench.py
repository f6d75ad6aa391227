"""Our decoding beside llama-bench: the same GGUF file, the same threads, in turns.

python -m tools.llama_bench [FILE | TYPE …] [--drafter D …] [--turns 5] [--prompts 6] [--tokens 64]
                            [--depth 0] [--json FILE]

A TYPE is one that llama-quantize makes of the embedded target's weights: BF16, Q8_0, Q4_K_M. A file
in BF16 is decoded in bfloat16, others in float32, where weights of known types keep their form.
llama-bench writes --tokens behind --depth tokens. We write as many for each prompt: shipped test
prompts, or with --depth random tokens. Times are of steps; no prompt is in them. With --drafter, we
also decode with that drafter, its drafts of a fixed length and by their worth. Prints tokens a
second by turn, and ratios: the median of the turns, the lowest and the highest.

Needs llama-bench (make engine-llama).
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.llama_cpp import program, quantised, write_target
from benchmarks.shared.never_slower import endless_decoder
from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.loop.decoding import Decoder
from decode.model.loading import Target, load_target
from decode.settings import DecodeSettings
from draftsmith.cli.command import given_or_shipped, tokenized_prompts
from draftsmith.export.formats.gguf_layout import FILE
from train.base.provenance import describe_process

TARGET = "embedded:smollm2-135m"
IN_BFLOAT16 = "BF16"
PLAIN, POLICIES = "plain", ("fixed", "worth")
WARM_UP = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=[IN_BFLOAT16], metavar="FILE | TYPE")
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        found += [compared(name, Path(folder), given) for name in given.files]
    if given.json is not None:
        figures = {"settings": vars(given) | {"json": None}, "process": describe_process()}
        write_file(given.json, json.dumps({"files": found, **figures}, default=str, indent=2))


def compared(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Take turns with llama-bench on one file, and print what came out."""
    file = Path(name) if Path(name).is_file() else written(name, folder)
    target = opened(file, name)
    decoders = {PLAIN: Decoder(target.model, None)}
    for drafter, policy in itertools.product(given.drafter, POLICIES):
        settings = DecodeSettings(policy=policy)
        decoders[f"{drafter}, {policy}"] = endless_decoder(target, drafter, settings)
    prompts = texts(target, given)
    for decoder in decoders.values():
        decoder.decode(prompts[:1], WARM_UP)
    rates: dict[str, list[float]] = {"llama-bench": [], **{name: [] for name in decoders}}
    for _ in range(given.turns):
        rates["llama-bench"].append(theirs(file, given))
        for contestant, decoder in decoders.items():
            rates[contestant].append(ours(decoder, prompts, given.tokens))
    print(f"{name}: tokens a second by turn")
    for contestant, values in rates.items():
        print(f"  {contestant:40} {' '.join(f'{value:6.1f}' for value in values)}")
    pairs = [(contestant, "llama-bench") for contestant in decoders]
    ratios: dict[str, list[float]] = {}
    pairs += [(contestant, PLAIN) for contestant in decoders if contestant != PLAIN]
    for one, other in pairs:
        each = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        found = [statistics.median(each), min(each), max(each)]
        print(f"  {one} ÷ {other}: {found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]")
        ratios[f"{one} ÷ {other}"] = found
    sys.stdout.flush()
    return {"file": name, "tokens_per_second": rates, "ratios": ratios}


def written(kind: str, folder: Path) -> Path:
    """A file of the embedded target's weights in this type."""
    whole = folder / FILE
    if not whole.exists():
        model = load_target(TARGET, dtype="bfloat16", device="cpu").model
        write_target(folder, model, TARGET)
    return whole if kind == IN_BFLOAT16 else quantised(whole, kind)


def opened(file: Path, name: str) -> Target:
    dtype = "bfloat16" if name == IN_BFLOAT16 else "float32"
    return load_target(str(file), dtype=dtype, device="cpu")


def texts(target: Target, given: argparse.Namespace) -> list[list[int]]:
    if not given.depth:
        return tokenized_prompts(given_or_shipped(None), target, given.prompts)
    ids = torch.randint(100, target.token_count, (given.depth,), generator=torch.Generator())
    return [ids.tolist()]


def ours(decoder: Decoder, prompts: Sequence[list[int]], tokens: int) -> float:
    """Tokens a second of the steps. The first token of a text comes with its prompt."""
    count = seconds = 0.0
    for prompt in prompts:
        done = decoder.decode([prompt], tokens + 1)
        count += len(done.outputs[0]) - 1
        seconds += done.timing.stepping
    return count / seconds


def theirs(file: Path, given: argparse.Namespace) -> float:
    settings = {"-n": given.tokens, "-d": given.depth, "-t": torch.get_num_threads()}
    options = [text for name, value in settings.items() for text in (name, str(value))]
    command: list[str | Path] = [
        program("llama-bench"),
        "-m",
        file,
        "-p",
        "0",
        "-fa",
        "1",
        "-r",
        "1",
        "-o",
        "json",
    ]
    done = subprocess.run([*command, *options], capture_output=True, encoding="utf-8", check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"Error: {error}")
