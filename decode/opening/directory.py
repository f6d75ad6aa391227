"""Saves trained drafters as directories, and opens drafters by the name a user gives.

A drafter directory holds the weights (safetensors) with their config and tokenizer, a manifest
with hashes, and `drafter.json`: its kind, the target it was made for and how it was trained.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from decode.base.artifact import MANIFEST, read_versioned, verify_directory, write_directory
from decode.base.device import dtype_name
from decode.base.errors import UserError, nearest
from decode.base.paths import from_home
from decode.base.registry import Choice
from decode.drafters import DRAFTERS, Drafter
from decode.drafters.pard import small_lm_drafter
from decode.drafters.several.combined import CompositeDrafter, SeveralDrafters
from decode.drafters.tokenizers.other_tokenizer import OtherTokenizerDrafter
from decode.drafters.tokenizers.retokenised import RetokenisedDrafter
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from decode.drafters.trained import InTarget
from decode.loop.parts import require_no_encoder
from decode.model.cache.sliding_window import SlidingWindow
from decode.model.forward.weight_bytes import use_bytes
from decode.model.identity import require_same_vocabulary
from decode.model.loading import DTYPES, Target, load_model_and_tokenizer
from decode.model.model_names import EMBEDDED_PREFIX, HUB_ID
from decode.model.same_target import describe_target, require_same_target
from decode.opening import adapters
from decode.opening.combinations import COMBINATIONS, Combination
from decode.opening.shipped import shipped_drafter

DRAFTER_FILE = "drafter.json"
FORMAT = 1
# The kinds of drafters that are a small language model, whose tokenizer may be another one.
SMALL_LMS = ("shared_vocabulary", "small_lm")
# What `DIRECTORY:vocabulary=NAME` opens, for a model with another tokenizer than the target's.
OTHER_VOCABULARIES: dict[str, type[OtherTokenizerDrafter]] = {
    "shared": SharedVocabularyDrafter,
    "text": RetokenisedDrafter,
}
_VOCABULARY = ":vocabulary="
_WINDOW = ":window="
_WEIGHTS = re.compile(":weights=([^:+]*)")
_OPTIONS = re.compile(f"(({_VOCABULARY}|{_WINDOW}|:weights=)[^:+]*)+$")  # at the end of a name


def save_drafter(
    path: Path,
    kind: str,
    write_weights: Callable[[Path], None],
    *,
    target: Target,
    provenance: dict[str, Any],
    base: dict[str, str] | None = None,
    weights: str | None = None,
) -> None:
    """Writes a drafter directory atomically (see `decode.base.artifact`).

    write_weights(directory) writes the files that `kind`'s loader reads. provenance: how the
    drafter was made, as JSON values. base: of an adapter, see `decode.opening.adapters`. weights:
    int8 for a drafter whose products read one byte a weight, on machines that can.
    """
    description = {
        "format": FORMAT,
        "kind": kind,
        "target": {"name": target.name, **describe_target(target)},
        "provenance": provenance,
    } | {key: value for key, value in (("base", base), ("weights", weights)) if value is not None}

    def fill(directory: Path) -> None:
        write_weights(directory)
        (directory / DRAFTER_FILE).write_text(
            json.dumps(description, indent=2, default=str), encoding="utf-8"
        )

    write_directory(path, fill)


def describe_drafter(path: Path) -> dict[str, Any]:
    """The content of `drafter.json`, after a check of the directory against its manifest.

    Raises UserError that names the missing or damaged file.
    """
    verify_directory(path)
    return read_versioned(
        path / DRAFTER_FILE, FORMAT, ("kind", "target"), "a drafter description",
        "restore it from a copy, or write the drafter again",
    )  # fmt: skip


def open_drafter(spec: str, target: Target, *, dtype: torch.dtype | None = None) -> Drafter:
    """Opens a drafter by name. `spec` is one of:

    - a drafter that is not trained, with or without options: `none`, `ngram:max_n=4`, `store`,
      `max_gram`, `suffix`, `lookahead`, `skip`, `swift` or `sparse`;
    - `mtp`, the module of multi-token prediction in the target's own checkpoint;
    - a drafter directory, or `embedded:NAME` for one that comes with draftsmith;
    - any smaller causal LM with the same tokenizer (directory, GGUF file or hub id). Its output
      layer may be padded to another size than the target's. With `pard_token` in its config it
      drafts all tokens in one pass;
    - such a model with another tokenizer, with `:vocabulary=shared` or `:vocabulary=text` after its
      name (`decode.drafters.tokenizers`);
    - one of the last three with a window of the text that its layers see, such as
      `runs/x/drafter:window=512,sinks=4` (`decode.model.cache.sliding_window`);
    - one of them with `:weights=int8` after its name (`decode.model.forward.weight_bytes`);
    - several of these joined by `+`, such as `ngram+runs/x/drafter`: they are called in that order
      (`partition_drafters`);
    - several joined by `++`: their drafts become one tree;
    - a combination with options, such as `horizontal:first=runs/x/drafter,later=ngram,depth=2`
      (`decode.opening.combinations`). All that follows its name is its options.

    dtype: the dtype of the drafter's weights; default the target's. Raises UserError if the
    drafter's vocabulary is not the target's, its directory is damaged, or an option is unknown.
    """
    first, plus, others = partition_drafters(spec)
    if plus:
        parts = [open_drafter(part, target, dtype=dtype) for part in (first, others)]
        return SeveralDrafters(parts) if plus == "++" else CompositeDrafter(parts)
    path = shipped_drafter(spec) or from_home(spec)
    if _is_combination(spec) and not os.path.exists(path):
        combination: Combination = COMBINATIONS.make(spec)
        return combination.open(lambda part: open_drafter(part, target, dtype=dtype), target)
    if (weights := _WEIGHTS.search(spec)) and not os.path.exists(path):
        return _in_bytes(_WEIGHTS.sub("", spec), weights[1], target, dtype)
    if _WINDOW in spec and _kind(spec) not in DRAFTERS and not os.path.exists(path):
        wide, window = split_window(spec)
        assert window is not None
        return open_drafter(wide, target, dtype=dtype).with_window(window)
    dtype = dtype or target.dtype
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise UserError(f"the drafter's dtype is {dtype}; expected one of {', '.join(DTYPES)}")
    if _VOCABULARY in spec and not os.path.exists(path):
        return _open_other_vocabulary(spec, target, name)
    kind = _kind(spec)
    if kind in DRAFTERS and not os.path.exists(path):
        part = DRAFTERS[kind]
        if issubclass(part, InTarget):
            return part.in_target(Choice.of(spec), target, dtype)
        if part.trained:
            raise UserError(
                f"{kind!r} is a kind of trained drafter; give the directory of a trained drafter"
            )
        drafter: Drafter = DRAFTERS.make(spec)
        return drafter
    if os.path.exists(path / DRAFTER_FILE):
        return _open_directory(spec, path, target, name)
    return _open_small_lm(spec, path, target, name)


def require_findable(spec: str) -> None:
    """What `open_drafter` finds out about names without a target, which takes long to load. Raises
    UserError for a misspelt name, and for a directory that has no drafter."""
    first, plus, others = partition_drafters(spec)
    if plus:
        require_findable(first)
        require_findable(others)
        return
    path = shipped_drafter(spec) or from_home(spec)
    named = _kind(spec) in DRAFTERS or _is_combination(spec) or _OPTIONS.search(spec)
    if not os.path.exists(path / DRAFTER_FILE) and (os.path.exists(path) or not named):
        _require_model(spec, path)


def _open_directory(spec: str, path: Path, target: Target, dtype: str) -> Drafter:
    description = describe_drafter(path)
    kind = description["kind"]
    if kind == adapters.KIND:
        return adapters.open_adapter(
            path,
            description,
            target,
            dtype,
            lambda base: open_drafter(base, target, dtype=DTYPES[dtype]),
        )
    padding = kind in ("pard", "rest", *SMALL_LMS)
    with _naming_options(spec, kind in SMALL_LMS and not target.has_encoder):
        require_same_target(description["target"], target, f"drafter {spec}", padding=padding)
    try:
        loader: Any = DRAFTERS[kind]
    except UserError as error:
        raise UserError(
            f"{path}: {error} Importing `draftsmith` registers the drafters that read the "
            "target's hidden states: import open_drafter from there"
        ) from error
    if target.has_encoder:
        require_no_encoder(loader, f"the {kind} drafter {spec}")
    opened: Drafter = loader.load(path, target, dtype=dtype)
    if target.has_encoder:  # a small language model has an encoder or not
        require_no_encoder(opened, f"the {kind} drafter {spec}")
    if description.get("weights") == "int8" and opened.module is not None:
        use_bytes(opened.module)
    adapters.remember(opened, path, target, dtype)
    return opened


def _open_small_lm(spec: str, path: Path, target: Target, dtype: str) -> Drafter:
    _require_model(spec, path)
    try:
        loaded = load_model_and_tokenizer(
            spec, dtype=dtype, device=str(target.device), encoder=target.has_encoder
        )
    except UserError as error:
        raise UserError(f"{error}{nearest(spec, DRAFTERS)}") from error
    with _naming_options(spec, not target.has_encoder):
        require_same_vocabulary(
            loaded.fingerprint, target.fingerprint, f"drafter {spec}", padding=True
        )
    small = small_lm_drafter(loaded.model, target)
    if target.has_encoder:
        require_no_encoder(small, f"a small language model ({spec})")
    return small


def _require_model(spec: str, path: Path) -> None:
    """Raises UserError if there is something else than a model at this place."""
    if os.path.exists(path / MANIFEST):
        verify_directory(path)  # a drafter without its description is not a plain model
    if inside := _drafters_inside(path):
        raise UserError(
            f"{path} is not the directory of a drafter, but holds {len(inside)}; name one of them: "
            f"{', '.join(inside)}"
        )
    if path.is_dir() and not (path / "config.json").exists():
        raise UserError(f"{path} is neither a drafter directory nor a model directory")
    if not os.path.exists(path) and "/" not in spec and (typo := _typo(spec)):
        raise UserError(
            f"there is no drafter {spec!r}, and no such file or directory.{typo} A model of a hub "
            "is named OWNER/NAME"
        )


def _drafters_inside(path: Path) -> list[str]:
    """The drafter directories in a directory, such as that of a run or of a stage."""
    files = (file for depth in range(1, 4) for file in path.glob("[!.]*/" * depth + DRAFTER_FILE))
    return sorted(str(file.parent) for file in files)


def _typo(spec: str) -> str:
    """`nearest`, if the name is nearly that of a drafter: only then no hub is asked for it."""
    kind = _kind(spec)
    return nearest(kind, difflib.get_close_matches(kind, DRAFTERS, cutoff=0.75))


def _path_exists(name: str) -> bool:
    return os.path.exists(from_home(name))


def partition_drafters(
    spec: str, exists: Callable[[str], bool] = _path_exists
) -> tuple[str, str, str]:
    """The first drafter of `A+B` or `A++B`, what joins it (`+` or `++`), and the others. For the
    name of one drafter: that name, and two empty strings.

    A path may have a + in it. So a + joins two drafters only after a registered name, after a path
    that exists (the longest one), or else after `embedded:NAME` or a hub id, with their options.
    After the name of a combination all is options. exists: whether a name is that of a path.

    >>> partition_drafters("ngram:max_n=4++store+none")
    ('ngram:max_n=4', '++', 'store+none')
    >>> partition_drafters("vertical:model=small,inner=ngram+store")[1:]
    ('', '')
    """
    if "+" not in spec or exists(_OPTIONS.sub("", spec)) or _is_combination(spec):
        return spec, "", ""
    end = spec.index("+")
    if _kind(spec[:end]) not in DRAFTERS:
        ends = [place for place, sign in enumerate(spec) if sign == "+"]
        paths = [place for place in ends if exists(_OPTIONS.sub("", spec[:place]))]
        name = _OPTIONS.sub("", spec[:end])
        if paths:
            end = paths[-1]
        elif not name.startswith(EMBEDDED_PREFIX) and HUB_ID.fullmatch(name) is None:
            return spec, "", ""
    plus = "++" if spec.startswith("++", end) else "+"
    return spec[:end], plus, spec[end + len(plus) :]


def split_window(spec: str) -> tuple[str, SlidingWindow | None]:
    """The name of a drafter without its window, and the window. Raises UserError for a window that
    is no number of tokens.

    >>> split_window("runs/x/drafter:window=512,sinks=4")
    ('runs/x/drafter', SlidingWindow(size=512, sinks=4))
    """
    name, named, options = spec.rpartition(_WINDOW)
    if not named:
        return spec, None
    size, *others = options.split(",")
    names = [item.partition("=")[0] for item in others]
    numbers = [size, *(item.partition("=")[2] for item in others)]
    if names not in ([], ["sinks"]) or not all(number.isdecimal() for number in numbers):
        raise UserError(
            f"window is {options!r} in {spec!r}; expected a number of tokens, such as window=512, "
            "or also a number of sinks: window=512,sinks=4"
        )
    return name, SlidingWindow(*map(int, numbers))


def _in_bytes(name: str, weights: str, target: Target, dtype: torch.dtype | None) -> Drafter:
    """The drafter `name`, whose products read bytes. weights: the option, as given."""
    if weights != "int8":
        raise UserError(f"weights is {weights!r} after {name!r}; expected int8, or leave it out")
    path = from_home(name)
    if path.is_dir() and describe_drafter(path)["kind"] == adapters.KIND:
        raise UserError(
            f"weights=int8 of the adapter {name} would change its base, which other drafters "
            "share; merge it first (draftsmith merge), or leave it out"
        )
    drafter = open_drafter(name, target, dtype=dtype)
    if drafter.module is None or not use_bytes(drafter.module):
        raise UserError(
            f"weights=int8: no product of {name} can read weights of one byte here. That takes "
            "trained layers on a CPU with the products of few rows (AVX2 for float32, AVX512-BF16 "
            "for bfloat16) and a C++ compiler; leave it out"
        )
    adapters.forget(drafter, target)
    return drafter


def _is_combination(spec: str) -> bool:
    """Whether a name is that of a combination, or of one that earlier versions had."""
    return _kind(spec) in (*COMBINATIONS, *COMBINATIONS.gone)


def _kind(spec: str) -> str:
    return spec.partition(":")[0]


def _open_other_vocabulary(spec: str, target: Target, dtype: str) -> Drafter:
    model, _, choice = spec.rpartition(_VOCABULARY)
    if choice not in OTHER_VOCABULARIES:
        raise UserError(
            f"vocabulary is {choice!r} in {spec!r}; expected one of "
            f"{', '.join(OTHER_VOCABULARIES)}.{nearest(choice, OTHER_VOCABULARIES)}"
        )
    path = from_home(model)
    if _kind(model) in DRAFTERS and not os.path.exists(path):
        raise UserError(
            f"{model} has no option 'vocabulary'; it is for a small language model, named by its "
            "directory, file or hub id"
        )
    if os.path.exists(path / DRAFTER_FILE):
        kind = describe_drafter(path)["kind"]
        if kind not in SMALL_LMS:
            raise UserError(
                f"{path} is a drafter of the kind {kind}, which works only with the target it was "
                "trained for; vocabulary= is for a small language model"
            )
    return OTHER_VOCABULARIES[choice].open(model, target, dtype=dtype)


@contextmanager
def _naming_options(spec: str, small_lm: bool) -> Iterator[None]:
    """Adds to an error about another vocabulary how to use a small language model all the same."""
    try:
        yield
    except UserError as error:
        if not small_lm:
            raise
        raise UserError(
            f"{error} Or name it {spec}{_VOCABULARY}shared: then it drafts the tokens that both "
            f"have, and with {_VOCABULARY[1:]}text it drafts text"
        ) from error
