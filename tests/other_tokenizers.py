"""Tiny tokenizers with other ids than the tiny tokenizer's, and models that fit them."""

import copy
import functools
import json
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from decode.drafters.tokenizers.retokenised import RetokenisedDrafter
from decode.drafters.tokenizers.shared_tokens import SharedVocabularyDrafter
from tests.lossless import LONGER, Case
from tests.tiny import as_target, tiny_tokenizer

_SENTENCES = (
    "Another text gives another vocabulary: the quick dog proposes a token, naïve and brown.",
    "It verifies the shells by the shore; 42 is what the user said, and 30 is the sum.",
)


def _fast(backend: Tokenizer, **special: str) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@functools.cache
def byte_level() -> Any:
    """A byte-level BPE with other ids, other merges and other names of special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        _SENTENCES,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True),
            show_progress=False,
        ),
    )
    return _fast(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@functools.cache
def sentencepiece() -> Any:
    """A BPE with ▁ for spaces and <0x0A> for bytes, and a token at the start of each text."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trained.train_from_iterator(
        _SENTENCES,
        trainers.BpeTrainer(vocab_size=100, special_tokens=special, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(special)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _fast(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def words(*names: str) -> Any:
    """A WordLevel tokenizer with these tokens, in this order."""
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(backend)


def letters(*names: str, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """A byte-level BPE with only these tokens, in this order."""
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend)


def shuffled(seed: int = 0) -> tuple[Any, torch.Tensor]:
    """The tiny tokenizer with its ids in another order, and the tiny tokenizer's id of each id."""
    tokenizer = tiny_tokenizer()
    order = torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(seed))
    place = {int(old): new for new, old in enumerate(order)}
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    model["vocab"] = {name: place[i] for name, i in model["vocab"].items()}
    for token in content["added_tokens"]:
        token["id"] = place[token["id"]]
    special = {key: getattr(tokenizer, key) for key in ("pad_token", "bos_token", "eos_token")}
    return _fast(Tokenizer.from_str(json.dumps(content)), **special), order


def with_rows(model: Any, order: list[int] | torch.Tensor) -> Any:
    """A copy whose token i is the model's token order[i]."""
    other = copy.deepcopy(model)
    order = torch.as_tensor(order)
    rows = [layer.weight[order].clone() for layer in _layers(other)]
    other.resize_token_embeddings(len(order), mean_resizing=False)
    with torch.no_grad():
        for layer, weight in zip(_layers(other), rows, strict=True):
            layer.weight.copy_(weight)
    return other


def _layers(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


# The drafter's tokens, as tokens of the case's models: 1 (b) is missing, and three copies of likely
# tokens have names that the target does not have.
_ORDER = (3, 2, 0, 4, 2, 2, 3)
_NAMES = ("d", "x", "a", "e", "c", "y", "z")


def shared_small_lm(
    case: Case = LONGER, kind: type[SharedVocabularyDrafter] = SharedVocabularyDrafter
) -> SharedVocabularyDrafter:
    """A drafter near the case's target, with four of its five tokens and three others, in another
    order."""
    target = as_target(case.model(0.0), words("a", "b", "c", "d", "e"))
    return kind.of_models(with_rows(case.model(0.2), _ORDER), words(*_NAMES), target)


def text_small_lm(case: Case = LONGER) -> RetokenisedDrafter:
    """A drafter of text near the case's target. One of its tokens spells two of the target's."""
    target = as_target(case.model(0.0), letters("a", "b", "c", "d", "e"))
    other = letters("d", "x", "a", "e", "c", "b", "dc", merges=(("d", "c"),))
    model = with_rows(case.model(0.2), (3, 2, 0, 4, 2, 1, 3))
    return RetokenisedDrafter.of_models(model, other, target)
