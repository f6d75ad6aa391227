"""Block drafters as GGUF files for llama.cpp: DFlash (2602.06036), DSpark (2607.05147), DFlash2.

All three are llama.cpp's architecture `dflash`. A Markov head makes it DSpark, a selector DFlash2.
Tensors are those of `block_layers` by other names. Keys and values are those of a config there, but
`target_layers` are the layers whose input is read, and DSpark's rank is only in its tensors.

llama-server (11434) fills blocks of as many tokens as its draft is long. Ours are as long as in
training. So serve such a file with the longest draft: S − 1 tokens for a block of S, S for DSpark.
It chooses the likeliest token of each place, for DSpark and DFlash2 after the one before.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.gguf_file import read_header
from decode.model.loading import Target, target_gguf
from draftsmith.export.file_schema import is_bool, is_count, is_id, key_problems, require_none
from draftsmith.export.formats import FORMATS, ExportJob, export_facts
from draftsmith.export.formats.block_layers import (
    CONFIDENCE,
    FULL,
    INNER,
    RANK,
    SECOND,
    SHIFT,
    DFlash2Layers,
    DFlashLayers,
    DSparkLayers,
)
from draftsmith.export.formats.eagle3_layer import OUTPUT, ROWS, are_inputs
from draftsmith.export.formats.gguf_layout import (
    D2T,
    FILE,
    HEAD_SIZES,
    PARTS,
    SIZES,
    open_gguf,
    read_keys,
    read_weights,
)
from draftsmith.export.formats.heads_gguf import FREQUENCIES, HeadsGGUF, rotation_slowdowns
from draftsmith.export.formats.layer_format import SLIDING, unusual_layer
from draftsmith.export.formats.published_layer import EMBEDDINGS
from draftsmith.export.formats.tensor_table import OWN_OUTPUT, TensorRow
from draftsmith.export.trained_drafter import (
    TrainedDrafter,
    heads_drafter,
    require_fitting_target,
)
from heads.layers.layer_config import layer_config

ARCH = "dflash"
TOKENS, MASK = "tokenizer.ggml.tokens", "tokenizer.ggml.mask_token_id"
TAPS, BLOCK = f"{ARCH}.target_layers", f"{ARCH}.block_size"
WINDOW = f"{ARCH}.attention.sliding_window"
PATTERN = f"{WINDOW}_pattern"
CAUSAL = f"{ARCH}.attention.causal"
ANCHOR, ESTIMATES = f"{ARCH}.sample_from_anchor", f"{ARCH}.has_confidence_head"
EPSILON, THETA = f"{ARCH}.attention.layer_norm_rms_epsilon", f"{ARCH}.rope.freq_base"
HEAD = f"{ARCH}.attention.key_length"
# GGUF's names of tensors, and those of the parts of a layer, by their names in `block_layers`.
STORED = {
    EMBEDDINGS: "token_embd.weight",
    OUTPUT: "output.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    **{f"{ours}.weight": f"{stored}.weight" for ours, stored in PARTS.items()},
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
OWN = {stored: ours for ours, stored in STORED.items()}


class BlockGGUF(HeadsGGUF):
    """layout: the layout of such heads in safetensors."""

    arch = ARCH
    architectures = (ARCH,)
    spec_type = "draft-dflash"
    holds_windows = True
    layout: ClassVar[DFlashLayers]

    def max_depth(self, drafter: TrainedDrafter) -> int | None:
        return self.layout.max_depth(drafter)

    def refuse_target(self, job: ExportJob) -> None:
        file = target_gguf(job.target_spec)
        keys, taps = read_header(file).metadata, job.drafter.options.taps
        layers = keys.get(f"{keys.get('general.architecture')}.block_count")
        if layers is not None and max(taps) >= layers - 1:
            raise UserError(
                f"{job.drafter} reads the outputs of the layers {taps} of its target, and {file} "
                f"has {layers} layers; llama.cpp captures what a layer reads, so not the output of "
                "the last one. Train heads with other taps, or serve these with vLLM"
            )

    def described(self, heads: Any) -> dict[str, tuple[Any, str]]:
        options = heads.options
        keys: dict[str, tuple[Any, str]] = {
            BLOCK: (options.block, "UINT32"),
            MASK: (heads.mask_token, "UINT32"),
        }
        if options.window is not None:
            keys |= {
                WINDOW: (options.window, "UINT32"),
                PATTERN: ([True] * options.layers, "ARRAY"),
            }
        return keys

    def own_facts(self, heads: Any) -> dict[str, Any]:
        layers = heads.options.layers
        return {"layers": layers, "size": self.layout.size({"num_hidden_layers": layers})}

    def extra_expected_keys(self, arch: str) -> dict[str, Any]:
        return super().extra_expected_keys(arch) | {BLOCK: is_count, MASK: is_id}

    def rows(self, keys: Mapping[str, Any], facts: Mapping[str, Any]) -> list[TensorRow]:
        config = config_of(keys, facts)
        table = [
            TensorRow(stored_name(row.name), row.shape, row.source)
            for row in self.layout.table(config)
            if row.name not in (D2T, "t2d")
        ]
        if facts["kept"]:
            shape = (facts["kept"], config["hidden_size"])
            table.append(TensorRow(stored_name(OUTPUT), shape, OWN_OUTPUT))
        return table

    def value_problems(self, weights: Mapping[str, Tensor], keys: Mapping[str, Any]) -> list[str]:
        problems = super().value_problems(weights, keys)
        if keys[MASK] >= keys[f"{ARCH}.vocab_size"]:
            problems.append(f"{MASK} is {keys[MASK]}, but there is no such token")
        windows = [] if WINDOW not in keys else [True] * keys[f"{ARCH}.block_count"]
        if keys.get(PATTERN, []) != windows:
            problems.append(f"{PATTERN} is {keys.get(PATTERN)}, expected {windows or 'none'}")
        return problems

    def reload(self, directory: Path, target: Target) -> Drafter:
        reader = open_gguf(directory / FILE)
        keys, weights = read_keys(reader), read_weights(reader)
        config = config_of(keys, export_facts(directory))
        require_fitting_target(config, directory, target)
        config["rope_parameters"] = rotation_of(keys, weights, target)
        options, ids, state = self.layout.rebuilt(
            config,
            own_tensors(weights),
            target,
            depth=None,
            layer=unusual_layer(config, target),
            window=config.get("sliding_window"),
        )
        return heads_drafter(self.layout.drafter, options, ids, state, target)


class DFlashGGUF(BlockGGUF):
    """DFlash."""

    name = "dflash-gguf"
    kinds: ClassVar[tuple[str, ...]] = ("dflash",)
    elsewhere = "dflash"
    layout = DFlashLayers()


class DSparkGGUF(BlockGGUF):
    """DSpark. With `--spec-draft-p-min` above 0, the confidence head ends drafts."""

    name = "dspark-gguf"
    kinds: ClassVar[tuple[str, ...]] = ("dspark",)
    elsewhere = "dspark"
    spec_type = "draft-dspark"
    layout = DSparkLayers()

    def described(self, heads: Any) -> dict[str, tuple[Any, str]]:
        own = {ANCHOR: (True, "BOOL"), ESTIMATES: (heads.estimates, "BOOL")}
        return super().described(heads) | own

    def own_facts(self, heads: Any) -> dict[str, Any]:
        return super().own_facts(heads) | {"rank": heads.options.rank}

    def extra_expected_keys(self, arch: str) -> dict[str, Any]:
        return super().extra_expected_keys(arch) | {ANCHOR: True, ESTIMATES: is_bool}


class DFlash2GGUF(BlockGGUF):
    """DFlash2. llama.cpp keeps the scores of all pairs of candidates in a state of the drafter, so
    K candidates need a hidden size of K·(K + 1)."""

    name = "dflash2-gguf"
    kinds: ClassVar[tuple[str, ...]] = ("dflash2",)
    elsewhere = "dflash2"
    layout = DFlash2Layers()
    carries_vocabulary = False

    def refuse(self, job: ExportJob) -> None:
        self.layout.refuse(job)
        count, size = job.drafter.options.candidates, job.drafter.config["hidden_size"]
        if size < count * (count + 1):
            raise UserError(
                f"{job.drafter} has {count} candidates, for which llama.cpp needs a hidden size of "
                f"{count * (count + 1)}, and its target has {size}; train it with fewer candidates"
            )

    def described(self, heads: Any) -> dict[str, tuple[Any, str]]:
        own = {
            f"{ARCH}.{name}": (getattr(heads.options, option), "UINT32")
            for name, option in SECOND.items()
        }
        return super().described(heads) | own

    def extra_expected_keys(self, arch: str) -> dict[str, Any]:
        return super().extra_expected_keys(arch) | {f"{ARCH}.{name}": is_count for name in SECOND}


for layout in (DFlashGGUF(), DSparkGGUF(), DFlash2GGUF()):
    FORMATS.register(layout.name)(layout)


def stored_name(name: str) -> str:
    """Return GGUF's name of a tensor of `block_layers`.

    >>> stored_name("layers.1.mlp.up_proj.weight"), stored_name("fc.weight")
    ('blk.1.ffn_up.weight', 'fc.weight')
    """
    return _renamed(name, "layers", "blk", STORED)


def own_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file as `block_layers` has them: token ids minus their rows. Those
    with unknown names keep them."""
    tensors = {
        _renamed(name, "blk", "layers", OWN): tensor
        for name, tensor in weights.items()
        if name != FREQUENCIES
    }
    if D2T in tensors and tensors[D2T].ndim == 1:
        tensors[D2T] = tensors[D2T] - torch.arange(len(tensors[D2T]))
    return tensors


