"""Models of transformers: loading them, and the devices of their weights.

Errors of transformers about a model's files become UserErrors. Weights come from safetensors or
GGUF, never from pickle files, which can run code. Code that comes with a model runs only if the
user asks for it.

The weights may be on one device, distributed over several, or offloaded. accelerate's hooks move
inputs to the device of each part of a model. Offloaded weights are on the device `meta`, without
values, except while their layer runs.
"""

import copy
import functools
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from decode.base.errors import UserError
from decode.model import gguf_settings, gguf_tokenizer
from decode.model.config_numbers import require_sound_numbers, rope_kinds
from decode.model.gguf_file import read_header
from decode.model.loaded_weights import require_all_weights

logger = logging.getLogger(__name__)

# The longest text of models without a limit in their config.
UNLIMITED_POSITIONS = 2**31 - 1

# What a part of a config's name says about the model.
MEDIA = {"vision_config": "images", "audio_config": "sound"}
# Keys of a config that count things of which transformers makes a list, and the longest such list.
# `vocab_size_per_layer_input` (Gemma 3n and 4) counts no layers.
COUNTS, MOST = re.compile("(?<!per_)layer|label|block_count"), 10**5
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
# Lines and characters of an error that a message repeats.
REASON_LINES, REASON_LENGTH = 4, 400


@dataclass(frozen=True)
class LoadOptions:
    dtype: torch.dtype
    attn_implementation: str
    trust_remote_code: bool
    device: torch.device
    device_map: str | dict[str, Any] | None = None
    max_memory: Mapping[int | str, int | str] | None = None
    encoder: bool = False
    sharded: bool = False
    # The modules of the decoder that transformers shards over all processes, by name. None: none.
    fsdp_plan: dict[str, str] | None = None


def from_pretrained(source: str, options: LoadOptions, **where: Any) -> tuple[Any, Any]:
    """Loads model and tokenizer with transformers. Turns its errors into UserErrors.

    where: `revision` for hub ids or `gguf_file` for GGUF files.
    """
    where["trust_remote_code"] = options.trust_remote_code
    config, tokenizer = config_and_tokenizer(source, encoder=options.encoder, **where)
    if "gguf_file" in where:
        where["quantization_config"] = transformers.GgufConfig(dequantize=True)
    elif getattr(config, "quantization_config", None) is not None:
        where["device_map"] = {"": options.device}
    if options.device_map is not None:
        where |= {"device_map": options.device_map, "max_memory": options.max_memory}
    if options.fsdp_plan is not None:
        from transformers.distributed import DistributedConfig

        config.get_text_config().base_model_fsdp_plan = options.fsdp_plan
        where["distributed_config"] = DistributedConfig(fsdp_size=dist.get_world_size())
    # A GGUF file's sizes are compared with its config, and those of a hub model are not known here.
    if "gguf_file" not in where and Path(source).is_dir():
        without_values(source, copy.deepcopy(config), options.trust_remote_code)
    attention = options.attn_implementation
    with _explained(source, "weights"):
        model, info = _auto_class(config).from_pretrained(
            source,
            config=config,
            dtype=options.dtype,
            attn_implementation=None if attention == "auto" else attention,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `require_all_weights` refuses them by name
            **where,
        )
    require_all_weights(source, model, info)
    return model, tokenizer


