"""A published drafter on disk: its config and its tensors, read as data.

Nothing that comes with it runs. Code files (`auto_map`) are ignored, and a small LM that only such
code can run is refused. Pickled weights are refused unless the user asks for them, and are then
read with `weights_only=True`.
"""

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.model.loading import DTYPES, Target
from decode.model.pretrained import require_all_shards
from draftsmith.export.file_schema import DTYPE_NAMES, StoredTensor, require_none

CONFIG, TOKENIZER, CARD = "config.json", "tokenizer.json", "README.md"
# Files of tokenizers that are not compared with the target's.
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
# vLLM reads the mask token's embedding of a DFlash drafter from this file.
MASK_EMBEDDING = "mask_embedding.pt"
PICKLES = ("pytorch_model*.bin", "medusa_lm_head*.pt")
# What readers look up or loop over, wherever it stands in a config, and texts in whose place an
# object could hold keys that nobody reads. Other kinds of values in these keys are refused when a
# checkpoint is opened.
TEXT_KEYS = (
    *("model_type", "speculators_model_type", "rope_type"),
    *("algorithm", "default_proposal_method", "name_or_path"),
)
LISTED_TEXT_KEYS = ("architectures", "layer_types")
OBJECT_KEYS = (
    *("text_config", "transformer_layer_config", "speculators_config", "dflash_config"),
    *("eagle_config", "rope_parameters", "rope_scaling"),
)
# What is downloaded of a hub repository, besides weights.
TEXTS = ("*.json", "*.model", CARD)


@dataclass
class Checkpoint:
    """A directory with a drafter that somebody published.

    source: as the user named it. directory: where its files are. config: the config of config.json.
    """

    source: str
    directory: Path
    config: dict[str, Any]

    @classmethod
    def open(
        cls, source: str, *, pickled: bool = False, revision: str | None = None
    ) -> "Checkpoint":
        """Open a directory, or download a hub repository (`org/name`).

        Raises UserError if there is no such directory or repository, no config.json, no weights, or
        only pickled weights without `pickled`, for a config with another kind of value in
        a key that readers look up, and for a checkpoint that is quantised or has a separate
        embedding of its mask token.
        """
        directory = from_home(source)
        if directory.is_dir():
            if revision is not None:
                raise UserError(
                    f"revision {revision!r} was given for the directory {source}, but only hub ids "
                    "have revisions; leave the revision out"
                )
        else:
            directory = _download(source, revision, pickled)
        try:
            config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"{source} has no readable {CONFIG} ({error}); expected the directory of a "
                "published drafter, with its config and weights"
            ) from error
        if not isinstance(config, dict):
            raise UserError(f"{source}: {CONFIG} is not a JSON object")
        require_none(_kind_problems(config), f"{source} has a {CONFIG} that cannot be read")
        if config.get("quantization_config"):
            raise UserError(
                f"{source} has quantised weights (quantization_config); expected the original "
                "weights in float32, bfloat16 or float16"
            )
        _require_no_mask_embedding(source, (file.name for file in directory.iterdir()))
        checkpoint = cls(source, directory, config)
        if checkpoint.is_pickled and not pickled:
            raise UserError(_pickled(source, [file.name for file in checkpoint.weight_files]))
        return checkpoint

    @cached_property
    def weight_files(self) -> list[Path]:
        """The files with weights: all safetensors, or all pickled if there are no safetensors."""
        require_all_shards(self.directory)
        files = sorted(self.directory.glob("*.safetensors"))
        files = files or sorted(
            file for pattern in PICKLES for file in self.directory.glob(pattern)
        )
        if not files:
            raise UserError(f"{self.source} has no weights; expected *.safetensors")
        return files

    @property
    def is_pickled(self) -> bool:
        return self.weight_files[0].suffix != ".safetensors"

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all tensors, without reading safetensors' values."""
        if self.is_pickled:
            return frozenset(self.tensors)
        names: set[str] = set()
        for file in self.weight_files:
            with _opened(file) as opened:
                names |= set(opened.keys())
        return frozenset(names)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors on the CPU. If weights have several float dtypes, all get float32, in which
        every value stays the same."""
        tensors: dict[str, Tensor] = {}
        for file in self.weight_files:
            stored = _unpickled(file) if self.is_pickled else _read(file)
            twice = sorted(tensors.keys() & stored.keys())
            if twice:
                raise UserError(f"{self.source}: tensor {twice[0]} is in two files")
            tensors |= stored
        dtype = DTYPES[self.dtype]
        return {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}

    @cached_property
    def dtype(self) -> str:
        """The dtype of the weights, by its name in `DTYPES`; float32 if they have several. Raises
        UserError for others."""
        stored: set[str] = set()
        for file in self.weight_files:
            if self.is_pickled:
                stored |= {_TYPES.get(x.dtype, str(x.dtype)) for x in _unpickled(file).values()}
                continue
            with _opened(file) as opened:
                stored |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        names = {name for name in stored if not name.startswith(("I", "U", "BOOL"))}
        unknown = sorted(names - set(DTYPE_NAMES.values()))
        if unknown:
            raise UserError(
                f"{self.source} has weights in {', '.join(unknown)}; expected {', '.join(DTYPES)}"
            )
        if len(names) == 1:
            return next(name for name, stored in DTYPE_NAMES.items() if stored in names)
        return "float32"

    @property
    def code_notes(self) -> list[str]:
        """A sentence for the user if the config names code, which is ignored."""
        if not self.config.get("auto_map"):
            return []
        return ["its config names code (auto_map), which was neither read nor run"]

    def require_no_code(self) -> None:
        """Raise UserError if only code that the config names can run the model."""
        code, kind = self.config.get("auto_map"), self.config.get("model_type")
        if code and kind not in transformers.CONFIG_MAPPING:
            named = ", ".join(map(str, code.values())) if isinstance(code, dict) else code
            raise UserError(
                f"{self.source} is a model of the type {kind!r}, which needs its own code: {named} "
                "(auto_map). An import runs no code; expected a type that transformers knows"
            )

    @property
    def tokenizer_notes(self) -> list[str]:
        """A sentence for the user if there is a tokenizer that `require_tokenizer_of` cannot
        compare."""
        others = [name for name in OTHER_TOKENIZERS if (self.directory / name).exists()]
        if not others or (self.directory / TOKENIZER).exists():
            return []
        return [
            f"its tokenizer ({', '.join(others)}) was not compared with the target's: only a "
            f"{TOKENIZER} is"
        ]

    def require_tokenizer_of(self, target: Target) -> None:
        """Raise UserError if the directory has a tokenizer whose ids mean other tokens."""
        file = self.directory / TOKENIZER
        if not file.exists():
            return
        try:
            vocabulary = Tokenizer.from_file(str(file)).get_vocab()
        except Exception as error:  # the library raises bare exceptions
            raise UserError(f"{self.source}: {TOKENIZER} cannot be read ({error})") from error
        tokens = {number: token for token, number in vocabulary.items()}
        expected = {number: token for token, number in target.tokenizer.get_vocab().items()}
        shared = tokens.keys() & expected.keys()
        different = sorted(number for number in shared if tokens[number] != expected[number])
        if different:
            first = different[0]
            raise UserError(
                f"{self.source} has another tokenizer than the target {target.name}: "
                f"{len(different)} ids mean other tokens (id {first} is {tokens[first]!r} there "
                f"and {expected[first]!r} in the target); use the target it was trained for"
            )


def _kind_problems(config: Mapping[str, Any], place: str = "") -> list[str]:
    """The keys of a config with a value of a kind that no reader expects, a line each. Null is as
    good as no key."""
    problems = []
    for key, value in config.items():
        is_list = isinstance(value, list) and all(isinstance(x, str) for x in value)
        for keys, fits, expected in (
            (TEXT_KEYS, isinstance(value, str), "text"),
            (LISTED_TEXT_KEYS, is_list, "a list of texts"),
            (OBJECT_KEYS, isinstance(value, Mapping), "an object"),
        ):
            if key in keys and value is not None and not fits:
                problems.append(f"{place}{key} is {value!r}, expected {expected}")
        if isinstance(value, Mapping):
            problems += _kind_problems(value, f"{place}{key}.")
    return problems


def _require_no_mask_embedding(source: str, names: Iterable[str]) -> None:
    if MASK_EMBEDDING in names:
        raise UserError(
            f"{source} has {MASK_EMBEDDING}, a trained embedding of its mask token, which engines "
            "read in place of the target's; expected a drafter whose mask token has the target's "
            "embedding. Serve this one in vLLM"
        )


def renamed(
    tensors: Mapping[str, Tensor], name_of: Callable[[str], str | None]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return published tensors by new names, and a problem for each tensor whose new name another
    one has too. name_of: returns the new name, None for a tensor to leave out."""
    sources: dict[str, str] = {}
    problems = []
    for name in tensors:
        new = name_of(name)
        if new is not None and sources.setdefault(new, name) != name:
            problems.append(
                f"tensors {sources[new]} and {name} both stand for {new}; expected one of them"
            )
    return {new: tensors[name] for new, name in sources.items()}, problems


