"""The parts that the directory of a cache holds."""

from pathlib import Path

from decode.base.artifact import numbers_of, verify_directory
from decode.base.errors import UserError

PART = "part"


def parts_of(directory: Path) -> list[Path]:
    """The parts in a directory, in order."""
    return [directory / f"{PART}-{number}" for number in numbers_of(directory, PART)]


def part_directories(directory: Path, what: str) -> list[Path]:
    """The parts of a cache in order. Raises UserError if there is none. what: names the cache."""
    parts = parts_of(directory)
    if not parts:
        raise UserError(f"{directory} holds no {what}; expected directories {PART}-N")
    return parts


def holds_features(directory: Path) -> bool:
    """Whether a cache holds hidden states. Raises UserError for a directory without a cache."""
    first, *_ = part_directories(directory, "cache")
    return "captured_layers" in verify_directory(first, deep=False)