def _auto_class(config: Any) -> Any:
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def weights_size(directory: Path) -> int:
    """Bytes of the safetensors files in a directory, 0 for none."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def without_values(
    source: str, config: Any, trust_remote_code: bool = False, **settings: Any
) -> Any:
    """The model of a config on the device `meta`: shapes without values, of its plain form if it
    is quantised. settings: for `from_config` of transformers, which may change the config.

    Raises UserError if no model can be made of the config, and as soon as the model has more
    parameters than the files of a local source can hold. transformers would make such a model,
    fill it with random numbers and only then compare it with the files.
    """
    place = Path(source)
    quantised = getattr(config, "quantization_config", None) is not None
    stored = place.stat().st_size if place.is_file() else weights_size(place)
    # A parameter takes a byte or more, or a bit or more if it is quantised. Weights that are tied
    # to others are made first and counted twice.
    most = 2 * stored * (8 if quantised or place.is_file() else 1) or float("inf")
    count, thread = 0, threading.get_ident()

    def add(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        if parameter is None or threading.get_ident() != thread:
            return
        count += parameter.numel()
        if count > most:
            raise UserError(
                f"the config of {source} describes a model of more than {count:,} parameters, but "
                f"its files have only {stored:,} bytes: their sizes differ. {type(module).__name__}"
                f".{name} is {list(parameter.shape)} in the config. Use the config and the weights "
                "of one model."
            )

    hook = register_module_parameter_registration_hook(add)
    if trust_remote_code:
        settings["trust_remote_code"] = True
    try:
        with explained(f"no model can be made from the config of {source}"), torch.device("meta"):
            return _auto_class(config).from_config(config, **settings)
    finally:
        hook.remove()


def config_and_tokenizer(source: str, *, encoder: bool = False, **where: Any) -> tuple[Any, Any]:
    """Loads the config and the tokenizer of a causal language model, without its weights. Turns the
    errors of transformers into UserErrors. encoder: the model may have an encoder. where: as for
    `from_pretrained` of transformers."""
    header = read_header(Path(source, where["gguf_file"])) if "gguf_file" in where else None
    with _explained(source, "config"):
        stored = (
            header.metadata
            if header
            else transformers.PreTrainedConfig.get_config_dict(source, **where)[0]
        )
        _require_countable(source, stored)
        config = transformers.AutoConfig.from_pretrained(source, **where)
    _require_causal(source, config, encoder)
    _require_tokens(source, config)
    if header is not None:
        with _explained(source, "config"):
            gguf_settings.set_config(config, header)
            shapes = without_values(str(header.path), config)
            gguf_settings.require_all_read(header, shapes)
    require_sound_numbers(source, config)
    tokenizer = _load_tokenizer(source, config, where)
    if header is not None:
        gguf_tokenizer.correct_tokenizer(tokenizer, header)
    _drop_padding_outside(source, config, tokenizer)
    return config, tokenizer


def _drop_padding_outside(source: str, config: Any, tokenizer: Any) -> None:
    """Remove padding tokens that have no embedding. Padding is masked, so any other token does."""
    text, dropped = config.get_text_config(), set()
    for holder in (config, text, tokenizer):
        token = getattr(holder, "pad_token_id", None)
        if isinstance(token, int) and not 0 <= token < text.vocab_size:
            holder.pad_token_id = None
            dropped.add(token)
    if dropped:
        rows, named = text.vocab_size, sorted(dropped)
        logger.warning("padding tokens %s of %s are outside its %s tokens", named, source, rows)


def _load_tokenizer(source: str, config: Any, where: dict[str, Any]) -> Any:
    try:
        if "gguf_file" in where:
            # AutoTokenizer selects this class too, but reads the file once more.
            return transformers.PreTrainedTokenizerFast.from_pretrained(source, **where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, config=config, **where)
    except Exception as error:  # the tokenizers library raises plain Exception for bad files
        if _asks_for_trust(error):
            raise UserError(_foreign_code(source)) from error
        raise UserError(
            f"no usable tokenizer in {source} ({in_one_line(error)}). Put the model's tokenizer "
            "files (tokenizer.json, tokenizer_config.json) beside its weights."
        ) from error
    return tokenizer


def _require_causal(source: str, config: Any, encoder: bool) -> None:
    # Encoders such as BERT load as language models too, but predict tokens that they already see.
    causal = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    architectures = config.architectures or []
    known = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if not any(type(config) in mapping for mapping in known) and not hasattr(config, "auto_map"):
        media = [m for part, m in MEDIA.items() if getattr(config, part, None) is not None]
        what = f"a model that reads {' and '.join(media)}" if media else "no language model"
        raise UserError(
            f"{source} is {what} (model type {config.model_type}); transformers does not load it "
            "as one that only writes text, so it is not supported. Expected a ...ForCausalLM, or a "
            "checkpoint of a family whose text part is one, such as gemma3 or qwen3_5."
        )
    foreign = architectures and not any(
        name.endswith((*causal, "MTModel")) for name in architectures
    )
    if config.is_encoder_decoder and not encoder:
        raise UserError(
            f"{source} is an encoder-decoder model ({config.model_type}), but a decoder-only model "
            "is needed here. Targets with an encoder work in generate, evaluate, and the stages "
            "generate, heads and distill"
        )
    if foreign:
        raise UserError(
            f"{source} is not a causal language model: its config names "
            f"{', '.join(architectures) or config.model_type}, expected a ...ForCausalLM. "
            "Name a decoder-only model with its output layer."
        )


def _require_countable(source: str, stored: Mapping[str, Any]) -> None:
    """What the file of a config says must be of the kinds that making a config of it relies on."""
    names = stored.get("architectures")
    if names and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(
            f"architectures is {names!r:.100} in the config of {source}, expected a list with the "
            "name of the model's class; get the file again"
        )
    for key, value in stored.items():
        if isinstance(value, Mapping):
            _require_countable(source, value)
        elif COUNTS.search(key) and isinstance(value, int | float) and value > MOST:
            raise UserError(
                f"{key} is {value} in the config of {source}, but no model has more than {MOST:,}; "
                "get the file again"
            )
        elif key in LAYERS and isinstance(value, int | float) and value < 1:
            raise UserError(
                f"{key} is {value} in the config of {source}, but a model has a layer at least; "
                "get the file again"
            )


def _require_tokens(source: str, config: Any) -> None:
    """A nested config that transformers does not know stays what the file has there."""
    with _explained(source, "config"):
        text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        found = f"vocab_size {size!r}" if isinstance(text, transformers.PreTrainedConfig) else text
        raise UserError(
            f"the config of {source} does not say how many tokens the model has: found "
            f"{found!s:.100}; expected a vocab_size of 1 or more in the config of its text model"
        )


@contextmanager
def _explained(source: str, part: str) -> Iterator[None]:
    """Turns exceptions of transformers about a model's files into UserErrors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # bad files bring out errors of every type
        reason = in_one_line(error)
        if _asks_for_trust(error):
            message = _foreign_code(source)
        elif "safetensors" in reason and "does not appear to have" in reason:
            message = no_safetensors(source, [])
        elif not Path(source).exists() and part == "config":
            message = (
                f"{source} is not a local directory, and loading from the hub failed ({reason}). "
                "Check the name, the network and, for a gated model, your access."
            )
        else:
            message = (
                f"the {part} of {source} cannot be loaded ({type(error).__name__}: {reason}). "
                "Check that the files are complete, belong together, and that this version of "
                f"transformers ({transformers.__version__}) knows the model."
            )
        raise UserError(message) from error


