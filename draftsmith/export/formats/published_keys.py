"""Which keys of a published config are known. No other key is ignored in silence.

A key may change what a drafter computes: a norm, a scale, the place of its first token. So each key
of a config must be read, or be known to change nothing. All others are refused by name, unless the
user says that they change nothing (`--ignore-keys`).
"""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

# Keys by the place where they stand: "" is the top of a config, `a.b` the object b in the object a.
Keys = Mapping[str, Collection[str]]

# About the file, the training, the tokens and the generation of a model: they change nothing in
# what its layers compute. Most are of transformers 4, which writes them into every config. In an
# object of a config, such as `eagle_config` or rotary settings, the same word may mean anything.
_HARMLESS = """
    _name_or_path _attn_implementation _attn_implementation_autoset attn_implementation
    architectures auto_map base_model_name_or_path dtype model_name model_type name_or_path
    target_model_type tokenizer_class torch_dtype transformers_version version
    attention_dropout embd_pdrop attn_pdrop resid_pdrop hidden_dropout initializer_range
    router_aux_loss_coef output_router_logits gradient_checkpointing embed_requires_grad
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label label2id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate suppress_tokens task_specific_params temperature
    tf_legacy_loss top_k top_p torchscript typical_p use_bfloat16 use_cache use_return_dict
    pretraining_tp
"""
HARMLESS = frozenset(_HARMLESS.split())
# What transformers reads of rotary settings, and where they stand.
_ROTARY = """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings
    attention_factor beta_fast beta_slow mscale mscale_all_dim truncate low_freq_factor
    high_freq_factor short_factor long_factor
"""
ROTARY_KEYS = frozenset(_ROTARY.split())
_ROTATIONS = ("rope_parameters", "rope_scaling")
# How code reads a key of a config. Any other word in it, such as `scaling`, is no key. Rotary
# settings are read from an object of that name, and not as the config's own keys are.
_READS_ROTARY = re.compile(r"\brope_\w+(?:\[\w+\])?(?:\[|\.get\()[\"'](\w+)[\"']")
_READS = re.compile(
    r"config\.(\w+)"
    r"|\b(?:getattr|hasattr|pop|get|setdefault)\(\s*(?:[\w.]+,\s*)?[\"'](\w+)[\"']"
)


def unknown_keys(config: Mapping[str, Any], known: Keys, place: str = "") -> list[str]:
    """Return the keys of a config that are not known, nor harmless at its top, sorted; those of an
    object in it, or in a list in it, as `object.key`. Keys with null or something empty say
    nothing, and are left out. An object for which `known` has no keys is not looked into.

    >>> unknown_keys({"scale": 2, "norm": None, "eagle_config": {"x": 1}}, {"": ["eagle_config"]})
    ['scale']
    >>> unknown_keys({"dtype": 1, "a": {"y": 1, "dtype": 2}}, {"": ["a"], "a": ["y"]})
    ['a.dtype']
    >>> unknown_keys({"a": [{"x": 1}, [{"y": 2, "z": 3}]]}, {"": ["a"], "a": ["y"]})
    ['a.x', 'a.z']
    """
    unknown, here = set(), {*known[place], *(() if place else HARMLESS)}
    for key, value in config.items():
        path = f"{place}.{key}" if place else key
        if value is None or value in ("", [], {}):
            continue
        if key not in here:
            unknown.add(path)
        elif path in known:
            for inner in _objects(value):
                unknown |= set(unknown_keys(inner, known, path))
    return sorted(unknown)


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """A value that is an object, or the objects in a list."""
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _objects(one)


def model_keys(config: Mapping[str, Any]) -> dict[str, Collection[str]]:
    """Return the keys that transformers knows in the config of a complete model, by place. None of
    a model that it does not know."""
    return _keys_of(_class_of(config, None), config, "")


def unread_by_transformers(config: Mapping[str, Any]) -> list[str]:
    """Return the unknown keys of a complete model's config, as `unknown_keys` writes them, that
    transformers' code for this family does not read. Models read some keys that no config lists."""
    made = _class_of(config, None)
    unknown = unknown_keys(config, model_keys(config))
    if made is None or not unknown:
        return unknown
    folder = Path(inspect.getfile(made)).parent
    files = [*folder.glob("*.py"), *folder.parent.parent.glob("modeling_rope_utils.py")]
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    read = {key for keys in _READS.findall(code) for key in keys if key}
    rotary = {*_READS_ROTARY.findall(code)}
    return [
        path
        for path in unknown
        if path.rpartition(".")[2] not in (rotary if {*path.split(".")} & {*_ROTATIONS} else read)
    ]


def _class_of(
    config: Mapping[str, Any], usual: type[PreTrainedConfig] | None
) -> type[PreTrainedConfig] | None:
    kind = config.get("model_type")
    # The mapping is filled when it is read, and its `get` reads nothing.
    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else usual  # noqa: SIM401


def _keys_of(
    made: type[PreTrainedConfig] | None, config: Mapping[str, Any], place: str
) -> dict[str, Collection[str]]:
    if made is None or not hasattr(made, "sub_configs"):
        return {place: ()}
    listed = {*made().to_dict(), *made.attribute_map, *HARMLESS}
    if listed & {*_ROTATIONS}:  # either is read, and looked into below
        listed |= {*_ROTATIONS}
    keys: dict[str, Collection[str]] = {place: listed}
    for name, usual in made.sub_configs.items():
        inner = config.get(name)
        if isinstance(inner, Mapping):
            path = f"{place}.{name}" if place else name
            keys |= _keys_of(_class_of(inner, usual), inner, path)
    for name in _ROTATIONS:
        if isinstance(inner := config.get(name), Mapping):
            path = f"{place}.{name}" if place else name
            # Some families have such settings for each type of layer.
            types = {key for key, value in inner.items() if isinstance(value, Mapping)}
            keys[path] = types | ROTARY_KEYS
            keys |= {f"{path}.{one}": ROTARY_KEYS for one in types}
    return keys
