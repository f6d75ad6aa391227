"""Tiny models and tokenizers, made in the process: tests need no network and no files.

The weights are random but far from flat, so that next-token distributions have clear winners,
greedy decoding never ties, and text depends on all of its prefix.
"""

import copy
import functools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from decode.draft import Contexts, Draft
from decode.drafters import NoDrafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.draw.random_numbers import CounterRNG
from decode.loop.decoding import Decoder, Decoding
from decode.model.features import Features
from decode.model.identity import fingerprint
from decode.model.loading import Target, load_target
from decode.model.model_names import EMBEDDED
from decode.opening.directory import save_drafter
from decode.rules import Rule
from decode.verdict import Decision, Scores, Verdict
from decode.verification import Outcome, Verification

# Ids 0, 1 and 2: padding, beginning and end of a turn.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID = range(3)
VOCAB = 300
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gpt2", "mistral")


def shortened(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The parameters of a test of which `make test` has one of each kind, those of `kept`, and
    `make test-thorough` the others. Tuples are the values of several parameters."""
    values = list(values)
    assert all(value in values for value in kept)
    marked = pytest.mark.thorough
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marked)
        for value in values
    ]


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A drafter proposes tokens and the target verifies them in one forward pass.",
    "She sells sea shells by the sea shore; the shells she sells are sea shells.",
    "user system assistant: what is the sum of 12 and 30? It is 42.",
)


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer with exactly VOCAB tokens and a ChatML template.

    3 special tokens, 256 bytes, and merges learnt from four sentences: any text round-trips.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        _SENTENCES,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        chat_template=CHAT_TEMPLATE,
    )


def gguf_writer(path: Path, architecture: str, config: Any) -> Any:
    """A writer of a GGUF file with the sizes of a model and the tiny tokenizer, as llama.cpp names
    them."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tiny_tokenizer_keys(writer, config.vocab_size)
    return writer


def tiny_tokenizer_keys(writer: Any, rows: int = VOCAB) -> None:
    """Give a writer of a GGUF file the tiny tokenizer, filled up to this number of rows as
    llama.cpp does."""
    import gguf

    tokenizer = tiny_tokenizer()
    vocab = tokenizer.get_vocab()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    spare = range(len(vocab), rows)
    writer.add_token_list([*sorted(vocab, key=vocab.get), *(f"[PAD{id}]" for id in spare)])
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3
        + [gguf.TokenType.NORMAL] * (len(vocab) - 3)
        + [gguf.TokenType.UNUSED] * len(spare)
    )
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)


