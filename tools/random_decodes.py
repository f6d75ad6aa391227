"""Random greedy decodes of tiny targets: is each text that of plain decoding?

python -m tools.random_decodes [TEXTS [SEED]]

A decode takes a drafter of each kind in turn, and draws the rest: the target, the policy, γ, how
prompts are read, and when up to eight rows join, with which prompts and lengths. In float32 every
text counts that differs. Ends with status 1 if one does. A seed repeats its decodes.
"""

import sys
from typing import Any

import numpy as np

from decode.base.errors import UserError
from decode.drafters import NoDrafter
from decode.lengths import POLICIES
from decode.loop.decoding import Decoding
from decode.loop.parts import Parts
from decode.model.cache.prefix_cache import PrefixCache
from tests.contract import CASES, HEAD_RECIPES, RECIPES, case_of, decoder, recipe
from tests.tiny import finish

TARGETS = ("plain", "deeper", "through transformers")
MOST_ROWS, LONGEST_PROMPT, LONGEST_TEXT, DEEPEST = 8, 40, 48, 6
# A line is printed after so many decodes.
OFTEN = 100


def one_decode(kind: str, random: np.random.Generator) -> tuple[str, int, int]:
    """Decode once with a drafter of this kind. Returns what was drawn, in words, how many texts
    were written and how many of them differ from plain decoding."""
    name = str(random.choice(TARGETS))
    if case_of(kind) is CASES["deeper"]:  # it needs a third layer
        name = "deeper"
    case = CASES[name]
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
        "prefixes": [None, PrefixCache(10**6)][random.integers(2)],
    }
    plain = decoder(NoDrafter(), case, eos_token_ids=options["eos_token_ids"])
    expected = plain.decode(prompts, max(limits)).outputs
    decoding = Decoding(decoder(drafter, case, gamma=gamma, policy=policy, **options))
    # How many tokens of prompts a pass of the running rows reads; 0: prompts are read apart.
    beside = int(random.integers(2) * random.integers(1, 2 * LONGEST_PROMPT))
    for prompt, limit in zip(prompts, limits, strict=True):
        decoding.begin([prompt], limit)
        for _ in range(random.integers(3)):
            step(decoding, beside)
    while decoding.waiting:
        step(decoding, beside)
    finish(decoding)
    drawn = f"{kind}, {name}, {policy}, gamma {gamma}, {rows} rows"
    pairs = zip(decoding.result().outputs, expected, limits, strict=True)
    return drawn, rows, sum(text != whole[:limit] for text, whole, limit in pairs)


def step(decoding: Decoding, beside: int) -> None:
    """A step, in which the rows that wait join, or are read."""
    for row in decoding.unread:
        decoding.read(row, 0 if beside and decoding.reads_beside else None)
    if not decoding.finished:
        decoding.step(None, beside)


def main(texts: int = 10_000, seed: int = 0) -> int:
    kinds = list(RECIPES | HEAD_RECIPES)
    done = wrong = decodes = 0
    while done < texts:
        random = np.random.default_rng([seed, decodes])
        drawn, rows, differ = one_decode(kinds[decodes % len(kinds)], random)
        decodes, done, wrong = decodes + 1, done + rows, wrong + differ
        if differ:
            print(f"decode {decodes - 1}: {differ} of {rows} texts differ: {drawn}", flush=True)
        if decodes % OFTEN == 0:
            print(f"{decodes} decodes, {done} texts, {wrong} differ", flush=True)
    print(f"{decodes} decodes, {done} texts, {wrong} differ", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
