"""Drafters that learnt the texts of a tiny target by heart, into which mistakes are planted: by the
tests of a diagnosis, and by `python -m tools.diagnosis_controls`."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from decode.drafters import DRAFTERS, Drafter
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from decode.settings import DecodeSettings
from draftsmith.diagnosis.entry import Diagnosis, diagnose
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
