"""Which rows of a run's data its target can use, known before the first stage begins.

Every row that a stage will read is written with the target's tokenizer and chat template once. A
row that cannot be written would end the stage when it is reached, after hours.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from decode.base.errors import UserError
from decode.loop.rows import prompt_problem
from decode.measure.ranks import ALONE, Ranks
from train.data.chat_tokens import Sample
from train.data.read import Example, select
from train.data.stored_samples import sizes


@dataclass
class UsableRows:
    """Finds the rows that can be used, and remembers them.

    positions, vocab_size: the target's. on_bad, max_bad_rate: the settings of the data; bad rows
    are left out under "skip". ranks: the processes that share the work. say: called with what was
    left out.
    """

    positions: int
    vocab_size: int
    on_bad: Literal["stop", "skip"] = "stop"
    max_bad_rate: float = 0.01
    ranks: Ranks = ALONE
    say: Callable[[str], None] = lambda line: None
    _known: dict[str, np.ndarray] = field(default_factory=dict)
    _sizes: dict[str, np.ndarray] = field(default_factory=dict)

    def asked(
        self, split: str, examples: Sequence[Example], prompt: Callable[[Example], list[int]]
    ) -> Sequence[Example]:
        """The examples whose prompts can be answered. Text without a prompt stays: who needs a
        prompt says so."""

        def problem(example: Example) -> str | None:
            if example.messages is None:
                return None
            found = prompt_problem(prompt(example), self.positions, self.vocab_size)
            return f"the prompt {found}" if found else None

        return self._usable(f"prompts of {split}", examples, problem)

    def trained_on(
        self,
        split: str,
        examples: Sequence[Example],
        samples: Callable[[Iterable[Example]], Iterable[Sample]],
    ) -> Sequence[Example]:
        """The examples whose own responses can be trained on."""
        mine: list[np.ndarray] = []

        def problem(example: Example) -> str | None:
            made = list(samples([example]))
            most = max((max(ids) for s in made for ids in (s.tokens, s.source) if ids), default=0)
            if most < self.vocab_size:
                mine.append(np.stack(sizes(made), axis=1))
                return None
            return f"has the token id {most}; expected ids from 0 to {self.vocab_size - 1}"

        found = self._usable(f"responses of {split}", examples, problem)
        if split not in self._sizes:
            own = np.concatenate(mine) if mine else np.zeros((0, 2), np.int32)
            self._sizes[split] = np.concatenate(self.ranks.gather(own))
        return found

    def sizes(self, split: str) -> np.ndarray:
        """int32 [n, 2]: the tokens of each sample of a split's own responses, and how many a
        loss predicts, in no order. Only after `trained_on`."""
        return self._sizes[split]

    def _usable(
        self, what: str, examples: Sequence[Example], problem: Callable[[Example], str | None]
    ) -> Sequence[Example]:
        """All ranks call this together. Raises UserError on all of them."""
        if what not in self._known:
            mine = np.arange(self.ranks.rank, len(examples), self.ranks.world)
            bad = dict[int, str]()
            for row, example in zip(mine.tolist(), select(examples, mine), strict=True):
                if (found := _problem(example, problem)) is not None:
                    bad[row] = found
            for other in self.ranks.gather(bad):
                bad |= other
            self._require_few(what, len(examples), bad)
            self._known[what] = np.setdiff1d(np.arange(len(examples)), list(bad))
        return select(examples, self._known[what])

    def _require_few(self, what: str, count: int, bad: dict[int, str]) -> None:
        if not bad:
            return
        first = bad[min(bad)]
        if self.on_bad == "stop":
            raise UserError(f"{first}. Mend the row, or leave such rows out with data.on_bad: skip")
        if len(bad) > self.max_bad_rate * count or len(bad) == count:
            raise UserError(
                f"{len(bad)} of {count} rows cannot be used for the {what}, more than the "
                f"{self.max_bad_rate:.2%} that data.max_bad_rate allows. The first: {first}"
            )
        self.say(f"left out of the {what}: {len(bad)} of {count} rows. The first: {first}")


def _problem(example: Example, problem: Callable[[Example], str | None]) -> str | None:
    """What is wrong with an example, with its place."""
    try:
        found = problem(example)
    except UserError as error:
        found = str(error).rstrip(".")
    if found is None or example.source in found:
        return found
    return f"{example.source}: {found}"
