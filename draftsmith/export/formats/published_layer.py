"""Reads the layers that EAGLE's authors and others published: names, settings, layer numbers, and
the maps of a reduced draft vocabulary.

Published directories differ in names and leave settings out. Here they become the names and
settings of our own exports, so that one schema checks both.

Layer numbers are the commonest error. A number in `captured_layers` means the output of that layer,
counted from 0. In files there are two conventions:
- the top-level keys `eagle_aux_hidden_state_layer_ids` and `aux_hidden_state_layer_ids` (library
  speculators, vLLM) name layers whose input is read;
- in `eagle_config` (SpecForge, Model Optimizer), SGLang takes the numbers as outputs if the first
  is 1, else as inputs. The same is done here.
Each of these keys is read in either place. `target_layer_ids` may mean either.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.base.errors import UserError
from decode.drafters.pard import text_of_used
from decode.model.loading import Target
from decode.model.pretrained import explained
from draftsmith.export.file_schema import is_count, is_id, is_positive
from draftsmith.export.formats.published_keys import ROTARY_KEYS
from heads.layers.layer_config import layer_config
from heads.layers.target_layers import auxiliary_layers, output_layer
from heads.options import LayerSettings

# Keys of a config that name captured layers: at the top, and in `eagle_config`.
LAYER_IDS, OTHER_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
OF_BLOCKS = "target_layer_ids"
NAMING = (LAYER_IDS, OTHER_IDS, OF_BLOCKS)
NESTED = "eagle_config"
EMBEDDINGS = "embed_tokens.weight"
# The names of the one decoder layer in published files.
LAYER_NAMES = ("midlayer", "layers.0")
# Settings that may be left out, and what they must be if they are there.
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "num_key_value_heads": is_count,
    "head_dim": is_count,
    "rms_norm_eps": is_positive,
    "rope_theta": is_positive,
    "rope_parameters": lambda value: _is_rotation(value),
    "rope_scaling": lambda value: _is_rotation(value),
    "original_max_position_embeddings": is_count,
    "max_position_embeddings": is_count,
}
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Families whose layers compute what a llama's do, with norms and biases that tensors show.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
WITHOUT_BIAS = ("attention_bias", "mlp_bias", "qkv_bias")
# The keys of a published layer that are read here, or that say nothing about such a layer: its
# positions are the target's, and it has no experts.
LAYER_KEYS = (
    *(*NEEDED, *WITHOUT_BIAS, *OPTIONAL),
    *("target_hidden_size", "target_vocab_size", "num_hidden_layers", "hidden_act"),
    *("partial_rotary_factor", "layer_types", "sliding_window", "use_sliding_window"),
    *("tie_word_embeddings", "max_window_layers", "decoder_sparse_step", "mlp_only_layers"),
)
# Tensors with a row for each token that is drafted.
ROWS_OF_TOKENS = {"lm_head.weight", "markov_head.markov_w2.weight"}
# Keys of rotary positions in transformers 4.
OLDER_ROTATION = ("rope_theta", "rope_scaling", "original_max_position_embeddings")


def plain_name(name: str, layer: str) -> str | None:
    """Return the name of a published tensor in our exports. layer: the name of the decoder layer
    there.

    Removes NeMo's prefix `model.`. None for rotary frequencies, which follow from the config.

    >>> plain_name("model.fc.weight", "layers.0"), plain_name("midlayer.mlp.up_proj", "layers.0")
    ('fc.weight', 'layers.0.mlp.up_proj')
    """
    plain = name.removeprefix("model.")
    for other in LAYER_NAMES:
        if plain.startswith(f"{other}."):
            plain = f"{layer}.{plain.removeprefix(f'{other}.')}"
    return None if plain.endswith("rotary_emb.inv_freq") else plain


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether published tensors of these names are a layer of EAGLE-3; else it may be EAGLE-1's."""
    plain = {name.removeprefix("model.") for name in names}
    marks = ("midlayer.", "layers.0.hidden_norm.", "d2t")
    return "fc.weight" in plain and any(name.startswith(marks) for name in plain)


def captured_count(contents: Mapping[str, Any]) -> int:
    """Return the number of layers that a drafter captures, by its config."""
    return len(named_layers(contents) or range(3))


def mask_problems(name: str, token: int, target: Target) -> list[str]:
    """Return a problem if texts may contain a published drafter's mask token. name: its key in the
    config."""
    text = text_of_used(token, target)
    if text is None:
        return []
    return [
        f"config.json: {name} is {token}, which {target.name} uses in texts, for {text!r}; "
        "expected an id that no text contains. Look for the target that the drafter was trained for"
    ]


