"""Would heads that adapt to the text they are drafting be accepted more often?

    python -m benchmarks.within_text [--quick] [--json FILE] [--target T] [--drafter D]
                                     [--gamma N] [--prompts FILE] [--tokens N]

The target writes long texts at temperature 1, with drafts of the heads. At each draft token that
the target judged, the acceptance α = Σ min(p, q) is counted for the heads as they are, and for
heads that were adapted to the tokens judged before in the same text (Test-Time Speculation,
2605.09329):

- bias: a vector is added to the logits. After each pass it moves by rate · (p − q).
- output: the output layer moves by rate · (p − q) hᵀ / |h|², the step of a gradient on the
  cross-entropy, for the states h that it read.
- lookup: the token that followed the last occurrence of the text's last three tokens, where there
  was one, with its α = p(token); elsewhere the heads as they are.

The adapted heads are judged on the drafts of the heads as they are, so α is that of one draft
token behind an accepted text. The law of the text does not depend on its drafts. Quarters are those
of the text. An interval is over texts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.common import (
    PROMPTS,
    TARGET,
    JsonOption,
    PromptsOption,
    TargetOption,
    describe_machine,
    format_interval,
    rows_table,
    run_command,
    start_benchmark,
    write_json,
)
from decode.base.errors import UserError
from decode.drafters.lookup.ngram import NgramIndex
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.measure.intervals import ratio_of_totals
from decode.model.loading import load_target
from decode.opening.directory import open_drafter
from decode.verification import Verification
from draftsmith.cli.command import tokenized_prompts
from heads.heads_drafter import HeadsDrafter
from train.data.read import read_examples

RATES = {"bias": (0.1, 0.3, 1.0), "output": (0.1, 0.3, 1.0)}
BEFORE = 3  # tokens that a lookup looks for
QUARTERS = 4


@dataclass
class Adapted:
    """What a way of adapting has learnt of a text.

    moved: [V', H], added to the output layer; or [V', 1] for a bias, which always reads 1.
    """

    rate: float
    moved: Tensor
    is_bias: bool

    @classmethod
    def begin(cls, way: str, rate: float, rows: int, size: int) -> "Adapted":
        is_bias = way == "bias"
        return cls(rate, torch.zeros(rows, 1 if is_bias else size), is_bias)

    def _read(self, state: Tensor) -> Tensor:
        return torch.ones(1) if self.is_bias else state

    def q(self, state: Tensor, logits: Tensor) -> Tensor:
        return (logits + self.moved @ self._read(state)).softmax(-1)

    def learn(self, state: Tensor, p: Tensor, q: Tensor) -> None:
        read = self._read(state)
        self.moved.addr_(p - q, read, alpha=self.rate / float(read @ read))


@dataclass
class Text:
    """The α of each judged draft token, by way of drafting, and where in the text it stands."""

    places: list[int] = field(default_factory=list)
    alphas: dict[str, list[float]] = field(default_factory=dict)

    def add(self, way: str, alpha: float) -> None:
        self.alphas.setdefault(way, []).append(alpha)


class Judge:
    """An observer that judges the draft tokens of one text at a time."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        self.vocabulary, output = drafter.heads.vocabulary, drafter.heads.output
        self.text, self._drafted = Text(), list[tuple[Tensor, Tensor]]()
        self._begin, self._adapted = 0, dict[str, Adapted]()
        at: Callable[[int, Tensor], Tensor] = output.at

        def watched(depth: int, states: Tensor) -> Tensor:
            logits = at(depth, states)
            self._drafted.append((states[0, -1].float(), logits[0, -1].float()))
            return logits

        output.at = watched  # type: ignore[method-assign]

    def begin(self, prompt: list[int]) -> None:
        self.text, self._begin, self._adapted = Text(), len(prompt), {}

    def observe(self, seen: Verification) -> None:
        drafted, self._drafted = self._drafted, []
        positions, text = seen.positions()[0], seen.contexts.tokens[0].tolist()
        judged = []
        for depth in range(int(seen.reached[0])):
            state, logits = drafted[depth]
            p = seen.scores.raw[0, positions[depth]].float().softmax(-1)
            before = text[: int(seen.lengths[0]) + depth]
            self.text.places.append(len(before) - self._begin)
            judged.append((state, p, self._judged(state, logits, p, before)))
        for state, p, by_way in judged:
            for way, q in by_way.items():
                self._adapted[way].learn(state, self._within(p), q)

    def _judged(
        self, state: Tensor, logits: Tensor, p: Tensor, before: list[int]
    ) -> dict[str, Tensor]:
        """Counts α of all ways. Returns q of those that adapt."""
        own, kept = logits.softmax(-1), p if self.vocabulary is None else p[self.vocabulary]
        frozen = float(torch.minimum(kept, own).sum())
        self.text.add("as they are", frozen)
        token = _looked_up(before)
        self.text.add("lookup, else as they are", frozen if token is None else float(p[token]))
        found = {}
        for way, rates in RATES.items():
            for rate in rates:
                name = f"{way}, rate {rate}"
                if name not in self._adapted:
                    self._adapted[name] = Adapted.begin(way, rate, len(logits), len(state))
                found[name] = self._adapted[name].q(state, logits)
                self.text.add(name, float(torch.minimum(kept, found[name]).sum()))
        return found

    def _within(self, p: Tensor) -> Tensor:
        """p over the draft vocabulary, renormalised as in training."""
        if self.vocabulary is None:
            return p
        kept = p[self.vocabulary]
        return kept / kept.sum().clamp(min=1e-9)


