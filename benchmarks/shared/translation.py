"""A small target with an encoder, trained on an invented translation, and its sentences.

No weights of a real model with an encoder come with a package, so `benchmarks.encoder_decoder`
trains one. What it learns is like a translation between two languages: each word has its
translation, written in two pieces; words come in another order; a noun gives its ending to the
words that agree with it; and names are copied. A sentence and its translation, where p… q… is a
word:

    when3 who9 does6 colour4 what0 in bi lo ru , other3 act0 shape11 thing1 .
    da bi lo ru p5 q6 p5 q11 -a p3 q5 p10 q3 p5 q1 -a , p7 q5 p1 q10 p7 q2 -e p1 q4 -e .
"""

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from decode.base.artifact import verify_directory, write_directory
from train.base.console import Reporter
from train.loop.optimizer import OptimizerConfig, make_optimizer
from train.loop.optimizer_step import take_step

# The words of a sentence in the order of the source, and how often each comes.
CLAUSES = (
    {"when": 0.5, "size": 0.5, "who": 1.0, "does": 1.0, "colour": 0.5, "what": 1.0, "how": 0.5},
    {"other": 1.0, "act": 1.0, "shape": 0.5, "thing": 1.0},
)
# The same words in the order of the translation; those with an ending have it from the first noun.
ORDERS = (
    {"when": "", "who": "who", "size": "who", "how": "", "what": "", "colour": "", "does": "who"},
    {"thing": "", "shape": "", "other": "other", "act": "other"},
)
WORDS = 12  # of each kind
PIECES = 12  # each word is written as one of these and one of those
ENDINGS = ("-a", "-e", "-o")
NAMES = 0.5  # how often a sentence has a name, of one syllable of each kind
SYLLABLES = [[f"{first}{last}" for first in "klmnrstpbd"] for last in "iou"]
SPECIAL = ("<pad>", "</s>")
PAD_ID, EOS_ID = range(2)
HEAD_SIZE = 64
SPLITS = ("train", "dev", "test")


class Language:
    """The words and their translations, which are the same every time."""

    def __init__(self) -> None:
        draw = random.Random(0)
        words = [f"{kind}{n}" for clause in CLAUSES for kind in clause for n in range(WORDS)]
        self.pieces = [f"{place}{number}" for place in "pq" for number in range(PIECES)]
        pairs = [f"{p} {q}" for p in self.pieces[:PIECES] for q in self.pieces[PIECES:]]
        self.translation = dict(zip(words, draw.sample(pairs, len(words)), strict=True))
        self.ending = {word: draw.choice(ENDINGS) for word in words}

    @property
    def tokens(self) -> list[str]:
        """The vocabulary of both languages."""
        syllables = [syllable for kind in SYLLABLES for syllable in kind]
        marks = [*SPECIAL, "in", "da", ",", ".", *ENDINGS]
        return [*marks, *syllables, *self.pieces, *self.translation]

    def sentence(self, draw: random.Random) -> tuple[str, str]:
        """A source and its translation."""
        name = [draw.choice(kind) for kind in SYLLABLES] if draw.random() < NAMES else []
        sources, texts = [], []
        for clause, order in zip(CLAUSES, ORDERS, strict=True):
            chosen = {
                kind: f"{kind}{draw.randrange(WORDS)}"
                for kind, share in clause.items()
                if draw.random() < share
            }
            sources.append(list(chosen.values()))
            texts.append(
                [
                    self.translation[chosen[kind]] + (noun and f" {self.ending[chosen[noun]]}")
                    for kind, noun in order.items()
                    if kind in chosen
                ]
            )
        if name:
            sources[0], texts[0] = [*sources[0], "in", *name], ["da", *name, *texts[0]]
        source, text = (" , ".join(" ".join(part) for part in side) for side in (sources, texts))
        return f"{source} .", f"{text} ."


def make_tokenizer(language: Language) -> Any:
    """One token per word or piece. The tokenizer ends each text with the EOS token."""
    backend = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(language.tokens)}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {SPECIAL[EOS_ID]}", special_tokens=[(SPECIAL[EOS_ID], EOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[PAD_ID], eos_token=SPECIAL[EOS_ID]
    )


@dataclass(frozen=True)
class Shape:
    """The sizes of the target, its batches and the number of sources in each split."""

    width: int = 256
    encoder_layers: int = 2
    layers: int = 6
    rows: int = 32
    train: int = 3000
    dev: int = 6
    test: int = 120


def write_target(path: Path, shape: Shape, steps: int, reporter: Reporter) -> dict[str, float]:
    """Train the target for these optimizer steps and write it to `path`, with train.jsonl,
    dev.jsonl and test.jsonl of sources and their translations, unless it is there already. Return
    its number of parameters, the seconds of its training and its last loss."""
    if path.exists():
        stored: dict[str, float] = verify_directory(path)
        return stored
    language = Language()
    tokenizer = make_tokenizer(language)
    figures: dict[str, float] = {}

    def fill(directory: Path) -> None:
        model, trained = train_target(language, tokenizer, shape, steps, reporter)
        figures.update(trained)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        draw = random.Random(1)
        for split in SPLITS:
            pairs = [language.sentence(draw) for _ in range(getattr(shape, split))]
            rows = [{"prompt": source, "response": text} for source, text in pairs]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (directory / f"{split}.jsonl").write_text(lines)

    write_directory(path, fill, meta=figures)
    return figures


def train_target(
    language: Language, tokenizer: Any, shape: Shape, steps: int, reporter: Reporter
) -> tuple[T5ForConditionalGeneration, dict[str, float]]:
    """Train a T5 from random weights on new sentences in each step, with its own loss."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(language.tokens),
        d_model=shape.width,
        d_kv=HEAD_SIZE,
        num_heads=max(shape.width // HEAD_SIZE, 1),
        d_ff=2 * shape.width,
        num_layers=shape.encoder_layers,
        num_decoder_layers=shape.layers,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=PAD_ID,
    )
    model = T5ForConditionalGeneration(config).train()
    settings = OptimizerConfig(lr=1.5e-3, warmup_steps=30)
    optimizer = make_optimizer(model, settings)
    draw, begin, loss = random.Random(0), time.perf_counter(), torch.tensor(0.0)
    for step in range(steps):
        pairs = [language.sentence(draw) for _ in range(shape.rows)]
        sources, texts = (
            tokenizer([pair[side] for pair in pairs], padding=True, return_tensors="pt")
            for side in range(2)
        )
        labels = texts.input_ids.masked_fill(texts.attention_mask == 0, -100)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(
                input_ids=sources.input_ids, attention_mask=sources.attention_mask, labels=labels
            ).loss
        loss.backward()
        take_step(
            optimizer,
            settings,
            step=step,
            total=steps,
            clip=lambda most: float(torch.nn.utils.clip_grad_norm_(model.parameters(), most)),
        )
        if (step + 1) % 50 == 0:
            reporter.say(f"target: step {step + 1} of {steps}, loss {float(loss.detach()):.3f}")
    return model, {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seconds": time.perf_counter() - begin,
        "loss": float(loss.detach()),
    }