def _renamed(name: str, layers: str, others: str, names: Mapping[str, str]) -> str:
    if not name.startswith(f"{layers}.") or name.count(".") == 1:
        return names.get(name, name)
    _, number, part = name.split(".", 2)
    return f"{others}.{number}.{names.get(part, part)}"


def config_of(keys: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of such heads as `block_layers` has it, without rotary positions. Keys that
    are missing are None there.

    facts: `kept`, the size of a reduced draft vocabulary, and `rank`, DSpark's.
    """
    config: dict[str, Any] = {name: keys.get(f"{ARCH}.{key}") for key, name in SIZES.items()}
    taps: Any = keys.get(TAPS)
    windows = keys.get(PATTERN) or [False] * keys[f"{ARCH}.block_count"]
    types = [SLIDING if sees_window else FULL for sees_window in windows]
    config |= {
        "model_type": "qwen3",
        "head_dim": keys.get(HEAD),
        "rms_norm_eps": _shortest(keys.get(EPSILON)),
        "block_size": keys.get(BLOCK),
        "layer_types": types,
        "use_sliding_window": SLIDING in types,
        "sliding_window": keys.get(WINDOW),
        ROWS: facts["kept"],
    }
    draft: dict[str, Any] = {
        "mask_token_id": keys.get(MASK),
        "target_layer_ids": [x - 1 for x in taps] if are_inputs(taps) else None,
    }
    if "rank" not in facts:
        draft |= {name: keys[f"{ARCH}.{name}"] for name in SECOND if f"{ARCH}.{name}" in keys}
        return config | {INNER: draft}
    estimates = keys.get(ESTIMATES, True)
    draft |= {RANK: facts["rank"], "markov_head_type": "vanilla", CONFIDENCE: estimates}
    draft["confidence_head_with_markov"] = estimates
    return config | draft | {INNER: {SHIFT: keys.get(ANCHOR, True)}}


def published_config(keys: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the config of a published file, as `config_of` does. Keys that may change what it
    computes, and are not read here, keep their names."""
    read_below: dict[str, Any] = {
        f"{ARCH}.block_count": lambda x: is_count(x) and x <= len(weights),
        **dict.fromkeys((EPSILON, THETA), lambda x: isinstance(x, int | float)),
        **dict.fromkeys((TOKENS, PATTERN), lambda x: isinstance(x, list)),
    }
    known_keys = {key: test for key, test in read_below.items() if key in keys}
    require_none(key_problems(known_keys, keys, "it"), "the file cannot be read")
    facts: dict[str, Any] = {"kept": len(weights[D2T]) if D2T in weights else None}
    if "markov_w1.weight" in weights:
        facts["rank"] = weights["markov_w1.weight"].shape[-1]
    sizes = {f"{ARCH}.block_count": 0, f"{ARCH}.vocab_size": len(keys.get(TOKENS, ()))}
    config = config_of({**sizes, **keys}, facts) | {"is_causal": keys.get(CAUSAL, False)}
    known = {f"{ARCH}.{key}" for key in (*SIZES, *SECOND)}
    known |= {TAPS, BLOCK, WINDOW, PATTERN, CAUSAL, ANCHOR, ESTIMATES, EPSILON, THETA, HEAD}
    # The rest of the sizes of a head, which are the same in such layers.
    known |= {f"{ARCH}.{key}" for key in HEAD_SIZES if keys.get(f"{ARCH}.{key}") == keys.get(HEAD)}
    others = keys.keys() - known
    return config | {key: keys[key] for key in others if key.startswith(f"{ARCH}.")}


def rotation_of(
    keys: Mapping[str, Any], weights: Mapping[str, Tensor], target: Target
) -> dict[str, Any]:
    """Return the rotary settings of a file. Raises UserError if they are scaled, and in another
    way than the target's."""
    theta = _shortest(keys.get(THETA))
    if FREQUENCIES not in weights:
        return {"rope_type": "default", "rope_theta": theta}
    usual = layer_config(target.model)
    rope: dict[str, Any] = dict(usual.rope_parameters)
    if rope.get("rope_type") == "llama3" and rope["rope_theta"] == theta:
        slowdowns = rotation_slowdowns(usual)
        if slowdowns.shape == weights[FREQUENCIES].shape and slowdowns.allclose(
            weights[FREQUENCIES], rtol=1e-5
        ):
            return rope
    raise UserError(
        f"the drafter's rotary positions are scaled by {FREQUENCIES}, and in another way than "
        f"those of the target {target.name} ({rope}); use the target it was made for"
    )


def _shortest(number: Any) -> float | None:
    """Return the shortest decimal number that has these 32 bits: 1e-5, not 9.99999974e-6."""
    return None if number is None else float(str(np.float32(number)))
