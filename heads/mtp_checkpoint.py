"""The module of multi-token prediction in a target's own checkpoint: its names, and reading it.

transformers leaves these tensors out when it loads a model for ordinary decoding. Its `MtpModel`
reads them. It fills in no missing tensor, but it also reads a checkpoint whose names half match, so
everything is compared here first, by name and shape, from the headers of the files.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpModel

from decode.base.errors import UserError
from decode.model.loading import Target, stored_directory
from decode.model.pretrained import explained, no_progress_bars
from heads.heads_directory import build_heads
from heads.layers.family_layer import mtp_config
from heads.mtp_heads import MtpHeads
from heads.options import HeadOptions

INDEX = "model.safetensors.index.json"
# Dtypes of weights that are numbers themselves, as safetensors names them.
PLAIN = ("F64", "F32", "F16", "BF16")
# The target's own output layer and embeddings, which some checkpoints store once more.
COPIES = ("shared_head.head.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class Layout:
    """Where a family keeps its module.

    place: the tensors of layer k, with {n} for k plus the number of the target's layers, and {k}.
    names: the tensors beside the decoder layer, by their names in `MtpLayer`; for a family that
    keeps them outside of the layers, with their full names. count: how the config names the number
    of layers; None: there is one.
    """

    place: str
    names: Mapping[str, str]
    count: str | None

    def holds(self, name: str, layers: int) -> bool:
        """Whether a tensor of this name is the module's, in a target with `layers` layers."""
        return re.search(self.pattern(layers), name) is not None

    def pattern(self, layers: int) -> str:
        """A regular expression for all names of the module, in a target with `layers` layers."""
        if "{k}" in self.place:
            return "^" + re.escape(self.place.split("layers.")[0])
        numbers = "|".join(str(number) for number in range(layers, layers + 100))
        return rf"^model\.layers\.({numbers})\."


