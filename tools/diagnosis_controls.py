"""Every known mistake, planted into a drafter: how often is it named?

python -m tools.diagnosis_controls [KIND …]
python -m tools.diagnosis_controls --embedded FOLDER [KIND …]
python -m tools.diagnosis_controls --service [KIND …]

Without HTTP: the decode loop drafts with the planted drafter, and its counts are those of the
server. The hypotheses come from `drafts_along`, as in a diagnosis. With --embedded, the target is
SmolLM2-135M with the shipped EAGLE-1 and briefly trained drafters of the other kinds. What was
measured is kept in the folder, and a killed run goes on. With --service, each mistake is planted
once into our own service, and the whole diagnosis is run.
"""

import argparse
import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target, load_target
from decode.opening.shipped import SHIPPED
from decode.settings import DecodeSettings
from draftsmith.cli.command import given_or_shipped
from draftsmith.diagnosis.counts import accepted_by_place, drafts_along
from draftsmith.diagnosis.entry import Diagnosis, diagnose, open_plain
from draftsmith.diagnosis.explain import EQUAL, Explanation, as_keys, explain
from draftsmith.diagnosis.mistakes import MISTAKES
from draftsmith.export.compare_acceptance import Counting
from heads.heads_directory import new_heads, save_heads
from heads.heads_drafter import HeadsDrafter
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
TAUGHT, BEGINNING, ANSWER = 24, 6, 24  # texts, and their tokens
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
    """The texts that drafters learn."""
    return texts_of(target())


def texts_of(one: Target, asked: Sequence[list[int]] | None = None) -> list[list[int]]:
    """Prompts, random ones by default, with the target's greedy answers, token ids."""
    rng = np.random.default_rng(1000)
    asked = asked or [rng.integers(3, VOCAB, BEGINNING).tolist() for _ in range(TAUGHT)]
    answers = Decoder(one.model, DRAFTERS.make("none"), gamma=1).decode(asked, ANSWER).outputs
    return [x + y for x, y in zip(asked, answers, strict=True)]


def prompts(count: int, seed: int, texts: Sequence[list[int]] | None = None) -> list[list[int]]:
    """Token ids: different beginnings of known texts, so that what follows each is known, too."""
    cuts = range(BEGINNING, BEGINNING + ANSWER - TOKENS - GAMMA - 1)
    whole = (text for text in texts or known() if len(text) == BEGINNING + ANSWER)
    found = [text[:cut] for text in whole for cut in cuts]
    return [found[i] for i in np.random.default_rng(seed).permutation(len(found))[:count]]


@functools.cache
def taught(kind: str, seed: int = 0) -> Drafter:
    """A drafter of this kind that learnt some texts of the target by heart."""
    return taught_on(known(), kind, seed)


def taught_on(
    learnt: Sequence[Sequence[int]],
    kind: str,
    seed: int = 0,
    one: Target | None = None,
    steps: int = STEPS,
) -> Drafter:
    """A drafter of this kind that learnt texts of the target, token ids, by heart; in fewer steps
    less well. one: the target, if it is another one."""
    one = one or target()
    torch.manual_seed(seed)
    if kind == "small_lm":
        model = copy.deepcopy(one.model)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.15 * weight.std() * torch.randn(weight.shape)
        return SmallLMDrafter(model)
    ids, mask = as_batch(learnt)
    reduced = ids.unique() if kind in REDUCED else None
    heads = new_heads(HeadOptions.of(KINDS[kind]), one, reduced)
    return taught_heads(ids, mask, heads, one, steps=steps)


