"""Every known mistake, planted into a drafter: how often is it named?

python -m tools.diagnosis_controls [KIND …]
python -m tools.diagnosis_controls --service [KIND …]

Without HTTP: the decode loop drafts with the planted drafter, and its counts are those of the
server. The hypotheses come from `drafts_along`, as in a diagnosis. With
--service, each mistake is planted once into our own service, and the whole diagnosis is run.
"""

import copy
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decode.drafters import Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from draftsmith.diagnosis.counts import accepted_by_place, drafts_along
from draftsmith.diagnosis.explain import EQUAL, Explanation, as_keys, explain
from draftsmith.diagnosis.mistakes import MISTAKES
from draftsmith.export.acceptance import Counting
from tests.diagnosis_controls import (
    GAMMA,
    KINDS,
    TOKENS,
    prompts,
    target,
    taught,
    through_service,
)

ROUNDED = "equal, in bfloat16"
# Drafters of a kind, taught from other random weights, and draws of prompts for each.
SEEDS, DRAWS, HONEST_DRAWS, DRAWN = 4, 5, 25, 200
ROWS = 8  # that the loop with a planted drafter decodes together


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