_AFTER = Layout(
    "model.layers.{n}.",
    {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"},
    "num_nextn_predict_layers",
)
_APART = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}
LAYOUTS = {
    "deepseek_v3": _AFTER,
    "glm4_moe": _AFTER,
    "mellum": Layout("mtp.layers.{k}.", _APART, "num_nextn_predict_layers"),
    "qwen3_next": Layout("mtp.layers.{k}.", _APART, None),
    "qwen3_5_text": Layout("mtp.layers.{k}.", _APART, "mtp_num_hidden_layers"),
    "qwen3_5_moe_text": Layout("mtp.layers.{k}.", _APART, "mtp_num_hidden_layers"),
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of a checkpoint: its file, dtype as safetensors names it, and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def mtp_layout_of(config: Any, name: str) -> Layout:
    """The layout of a target's family. Raises UserError for other families."""
    kind = config.get_text_config(decoder=True).model_type
    if kind not in LAYOUTS:
        raise UserError(
            f"{name} is of the family {kind}, whose module of multi-token prediction is not known "
            f"here; known families: {', '.join(LAYOUTS)}. Train mtp heads for it instead (heads: "
            "{type: mtp})"
        )
    return LAYOUTS[kind]


def checkpoint_directory(target: Target) -> Path:
    """The directory with the target's files. Raises UserError for a target from a GGUF file."""
    path = stored_directory(target)
    if path is None:
        raise UserError(
            f"the target {target.name} is not a directory with safetensors, so it has no module of "
            "multi-token prediction that can be read; name the directory or the hub id of its "
            "checkpoint"
        )
    return path


def stored_module(directory: Path, layout: Layout, layers: int) -> dict[str, Stored]:
    """The tensors of the module in a checkpoint, by name. layers: the target's. Raises UserError
    for a tensor that is in two files: nothing says which of them belongs to the target."""
    found: dict[str, Stored] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                if layout.holds(name, layers):
                    if name in found:
                        raise UserError(
                            f"{directory} has {name} in {found[name].file.name} and in "
                            f"{file.name}; one of them is left from another revision. Remove the "
                            "file that the checkpoint does not need, or download it again"
                        )
                    part = opened.get_slice(name)
                    found[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
    return found


def named_as_stored(
    heads: MtpHeads, model: Any, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights of heads by the names, and in the parts, that the checkpoint has. A fused tensor of
    all experts becomes one tensor for each matrix."""
    layout, count = mtp_layout_of(model.config, ""), own_layers(model)
    renamed = {_stored_name(layout, name, count): x for name, x in weights.items()}
    holder: Any = nn.Module()
    holder.config = heads.config
    holder._weight_conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if type(conversion).__name__ != "PrefixChange"
    ]
    reverted: dict[str, Tensor] = revert_weight_conversion(holder, renamed)
    return reverted


def _stored_name(layout: Layout, name: str, count: int) -> str:
    """layers.0.enorm.weight → model.layers.61.enorm.weight, and so on. count: the target's
    layers."""
    _, number, part, *rest = name.split(".")
    place = layout.place.format(n=count + int(number), k=number)
    if part == "mtp_block":
        return place + ".".join(rest)
    own = layout.names[part]
    return ".".join([own if "{k}" in layout.place else place + own, *rest])


def own_layers(model: Any) -> int:
    """The number of layers of a target, without those of its module."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def stored_layers(target: Target) -> int:
    """The number of layers of the module, as the target's config says. Raises UserError for a
    family that is not known, and for a config that says there is none."""
    layout = mtp_layout_of(target.model.config, target.name)
    config = target.model.config.get_text_config(decoder=True)
    count = 1 if layout.count is None else getattr(config, layout.count, None)
    if not count:
        found = _layers_in_files(target, layout)
        if found:
            raise UserError(
                f"{target.name} has the tensors of a module of multi-token prediction of {found} "
                f"layers, but its config does not say so ({layout.count} is {count}). Set "
                f"{layout.count}: {found} in its config.json"
            )
        raise UserError(
            f"the config of {target.name} says that it has no module of multi-token prediction "
            f"({layout.count} is {count}); train mtp heads for it (heads: {{type: mtp}})"
        )
    return int(count)


def _layers_in_files(target: Target, layout: Layout) -> int:
    """The number of layers of the module that the target's files hold, whatever its config says."""
    directory = stored_directory(target)
    if directory is None:
        return 0
    count = own_layers(target.model)
    names = stored_module(directory, layout, count)
    parts = re.split(r"({[nk]})", layout.place)
    within = re.compile("".join(r"(\d+)" if x[:1] == "{" else re.escape(x) for x in parts))
    return len({found[1] for name in names if (found := within.match(name))})


def has_module(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint has a tensor of a module. config: its config.json. names: its tensors'
    names."""
    text = config.get("text_config") or config
    kind, layers = text.get("model_type"), text.get("num_hidden_layers")
    if kind not in LAYOUTS or not isinstance(layers, int):
        return False
    return any(LAYOUTS[kind].holds(name, layers) for name in names)


def module_heads(target: Target, options: Mapping[str, Any]) -> MtpHeads:
    """Heads in the shape of the target's module, without weights. options: those that the user
    chose. Raises UserError as `read_module` does for a target and options."""
    layers = stored_layers(target)
    chosen = HeadOptions.of({"type": "mtp", "depth": layers} | dict(options) | {"layers": layers})
    if options.get("layers", layers) != layers:
        raise UserError(
            f"layers is {options['layers']}, but the module of {target.name} has {layers}; leave "
            "layers out"
        )
    heads = build_heads(chosen, target, None, "meta")
    assert isinstance(heads, MtpHeads)
    return heads


def read_module(
    target: Target, options: Mapping[str, Any], directory: Path | None = None
) -> MtpHeads:
    """The module in the target's checkpoint, as heads on the CPU in the target's dtype, without the
    weights borrowed from the target.

    options: those of `MtpOptions`, but for `layers`, which is the module's. directory: another
    checkpoint to read the module from, such as that before a fine-tuning. Raises UserError for a
    family or checkpoint without a module, one that is partial or quantised, and tensors with other
    names or shapes than the config says.
    """
    heads = module_heads(target, options)
    directory = directory or checkpoint_directory(target)
    check_module(target, heads, directory)
    layers, model = len(heads.layers), copy.copy(target.model)
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    made = mtp_config(model, layers)
    text.num_mtp_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(made, name, None) is not None:
            setattr(text, f"mtp_{name}", getattr(made, name))
    config.name_or_path = str(directory)
    model.config = config
    layout = mtp_layout_of(config, target.name)
    model._keys_to_ignore_on_load_unexpected = [layout.pattern(own_layers(model))]
    with explained(f"the module of {target.name} cannot be read"), no_progress_bars():
        read = MtpModel.from_pretrained(model)
    heads.layers.load_state_dict(read.layers.state_dict(), assign=True)
    return heads


def check_module(target: Target, heads: MtpHeads, directory: Path) -> dict[str, Stored]:
    """The tensors of the module in a checkpoint, without copies of the target's own. Raises
    UserError unless they are those of the heads."""
    layout, layers = mtp_layout_of(target.model.config, target.name), own_layers(target.model)
    found = stored_module(directory, layout, layers)
    if not found:
        raise UserError(
            f"{directory} has no tensor of a module of multi-token prediction, although its config "
            f"says that there is one: no name begins with {layout.place.format(n=layers, k=0)}. "
            "Fine-tuning tools often leave it out; take it from the original checkpoint, or train "
            "mtp heads (heads: {type: mtp})"
        )
    found = {name: x for name, x in found.items() if not name.endswith(COPIES)}
    quantised = sorted(name for name, x in found.items() if x.dtype not in PLAIN)
    if quantised:
        raise UserError(
            f"the module in {directory} is quantised: {quantised[0]} is "
            f"{found[quantised[0]].dtype}, expected one of {', '.join(PLAIN)}; use the checkpoint "
            "in 16 bits"
        )
    expected = named_as_stored(heads, target.model, heads.state_dict())
    missing, other = sorted(expected.keys() - found), sorted(found.keys() - expected)
    if missing or other:
        lacks = f"lacks {_some(missing)}" if missing else ""
        has = f"has {_some(other)}, which the config does not know" if other else ""
        raise UserError(
            f"the module in {directory} {' and '.join(filter(None, (lacks, has)))}; its names are "
            "those of another revision, or the checkpoint is not complete. Download it again"
        )
    for name, tensor in expected.items():
        if tuple(tensor.shape) != found[name].shape:
            raise UserError(
                f"{name} in {directory} is {list(found[name].shape)}, expected "
                f"{list(tensor.shape)} by its config; use the config and the weights of one model"
            )
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more tensors" if names[2:] else ""
    return ", ".join(names[:2]) + more