def as_batch(texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as int64 [N, T], and which tokens there are."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in texts], batch_first=True)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in texts])[:, None]


def taught_heads(
    ids: torch.Tensor, mask: torch.Tensor, heads: Any, one: Target, **options: Any
) -> Drafter:
    """The drafter of new heads that learnt these texts. options: for `teach`."""
    with torch.no_grad():  # attention and norms count from the beginning, and with it positions
        for name, weight in heads.named_parameters():
            if "o_proj" in name:
                weight.normal_(std=0.1)
            if "norm" in name:
                weight.mul_(1 + 0.5 * torch.randn(weight.shape))
    teach(heads, one, ids, mask, **{"steps": STEPS} | options)
    heads.eval().requires_grad_(False)
    kind = DRAFTERS[heads.options.type]
    drafter: Drafter = kind(heads, one.vocab_size)  # type: ignore[call-arg]
    return drafter


def through_service(kind: str, served: Drafter, count: int, **settings: Any) -> Diagnosis:
    """Our service drafts with `served`; the diagnosis is given the drafter as it is."""
    with serving(target(), served, DecodeSettings(gamma=GAMMA, **settings)) as running:
        config = ServerConfig(url=[running.url], concurrency=1)
        return diagnose(running.url, target(), taught(kind), prompts(count, 0), config, gamma=GAMMA)


ROUNDED = "equal, in bfloat16"
# Drafters of a kind, taught from other random weights, and repetitions in all.
SEEDS, DRAWS, HONEST_DRAWS, DRAWN = 4, 20, 100, 200
# That the loop with a planted drafter decodes together: of the tiny target, of the embedded one.
ROWS, MORE_ROWS = 8, 25
# Of the embedded target: it writes a text for one shipped prompt of so many; the training.
SPREAD, FEWER_STEPS, RATE = 5, 120, 1e-3
FEWER = {"medusa": 20, "eagle3": 40, "mtp": 40, "small_lm": 40}
LAYERS = 2  # of its small LM
TAPS = [1, 14, 26]  # of its DFlash


@dataclass(frozen=True)
class Bench:
    """A target with drafters of each kind, and the prompts. keep: the folder of what was measured;
    None: nothing is kept."""

    target: Target
    prompts: list[list[int]]
    drafters: Callable[[str], list[Drafter]]
    rows: int = ROWS
    keep: Path | None = None

    def measured(self, name: str, measure: Callable[[], Any]) -> np.ndarray:
        """What `measure` gives, or what it gave before."""
        file = None if self.keep is None else self.keep / f"{name}.npy"
        if file is not None and file.exists():
            return np.load(file)
        found = np.array(measure())
        if file is not None:
            np.save(file, found)
        return found


def tiny() -> Bench:
    return Bench(
        target(), prompts(10**6, 0), lambda kind: [taught(kind, seed) for seed in range(SEEDS)]
    )


def embedded(keep: Path) -> Bench:
    """Texts begin as the shipped test prompts do, without a chat template."""
    keep.mkdir(parents=True, exist_ok=True)
    one = load_target("embedded:smollm2-135m", dtype="float32", device="cpu")
    asked = [one.tokenizer(example.prompt)["input_ids"] for example in given_or_shipped(None)]
    texts = texts_of(one, [x[:BEGINNING] for x in asked[::SPREAD]])

    def drafters(kind: str) -> list[Drafter]:
        if kind == "small_lm":
            return [first_layers(one, texts)]
        path = SHIPPED / "eagle1-smollm2-135m" if kind == "eagle1" else keep / kind
        if not path.exists():
            options = KINDS[kind] | ({"taps": TAPS} if kind == "dflash" else {})
            ids, mask = as_batch(texts)
            heads = new_heads(HeadOptions.of(options), one, ids.unique())
            learnt = taught_heads(
                ids, mask, heads, one, steps=FEWER.get(kind, FEWER_STEPS), lr=RATE
            )
            assert isinstance(learnt, HeadsDrafter)
            save_heads(path, learnt.heads, target=one, provenance={"stage": "heads"})
        return [open_plain(path, one)]

    return Bench(one, prompts(DRAWN, 0, texts), drafters, MORE_ROWS, keep)


def first_layers(one: Target, texts: Sequence[list[int]]) -> SmallLMDrafter:
    """A small LM of the target's first layers, which learnt the texts."""
    torch.manual_seed(0)
    model: Any = copy.deepcopy(one.model)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    learnt = model.model.layers.requires_grad_(True)
    optimizer = torch.optim.Adam(learnt.parameters(), lr=RATE)
    ids, _ = as_batch(texts)
    with torch.enable_grad():
        for _ in range(FEWER["small_lm"]):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return SmallLMDrafter(model.eval().requires_grad_(False))


def with_mistakes(drafter: Drafter, one: Target) -> dict[str, Drafter]:
    """{name: the drafter with this mistake}, as far as it can have it."""
    made = {name: MISTAKES[name](TOKENS).make(drafter, one) for name in MISTAKES}
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


def counted(bench: Bench, drafter: Drafter) -> np.ndarray:
    """Accepted tokens by place, int [N, γ], of a loop that drafts with this drafter. Prompts are
    read in their order."""
    one = bench.target
    decoder = Decoder(one.model, drafter, eos_token_ids=one.eos_token_ids, gamma=GAMMA)
    accepted = decoder.decode(bench.prompts, TOKENS, batch_size=bench.rows).tally.accepted
    return np.pad(accepted, ((0, 0), (0, GAMMA - accepted.shape[1])))


def expected(bench: Bench, drafters: Sequence[Drafter]) -> list[np.ndarray]:
    """The same of each drafter, as a diagnosis measures it."""
    one, asked = bench.target, bench.prompts
    drafts = drafts_along(one, drafters, asked, GAMMA, TOKENS, first_drafted=False)
    return [
        accepted_by_place(drafts, member, Counting(), one.eos_token_ids, TOKENS)[1]
        for member in range(len(drafters))
    ]


@dataclass
class Planted:
    """accepted: tokens of a text, of each drafter in the mean. found: of each repetition."""

    accepted: list[float]
    found: list[Explanation]


def named(kind: str, bench: Bench) -> dict[str, Planted]:
    """What is said of each mistake, and of the drafter as it is. A repetition is a draw of prompts,
    with replacement where there are no more."""
    planted: dict[str, Planted] = {}
    drafters = bench.drafters(kind)
    count = len(bench.prompts)
    for drafter in drafters:
        made = {EQUAL: drafter} | with_mistakes(drafter, bench.target)
        said = bench.measured(f"{kind} here", partial(expected, bench, [*made.values()]))
        served = made | {ROUNDED: in_bfloat16(drafter)}
        for name, one in served.items():
            counts = bench.measured(f"{kind} {name}", partial(counted, bench, one))
            here = planted.setdefault(name, Planted([], []))
            here.accepted.append(float(counts.sum(1).mean()))
            draws = HONEST_DRAWS if name in (EQUAL, ROUNDED) else DRAWS
            for draw in range(draws // len(drafters)):
                rng = np.random.default_rng(draw)
                rows = rng.choice(count, DRAWN, replace=count <= DRAWN)
                keys = {x: as_keys(y[rows]) for x, y in zip(made, said, strict=True)}
                here.found.append(explain(as_keys(counts[rows]), keys, {}))
    return planted


def main(kinds: Sequence[str], bench: Bench) -> None:
    """Print a table: how often each mistake was named, alone or as one of several, and what else
    was said of it."""
    print("| kind | planted | accepted a text | named | as one of several | otherwise |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        for name, one in named(kind, bench).items():
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
        for name, served in ({EQUAL: taught(kind)} | with_mistakes(taught(kind), target())).items():
            found = through_service(kind, served, count)
            said = ", ".join(found.explanation.names) or found.explanation.verdict
            print(f"| {kind} | {name} | {sum(found.there):.2f} | {said} |", flush=True)


if __name__ == "__main__":
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--embedded", type=Path, metavar="FOLDER")
    parser.add_argument("--service", action="store_true")
    given = parser.parse_args()
    every = given.kinds or [*KINDS]
    if given.service:
        main_of_service(every)
    else:
        main(every, tiny() if given.embedded is None else embedded(given.embedded))