def stored_tensors(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return the descriptions of tensors that `file_schema.tensor_problems` compares."""
    return {
        name: StoredTensor(
            tuple(x.shape),
            _TYPES.get(x.dtype, str(x.dtype)),
            not x.is_floating_point() or bool(x.isfinite().all()),
        )
        for name, x in tensors.items()
    }


# safetensors' names of dtypes.
_TYPES = {
    **{DTYPES[name]: stored for name, stored in DTYPE_NAMES.items()},
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def _pickled(source: str, names: list[str]) -> str:
    return (
        f"{source} has only pickled weights ({', '.join(names)}), and loading a pickle can run "
        "code. Ask its publisher for safetensors, or read it with --allow-pickle, which accepts "
        "tensors and nothing else (weights_only)"
    )


def _download(source: str, revision: str | None, pickled: bool) -> Path:
    """Return the directory of a hub repository. Only data is downloaded, no code."""
    patterns = ["*.safetensors", *TEXTS, *(PICKLES if pickled else ())]
    try:
        names = huggingface_hub.list_repo_files(source, revision=revision)
        _require_no_mask_embedding(source, names)
        pickles = [name for name in names for pattern in PICKLES if fnmatch(name, pattern)]
        if pickles and not pickled and not any(name.endswith(".safetensors") for name in names):
            raise UserError(_pickled(source, pickles))
        return Path(
            huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=patterns)
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"{source} is neither a directory nor a hub repository that can be read ({error}); "
            "name a directory, or a hub id (org/name)"
        ) from error


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy or download it again") from error


def _read(file: Path) -> dict[str, Tensor]:
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, OSError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{file} holds more than tensors, or is damaged ({str(error).splitlines()[0]}); "
            "nothing of it was run. Ask its publisher for safetensors"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise UserError(f"{file} does not hold a mapping of names to tensors")
    return {str(name): tensor.contiguous() for name, tensor in loaded.items()}
