"""A small language model with another tokenizer than the target's, from the target's own weights.

No pair of real models with different tokenizers comes with packages, so `benchmarks.drafters` makes
one: a tokenizer with far fewer tokens, and the target's first two layers. The embedding of each of
its tokens is the mean of the embeddings of the target's tokens that spell it. It knows the target's
language badly until a `distill` stage trains it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from decode.base.artifact import write_directory
from decode.model.loading import Target
from distill.untrained_student import student_from_layers

TOKENS = 4000
LAYERS = (0, 1)


def write_student(path: Path, target: Target, texts: Iterable[str]) -> None:
    """Write the model's directory, unless it is there already. texts: for its tokenizer."""
    if path.exists():
        return
    known = target.tokenizer
    tokenizer = make_tokenizer(texts, known.all_special_tokens, known.eos_token)
    spellings = [
        known(tokenizer.decode([token]), add_special_tokens=False)["input_ids"]
        for token in range(len(tokenizer))
    ]
    embeddings = target.model.get_input_embeddings().weight.detach()
    # The target's tokenizer drops some control characters.
    means = torch.stack([embeddings[ids or slice(None)].mean(0) for ids in spellings])
    model = student_from_layers(target.model, LAYERS)
    model.resize_token_embeddings(len(means), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(means)

    def fill(directory: Path) -> None:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    write_directory(path, fill)


def make_tokenizer(
    texts: Iterable[str], special: list[str], eos: str, size: int = TOKENS, **options: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of these texts, with `size` tokens. special, eos: its special tokens, and
    the one of them that ends a text. options: more of the tokenizer's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **options)
