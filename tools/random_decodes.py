"""Random greedy decodes of tiny targets: is each text that of plain decoding?

python -m tools.random_decodes [TEXTS [SEED]]

A decode takes a drafter of each kind in turn, and draws the rest: the target, the policy, γ, how
prompts are read, when up to eight rows join, with which prompts and lengths, and which of them are
dropped or sit out, and when the drafter is exchanged. Each text is compared with plain decoding of
its row alone. The targets are float32, of which C++ runs none, some or all parts, the weights of a
quantised file, and bfloat16 where that promises the same bits. Of a text that differs the command
prints how far apart the two likeliest logits of plain decoding are there. In float32, where bits
are not promised, less than NEAR is rounding. Ends with status 1 if a text differs by more. A seed
repeats its decodes.
"""

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from decode.base.errors import UserError
from decode.drafters import NoDrafter
from decode.lengths import POLICIES
from decode.loop.decoding import Decoding
from decode.loop.parts import Parts
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.forward import few_rows
from decode.model.forward.quantised_rows import QuantisedFile
from tests.contract import HEAD_RECIPES, RECIPES, decoder, recipe
from tests.lossless import LONGER, Case, through_transformers
from tests.tiny import is_matrix, moved, tiny_model
from train.measure.machine import describe_kernels

MOST_ROWS, LONGEST_PROMPT, LONGEST_TEXT, DEEPEST = 8, 40, 48, 6
KINDS = tuple(RECIPES | HEAD_RECIPES)
# A line is printed after so many decodes.
OFTEN = 100
NEAR = 1e-5


def case_of(
    vocab: int = 32,
    hidden: int = 64,
    change: Callable[[Any], Any] = lambda lm: lm,
    family: str = "llama",
    **fields: Any,
) -> Case:
    """A target that writes many different tokens, after a change of its weights or their dtype.
    Models near it, for drafters, are right now and then. C++ takes sizes that are multiples of 32.
    fields: of the family's config."""
    shape: dict[str, Any] = {"layers": 3, "heads": 2, "kv_heads": 1, "tie": False}

    @functools.cache
    def model(apart: float) -> Any:
        lm = tiny_model(family, vocab=vocab, hidden=hidden, seed=4, **(shape | fields))
        return change(moved(lm, apart / 5, seed=2, which=is_matrix))

    return replace(LONGER, model=model, vocab=vocab)


def bfloat16(lm: Any) -> Any:
    return lm.bfloat16()


def rounded(lm: Any) -> Any:
    """In float32, with numbers of bfloat16, as most checkpoints have."""
    return lm.bfloat16().float()


