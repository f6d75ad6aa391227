"""Opens caches of the target's outputs on all ranks together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator

from decode.base.errors import UserError
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from distill.teacher.cache_directory import holds_features, part_directories
from distill.teacher.cache_parts import check_parts, note_checked
from distill.teacher.cached_features import CachedFeatures
from distill.teacher.top_k_cache import CachedTeacher
from train.data.chat_tokens import Sample
from train.data.stored_samples import texts
from train.measure.ranks import Ranks

Cache = CachedTeacher | CachedFeatures
C = TypeVar("C", bound=Cache)


def open_cache(
    directory: Path, target: Target, samples: Sequence[Sample], accelerator: Accelerator
) -> Cache:
    """The cache that a `teacher_cache` or `feature_cache` stage wrote in a directory.

    Every rank must call this. One rank of each machine hashes the parts that changed since they
    were hashed last. Raises UserError on every rank if the cache is damaged, was made from another
    target or lacks one of the samples, or if the ranks see different files.
    """

    def read() -> Cache:
        if holds_features(directory):
            return CachedFeatures(directory, target, [FINAL])
        return CachedTeacher(directory, target)

    return _open(read, directory, samples, accelerator)


def open_features(
    directory: Path,
    target: Target,
    samples: Sequence[Sample],
    captured_layers: Sequence[int],
    accelerator: Accelerator,
) -> CachedFeatures:
    """The hidden states at `captured_layers` that a `feature_cache` stage wrote in a directory. See
    `open_cache`."""

    def read() -> CachedFeatures:
        return CachedFeatures(directory, target, captured_layers)

    return _open(read, directory, samples, accelerator)


def _open(
    read: Callable[[], C], directory: Path, samples: Sequence[Sample], accelerator: Accelerator
) -> C:
    ranks = Ranks.of(accelerator)
    # Each rank compares a share of the text.
    first, end = (len(samples) * (ranks.rank + i) // ranks.world for i in (0, 1))

    def opened() -> C:
        cache = read()
        cache.require(texts(samples, first, end))
        if accelerator.is_local_main_process:
            check_cache_directory(directory, cache.what)
        return cache

    cache = ranks.together(opened)
    hashes = ranks.gather(cache.index_sha256)
    for rank, seen in enumerate(hashes):
        if seen != hashes[0]:
            raise UserError(
                f"rank {rank} sees other files in {directory} than rank 0: the hash of the parts "
                f"is {seen[:12]}…, expected {hashes[0][:12]}…. All ranks must read the same cache: "
                "put it on a disk that all machines share, or copy it to each of them"
            )
    return cache


def check_cache_directory(directory: Path, what: str, *, again: bool = False) -> int:
    """Hash the parts of a cache that changed since they were hashed last (again: all of them), and
    note that. Returns the number of hashed parts. Raises UserError for a damaged part."""
    count = check_parts(part_directories(directory, what), again=again)
    note_checked(directory, what)
    return count
