"""Opens caches of the target's outputs on all ranks together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from decode.errors import UserError
from decode.target.hidden_states import FINAL
from decode.target.loading import Target
from distill.teacher.cache_parts import check_parts, note_checked, part_directories, text_sha256
from distill.teacher.feature_sources import CachedFeatures, holds_features
from distill.teacher.top_k_cache import CachedTeacher
from train.data.chat import Sample

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
    cache: C | None = None
    problem: UserError | None = None
    try:
        cache = read()
        cache.require([(sample.id, text_sha256(sample.tokens, sample.mask)) for sample in samples])
        if accelerator.is_local_main_process:
            check_directory(directory, cache.parts.what)
    except UserError as error:
        problem = error
    # Before one rank ends alone and the others wait for it.
    message = None if problem is None else str(problem)
    views = [(message, None if cache is None else cache.parts.index_sha256)]
    if accelerator.num_processes > 1:
        views = gather_object(views)
    if problem is not None:
        raise problem
    for rank, (message, index) in enumerate(views):
        if message is not None:
            raise UserError(f"rank {rank}: {message}")
        if index != views[0][1]:
            raise UserError(
                f"rank {rank} sees other files in {directory} than rank 0: the hash of the parts "
                f"is {(index or '')[:12]}…, expected {(views[0][1] or '')[:12]}…. All ranks must "
                "read the same cache: put it on a disk that all machines share, or copy it to "
                "each of them"
            )
    assert cache is not None
    return cache


def check_directory(directory: Path, what: str, *, again: bool = False) -> int:
    """Hash the parts of a cache that changed since they were hashed last (again: all of them), and
    note that. Returns the number of hashed parts. Raises UserError for a damaged part."""
    count = check_parts(part_directories(directory, what), again=again)
    note_checked(directory, what)
    return count
