"""Parts by name: drafters, verification rules, losses, stages."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from decode.errors import UserError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to a part. A new part is one new file with one `@registry.register(name)`.

    >>> shapes = Registry[type]("shape")
    >>> @shapes.register("circle")
    ... class Circle: ...
    >>> shapes["circle"] is Circle
    True
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._parts: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a part under `name`; a name taken twice is a programming error."""

        def add(part: T) -> T:
            if name in self._parts:
                raise ValueError(f"{self.what} {name!r} is registered twice")
            self._parts[name] = part
            return part

        return add

    def __getitem__(self, name: str) -> T:
        """The part called `name`. Raises UserError naming the nearest known one."""
        if name not in self._parts:
            raise UserError(
                f"unknown {self.what} {name!r}; known: {', '.join(sorted(self._parts))}."
                f"{nearest(name, self._parts)}"
            )
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._parts))

    def __contains__(self, name: object) -> bool:
        return name in self._parts
