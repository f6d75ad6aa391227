"""Carries out `draftsmith calibrate-tree`: choose a drafter's tree on dev prompts, and store it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.artifact import write_file
from decode.drafters.directory import DRAFTER_FILE, describe_drafter, open_drafter
from decode.errors import UserError
from decode.measure.calibrate_tree import TreeCalibration, calibrate_tree
from decode.sampling import Sampling
from decode.target.loading import load_target
from decode.trees.static import TREE, store_tree
from train.console import Reporter
from train.data.chat import prompt_tokens
from train.data.read import read_examples, spread


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command's options. out: a file for the tree, instead of the drafter's directory."""

    target: str
    drafter: str
    prompts: Path
    method: str
    nodes: int | None
    depth: int
    width: int
    sampling: Sampling
    max_new_tokens: int
    limit: int | None
    dtype: str
    device: str
    seed: int
    out: Path | None
    json_file: Path | None


def run(asked: Asked, reporter: Reporter) -> TreeCalibration:
    """Calibrate, store the tree, and report it. Raises UserError as `calibrate_tree` does, and for
    a drafter that is not one of our directories, unless `out` is given."""
    directory = Path(asked.drafter).expanduser()
    if asked.out is None:
        if not (directory / DRAFTER_FILE).exists():
            raise UserError(
                f"{asked.drafter} is no drafter directory (it has no {DRAFTER_FILE}), so a tree "
                "cannot be stored with it; write the tree to a file with --out FILE and draft in "
                "it with --shape static:file=FILE"
            )
        describe_drafter(directory)  # fails early if the directory is damaged
    examples, _ = read_examples(str(asked.prompts))
    target = load_target(asked.target, dtype=asked.dtype, device=asked.device)
    drafter = open_drafter(asked.drafter, target)
    prompts = [prompt_tokens(e, target.tokenizer) for e in spread(examples, asked.limit)]
    method: Any = asked.method
    found = calibrate_tree(
        target,
        drafter,
        prompts,
        method=method,
        nodes=asked.nodes,
        depth=asked.depth,
        width=asked.width,
        sampling=asked.sampling,
        max_new_tokens=asked.max_new_tokens,
        seed=asked.seed,
        progress=lambda what: reporter.say(f"  measuring {what}"),
    )
    for depth, row in enumerate(found.acceptance.table(), 1):
        shown = " ".join(f"{share:.3f}" for share in row)
        reporter.say(f"  depth {depth}: share of the target's tokens by rank {shown}")
    reporter.say(found.verdict)
    about = found.to_dict() | {"target": target.name, "prompts_file": str(asked.prompts)}
    if asked.out is not None:
        found.structure.save(asked.out, about)
        reporter.say(f"written to {asked.out}; use it as --shape static:file={asked.out}")
    else:
        store_tree(directory, found.structure, about)
        reporter.say(f"stored as {directory / TREE}: this drafter now drafts in it by default")
    if asked.json_file:
        paths = {"paths": found.structure.paths}
        write_file(asked.json_file, json.dumps(about | paths, indent=2))
    return found
