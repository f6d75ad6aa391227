"""Tiny models whose texts can be enumerated: a target and its drafters, made without training.

Every engine reads them: eight tokens, llama's architecture, attention heads of 32 numbers.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models

from decode.model.loading import load_target
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import export_drafter, vacant
from draftsmith.export.formats.gguf_layout import metadata, write_gguf
from draftsmith.export.formats.small_lm_gguf import gguf_tensors, own_weights
from heads.heads_directory import new_heads, save_heads
from heads.options import HeadOptions
from train.measure.check_lossless import random_llama

LETTERS, END = "abcdefg", "</s>"
SHAPE: dict[str, Any] = {
    "vocab_size": len(LETTERS) + 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": len(LETTERS),
    "pad_token_id": None,
}
END_SHARE = 0.3  # of the weights of the end of the text, which are smaller: few texts end early
NOISE = 0.05  # of a drafter's weights: about half of its tokens are accepted
EAGLE = {"type": "eagle1", "depth": 4}
EAGLE_NOISE = 0.02


def tiny_model(noise: float = 0.0, **changes: Any) -> Any:
    """A llama of SHAPE in float32, the same each time. noise: added to its weights, with this
    standard deviation. changes: of the shape."""
    model = random_llama(**SHAPE | changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.get_output_embeddings().weight[len(LETTERS) :] *= END_SHARE
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return model


def tiny_tokenizer() -> Any:
    """One token for each letter. The chat template is the messages."""
    vocabulary = {token: i for i, token in enumerate((*LETTERS, END))}
    backend = Tokenizer(tokenizer_models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def write_tiny(out: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Write `target` and `drafter` (Hugging Face directories), `eagle` (a drafter directory) and
    `eagle-vllm` (its export) into `out`; with the package gguf also `target.gguf` and
    `drafter.gguf`. Raises UserError if `out` is there and not an empty directory."""
    out = vacant(out, "directory")
    models = {"target": tiny_model(), "drafter": tiny_model(NOISE)}
    for name, model in models.items():
        model.save_pretrained(out / name)
        tiny_tokenizer().save_pretrained(out / name)
    _write_eagle(out)
    if find_spec("gguf") is None:
        say("no GGUF files are written: the package gguf is not installed")
        return
    for name, model in models.items():
        write_gguf_file(out / f"{name}.gguf", model)


def write_gguf_file(file: Path, model: Any) -> None:
    """In float32, with the tokenizer as llama.cpp reads it."""
    vocabulary = [*LETTERS, END]
    normal, control = 1, 3  # of llama.cpp's kinds of tokens
    described = metadata(model.config, "llama", "float32") | {
        "tokenizer.ggml.model": ("llama", "STRING"),
        "tokenizer.ggml.tokens": (vocabulary, "ARRAY"),
        "tokenizer.ggml.scores": ([0.0] * len(vocabulary), "ARRAY"),
        "tokenizer.ggml.token_type": ([normal] * len(LETTERS) + [control], "ARRAY"),
        "tokenizer.ggml.eos_token_id": (len(LETTERS), "UINT32"),
        "tokenizer.ggml.add_bos_token": (False, "BOOL"),
        "tokenizer.ggml.add_space_prefix": (False, "BOOL"),
    }
    tensors = gguf_tensors(model.config, own_weights(model))
    write_gguf(file, "llama", described, {}, tensors, "float32")


def _write_eagle(directory: Path) -> None:
    """EAGLE-1's layer with its first weights and noise."""
    target = load_target(str(directory / "target"), dtype="float32", device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads = new_heads(HeadOptions.of(EAGLE), target, None)
        with torch.no_grad():
            for weight in heads.parameters():
                weight.add_(EAGLE_NOISE * torch.randn(weight.shape))
    save_heads(directory / "eagle", heads, target=target, provenance={"stage": "heads"})
    options = ExportOptions(target=str(directory / "target"))
    export_drafter(directory / "eagle", "eagle1", directory / "eagle-vllm", options)