def require_all_shards(directory: Path) -> None:
    """Raises UserError if a file that the index of safetensors names is missing."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read ({error}); copy or download it again") from error
    missing = sorted(str(name) for name in named if not (directory / str(name)).is_file())
    if missing:
        raise UserError(
            f"{directory} lacks {', '.join(missing[:3])}{' …' if missing[3:] else ''} "
            f"({len(missing)} of {len(named)} files that {index.name} names); download it again"
        )


def _asks_for_trust(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def _foreign_code(source: str) -> str:
    return (
        f"{source} contains Python code, which does not run by default. "
        "Read that code, then set trust_remote_code, or name another model."
    )


def no_safetensors(source: str, pickles: list[str]) -> str:
    formats = f"only {', '.join(sorted(pickles))}" if pickles else "none"
    return (
        f"{source} has no safetensors weights (found {formats}). Pickle files (.bin) are not read, "
        "because loading one can run code. If you trust them, convert them first: load the model "
        "with transformers and call save_pretrained, which writes safetensors."
    )


def in_one_line(error: Exception) -> str:
    """The first lines of an error's message, joined."""
    # A KeyError's text is the repr of its message.
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    reason = " ".join(lines[:REASON_LINES]) or type(error).__name__
    if lines[REASON_LINES:] or reason[REASON_LENGTH:]:
        return f"{reason[:REASON_LENGTH]} …"
    return reason.rstrip(".:")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns whatever a library raises for values of the user into a UserError. what: did not work,
    with the values, as the start of the message."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} ({type(error).__name__}: {in_one_line(error)})") from error


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside this context, an attribute has another value."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def no_progress_bars() -> AbstractContextManager[None]:
    """Silences tqdm, because some progress bars of transformers cannot be switched off."""
    return replaced(tqdm, "__init__", functools.partialmethod(tqdm.__init__, disable=True))


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Halves the time to load a GGUF file, and reads its vocabulary in a quarter.

    Without it, transformers parses the file separately for the config and for the weights, and
    builds the table of tensor names again for every module. The package gguf makes an array for
    each entry of the vocabulary: an array of a mapped file takes several times as long as another.
    """
    import gguf  # optional, see `decode.model.gguf_file.require_gguf`

    class PlainArrays(gguf.GGUFReader):
        """Its arrays are plain views of the mapped file."""

        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._data = mapped.view(np.ndarray)

    with (
        replaced(gguf, "GGUFReader", functools.cache(PlainArrays)),
        replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def config_text(config: Any) -> str:
    """All that a config says, except where it was found."""
    values = config.to_dict()
    return repr({name: values[name] for name in sorted(values) if name != "_name_or_path"})


def has_encoder(model: Any) -> bool:
    """Whether the model is a decoder under an encoder."""
    return bool(model.config.is_encoder_decoder)


def decoder_config(model: Any) -> Any:
    """The config of the part that writes text."""
    if not has_encoder(model):
        return model.config.get_text_config()
    # Its own config, or one for both parts, which names the decoder's sizes apart.
    return model.get_decoder().config.get_text_config(decoder=True)


def adapters_in_use(model: nn.Module) -> tuple[Any, ...]:
    """Which of peft's adapters each of the model's layers applies, and which are merged."""
    layers: Any = (layer for layer in model.modules() if hasattr(layer, "merged_adapters"))
    return tuple(
        (tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters))
        for layer in layers
    )


def longest_text(config: Any) -> int:
    """The length of the longest text, in tokens, that a model with this (text) config supports.

    A model with rotary positions of the type `longrope` (Phi-3) turns all tokens of a text by other
    angles once it is longer than `original_max_position_embeddings`. The keys of the tokens before
    would be wrong from there on, so its texts end there.
    """
    longest: int = getattr(config, "max_position_embeddings", None) or UNLIMITED_POSITIONS
    switches = (
        kind.get("original_max_position_embeddings", longest)
        for kind in rope_kinds(config)
        if kind.get("rope_type") == "longrope"
    )
    return min([longest, *switches])


def decoder_start(model: Any) -> int:
    """The token that a decoder under an encoder starts with, as in `generate()`. Raises UserError
    if the checkpoint names none."""
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            start = getattr(config, name, None)
            if isinstance(start, int):
                return start
    raise UserError(
        f"{type(model).__name__} names no token that its decoder starts with; set "
        "decoder_start_token_id in its generation_config.json"
    )


def input_device(model: Any) -> torch.device:
    """The device of the model's embeddings. The model's inputs, and computations next to the model,
    belong there. `model.device` is the device of the first weight, which may be `meta`."""
    first: torch.device = model.device
    if first.type != "meta":
        return first
    for module in (model.get_input_embeddings(), model):
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return first


def is_hooked(module: nn.Module) -> bool:
    """Whether another library runs code around the forward of a part of the module."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in module.modules()
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether this process holds only a part of some weights (`decode.model.sharded`)."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def complete(tensor: Tensor) -> Tensor:
    """The tensor, or all of it on every process if it is sharded. All processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def require_present(model: nn.Module, what: str) -> None:
    """Raises UserError if weights are offloaded. what: the part that reads the weights, such as
    'heads', for the message."""
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UserError(
            f"{what} must read the target's weights, but some of {type(model).__name__}'s are "
            "offloaded to the CPU or to disk; load the target without offloading, or use a drafter "
            "that does not read them (a small language model, or lookup)"
        )


def require_finite(model: nn.Module, spec: str) -> None:
    """Raises UserError if weights are NaN or infinite, and names the first ones with their layer.
    Weights that are offloaded or quantised are not read. Of a sharded model, each process reads its
    shards."""
    names, extremes = [], []
    for name, parameter in model.named_parameters():
        weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # A quantiser's tensor may have the dtype of the numbers that it stands for.
        if type(weight) not in (Tensor, nn.Parameter):
            continue
        if weight.dtype in _READABLE and weight.device.type != "meta" and weight.numel():
            names.append(name)
            extremes.append(torch.stack(torch.aminmax(weight)).float().cpu())
    sound = torch.stack(extremes).isfinite().all(1).tolist() if extremes else []
    broken = [name for name, good in zip(names, sound, strict=True) if not good]
    if broken:
        listed = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if broken[3:] else "")
        raise UserError(
            f"weights of {spec!r} are NaN or infinite: {listed}; load it in a dtype with more "
            "range, or get its files again"
        )


# Dtypes whose extremes PyTorch can compute.
_READABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
