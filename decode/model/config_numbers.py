"""Numbers of a model's config that are of the right type and mean nothing.

transformers makes a model of them. It then computes NaN, or fails in the middle of a text.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from decode.base.errors import UserError

# Infinite numbers mean "no limit" in such a key (`time_step_limit`) and nothing elsewhere.
LIMIT = "limit"
# What a number must be where its key says so. The parts for images and sound, which do not run, and
# for quantisers have other habits: `group_size: -1` of GPTQ is one group a row.
ABOVE_0 = re.compile(r"theta$|_position_embeddings$|^max_.*positions$")
# A text is a token and one more.
ABOVE_1 = re.compile(r"^(max_position_embedding|n_position)s$")
NOT_BELOW_0 = re.compile(r"^(num|max|n)_|(^|_)(size|dim|heads|rank|window|eps|epsilon)$")
ROPE = "rope_parameters"
OTHERS = {"vision_config", "audio_config", "quantization_config", "compression_config"}
# Experts of a layer, and those of them that a token goes to. A single expert has no router: it is
# the plain layer of a dense Jamba.
EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
CHOSEN = re.compile(r"experts_per_tok(en)?$|^moe_top_?k$|^top_k_experts$")


def require_sound_numbers(source: str, config: Any) -> None:
    """Raise UserError for a number of a config of transformers that is not finite, has a sign that
    its key excludes, for factors of rotary positions that do not fit each other, or if it chooses
    more experts than there are."""
    for key, value, holders in _numbers(config.to_dict(), ()):
        rope = ROPE in holders
        unbounded = isinstance(value, float) and not math.isfinite(value)
        if unbounded and not (LIMIT in key and not math.isnan(value)):
            wanted = "a finite number"
        elif OTHERS & {*holders}:
            continue
        elif value <= 1 and ABOVE_1.search(key):
            wanted = "2 or more"
        elif value <= 0 and (ABOVE_0.search(key) or (rope and "factor" in key)):
            wanted = "a number above 0"
        elif value < 0 and (rope or NOT_BELOW_0.search(key)):
            wanted = "0 or more"
        else:
            continue
        raise UserError(
            f"{'.'.join((*holders, key))} is {value} in the config of {source}, expected {wanted}; "
            "correct it, or get the file again"
        )
    for kind in rope_kinds(config.get_text_config()):
        lists = (kind.get(f"{text}_factor") for text in ("short", "long"))
        short, long = (len(x) if isinstance(x, list) else 0 for x in lists)
        # A list of one number would count for all pairs.
        if kind.get("rope_type") == "longrope" and (short != long or short < 2):
            raise UserError(
                f"short_factor and long_factor have {short} and {long} numbers in the config of "
                f"{source}, expected one each for every pair of a head's dimensions; get the file "
                "again"
            )
    text = config.get_text_config().to_dict()
    counts = {key: value for key, value in text.items() if isinstance(value, int)}
    experts = max((n for key, n in counts.items() if EXPERTS.search(key)), default=0)
    for key, chosen in counts.items():
        if experts > 1 and CHOSEN.search(key) and not 1 <= chosen <= experts:
            raise UserError(
                f"{key} is {chosen} in the config of {source}, but a layer has {experts} experts; "
                f"expected 1 to {experts}; correct it, or get the file again"
            )


def rope_kinds(config: Any) -> list[Mapping[str, Any]]:
    """The rotary positions of a (text) config: those of all layers, or of each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = all(isinstance(kind, Mapping) for kind in rope.values())
    return list(rope.values()) if nested else [rope]


def _numbers(
    part: Mapping[str, Any], holders: tuple[str, ...]
) -> Iterator[tuple[str, float, tuple[str, ...]]]:
    """All numbers of a config, with their keys and those of the parts around them. The key of a
    list's numbers ends in [], so that it says no sign."""
    for key, value in part.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, (*holders, str(key)))
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield f"{key}{'[]' if number is not value else ''}", number, holders
