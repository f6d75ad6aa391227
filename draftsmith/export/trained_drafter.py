"""A trained drafter that is exported: a small LM with an output layer for every token, or heads."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.base.artifact import MANIFEST, verify_directory
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.draft_vocabulary import load_vocabulary
from decode.drafters.pard import small_lm_drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.model.forward.low_rank_output import expand
from decode.model.identity import token_count
from decode.model.loading import DTYPES, Target, load_model_and_tokenizer
from decode.model.model_names import EMBEDDED, EMBEDDED_PREFIX
from decode.opening.directory import DRAFTER_FILE, describe_drafter
from heads.heads_directory import build_heads, make_ready, read_heads, stored_options
from heads.heads_drafter import HeadsDrafter
from heads.heads_module import Heads
from heads.kinds import HEADS
from heads.layers.target_layers import output_layer
from heads.options import HeadOptions

# Untrained drafters have nothing to export. Engines have their own options for prompt lookup.
BUILT_IN = (
    "engines have prompt lookup built in: transformers `prompt_lookup_num_tokens`, vLLM "
    '`{"method": "ngram"}`, llama-server `--spec-type ngram-simple`'
)


@dataclass
class LoadedSmallLM:
    """A small language model with its tokenizer, ready to be written.

    reduced_to: the size of its reduced draft vocabulary in tokens; None if it had none.
    filled_from: the source of the rows of all other tokens. dtype: the dtype of the weights as
    stored.
    """

    model: PreTrainedModel
    tokenizer: Any
    dtype: str
    reduced_to: int | None = None
    filled_from: str | None = None


@dataclass(frozen=True)
class TrainedDrafter:
    """A drafter directory that was checked against its manifest.

    description: the contents of `drafter.json`. in_run: its directory in the run that trained it,
    if it is elsewhere.
    """

    path: Path
    description: dict[str, Any]
    in_run: Path | None = field(default=None, kw_only=True)

    @classmethod
    def open(cls, path: Path) -> "TrainedDrafter":
        """Open a directory. Raises UserError if it is not a trained drafter or is damaged."""
        if (path / DRAFTER_FILE).exists():
            return cls(path, describe_drafter(path))
        if str(path).partition(":")[0] in DRAFTERS and not path.exists():
            raise UserError(
                f"drafter {path} is not trained, so there is nothing to export; {BUILT_IN}"
            )
        if (path / MANIFEST).exists():
            verify_directory(path)
            raise UserError(
                f"{path} has no {DRAFTER_FILE}: draftsmith did not train it, or it is already an "
                "export. Give the drafter/ directory of a stage"
            )
        problem = "is not a drafter directory" if path.is_dir() else "does not exist"
        raise UserError(
            f"{path} {problem}: expected the drafter/ directory of a stage, with {DRAFTER_FILE}. A "
            "plain model needs no export; engines read it directly"
        )

    def __str__(self) -> str:
        return str(self.path)

    @property
    def kind(self) -> str:
        return str(self.description["kind"])

    @property
    def target(self) -> dict[str, Any]:
        """The description of the target that it was trained for."""
        return self.description["target"]

    @property
    def provenance(self) -> dict[str, Any]:
        return self.description.get("provenance") or {}

    @property
    def has_backbone(self) -> bool:
        """Whether it was trained together with its target."""
        return bool(self.provenance.get("drift"))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return json.loads((self.path / "config.json").read_text(encoding="utf-8"))

    @cached_property
    def options(self) -> Any:
        """The options of its heads; None for a small LM."""
        return stored_options(self.path) if self.kind in HEADS else None

    @property
    def used_options(self) -> list[str]:
        """The names of the options of its heads that are set, none for a small LM."""
        return [name for name, value in self.options or () if value]

    @property
    def is_reduced(self) -> bool:
        """Whether it has a reduced draft vocabulary."""
        rows = self.config["vocab_size"]
        is_reduced = self.config.get("draft_vocab_size", rows) < rows
        return is_reduced or (self.path / "draft_vocabulary.safetensors").exists()

    def heads(self, layout: str, target: Target) -> Heads:
        """Return its heads in their stored dtype, with full output layers, and with the modules
        that they borrow from the target in float32. Raises UserError if the target's output layer
        has a bias, which no layout of heads can hold."""
        if output_layer(target.model).bias is not None:
            raise UserError(
                f"the output layer of {target.name} has a bias, which format {layout} cannot hold"
            )
        heads = read_heads(self.path, target)
        expand(heads.output.layers)
        heads.borrow(target.model, torch.float32)
        return heads

    def small_lm(self, target: Target | None) -> LoadedSmallLM:
        """Return its small LM, with an output layer for the full vocabulary.

        A reduced draft vocabulary is filled up. Tokens in it keep their rows. All other tokens get
        the target's row if the hidden sizes are equal, else the row from before the reduction. Rows
        of zeros would not work: they give logit 0, which does not mean "never". Raises UserError
        without a target that is needed for that.
        """
        dtype = self.config.get("dtype") or "float32"
        if dtype not in DTYPES:
            raise UserError(f"{self} has weights in {dtype}; expected one of {', '.join(DTYPES)}")
        model, tokenizer, _ = load_model_and_tokenizer(str(self), dtype=dtype, device="cpu")
        reduced = load_vocabulary(self.path, model)
        _resize(model, tokenizer, self.target["fingerprint"]["vocab_size"], reduced is None)
        if reduced is None:
            return LoadedSmallLM(model, tokenizer, dtype)
        layer, full_layer = model.get_output_embeddings(), reduced.full
        filled_from = "the output layer it had before it was reduced"
        rows = full_layer.weight.detach()
        if target is not None:
            target_rows = target.model.get_output_embeddings().weight.detach()
            if target_rows.shape == rows.shape and layer.bias is None:
                rows, filled_from = target_rows.to(rows), "the target's output layer"
        ids = reduced.ids.cpu()
        weight = rows.clone()
        weight[ids] = layer.weight.detach()
        model.set_output_embeddings(full_layer)
        if not torch.equal(weight, full_layer.weight):
            has_bias = layer.bias is not None
            filled_layer = nn.Linear(full_layer.in_features, full_layer.out_features, has_bias)
            filled_layer.to(full_layer.weight.dtype)
            with torch.no_grad():
                filled_layer.weight.copy_(weight)
                if has_bias:
                    filled_layer.bias.copy_(full_layer.bias)
                    filled_layer.bias[ids] = layer.bias
            model.set_output_embeddings(filled_layer.requires_grad_(False))
            model.config.tie_word_embeddings = False
        return LoadedSmallLM(model, tokenizer, dtype, len(ids), filled_from)


def _resize(model: PreTrainedModel, tokenizer: Any, rows: int, is_complete: bool) -> None:
    """Give embeddings and output layer the target's number of rows, because engines compare it.

    Rows past the tokenizer's last id are no tokens. Those that are added repeat the last row, which
    is padding or the last special token, so they are as unlikely. Raises UserError for a drafter
    with a reduced output layer, and if there are fewer rows than tokens.
    """
    config = model.config.get_text_config()
    before: int = config.vocab_size
    if before == rows:
        return
    tokens = token_count(tokenizer, before)
    if not is_complete or rows < tokens:
        raise UserError(
            f"the drafter has {before} rows for {tokens} tokens, its target {rows}, and engines "
            "need the same number; train one without a reduced draft vocabulary, on this target"
        )
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for weight in (layer.weight, getattr(layer, "bias", None)):
                if weight is not None and rows > before:
                    weight[before:] = weight[before - 1]


def load_small_lm(path: Path, target: Target) -> SmallLMDrafter:
    """Load a model directory or GGUF file as a drafter, in the target's dtype and on its device. A
    model with a mask token drafts in parallel."""
    dtype = dtype_name(target.dtype)
    loaded = load_model_and_tokenizer(str(path), dtype=dtype, device=str(target.device))
    return small_lm_drafter(loaded.model, target)


def target_hub_id(name: str) -> str | None:
    """Return the hub id of a target. name: the name it was loaded with. None for a local file."""
    if name.startswith(EMBEDDED_PREFIX):
        known = name.removeprefix(EMBEDDED_PREFIX)
        return EMBEDDED[known].hub_id if known in EMBEDDED else None
    path = Path(name)
    is_local = path.is_absolute() or name.startswith((".", "~")) or path.exists()
    return None if is_local or name.endswith(".gguf") or name.count("/") != 1 else name


def public_name(name: str) -> str:
    """Return a target's name to show to others. A local path is cut to its last part: the rest is
    private and helps nobody else."""
    return name if target_hub_id(name) else Path(name).name


# Signs that end a path in a text. A directory may have them too: before more of its name, and
# brackets in pairs.
_ENDS = r",=:;\[\]{}\"'"
_MORE = rf"(?=[^\s{_ENDS}/\\])"
_GROUP = r"\[[^\[\]/\\\n]*\]|{[^{}/\\\n]*}"
_SIGN = rf"(?:{_GROUP}|(?!{_GROUP})[{_ENDS}]{_MORE})"
# A directory, in which blanks may be; and one without blanks, at the begin of a path and in it. A
# comma there may be between two names of a hub.
_PART = (
    rf"(?:(?:[^\s{_ENDS}/\\]|{_SIGN})(?:(?:[^{_ENDS}/\\\n]|{_SIGN})*(?:[^\s{_ENDS}/\\]|{_SIGN}))?"
    r"[/\\])"
)
_BARE = rf"(?:[^\s(){_ENDS}/\\]+[/\\])"
_INNER = rf"(?:(?:[^\s(){_ENDS}/\\]|(?!,){_SIGN})+[/\\])"
# What a path may begin with: a user's directory, or a variable of a shell.
_ROOT = r"(?:~[\w.+-]+|\$\{[^}\n]+\}|\$(?:env:)?[A-Za-z_]\w*|%\w+%)[/\\]"
# Directories in a text: `/a/b/` of /a/b/c, `../` of ../c, also behind `=`, `[` or the like; not of
# a URL, but for one without a host, as `sqlite:////a/b/c`. Without a sign where a path begins there
# are two or more: org/name is a hub's.
_DIRECTORIES = re.compile(
    rf"(?<![\w./\\~])(?:{_ROOT}{_PART}*|\.{{1,2}}[/\\]{_PART}*"
    rf"|(?:(?:[\w+]{{0,16}}(?i:file)://[^\s/]*|[\w+]{{1,16}}://(?=/)|~|[A-Za-z]:|\\)?[/\\])(?:(?<=//)/+)?{_PART}+"
    rf"|(?!\d+[/\\]){_BARE}{_INNER}+(?=[^\s/\\]))"
)


def without_directories(value: Any) -> Any:
    """Return a JSON value without the directories of this machine: each path in it is cut to its
    last part. The rest is private and helps nobody else. Relative ones too.

    >>> without_directories({"start": "/home/me/run/drafter", "said": "read ~/a/b.json", "n": [1]})
    {'start': 'drafter', 'said': 'read b.json', 'n': [1]}
    """
    if isinstance(value, Mapping):
        return {without_directories(key): without_directories(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [without_directories(x) for x in value]
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    is_path = Path(text).is_absolute() or text.startswith("~/") or os.path.exists(text)
    return Path(text).name if is_path and "\n" not in text else _DIRECTORIES.sub("", text)


def heads_drafter(
    kind: type[HeadsDrafter],
    options: HeadOptions,
    vocabulary: Tensor | None,
    state: Mapping[str, Tensor],
    target: Target,
) -> HeadsDrafter:
    """Build a drafter from exported heads. vocabulary: token ids of a reduced draft vocabulary."""
    heads = rebuild_heads(options, vocabulary, state, target)
    make_ready(heads, target, target.dtype)
    return kind(heads, target.vocab_size)


def rebuild_heads(
    options: HeadOptions, vocabulary: Tensor | None, state: Mapping[str, Tensor], target: Target
) -> Heads:
    """Build heads from their stored weights, which keep their dtype."""
    heads = build_heads(options, target, vocabulary, "meta")
    heads.load_state_dict(state, assign=True)
    return heads


def stored_dtype(heads: Heads) -> str:
    """Return the name of the dtype that the weights of heads are stored in."""
    return dtype_name(next(heads.parameters()).dtype)


def require_fitting_target(config: Mapping[str, Any], directory: Path, target: Target) -> None:
    """Raise UserError unless the sizes in an exported config match the target's."""
    hidden = output_layer(target.model).in_features
    if (config["hidden_size"], config["vocab_size"]) != (hidden, target.vocab_size):
        raise UserError(
            f"the heads {directory} are for hidden size {config['hidden_size']} and "
            f"{config['vocab_size']} tokens, but the target {target.name} has {hidden} and "
            f"{target.vocab_size}; use the target they were made for"
        )


def copy_to_cpu(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copy tensors to the CPU without shared memory. Weights get this dtype; others keep theirs."""

    def copied(tensor: Tensor) -> Tensor:
        stored_dtype: torch.dtype = DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", stored_dtype, copy=True).contiguous()

    return {name: copied(tensor) for name, tensor in tensors.items()}
