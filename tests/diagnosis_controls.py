"""Every known mistake, planted into a drafter: how often is it named?

python -m tests.diagnosis_controls [REPETITIONS [KIND …]]
"""

import copy
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from draftsmith.diagnosis.counts import accepted_by_place, drafts_along
from draftsmith.diagnosis.explain import EQUAL, Explanation, explain
from draftsmith.diagnosis.mistakes import MISTAKES
from draftsmith.export.engines import Counting
from heads.heads_directory import new_heads
from heads.options import HeadOptions
from tests.export import teach
from tests.tiny import VOCAB, tiny_target

GAMMA, TOKENS = 3, 5
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"type": "eagle1", "depth": GAMMA, "window": 6},
    "eagle3": {"type": "eagle3", "steps": GAMMA},
    "mtp": {"type": "mtp", "depth": GAMMA},
    "dflash": {"type": "dflash", "layers": 2, "block": GAMMA + 1, "taps": [0, 2]},
    "medusa": {"type": "medusa", "heads": GAMMA},
    "small_lm": {},
}
REDUCED = ("eagle3",)  # to a draft vocabulary
TAUGHT, BEGINNING, ANSWER = 12, 6, 24  # texts, and their tokens
STEPS = 250


@functools.cache
def target() -> Target:
    """A tiny target with layers enough for every kind of drafter, and ids for mask tokens."""
    made = tiny_target(vocab=VOCAB + 8, layers=7, max_positions=512)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # a norm that does more than to scale, as trained ones do
        made.model.model.norm.weight.uniform_(0.5, 1.5)
    return made


@functools.cache
def known() -> list[list[int]]:
    """The texts that drafters learn: prompts with the target's greedy answers, token ids."""
    rng = np.random.default_rng(1000)
    asked = [rng.integers(3, VOCAB, BEGINNING).tolist() for _ in range(TAUGHT)]
    answers = Decoder(target().model, DRAFTERS.make("none"), gamma=1).decode(asked, ANSWER).outputs
    return [x + y for x, y in zip(asked, answers, strict=True)]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Token ids: beginnings of known texts, so that what follows each is known, too."""
    rng = np.random.default_rng(seed)
    texts = [text for text in known() if len(text) == BEGINNING + ANSWER]
    cuts = rng.integers(BEGINNING, BEGINNING + ANSWER - TOKENS - GAMMA - 1, count)
    return [texts[int(rng.integers(len(texts)))][:cut] for cut in cuts]


@functools.cache
def taught(kind: str) -> Drafter:
    """A drafter of this kind that learnt some texts of the target by heart."""
    torch.manual_seed(0)
    if kind == "small_lm":
        model = copy.deepcopy(target().model)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.15 * weight.std() * torch.randn(weight.shape)
        return SmallLMDrafter(model)
    texts = [torch.tensor(text) for text in known()]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in texts])[:, None]
    reduced = ids.unique() if kind in REDUCED else None
    heads = new_heads(HeadOptions.of(KINDS[kind]), target(), reduced)
    with torch.no_grad():  # attention and norms count from the beginning, and with it positions
        for name, weight in heads.named_parameters():
            if "o_proj" in name:
                weight.normal_(std=0.1)
            if "norm" in name:
                weight.mul_(1 + 0.5 * torch.randn(weight.shape))
    teach(heads, target(), ids, mask, steps=STEPS)
    heads.eval().requires_grad_(False)
    drafter: Drafter = DRAFTERS[kind](heads, target().vocab_size)  # type: ignore[call-arg]
    return drafter


@dataclass
class Planted:
    """accepted: tokens of a text, in the mean. found: of each repetition."""

    accepted: float
    found: list[Explanation]


def named(kind: str, repetitions: int, count: int = 200) -> dict[str, Planted]:
    """What is said of each mistake, and of the drafter as it is."""
    drafter = taught(kind)
    made = {EQUAL: drafter} | {
        name: changed
        for name in MISTAKES
        if (changed := MISTAKES[name]().make(drafter, target())) is not None
    }
    planted: dict[str, Planted] = {}
    for seed in range(repetitions):
        drafts = drafts_along(
            target(), [*made.values()], prompts(count, seed), GAMMA, TOKENS, first_drafted=False
        )
        eos = target().eos_token_ids
        said = {
            name: accepted_by_place(drafts, member, Counting(), eos, TOKENS)[1]
            for member, name in enumerate(made)
        }
        keys = {name: [tuple(x) for x in counts.tolist()] for name, counts in said.items()}
        for name in made:
            one = planted.setdefault(name, Planted(float(said[name].sum(1).mean()), []))
            one.found.append(explain(keys[name], keys, {}))
    return planted


def main(repetitions: int, kinds: Sequence[str] = tuple(KINDS)) -> None:
    """Print a table: how often each mistake was named, alone or as one of several, and what else
    was said of it."""
    print("| kind | planted | accepted a text | named | as one of several | otherwise |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        for name, one in named(kind, repetitions).items():
            right = [x for x in one.found if name in (x.names or (x.verdict,))]
            others = Counter(
                "not visible" if name in x.unseen else x.verdict
                for x in one.found
                if x not in right
            )
            said = ", ".join(f"{verdict} {times}" for verdict, times in others.items())
            several = sum(len(x.names) > 1 for x in right)
            print(
                f"| {kind} | {name} | {one.accepted:.2f} | {len(right)} of {repetitions} "
                f"| {several} | {said} |",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2:] or tuple(KINDS))