def finish_gguf(writer: Any) -> None:
    """Write all that a writer was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_model(
    family: str,
    *,
    vocab: int = VOCAB,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    max_positions: int = 256,
    tie: bool = True,
    **config_fields: Any,
) -> Any:
    """A model of one of FAMILIES, float32, in eval mode; the same arguments give the same weights.

    config_fields: more fields of the family's config, such as sliding_window for mistral.
    """
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if family == "gpt2":
        shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        shape |= {"num_key_value_heads": kv_heads, "intermediate_size": 2 * hidden}
    if family in ("qwen3", "gemma"):
        # Their heads need not add up to the hidden size, and by default they are large.
        shape["head_dim"] = hidden // heads
    if family == "mistral":
        shape["sliding_window"] = None
    config = transformers.AutoConfig.for_model(family, **(shape | config_fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        sharpen(model)
    return model.eval()


def tiny_encoder_decoder(
    family: str,
    *,
    vocab: int = VOCAB,
    encoder_layers: int = 2,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    seed: int = 0,
    max_positions: int = 64,
    **config_fields: Any,
) -> Any:
    """A t5, bart or marian model, float32, in eval mode, whose decoder starts with PAD_ID; the same
    arguments give the same weights."""
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "d_model": hidden,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": PAD_ID,
        "forced_eos_token_id": None,
        # Tied models repeat their input.
        "tie_word_embeddings": False,
    }
    if family == "t5":
        shape |= {"num_layers": encoder_layers, "num_decoder_layers": layers, "num_heads": heads}
        # Few buckets and a small largest distance: both kinds of buckets occur.
        shape |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
        shape |= {"d_kv": hidden // heads, "d_ff": 2 * hidden}
    else:
        shape |= {"encoder_layers": encoder_layers, "decoder_layers": layers}
        shape |= {f"{part}_attention_heads": heads for part in ("encoder", "decoder")}
        shape |= {f"{part}_ffn_dim": 2 * hidden for part in ("encoder", "decoder")}
        shape |= {"max_position_embeddings": max_positions, "scale_embedding": False}
    config = transformers.AutoConfig.for_model(family, **(shape | config_fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        # T5 is tied in spite of its config.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        sharpen(model)
    with torch.no_grad():
        for module in model.modules():
            # Weaker layers: else the sources alone decide, and a text is one token over and over.
            if type(module) is torch.nn.Linear and module is not model.get_output_embeddings():
                module.weight.mul_(0.5)
    return model.eval()


def sharpen(model: Any) -> None:
    """Draws all weights again, wide enough that every layer and position counts.

    Matrices have gain 0.3·√hidden ≈ 1.7, so layers outweigh the embedding in the residual stream
    (else tied models would repeat their input); embeddings with std 0.5 give logits a spread of
    about 3.
    """
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.normal_(std=0.5)
            elif type(module).__name__ in ("Linear", "Conv1D"):
                module.weight.normal_(std=0.3)
                if module.bias is not None:
                    module.bias.normal_(std=0.1)
        model.get_output_embeddings().weight.normal_(std=0.5)


def forbid_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare models as on a device where products cannot be packed."""
    name = "decode.model.forward.prepare_model.reason_against_packing"
    monkeypatch.setattr(name, lambda model: "a test forbids it")


def padded(model: Any, rows: int, std: float = 2.0) -> Any:
    """A copy with so many rows in its embeddings and output layer. Those that are added have this
    standard deviation; where it is large, a model that may say them often does."""
    other = copy.deepcopy(model)
    before = other.config.vocab_size
    other.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(rows)
        for layer in (other.get_input_embeddings(), other.get_output_embeddings()):
            layer.weight[before:].normal_(std=std)
    return other


def tiny_llama(**shape: Any) -> Any:
    """`tiny_model("llama", ...)`."""
    return tiny_model("llama", **shape)


def tiny_target(family: str = "llama", **shape: Any) -> Target:
    """A frozen tiny model with the tiny tokenizer, as `load_target` would give it."""
    return as_target(tiny_model(family, **shape).requires_grad_(False), name=f"tiny-{family}")


def as_target(model: Any, tokenizer: Any = None, name: str = "tiny") -> Target:
    """A model with this tokenizer, the tiny one by default."""
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    identity = fingerprint(tokenizer, model.config, model.generation_config)
    return Target(model, tokenizer, name, None, identity, identity.eos_token_ids)


@functools.cache
def real_target() -> Target:
    """The embedded SmolLM2-135M-Instruct in float32 on the CPU, for tests marked `real`.

    Loaded once a process (about 10 s), so tests must leave it as it is. Skips the test when its
    package is not installed.
    """
    if EMBEDDED["smollm2-135m"].find() is None:
        pytest.skip(EMBEDDED["smollm2-135m"].install)
    return load_target("embedded:smollm2-135m", dtype="float32", device="cpu")


def save_tiny(directory: Path, family: str = "llama", **shape: Any) -> Path:
    """Writes a tiny model and the tiny tokenizer as a model directory; returns the directory."""
    tiny_model(family, **shape).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def save_small_lm(
    directory: Path,
    model: Any,
    target: Target,
    kind: str = "small_lm",
    provenance: Mapping[str, Any] = {},
) -> Path:
    """Writes a drafter directory with this model and the tiny tokenizer; returns the directory."""

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)

    save_drafter(directory, kind, write, target=target, provenance=dict(provenance))
    return directory


