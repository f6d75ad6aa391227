"""Every known mistake, planted into a drafter: how often is it named?

python -m tests.diagnosis_controls [KIND …]
python -m tests.diagnosis_controls --service [KIND …]

Without HTTP: the decode loop drafts with the planted drafter, and its counts are those of the
server. The hypotheses come from `drafts_along`, as in a diagnosis. With
--service, each mistake is planted once into our own service, and the whole diagnosis is run.
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
from decode.settings import DecodeSettings
from draftsmith.diagnosis.counts import accepted_by_place, drafts_along
from draftsmith.diagnosis.entry import Diagnosis, diagnose
from draftsmith.diagnosis.explain import EQUAL, Explanation, as_keys, explain
from draftsmith.diagnosis.mistakes import MISTAKES
from draftsmith.export.acceptance import Counting
from heads.heads_directory import new_heads
from heads.options import HeadOptions
from tests.export import teach
from tests.service import serving
from tests.tiny import VOCAB, tiny_target
from train.settings.server_config import ServerConfig

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
ROUNDED = "equal, in bfloat16"
TAUGHT, BEGINNING, ANSWER = 24, 6, 24  # texts, and their tokens
STEPS = 250
# Drafters of a kind, taught from other random weights, and draws of prompts for each.
SEEDS, DRAWS, HONEST_DRAWS, DRAWN = 4, 5, 25, 200
ROWS = 8  # that the loop with a planted drafter decodes together


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
    """Token ids: different beginnings of known texts, so that what follows each is known, too."""
    cuts = range(BEGINNING, BEGINNING + ANSWER - TOKENS - GAMMA - 1)
    whole = (text for text in known() if len(text) == BEGINNING + ANSWER)
    found = [text[:cut] for text in whole for cut in cuts]
    return [found[i] for i in np.random.default_rng(seed).permutation(len(found))[:count]]


@functools.cache
def taught(kind: str, seed: int = 0) -> Drafter:
    """A drafter of this kind that learnt some texts of the target by heart."""
    return taught_on(known(), kind, seed)


def taught_on(learnt: Sequence[Sequence[int]], kind: str, seed: int = 0) -> Drafter:
    """A drafter of this kind that learnt texts of the target, token ids, by heart."""
    torch.manual_seed(seed)
    if kind == "small_lm":
        model = copy.deepcopy(target().model)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.15 * weight.std() * torch.randn(weight.shape)
        return SmallLMDrafter(model)
    texts = [torch.tensor(text) for text in learnt]
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


def with_mistakes(drafter: Drafter) -> dict[str, Drafter]:
    """{name: the drafter with this mistake}, as far as it can have it."""
    made = {name: MISTAKES[name]().make(drafter, target()) for name in MISTAKES}
    return {name: changed for name, changed in made.items() if changed is not None}


def in_bfloat16(drafter: Drafter) -> Drafter:
    """The same drafter with weights that were stored in bfloat16: no mistake."""
    if isinstance(drafter, SmallLMDrafter):  # its packed weights cannot be copied
        model = copy.deepcopy(drafter.lm.model)
        round_weights(model)
        return SmallLMDrafter(model)
    rounded = copy.deepcopy(drafter)
    assert rounded.module is not None
    round_weights(rounded.module)
    return rounded


@torch.no_grad()
def round_weights(module: torch.nn.Module) -> None:
    """To bfloat16, in place."""
    for weight in module.parameters():
        weight.copy_(weight.bfloat16())


def counted(drafter: Drafter, asked: Sequence[Sequence[int]]) -> np.ndarray:
    """Accepted tokens by place, int [N, γ], of a loop that drafts with this drafter. Prompts are
    read in their order."""
    decoder = Decoder(target().model, drafter, eos_token_ids=target().eos_token_ids, gamma=GAMMA)
    accepted = decoder.decode(asked, TOKENS, batch_size=ROWS).tally.accepted
    return np.pad(accepted, ((0, 0), (0, GAMMA - accepted.shape[1])))


@dataclass
class Planted:
    """accepted: tokens of a text, of each drafter in the mean. found: of each repetition."""

    accepted: list[float]
    found: list[Explanation]


def named(kind: str) -> dict[str, Planted]:
    """What is said of each mistake, and of the drafter as it is."""
    planted: dict[str, Planted] = {}
    asked = prompts(10**6, 0)
    for seed in range(SEEDS):
        drafter = taught(kind, seed)
        made = {EQUAL: drafter} | with_mistakes(drafter)
        drafts = drafts_along(target(), [*made.values()], asked, GAMMA, TOKENS, first_drafted=False)
        eos = target().eos_token_ids
        said = [
            accepted_by_place(drafts, member, Counting(), eos, TOKENS)[1]
            for member in range(len(made))
        ]
        served = made | {ROUNDED: in_bfloat16(drafter)}
        there = {name: counted(one, asked) for name, one in served.items()}
        for name, counts in there.items():
            one = planted.setdefault(name, Planted([], []))
            one.accepted.append(float(counts.sum(1).mean()))
            for draw in range(HONEST_DRAWS if name in (EQUAL, ROUNDED) else DRAWS):
                rows = np.random.default_rng(draw).permutation(len(asked))[:DRAWN]
                keys = {x: as_keys(y[rows]) for x, y in zip(made, said, strict=True)}
                one.found.append(explain(as_keys(counts[rows]), keys, {}))
    return planted


def through_service(kind: str, served: Drafter, count: int) -> Diagnosis:
    """Our service drafts with `served`; the diagnosis is given the drafter as it is."""
    with serving(target(), served, DecodeSettings(gamma=GAMMA)) as running:
        config = ServerConfig(url=[running.url], concurrency=1)
        return diagnose(running.url, target(), taught(kind), prompts(count, 0), config, gamma=GAMMA)


def main(kinds: Sequence[str]) -> None:
    """Print a table: how often each mistake was named, alone or as one of several, and what else
    was said of it."""
    print("| kind | planted | accepted a text | named | as one of several | otherwise |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        for name, one in named(kind).items():
            right = [x for x in one.found if names_it(x, name)]
            others = Counter(
                "not visible" if name in x.unseen else " or ".join(x.names or (x.verdict,))
                for x in one.found
                if x not in right
            )
            said = ", ".join(f"{verdict} {times}" for verdict, times in others.items())
            several = Counter(len(x.names) for x in right if len(x.names) > 1)
            of_several = ", ".join(f"{times} × {size}" for size, times in several.items())
            print(
                f"| {kind} | {name} | {np.mean(one.accepted):.2f} | {len(right)} of "
                f"{len(one.found)} | {of_several or 0} | {said} |",
                flush=True,
            )


def names_it(found: Explanation, name: str) -> bool:
    return found.verdict == EQUAL if name in (EQUAL, ROUNDED) else name in found.names


def main_of_service(kinds: Sequence[str], count: int = 60) -> None:
    """Print a table: what a whole diagnosis says of each mistake."""
    print("| kind | planted | accepted a text there | said |")
    print("|---|---|---|---|")
    for kind in kinds:
        for name, served in ({EQUAL: taught(kind)} | with_mistakes(taught(kind))).items():
            found = through_service(kind, served, count)
            said = ", ".join(found.explanation.names) or found.explanation.verdict
            print(f"| {kind} | {name} | {sum(found.there):.2f} | {said} |", flush=True)


if __name__ == "__main__":
    asked_for = [x for x in sys.argv[1:] if x != "--service"] or [*KINDS]
    (main_of_service if "--service" in sys.argv else main)(asked_for)
