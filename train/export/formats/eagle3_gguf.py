"""EAGLE-3's layer as a GGUF file for llama.cpp (2503.01840).

H hidden size, V' draft vocabulary. `fc.weight` [H, 3H]; `blk.0.*`, whose q, k and v read 2H, with
`attn_norm` for the embedding and `attn_norm_2` for the state; `output_norm.weight`;
`output.weight` [V', H]. With a reduced draft vocabulary also `d2t`, int64 [V'], the token id of
each row (other layouts store the id minus the row). The embeddings are the target's.
`target_layers` are the layers whose input is captured, so each is one more than the layer whose
output that is. For Llama 3's rotary positions `rope_freqs.weight`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGUFValueType as Value
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.drafters import Drafter
from decode.errors import UserError
from decode.target.loading import Target
from heads.eagle_heads import Eagle3Drafter, Eagle3Options
from heads.heads_directory import stored_options
from train.export.formats import EXPORT_FILE, FORMATS, ExportJob
from train.export.formats.eagle3 import OUTPUT, OWN_OUTPUT, are_ids, tensors_of
from train.export.formats.in_gguf import (
    D2T,
    FILE,
    LAYER,
    InGGUF,
    in_halves,
    in_pairs,
    keys_of,
    layer_shapes,
    metadata,
    target_gguf,
    tokenizer_fields,
    weights_of,
    write_file,
)
from train.export.formats.of_heads import drafter_of, heads_of, require_fit
from train.export.tensors import read_json, whole

OF = "eagle3"
# GGUF's tensor names, by the names of the layout for vLLM.
NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    OUTPUT: "output.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"midlayer.{theirs}.weight": f"blk.0.{own}.weight" for theirs, own in LAYER.items()},
}
FREQUENCIES = "rope_freqs.weight"
TURNED = {"blk.0.attn_q.weight": "head_count", "blk.0.attn_k.weight": "head_count_kv"}


class Eagle3GGUF(InGGUF):
    """A reduced draft vocabulary stays reduced."""

    name = "eagle3-gguf"
    kinds = ("eagle3",)
    architectures = (OF,)
    spec_type = "draft-eagle3"
    carries_vocabulary = True

    def max_depth(self, drafter: Path) -> int | None:
        options: Any = stored_options(drafter)
        steps: int = options.steps
        return steps

    def loads(self, job: ExportJob) -> str:
        """Return the target that the heads were trained for. The file for serving may be quantized
        and then has other weights."""
        return str(job.description["target"]["name"])

    def refuse(self, job: ExportJob) -> None:
        target_gguf(job.target_spec)

    def write(self, job: ExportJob, directory: Path) -> dict[str, Any]:
        heads: Any = heads_of(job, self.name)
        config = heads.config
        rope = config.rope_parameters.get("rope_type", "default")
        if rope not in ("default", "llama3"):
            raise UserError(
                f"{job.drafter} has rope_type {rope}, which format {self.name} does not write; "
                "export it as eagle3 and convert that with llama.cpp's own convert_hf_to_gguf.py"
            )
        dtype = job.dtype or "float32"
        assert job.target is not None
        file = target_gguf(job.target_spec)
        copied = tokenizer_fields(file, config.vocab_size)
        _require_same_tokens(file, copied["tokenizer.ggml.tokens"].contents(), job.target)
        found = tensors_of(heads, config.vocab_size)
        tensors = {own: found[theirs].detach().cpu() for theirs, own in NAMES.items()}
        counts = (config.num_attention_heads, config.num_key_value_heads)
        for name, count in zip(TURNED, counts, strict=True):
            tensors[name] = in_pairs(tensors[name], count)
        parameters = sum(tensor.numel() for tensor in tensors.values())
        if rope == "llama3":
            tensors[FREQUENCIES] = slowed(config)
        if heads.vocabulary is not None:
            tensors[D2T] = heads.vocabulary.cpu()
        described = metadata(config, OF, dtype) | {
            f"{OF}.target_layers": ([layer + 1 for layer in heads.captured_layers], Value.ARRAY),
            f"{OF}.target_hidden_size": (heads.hidden_size, Value.UINT32),
            f"{OF}.norm_before_residual": (False, Value.BOOL),
            f"{OF}.norm_before_fc": (False, Value.BOOL),
        }
        write_file(directory, OF, described, copied, tensors, dtype)
        return {
            "dtype": dtype,
            "kept": None if heads.vocabulary is None else len(heads.vocabulary),
            "filled_from": None,
            "parameters": parameters,
            "layers": 1,
            "rope": rope,
            "size": "one decoder layer",
        }

    def extra_keys(self, of: str) -> dict[str, Any]:
        return {
            f"{OF}.target_layers": lambda x: isinstance(x, list) and len(x) == len(set(x)) == 3,
            f"{OF}.target_hidden_size": whole,
            f"{OF}.norm_before_residual": False,
            f"{OF}.norm_before_fc": False,
        }

    def shapes(
        self, of: str, keys: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        hidden, rows = keys[f"{OF}.embedding_length"], facts["kept"] or keys[f"{OF}.vocab_size"]
        found = {
            "fc.weight": (hidden, 3 * keys[f"{OF}.target_hidden_size"]),
            "output_norm.weight": (hidden,),
            "output.weight": (rows, hidden),
            "blk.0.attn_norm_2.weight": (hidden,),
        }
        layer = layer_shapes(OF, keys, 2 * hidden)
        found |= {f"blk.0.{name}": shape for name, shape in layer.items()}
        if facts["rope"] == "llama3":
            found[FREQUENCIES] = (keys[f"{OF}.rope.dimension_count"] // 2,)
        return found | ({D2T: (rows,)} if facts["kept"] else {})

    def wrong_values(self, weights: Mapping[str, Tensor], keys: Mapping[str, Any]) -> list[str]:
        if D2T not in weights or are_ids(weights[D2T], keys[f"{OF}.vocab_size"]):
            return []
        return [f"{D2T} is not of different tokens, ascending"]

    def reload(self, directory: Path, target: Target) -> Drafter:
        reader = gguf.GGUFReader(directory / FILE)
        keys, weights = keys_of(reader), weights_of(reader)
        sizes = {
            "hidden_size": keys[f"{OF}.embedding_length"],
            "vocab_size": keys[f"{OF}.vocab_size"],
        }
        require_fit(sizes, directory, target)
        for name, count in TURNED.items():
            weights[name] = in_halves(weights[name], keys[f"{OF}.attention.{count}"])
        state = {theirs: weights[own] for theirs, own in NAMES.items()}
        state[OWN_OUTPUT] = state.pop(OUTPUT)
        record: Any = read_json(directory / EXPORT_FILE)
        options = Eagle3Options(steps=record["facts"]["max_depth"])
        ids: torch.Tensor | None = weights.get(D2T)
        drafter = drafter_of(Eagle3Drafter, options, ids, state, target)
        if keys[f"{OF}.target_layers"] != [layer + 1 for layer in drafter.heads.captured_layers]:
            raise UserError(
                f"{directory} reads what layers {keys[f'{OF}.target_layers']} of its target are "
                f"given, and with {target.name} they would be others; use the target it was made "
                "for"
            )
        return drafter


FORMATS.register("eagle3-gguf")(Eagle3GGUF())


def slowed(config: LlamaConfig) -> Tensor:
    """Return [d/2]: how many times slower each pair of a head rotates because of the scaling in
    Llama 3's configs."""
    size = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, size, 2).float() / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return plain / scaled


def _require_same_tokens(file: Path, tokens: Sequence[str], target: Target) -> None:
    """Raise UserError if a GGUF file's tokens are not the target's. Up to 1% may differ: some files
    write a few tokens differently, such as those that only fill up the vocabulary."""
    own = target.tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    differ = sum(a is not None and a != b for a, b in zip(own, tokens, strict=True))
    if differ > len(tokens) // 100:
        raise UserError(
            f"{differ} of the {len(tokens)} tokens of {file} are not those of {target.name}, which "
            "the drafter was made for; name a GGUF file of that model"
        )
