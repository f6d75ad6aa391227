"""What a generate stage asks: every prompt, as often as it wants answers."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from train.data.read import Example, select

Job = tuple[Example, int]  # a prompt, and the number of its answer


class Jobs(Sequence[Job]):
    """All prompts with the number 0, then all with the number 1, and so on. Prompts are read when
    they are asked for."""

    def __init__(self, examples: Sequence[Example], numbers: range) -> None:
        """numbers: the numbers of the jobs, counted over all answers."""
        self.examples, self._numbers = examples, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Job]:
        prompts = len(self.examples)
        rows = np.asarray(self._numbers) % prompts
        for number, example in zip(self._numbers, select(self.examples, rows), strict=True):
            yield example, number // prompts

    @overload
    def __getitem__(self, index: int) -> Job: ...

    @overload
    def __getitem__(self, index: slice) -> "Jobs": ...

    def __getitem__(self, index: int | slice) -> "Job | Jobs":
        if isinstance(index, slice):
            return Jobs(self.examples, self._numbers[index])
        sample, row = divmod(self._numbers[index], len(self.examples))
        return self.examples[row], sample
