"""Spreads the prompts of a measurement over processes, each of which has the complete target.

A row's text depends only on its prompt and its number, so in float32 the counts over all prompts
are those of one process. Times are never measured by several processes together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from decode.base.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes that share a measurement. Each calls the same methods in the same order."""

    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, accelerator: Any) -> "Ranks":
        """The processes of an accelerate `Accelerator`."""
        return cls(accelerator.process_index, accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """The items of this process."""
        return items[self.rank :: self.world]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order. They are pickled."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def main_only(self, measure: Callable[[], T]) -> T:
        """The result of `measure`, which only the first process runs while the others wait. Raises
        UserError in all of them if it raised one."""
        result: Any = self.together(lambda: measure() if self.is_main else None)
        return self.gather(result)[0]

    def together(self, act: Callable[[], T]) -> T:
        """The result of `act`, which every process runs. Raises UserError in all of them if it
        raised one in any: a process that ends alone lets the others wait for it."""
        result: T
        problem: UserError | None = None
        try:
            result = act()
        except UserError as error:
            problem = error
        messages = self.gather(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for rank, message in enumerate(messages):
            if message is not None:
                raise UserError(f"rank {rank}: {message}")
        return result


ALONE = Ranks()