def with_noise(model: Any, noise: float) -> Any:
    """The model after noise of this share of its weights' spread: it is right now and then."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    return model


def verification(accepted: Sequence[int], **fields: Any) -> Verification:
    """A verification pass that accepted so many tokens in each row, with other fields as given and
    no draft to look at."""
    rows, kept = len(accepted), np.array(accepted)
    done = Verification.of_nothing(
        np.arange(rows), Contexts.of([()] * rows, 0), torch.device("cpu")
    )
    block = np.zeros((rows, 1), dtype=np.int64)
    return replace(done, **{"accepted": kept, "reached": kept, "block": block} | fields)


def verify(rule: Rule, draft: Draft, scores: Scores, rng: CounterRNG) -> Verification:
    """What the rule decides, on the host."""
    return judged(draft, scores, rule.decide(draft, scores, rng))


def judged(
    draft: Draft, scores: Scores, decision: Decision, contexts: Contexts | None = None
) -> Verification:
    """The pass with this decision, in which no text ends. contexts: the texts, as they are now."""
    verdict, rows = Verdict.read(draft, scores, decision), len(draft.sizes)
    many, none = np.full(rows, sys.maxsize), np.zeros(0, dtype=np.int64)
    outcome = Outcome.after(verdict, np.arange(rows), many, none, np.zeros(rows, dtype=bool))
    texts = Contexts.of([()] * rows, 0) if contexts is None else contexts
    return Verification.of(verdict, outcome, texts, rows=np.arange(rows))


def after(contexts: Contexts, features: Features | None = None) -> Verification:
    """The pass after which the texts are `contexts`, for a drafter to observe."""
    return verification([0] * len(contexts.lengths), contexts=contexts, features=features)


def moved(
    module: Any,
    by: float,
    seed: int = 0,
    which: Callable[[str, torch.Tensor], bool] = lambda name, weight: True,
) -> Any:
    """The module, with normal noise of this size on its weights: near what it was."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if which(name, weight):
                weight += by * torch.randn(weight.shape, generator=generator)
    return module


def is_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim > 1


def near_drafter(kind: type[SmallLMDrafter] = SmallLMDrafter) -> SmallLMDrafter:
    return kind(moved(tiny_model("llama"), 0.03, seed=3))


def finish(decoding: Decoding) -> dict[int, list[int]]:
    """The texts of all rows, after the steps that are left."""
    while not decoding.finished:
        decoding.step()
    return decoding.outputs


def plain_texts(
    model: Any, prompts: Sequence[Sequence[int]], new: int, **options: Any
) -> list[list[int]]:
    """The texts of plain decoding. options: of the decoder."""
    return Decoder(model, NoDrafter(), **options).decode(prompts, new).outputs


def tokens_fed(lm: Any) -> list[int]:
    """How many tokens each pass of a model feeds from now on, over all rows."""
    feed, fed = lm._feed, []

    def counted(*args: Any, **more: Any) -> Any:
        found = feed(*args, **more)
        fed.append(lm.fed)
        return found

    lm._feed = counted
    return fed


def generated(
    model: Any, prompt: Sequence[int], new: int, call: Mapping[str, Any] = {}, **settings: Any
) -> list[int]:
    """What transformers' greedy `generate()` says after one prompt, its EOS included. call: more
    of its arguments. settings: those of its config, which names no EOS by itself."""
    ids = torch.tensor([prompt])
    config = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD_ID} | settings
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=transformers.GenerationConfig(max_new_tokens=new, **config),
        **call,
    )
    begin = 1 if model.config.is_encoder_decoder else len(prompt)
    text: list[int] = found[0, begin:].tolist()
    return text


@torch.no_grad()
def own_text(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """Greedy, by the model's own forward over the whole text, without a cache."""
    ids = list(prompt)
    for _ in range(new):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]
