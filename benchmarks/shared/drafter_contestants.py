"""Which drafters `benchmarks.drafters` compares, and why others are left out."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import heads.kinds  # noqa: F401  (registers its drafters)
from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.drafters import DRAFTERS
from decode.model.model_names import EMBEDDED_PREFIX
from decode.opening.combinations import COMBINATIONS
from decode.opening.directory import DRAFTER_FILE
from decode.opening.shipped import SHIPPED, shipped_names

# Texts here are short, so `sparse` keeps less of them than by its default.
SPARSE = "sparse:sinks=4,recent=16,chunk=8,budget=32,every=16"
# Drafters without training, by kind, with options for a CPU where the paper's are for a GPU.
UNTRAINED = {
    "ngram": "ngram",
    "store": "store",
    "max_gram": "max_gram",
    "suffix": "suffix",
    "lookahead": "lookahead:window=5,ngram=3,guesses=3",
    "skip": "skip:mlp=20",
    "swift": "swift",
    "sparse": SPARSE,
    "A++B": "ngram++suffix",
    "vertical": f"vertical:model='{SPARSE}',inner=ngram",
    "horizontal": "horizontal:first=ngram,later=max_gram,depth=2",
    "routed": 'routed:drafters=["ngram","suffix"],labels=["one","other"]',
}
# Kinds of small language models, which can be the model of a cascade.
SMALL_LM = ("small_lm", "pard")
PLAIN = "none"
# What is measured elsewhere, and why.
ELSEWHERE = {
    "layer_skip, medusa2, blockwise with a backbone": "train another target: draftsmith evaluate",
    "drafters for a target with an encoder": "have their own target: docs/results/targets.md",
}


@dataclass(frozen=True)
class Contestant:
    """name: for the table. spec: as `open_drafter` takes it. kind: a registered name, of a drafter
    or combination. seconds: of its training. size: of its files in bytes."""

    name: str
    spec: str
    kind: str
    seconds: float | None = None
    size: int | None = None


def untrained() -> list[Contestant]:
    """The drafters and combinations that need no training, and the drafters that come along."""
    rows = [Contestant(kind, spec, kind) for kind, spec in UNTRAINED.items()]
    for name in shipped_names():
        directory, spec = SHIPPED / name, EMBEDDED_PREFIX + name
        rows.append(Contestant(spec, spec, _kind_of(directory), size=size_of(directory)))
    return rows


def named(spec: str) -> Contestant:
    """A drafter that the command line names."""
    kind = spec.partition(":")[0]
    directory = from_home(spec)
    if kind in DRAFTERS or kind in COMBINATIONS:
        return Contestant(spec, spec, kind)
    if (directory / DRAFTER_FILE).exists():
        return Contestant(spec, spec, _kind_of(directory), None, size_of(directory))
    return Contestant(spec, spec, SMALL_LM[0])


def trained_drafters(run: Path) -> list[Contestant]:
    """The drafters of a run's stages, each alone and after prompt lookup; the last small model also
    in cascades, `pass` also in the passes that verify, and one other, EAGLE-1 if there is one, also
    in the other combinations with prompt lookup. Raises UserError if there is none."""
    files = sorted(run.glob(f"stages/*/drafter/{DRAFTER_FILE}"))
    if not files:
        raise UserError(
            f"--run {run} has no stages with a drafter; expected the directory of a run"
        )
    kinds = {file: _kind_of(file.parent) for file in files}
    last_small = next((file for file in reversed(files) if kinds[file] in SMALL_LM), None)
    combined = next((file for file in files if kinds[file] == "eagle1"), files[-1])
    contestants = []
    for file, kind in kinds.items():
        directory = file.parent
        stage = directory.parent
        row = Contestant(
            f"{kind} ({run.name}/{stage.name})",
            str(directory),
            kind,
            seconds_of(stage),
            size_of(directory),
        )
        turns = replace(row, kind="A+B", name=f"ngram+{row.name}", spec=f"ngram+{directory}")
        contestants += [row, turns]
        if file == last_small:
            contestants += cascades_of(row)
        if file == combined:
            contestants += [
                replace(row, kind="A++B", name=f"ngram++{row.name}", spec=f"ngram++{directory}"),
                of_parts(row, "horizontal", "horizontal:first={},later=ngram,depth=2"),
            ]
    # A small model can be the combined drafter too.
    return list({row.name: row for row in contestants}.values())


def shortly_named(contestants: Sequence[Contestant]) -> list[Contestant]:
    """The same rows with the shortest names that are still different: without the run and stage of
    a trained drafter, or with the stage alone."""
    forms = [
        [re.sub(r" \([^()]*/([^()/]*)\)", short, row.name) for row in contestants]
        for short in ("", r" (\1)", r"\g<0>")
    ]
    shortened = []
    for row, *names in zip(contestants, *forms, strict=True):
        unique = (name for name, those in zip(names, forms, strict=True) if those.count(name) == 1)
        shortened.append(replace(row, name=next(unique, row.name)))
    return shortened


def cascades_of(small: Contestant) -> list[Contestant]:
    """The cascades of a small language model: over prompt lookup, before it, and below the target
    over a part of its keys and values (TriForce)."""
    return [
        of_parts(small, "vertical", "vertical:model={},inner=ngram"),
        of_parts(small, "horizontal", "horizontal:first={},later=ngram,depth=2"),
        replace(
            of_parts(small, "vertical", f"vertical:model='{SPARSE}',inner={{}}"),
            name=f"TriForce {small.name}",
        ),
    ]


def of_parts(part: Contestant, kind: str, spec: str) -> Contestant:
    """A combination with `part`. spec: its name, with {} in place of the part's."""
    name, spec = f"{kind} {part.name}", spec.format(repr(part.spec))
    return replace(part, kind=kind, name=name, spec=spec)


def omitted(contestants: Iterable[Contestant]) -> dict[str, str]:
    """The registered drafters and combinations that do not compete, with the reason for each."""
    compete = {contestant.kind for contestant in contestants}
    reasons = {}
    for kind in sorted({*DRAFTERS, *COMBINATIONS} - compete):
        if kind == PLAIN:
            reasons[kind] = "is plain decoding, with which each drafter is compared"
        else:
            reasons[kind] = "needs training; name a run that trained it (--run), or its directory"
    return reasons | ELSEWHERE


def seconds_of(stage: Path) -> float | None:
    """The seconds of training of a finished stage, else of the complete stage. None for a stage
    that has not ended."""
    try:
        summary = json.loads((stage / "done.json").read_text("utf-8"))["summary"]
    except (OSError, ValueError, KeyError):
        return None
    training = summary.get("training") or {}
    seconds: float | None = training.get("training_seconds", summary.get("seconds"))
    return seconds


def size_of(directory: Path) -> int:
    """The bytes of a directory's files."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _kind_of(directory: Path) -> str:
    kind: str = json.loads((directory / DRAFTER_FILE).read_text("utf-8"))["kind"]
    return kind