def _looked_up(text: list[int]) -> int | None:
    """The token that followed the last earlier occurrence of the last tokens."""
    return next(iter(NgramIndex(BEFORE, BEFORE, text).continuation(1)), None)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="6 texts of 128 tokens")] = False,
    json_file: JsonOption = None,
    target: TargetOption = TARGET,
    drafter: Annotated[str, typer.Option(help="heads")] = "embedded:eagle1-smollm2-135m",
    gamma: Annotated[int, typer.Option(min=1, help="tokens of a draft")] = 3,
    prompts: PromptsOption = PROMPTS / "test.jsonl",
    tokens: Annotated[int, typer.Option(min=8, help="tokens of each text")] = 512,
) -> None:
    """Count the acceptance of heads as they are and adapted to each text."""
    reporter = start_benchmark()
    loaded = load_target(target, dtype="float32", device="cpu")
    heads = open_drafter(drafter, loaded)
    if not isinstance(heads, HeadsDrafter):
        raise UserError(f"{drafter} are no heads; name a drafter of heads")
    count, tokens = (6, min(tokens, 128)) if quick else (12, tokens)
    asked = tokenized_prompts(read_examples(str(prompts))[0], loaded, count)
    judge, texts = Judge(heads), []
    decoder = Decoder(
        loaded.model, heads, gamma=gamma, sampling=Sampling(temperature=1.0),
        observers=[judge.observe], eos_token_ids=(),
    )  # fmt: skip
    with reporter.bar("texts", len(asked)) as bar:
        for number, prompt in enumerate(asked):
            judge.begin(prompt)
            decoder.decode([prompt], tokens, seed=number)
            texts.append(judge.text)
            bar.update(number + 1)
    gains = {way: _gain(way, texts) for way in texts[0].alphas}
    rows = [_row(way, texts, tokens, gains[way]) for way in gains]
    title = f"α of a draft token of {drafter}, {len(texts)} texts of {tokens} tokens"
    reporter.table(rows_table(title, rows, left=1))
    if json_file is not None:
        ratios = {f"acceptance_gain_{way}": gain["value"] for way, gain in gains.items()}
        figures = {"benchmark": "within_text", "process": describe_machine(), "rows": rows}
        write_json(json_file, figures | {"ratios": ratios})


def _gain(way: str, texts: list[Text]) -> dict[str, float]:
    """α beside the heads as they are, with its interval over texts."""
    found = ratio_of_totals(
        *(np.array([sum(text.alphas[name]) for text in texts]) for name in (way, "as they are"))
    )
    assert found is not None, "no draft token was judged"
    return found


def _row(way: str, texts: list[Text], tokens: int, gain: dict[str, float]) -> dict[str, str]:
    """α in each quarter of the texts, and its gain."""
    quarters = []
    for quarter in range(QUARTERS):
        inside = [
            alpha
            for text in texts
            for place, alpha in zip(text.places, text.alphas[way], strict=True)
            if place * QUARTERS // tokens == quarter
        ]
        quarters.append(f"{np.mean(inside):.3f}" if inside else "–")
    return {
        "drafts": way,
        **{f"quarter {n + 1}": value for n, value in enumerate(quarters)},
        "gain": format_interval(gain, 3),
    }


if __name__ == "__main__":
    run_command(main)