@torch.no_grad()
def quantised(lm: Any) -> Any:
    """As it would be read from a quantised file: its products have the types of GGUF in turns."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    tensors = []
    weights = [layer.weight for layer in lm.modules() if isinstance(layer, nn.Linear)]
    for number, weight in enumerate(weights):
        kind = GGMLQuantizationType[("Q4_1", "Q8_0")[number % 2]]
        tensors.append((kind, quantize(weight.numpy(), kind)))
        weight.copy_(torch.from_numpy(dequantize(tensors[-1][1], kind)))
    file = QuantisedFile(tensors)
    for weight in weights:
        weight.quantised_file = file
    return lm


TARGETS = {
    "narrow": case_of(31, 20),
    "through transformers": through_transformers(case_of()),
    "float32": case_of(),
    "rounded": case_of(change=rounded),
    "quantised": case_of(change=quantised),
    "bfloat16": case_of(change=bfloat16),
    "norms of heads": case_of(change=bfloat16, family="qwen3", head_dim=32),
    "windows": case_of(change=bfloat16, family="mistral", sliding_window=9),
}


def promises(name: str) -> bool:
    """Whether texts of a target are to be those of plain decoding."""
    lm = CachedLM(TARGETS[name].model(0.0))
    return lm.dtype == torch.float32 or lm.keeps_bits


def one_decode(kind: str, name: str, random: np.random.Generator) -> tuple[str, int, list[float]]:
    """Decode a target of this name once, with a drafter of this kind. Returns what was drawn, in
    words, how many texts were written, and for each that differs from plain decoding the distance
    of `apart`."""
    case = TARGETS[name]
    drafter = recipe(kind, case)
    gamma, policy = int(random.integers(1, DEEPEST + 1)), str(random.choice(list(POLICIES)))
    try:
        Parts.of(drafter, None, policy, gamma)
    except UserError:  # this policy does not take such drafts
        policy = "fixed"
    rows = int(random.integers(1, MOST_ROWS + 1))
    prompts = [
        random.integers(0, 4, random.integers(1, LONGEST_PROMPT + 1)).tolist() for _ in range(rows)
    ]
    limits = random.integers(1, LONGEST_TEXT + 1, rows).tolist()
    options: dict[str, Any] = {
        "eos_token_ids": [[], [4]][random.integers(2)],
        "first_target": bool(random.integers(2)),
        "prefill_tokens": int(random.integers(1, 2 * LONGEST_PROMPT)),
    }
    prefixes = [None, PrefixCache(10**6)][random.integers(2)]
    # How many tokens of prompts a pass of the running rows reads; 0: prompts are read apart.
    beside = int(random.integers(2) * random.integers(1, 2 * LONGEST_PROMPT))
    if case.model(0.0).dtype != torch.float32:
        # PyTorch computes the attention of a prompt's first pass, with other bits than C++. So
        # either no pass has two tokens of a prompt without a mask, or each prompt is read at once.
        options["prefill_tokens"] = [1, LONGEST_PROMPT][random.integers(2)]
        if options["prefill_tokens"] > 1:
            prefixes, beside = None, 0
    plain = decoder(NoDrafter(), case, **options)
    expected = [
        plain.decode([x], limit).outputs[0] for x, limit in zip(prompts, limits, strict=True)
    ]
    options |= {"gamma": gamma, "policy": policy, "prefixes": prefixes}
    decoding = Decoding(decoder(drafter, case, **options))
    dropped = set()
    left = list(zip(prompts, limits, strict=True))
    while left or decoding.waiting or not decoding.finished:
        if left and (decoding.finished or random.random() < 0.5):
            prompt, limit = left.pop(0)
            decoding.begin([prompt], limit)
        if not decoding.finished and random.random() < 0.05:
            decoding.set(drafter=recipe(kind, case))
        alive = [*decoding.rows.numbers.tolist(), *decoding.waiting]
        if alive and random.random() < 0.02:
            row = int(random.choice(alive))
            decoding.drop(row)
            dropped.add(row)
        step(decoding, beside, random)
    texts = decoding.result().outputs
    whole = [
        text[: len(found)] if row in dropped else text
        for row, (text, found) in enumerate(zip(expected, texts, strict=True))
    ]
    drawn = f"{kind}, {name}, {policy}, gamma {gamma}, {rows} rows"
    pairs = zip(prompts, whole, texts, strict=True)
    return drawn, rows, [apart(case, *some) for some in pairs if some[1] != some[2]]


def apart(case: Case, prompt: list[int], text: list[int], found: list[int]) -> float:
    """How far apart the two likeliest logits of the target are where a text first differs."""
    same = [x == y for x, y in zip(text, found, strict=False)]
    before = prompt + text[: (*same, False).index(False)]
    lm = CachedLM(case.model(0.0))
    lm.reset(1, len(before))
    with torch.inference_mode():
        logits = lm.forward(torch.tensor([before]), np.zeros(1, dtype=np.int64))[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def step(decoding: Decoding, beside: int, random: np.random.Generator) -> None:
    """A step, in which the rows that wait join, or are read, and some others sit out."""
    for row in decoding.unread:
        decoding.read(row, 0 if beside and decoding.reads_beside else None)
    if decoding.finished:
        return
    most = None
    if not decoding.decoder.drafter.captured_layers and random.random() < 0.1:
        most = np.where(random.random(len(decoding.rows)) < 0.3, -1, DEEPEST)
    decoding.step(most, beside)


def runs_in(case: Case) -> str:
    """Whether a target's layers run in C++, and in which forms it reads weights."""
    lm = CachedLM(case.model(0.0))
    kernels = describe_kernels(lm)
    where = "layers in C++" if lm.forward_pass.keeps_bits else "layers in PyTorch"
    return f"{where}, weights packed in C++: {', '.join(kernels['weights']) or 'none'}"


def main(texts: int = 10_000, seed: int = 0) -> int:
    names = [name for name in TARGETS if promises(name)]
    if len(names) < len(TARGETS):
        print(f"bfloat16 is left out: {few_rows.reason_against(torch.bfloat16)}")
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    while total["texts"] < texts:
        number = total["decodes"]
        random = np.random.default_rng([seed, number])
        name, kind = str(random.choice(names)), KINDS[number % len(KINDS)]
        if name == "windows" and "few slots" in kind:  # it takes targets that see all of a text
            name = "bfloat16"
        drawn, rows, differ = one_decode(kind, name, random)
        exact = TARGETS[name].model(0.0).dtype != torch.float32
        near = sum(x < NEAR for x in differ) * (not exact)
        for counter in (total, counts[name]):
            counter.update(decodes=1, texts=rows, differ=len(differ), near=near)
        if differ:
            gaps = ", ".join(f"{x:.2g}" for x in differ)
            print(
                f"decode {number}: {len(differ)} of {rows} texts differ, where the two likeliest "
                f"logits are {gaps} apart: {drawn}",
                flush=True,
            )
        if total["decodes"] % OFTEN == 0:
            print(said(total), flush=True)
    for name, counter in counts.items():
        print(f"{name}: {said(counter)}; {runs_in(TARGETS[name])}")
    print(said(total), flush=True)
    return int(total["differ"] > total["near"])


def said(counter: Counter[str]) -> str:
    return (
        f"{counter['decodes']} decodes, {counter['texts']} texts, {counter['differ']} differ, "
        f"{counter['near']} of them within rounding"
    )


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
