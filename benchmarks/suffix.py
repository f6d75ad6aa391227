"""Compares our suffix drafter with vLLM's, which is ArcticInference's, on the same prompts.

    python -m benchmarks.suffix [--quick] [--json FILE] [--target T] [--gamma N] [--prompts FILE]
                                [--tokens N]

Both decode the prompts one after the other, greedily and in float32, with the same settings: once
with the outputs of earlier prompts, once without. Drafted and accepted tokens are counted in the
same way. The output also says how many texts are equal; after another text, drafts differ too.
It needs `make engine-vllm-suffix`, which adds ArcticInference to the environment of vLLM.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    PromptsOption,
    TargetOption,
    describe_machine,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from decode.base.errors import UserError
from decode.model.loading import load_target
from decode.opening.directory import open_drafter
from draftsmith.cli.command import tokenized_prompts
from draftsmith.export.engines import EngineTask
from draftsmith.export.engines.vllm import VLLM
from draftsmith.export.verify_export import count_drafts
from train.data.read import read_examples
from train.engines.child_process import package_version

# Requests whose outputs are kept: none, and vLLM's default.
KEPT = {"texts apart": 0, "with earlier outputs": 10000}


class SuffixVLLM(VLLM):
    """vLLM with its method `suffix`. kept: the requests whose outputs it keeps."""

    def __init__(self, kept: int) -> None:
        self.kept = kept

    def missing(self, python: str | None = None) -> str | None:
        has_library = package_version("vllm", "arctic_inference")
        reason = None if has_library else "ArcticInference is not installed"
        return super().missing(python) or reason

    def speculative(self, task: EngineTask) -> dict[str, Any]:
        return {"method": "suffix", "suffix_decoding_max_cached_requests": self.kept}


def main(
    quick: Annotated[bool, typer.Option("--quick", help="6 prompts")] = False,
    json_file: JsonOption = None,
    target: TargetOption = TARGET,
    gamma: Annotated[int, typer.Option(min=1, help="most tokens of a draft")] = 8,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each text")] = 64,
) -> None:
    """Count drafted and accepted tokens of both."""
    reporter = start_benchmark()
    if missing := SuffixVLLM(0).missing():
        raise UserError(f"{missing}; install it with: make engine-vllm-suffix")
    loaded = load_target(target, dtype="float32", device="cpu")
    texts = tokenized_prompts(read_examples(str(prompts))[0], loaded, 6 if quick else 28)
    task = EngineTask(loaded, target, Path(), texts, gamma, tokens, reporter.say)
    rows = [row for name, kept in KEPT.items() for row in compare(task, name, kept)]
    title = f"suffix drafts of at most {gamma} tokens, {len(texts)} texts of {tokens} tokens"
    reporter.table(rows_table(title, rows, left=2))
    if json_file is not None:
        figures = {"benchmark": "suffix", "process": describe_machine(), "rows": rows}
        write_json(json_file, figures)


def compare(task: EngineTask, name: str, kept: int) -> list[dict[str, Any]]:
    """Return a row for vLLM and one for our loop."""
    run = SuffixVLLM(kept).run(task)
    equal = sum(a == b for a, b in zip(run.plain_texts, run.drafted_texts, strict=True))
    drafter = open_drafter(f"suffix:max_cached_requests={kept}", task.target)
    drafted = accepted = 0
    for prompt in task.prompts:
        alone = EngineTask(
            task.target, task.target_spec, task.export, [prompt], task.gamma, task.max_new_tokens
        )
        counts = count_drafts(alone, drafter, VLLM.counting)
        drafted, accepted = drafted + counts[0], accepted + counts[1]
    sides = {
        f"vLLM {run.version}": (run.drafted_tokens, run.accepted_tokens),
        "ours": (drafted, accepted),
    }
    return [
        {
            "requests": name,
            "drafter": side,
            "drafted": f"{counts[0]:,}",
            "accepted": f"{counts[1]:,}",
            "accepted / drafted": f"{counts[1] / max(1, counts[0]):.3f}",
            "texts equal": f"{equal} of {len(task.prompts)}",
        }
        for side, counts in sides.items()
    ]


if __name__ == "__main__":
    run_command(main)