def row_problems(name: str, stored: Tensor | None, table: Tensor, what: str) -> list[str]:
    """Return a problem if a stored tensor is not the target's `table`, up to rounding. None: it is
    not stored. what: the table's name, in words."""
    if stored is None:
        return []
    if stored.shape != table.shape:
        return [
            f"tensor {name} has shape {list(stored.shape)}, expected the target's "
            f"{list(table.shape)}"
        ]
    if not stored.is_floating_point():
        return [f"tensor {name} has dtype {stored.dtype}, expected the target's {table.dtype}"]
    eps = max(torch.finfo(x.dtype).eps for x in (stored, table))
    mine, theirs = stored.float(), table.float().cpu()
    near = (mine - theirs).abs() <= eps * torch.maximum(mine.abs(), theirs.abs()) + 1e-7
    rows = int((~near).any(1).sum())  # a NaN is near nothing
    if not rows:
        return []
    return [
        f"tensor {name} differs from the target's {what} in {rows} of {len(table)} rows; "
        "expected the target's, unquantised"
    ]


def sound_settings(
    contents: Mapping[str, Any], target: Target, layers: Any
) -> tuple[LayerSettings | None, list[str]]:
    """Return the settings of a published layer in which it differs from the target's, and the
    problems with its config. Settings that are left out get llama's values, as in all readers.
    layers: the number of layers to expect."""
    problems = [
        f"config.json has no valid {key} ({contents.get(key)!r})"
        for key in NEEDED
        if not is_count(contents.get(key))
    ]
    hidden = output_layer(target.model).in_features
    expected: dict[str, tuple[Any, ...]] = {
        "hidden_size": (hidden,),
        "target_hidden_size": (None, hidden),
        "vocab_size": (target.vocab_size,),
        "target_vocab_size": (None, target.vocab_size),
        "num_hidden_layers": (None, layers),
        "hidden_act": (None, "silu"),
        "partial_rotary_factor": (None, 1),
        **dict.fromkeys(WITHOUT_BIAS, (None, False)),
    }
    if contents.get("model_type") in CONFIG_MAPPING:
        expected["model_type"] = (None, *LLAMA_LIKE[::-1])
    if "sliding_attention" not in (contents.get("layer_types") or ()):
        expected["use_sliding_window"] = (None, False)
    for key, values in expected.items():
        if contents.get(key) not in values:
            named = "" if len(values) > 1 else f", the target's {key}"
            problems.append(
                f"config.json: {key} is {contents.get(key)!r}, expected {values[-1]!r}{named}"
            )
    problems += [
        f"config.json: {key} is {contents[key]!r}, which is not valid"
        for key, is_valid in OPTIONAL.items()
        if contents.get(key) is not None and not is_valid(contents[key])
    ]
    if problems:
        return None, problems
    heads = contents["num_attention_heads"]
    keys = contents.get("num_key_value_heads") or heads
    if heads % keys:
        return None, [f"config.json: {heads} query heads cannot share {keys} key heads"]
    if hidden % heads:
        return None, [
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and transformers has no such layers"
        ]
    size = contents.get("head_dim") or hidden // heads
    if size > hidden:  # its rotary positions are computed before its tensors are looked at
        return None, [f"config.json: head_dim is {size}, expected at most hidden_size, {hidden}"]
    usual = layer_config(target.model)
    rope, problems = _rotation(contents)
    if problems:
        return None, problems
    # Some rotary settings that are left out follow from it.
    longest = contents.get("max_position_embeddings") or usual.max_position_embeddings
    with explained(f"config.json: its layer cannot have the rotary settings {rope}"):
        llama = LlamaConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            max_position_embeddings=longest,
            rope_parameters=rope,
        )
    if longest != usual.max_position_embeddings and _follows_length(llama.rope_parameters):
        return None, [
            f"config.json: max_position_embeddings is {longest}, from which its rotary positions "
            f"({rope}) follow; expected the target's, {usual.max_position_embeddings}, as all "
            "drafters here have it"
        ]
    settings = LayerSettings(
        intermediate_size=contents["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=size,
        rms_norm_eps=float(contents.get("rms_norm_eps") or llama.rms_norm_eps),
        rope_parameters=dict(llama.rope_parameters),
    )
    return LayerSettings.difference(layer_config(target.model, settings), usual), []


def stated_tokens(config: Mapping[str, Any]) -> int | None:
    """Return the number of draft tokens that a config of the library speculators states, None for
    another config."""
    try:
        (method,) = config["speculators_config"]["proposal_methods"]
        depth = method["speculative_tokens"]
    except (KeyError, TypeError, ValueError):
        return None
    return depth if is_count(depth) else None


def published_window(contents: Mapping[str, Any]) -> tuple[int | None, list[str]]:
    """Return the window of a published layer, None if it sees all of the text, and the problems
    with it. Only layers of the type `sliding_attention` have one, as engines read configs."""
    kinds = set(contents.get("layer_types") or ())
    window = contents.get("sliding_window")
    if not kinds <= {"full_attention", "sliding_attention"}:
        return None, [
            f"config.json: layer_types is {contents['layer_types']!r}, expected full_attention or "
            "sliding_attention"
        ]
    if "sliding_attention" not in kinds:
        return None, []
    if len(kinds) > 1 or not is_count(window):
        return None, [
            f"config.json: layer_types is {contents['layer_types']!r} and sliding_window "
            f"{window!r}; expected one kind of layers, and a window of at least one token"
        ]
    return window, []


def _rotation(contents: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the rotary settings of a config, as `rope_parameters` has them, and the problems with
    them. None: it has none. Some configs have them for transformers 5 and, once more, for 4."""
    older = {key: contents[key] for key in OLDER_ROTATION if contents.get(key)}
    scaling = dict(older.pop("rope_scaling", {}))
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling["type"])
        del scaling["type"]
    older |= scaling
    stated = contents.get("rope_parameters") or older
    different = {key: x for key, x in older.items() if stated.get(key, x) != x}
    if scaling and stated.get("rope_type", "default") == "default" != scaling.get("rope_type"):
        different["rope_scaling"] = scaling
    if not different:
        return {**older, **stated} or None, []
    return None, [
        f"config.json: rope_parameters is {stated}, but beside it stands {different}, and readers "
        "take either; expected the same rotary positions in both"
    ]


def _is_rotation(settings: Any) -> bool:
    """Whether these are the settings of rotary positions that transformers can compute."""
    if not isinstance(settings, dict):
        return False
    kind = settings.get("rope_type", settings.get("type", "default"))
    others = [x for key, x in settings.items() if key not in ("rope_type", "type")]
    known = isinstance(kind, str) and (kind == "default" or kind in ROPE_INIT_FUNCTIONS)
    named = settings.keys() <= ROTARY_KEYS and settings.get("partial_rotary_factor", 1) in (1, None)
    return (
        known and named and all(isinstance(x, (int, float, list, bool, type(None))) for x in others)
    )


def _follows_length(rope: Mapping[str, Any]) -> bool:
    """Whether such rotary positions follow from the longest text that the config names."""
    kind = rope.get("rope_type")
    return kind == "dynamic" or (kind in ("yarn", "longrope") and not rope.get("factor"))


def head_problems(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str
) -> list[str]:
    """Return a problem if the rows of q, k and v are not those of the config's heads."""
    size = config["head_dim"]
    rows = [
        (*(tensors[name].shape if name in tensors else ()), 0)[0]
        for name in (f"{layer}.self_attn.{part}_proj.weight" for part in ("q", "k"))
    ]
    counts = (config["num_attention_heads"], config["num_key_value_heads"])
    if not all(rows) or rows == [count * size for count in counts]:
        return []
    return [
        f"its config groups attention as {counts[0]} query heads and {counts[1]} key heads of size "
        f"{size}, but q_proj has {rows[0]} rows and k_proj {rows[1]}; expected "
        f"{counts[0] * size} and {counts[1] * size}. Look for wrong or missing "
        "num_attention_heads, num_key_value_heads and head_dim"
    ]


def named_layers(contents: Mapping[str, Any]) -> list[int] | None:
    """Return the numbers of captured layers as a config names them, None if it names none. Raises
    UserError if they are no numbers of layers, or others in another place."""
    named = _namings(contents)
    for place, numbers in named.items():
        if not isinstance(numbers, list) or not all(map(is_id, numbers)):
            raise UserError(f"{place} is {numbers!r}; expected a list of layer numbers")
        first, expected = next(iter(named.items()))
        if numbers != expected:
            raise UserError(
                f"the config names the layers {expected} in {first} and {numbers} in {place}; "
                "expected the same ones"
            )
    return next(iter(named.values()), None)


def _namings(contents: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of its captured layers, by the place. Nothing and [] name none."""
    nested = contents.get(NESTED)
    places = {"": contents, f"{NESTED}.": nested if isinstance(nested, Mapping) else {}}
    return {
        f"{place}{key}": settings[key]
        for place, settings in places.items()
        for key in NAMING
        if settings.get(key) not in (None, [])
    }


def captured_layers(
    contents: Mapping[str, Any], target: Target, convention: str | None
) -> list[int] | None:
    """Return the layers whose outputs are captured, None for those that engines capture by default.

    convention: what the numbers mean; None for the rule at the top of this file. Raises UserError
    for numbers that may mean either, and for layers that the target does not have.
    """
    named = named_layers(contents)
    if named is None:
        return None
    count = target.model.config.get_text_config().num_hidden_layers
    places = _namings(contents)
    at_top = LAYER_IDS in places or OTHER_IDS in places
    try:
        usual: tuple[int, ...] | None = auxiliary_layers(count)
    except UserError:  # a target with few layers has no usual ones
        usual = None
    measure = "Measure both with --prompts: --layer-ids inputs and --layer-ids outputs"
    if convention is None and at_top and tuple(named) == usual:
        raise UserError(
            f"the config names the layers {named}. As inputs, which its key means, they are one "
            "lower than the layers that engines capture by default, so they may be meant as "
            f"outputs. {measure}"
        )
    if convention is None and all(place.endswith(OF_BLOCKS) for place in places):
        raise UserError(
            f"the config names the layers {named} in {OF_BLOCKS}, a key of block drafters, so they "
            f"may be meant as inputs or as outputs. {measure}"
        )
    if convention is None:
        convention = "outputs" if not at_top and named[0] == 1 else "inputs"
    outputs = [number - (convention == "inputs") for number in named]
    if outputs != sorted(set(outputs)) or outputs[0] < 0 or outputs[-1] >= count:
        first, last = (1, count) if convention == "inputs" else (0, count - 1)
        advice = ". If they are outputs: --layer-ids outputs" if outputs[0] < 0 else ""
        raise UserError(
            f"the config names the {convention} of layers {named}; expected numbers from {first} "
            f"to {last} in ascending order, because {target.name} has {count} layers{advice}"
        )
    return None if tuple(outputs) == usual else outputs


def layer_differences(layer: LayerSettings | None, captured: list[int] | None) -> list[str]:
    """Return notes on how a drafter's layer differs from what its target's sizes suggest."""
    notes = []
    if layer is not None:
        settings = ", ".join(f"{k} {v}" for k, v in layer.model_dump(exclude_none=True).items())
        notes.append(f"its layer has other settings than the target's: {settings}")
    if captured is not None:
        notes.append(f"it reads the outputs of layers {captured}, not the usual ones")
    return notes


def are_ascending_ids(ids: Tensor, vocab_size: int) -> bool:
    """Whether these are token ids of the vocabulary in ascending order."""
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (ids.diff() > 0).all())


def map_value_problems(weights: dict[str, Tensor], vocab_size: int) -> list[str]:
    """Return the problems with the values of maps of the right kinds and shapes."""
    if "d2t" not in weights:
        return []
    ids = ids_of_offsets(weights["d2t"])
    if not are_ascending_ids(ids, vocab_size):
        problem = "d2t does not give distinct token ids in ascending order"
        if are_ascending_ids(weights["d2t"], vocab_size):
            problem += ": it holds the ids, expected each id minus its row"
        return [problem]
    if "t2d" not in weights:
        return []
    has_row = weights["t2d"].nonzero()[:, 0]
    return [] if torch.equal(has_row, ids) else ["t2d does not mark the tokens of d2t"]


def map_problems(tensors: dict[str, Tensor], rows: Any, vocab_size: Any) -> list[str]:
    """Return the problems with the kinds of a published drafter's maps. Maps of a complete
    vocabulary are removed: they say nothing. Rows in another order than their tokens, as those of
    ModelOpt, which come by frequency, are put in order of the tokens."""
    maps = {"d2t": (torch.int64, rows), "t2d": (torch.bool, vocab_size)}
    problems = []
    for name, (dtype, size) in maps.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tensor.dtype == torch.int32:
            tensor = tensors[name] = tensor.long()
        if tensor.dtype != dtype or tensor.shape != (size,):
            problems.append(
                f"tensor {name} is {tensor.dtype} of shape {list(tensor.shape)}, expected {dtype} "
                f"of shape [{size}]"
            )
    if not problems and rows == vocab_size:
        is_identity = not tensors.get("d2t", torch.zeros(1)).any()
        if is_identity and tensors.get("t2d", torch.ones(1)).all():
            tensors.pop("d2t", None)
            tensors.pop("t2d", None)
    if not problems and "d2t" in tensors:
        ids, order = ids_of_offsets(tensors["d2t"]).sort()
        if are_ascending_ids(ids, vocab_size):
            tensors["d2t"] = ids - torch.arange(rows)
            for name in ROWS_OF_TOKENS & tensors.keys():
                tensors[name] = tensors[name][order]
    return problems


def vocabulary_maps(ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """Return the maps of a reduced draft vocabulary: `d2t`, int64 [V'], a token's id minus its row,
    and `t2d`, bool [V], which tokens have a row. None, a complete one, has no maps."""
    if ids is None:
        return {}
    has_row = torch.zeros(vocab_size, dtype=torch.bool)
    has_row[ids.cpu()] = True
    return {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": has_row}


def ids_of_offsets(offsets: Tensor) -> Tensor:
    """Return the token ids of a map, int64 [V']: offsets plus rows."""
    return offsets + torch.arange(len(offsets))
