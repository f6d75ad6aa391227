"""Directories that are either complete or absent: drafters, training checkpoints, generated data.

The writer fills a directory under a hidden name next to its final path, lists its files in
`manifest.json`, flushes it to disk and renames it. So a reader never sees a partial directory, even
if the writer is killed:

    .tmp-<name>-<host>.<pid>-<random>   being filled or deleted; useless once its process is dead
    .old-<name>                         the previous <name>, kept until the new one is in place

Only one process at a time may write a given path. No file is ever unpickled here.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from decode.base.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1

# Earlier versions wrote no host.
_TEMPORARY = re.compile(
    r"\.tmp-(?P<name>.+)-((?P<host>[0-9a-f]{8})\.)?(?P<pid>[0-9]{1,9})-[0-9a-f]{8}"
)
_ASIDE = re.compile(r"\.old-(?P<name>.+)")
# Names of the temporaries of this process. In a container, a restarted run often gets the process
# id of the killed run, so the id alone does not show which temporaries are stale.
_in_use: set[str] = set()


class CorruptArtifact(UserError):
    """A directory does not match its manifest. Has `directory`, `file` and `problem`."""

    def __init__(self, directory: Path, file: str, problem: str) -> None:
        super().__init__(directory, file, problem)
        self.directory, self.file, self.problem = directory, file, problem

    def __str__(self) -> str:
        # repr: a manifest from elsewhere may hold names with control characters.
        return (
            f"{self.directory} cannot be used: {self.file!r} {self.problem}. "
            "Restore it from a copy, or delete the directory and write it again."
        )


class ReadFailure(UserError):
    """The disk failed to read a file. That says nothing of its content, so nobody may delete it."""

    def __init__(self, directory: Path, file: str, error: OSError) -> None:
        super().__init__(
            f"{directory / file} cannot be read ({error.strerror}). Nothing was deleted. Start "
            f"again when the disk answers; if it stays so, move {directory} away."
        )


def write_directory(
    path: Path, fill: Callable[[Path], object], *, meta: dict[str, Any] | None = None
) -> None:
    """Write the directory `path` from the files that `fill(tmp)` puts into an empty directory.

    `meta` (JSON values) is stored in the manifest, and `verify_directory` returns it. It is read
    after `fill` returns. Replaces an empty directory and a directory written by this function.

    On any error, `path` stays unchanged and the temporary is removed. Raises UserError if `path` is
    something else that would be lost (a file, a link, a directory without a manifest), if `fill`
    leaves a link or a special file, and for every OSError, also in `fill`. Other exceptions of
    `fill` pass through.
    """
    path = Path(os.path.abspath(path))
    with _os_errors_named(f"cannot write {path}"):
        _make_directory(path.parent)
        _settle(path)
        if not _is_artifact(path) and not _is_vacant(path):
            raise UserError(
                f"{path} exists and holds no {MANIFEST}, so it was not written by draftsmith and "
                "is not replaced. Choose another path, or move it away."
            )
        with temporary(path) as tmp:
            tmp.mkdir()
            fill(tmp)
            _seal(tmp, meta or {})
            _put_in_place(tmp, path)


def link_directory(source: Path, path: Path) -> None:
    """Let `path`, which does not exist yet, be the complete directory `source` as well: it has the
    same files, which take no more space, or copies on a disk without hard links. UserError on
    OSError."""

    def link(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    path = Path(os.path.abspath(path))
    with _os_errors_named(f"cannot write {path}"), temporary(path) as tmp:
        shutil.copytree(source, tmp, copy_function=link)
        for entry in (*tmp.rglob("*"), tmp):
            _sync(entry)
        os.rename(tmp, path)
        _sync(path.parent)


def remove_directory(path: Path) -> None:
    """Delete a directory. A kill half-way leaves nothing visible. UserError on OSError."""
    with _os_errors_named(f"cannot remove {path}"):
        _discard(Path(os.path.abspath(path)))


def write_file(path: Path, data: bytes | str) -> None:
    """Write one file completely or not at all. Text is UTF-8. UserError on OSError."""
    path = Path(os.path.abspath(path))
    with _os_errors_named(f"cannot write {path}"):
        _make_directory(path.parent)
        with temporary(path) as tmp:
            _write_and_sync(tmp, data.encode() if isinstance(data, str) else data)
            os.replace(tmp, path)
            _sync(path.parent)


def read_versioned(
    path: Path, version: int, fields: Sequence[str], what: str, remedy: str
) -> dict[str, Any]:
    """The JSON object of a file that says its `format`. Raises UserError for a file that cannot be
    read, lacks one of `fields` or has another format. what, remedy: what it should be, and what to
    do if it is not, for the message."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found, *_ = [content[name] for name in ("format", *fields)]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not {what} ({error!r}); {remedy}") from error
    if found != version:
        raise UserError(
            f"{path} has format {found!r}; this version of draftsmith reads format {version} of "
            f"{what}"
        )
    return content


def require_space(directory: Path, needed: int, what: str) -> None:
    """Raise UserError if the disk of `directory` has fewer than `needed` free bytes. The directory
    need not exist yet. what: names the data, for the message."""
    free = free_space(directory)
    if free < needed:
        raise UserError(
            f"{what} in {directory} need {size(needed)}, but the disk has {size(free)} free; free "
            "some space there, or choose another output_dir"
        )


def size(count: float) -> str:
    """A number of bytes in the unit that shows it."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.{0 if unit == 'bytes' else 1}f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def free_space(directory: Path) -> int:
    """Return the free bytes on the disk of `directory`, which need not exist yet."""
    there = Path(os.path.abspath(directory))
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def verify_directory(path: Path, *, deep: bool | Collection[str] = True) -> dict[str, Any]:
    """Check `path` against its manifest and return the manifest's meta.

    With `deep`, every file is hashed, or those that it names. Of the others only presence and size
    are checked. Files that the manifest does not list are ignored (a clone from a model hub adds
    some). Raises CorruptArtifact for the first file that is missing, changed, a link, or outside
    the directory, and ReadFailure for one that the disk does not read.
    """
    body = _read_manifest(path)
    for name, entry in body["files"].items():
        try:
            hashed = deep if isinstance(deep, bool) else name in deep
            problem = _problem_of(path, name, entry, hashed)
        except (FileNotFoundError, NotADirectoryError):
            problem = "is missing"
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # no such file was ever written
                raise ReadFailure(path, name, error) from error
            problem = f"cannot be read ({error.strerror})"
        if problem:
            raise CorruptArtifact(path, name, problem)
    return body["meta"]


def manifest_sha256(path: Path) -> str:
    """The hash of the manifest of `path`: the same for two readers only if they see the same
    files. Raises as `verify_directory` does."""
    return json_sha256(_read_manifest(path))


def weights_sha256(path: Path) -> str:
    """A hash of the safetensors files of `path`, by what its manifest says of them. Raises as
    `verify_directory` does."""
    files = _read_manifest(path)["files"]
    return json_sha256({k: v["sha256"] for k, v in files.items() if k.endswith(".safetensors")})


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def numbers_of(parent: Path, prefix: str) -> list[int]:
    """The integers of all `parent/prefix-<integer>`, in ascending order."""
    names = (path.name.removeprefix(f"{prefix}-") for path in parent.glob(f"{prefix}-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def newest_complete(parent: Path, prefix: str) -> tuple[Path | None, list[CorruptArtifact]]:
    """The `parent/prefix-<integer>` with the highest integer that verifies, or None.

    Also returns the errors of the directories that were skipped, for the caller to show. Call
    `recover` first. Raises ReadFailure if the disk does not read one of them.
    """
    skipped = []
    for number in reversed(numbers_of(parent, prefix)):
        entry = parent / f"{prefix}-{number}"
        try:
            verify_directory(entry)
        except CorruptArtifact as error:
            skipped.append(error)
        else:
            return entry, skipped
    return None, skipped


def recover(parent: Path, *, alone: bool = False) -> None:
    """Clean up in `parent` after processes that died while writing. UserError on OSError.

    Deletes temporaries of this machine's dead processes. Restores a directory that was moved aside
    if its replacement was never put in place. Safe while other processes write. alone: no other
    machine writes there, so the temporaries of other machines are deleted too.
    """
    parent = Path(os.path.abspath(parent))
    if not parent.is_dir():
        return
    with _os_errors_named(f"cannot clean up in {parent}"):
        names = os.listdir(parent)
        being_written = set()
        for match in filter(None, map(_TEMPORARY.fullmatch, names)):
            if _is_stale(match, alone):
                _delete(parent / match[0])
            else:
                being_written.add(match["name"])
        for match in filter(None, map(_ASIDE.fullmatch, names)):
            # A live writer between its two renames handles the aside copy itself.
            if match["name"] not in being_written:
                _settle(parent / match["name"])


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """An unused hidden name next to `path`, for a file or a directory. Anything left there at the
    end is deleted, and after a kill by `recover`."""
    writer = f"{_host()}.{os.getpid()}"
    tmp = path.with_name(f".tmp-{path.name}-{writer}-{os.urandom(4).hex()}")
    _in_use.add(tmp.name)
    try:
        yield tmp
    finally:
        _delete(tmp)
        _in_use.discard(tmp.name)


def _host() -> str:
    """A short name of this machine, or of this container."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _put_in_place(tmp: Path, path: Path) -> None:
    """Commit. A kill between the renames leaves the aside copy, which `_settle` restores."""
    try:
        if _is_artifact(path):
            os.rename(path, _aside(path))
        os.rename(tmp, path)
        _sync(path.parent)
    except BaseException:
        if not tmp.exists():
            os.rename(path, tmp)
        _settle(path)
        raise
    # The new directory is safely on disk. If the old copy cannot be removed now, the write still
    # succeeded: the next write or `recover` tries again.
    with contextlib.suppress(OSError):
        _settle(path)


def _settle(path: Path) -> None:
    """Remove the aside copy of `path` if `path` exists. Otherwise restore it."""
    aside = _aside(path)
    # Another process may settle the same path at the same time. It does not matter which wins.
    with contextlib.suppress(FileNotFoundError):
        if not _is_artifact(aside):
            return
        if _is_artifact(path):
            _discard(aside)
        elif _is_vacant(path):
            os.rename(aside, path)
            _sync(path.parent)


def _aside(path: Path) -> Path:
    return path.with_name(f".old-{path.name}")


def _is_artifact(path: Path) -> bool:
    return not path.is_symlink() and (path / MANIFEST).is_file()


def _is_vacant(path: Path) -> bool:
    """Whether a directory can be renamed to `path` without loss of data."""
    if not os.path.lexists(path):
        return True
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _is_stale(match: re.Match[str], alone: bool) -> bool:
    if match["host"] not in (None, _host()):
        return alone
    pid = int(match["pid"])
    if pid == os.getpid():
        return match[0] not in _in_use
    return not psutil.pid_exists(pid)


def _delete(tmp: Path) -> None:
    """Remove a temporary as far as possible. An error here must not hide an earlier error."""
    if tmp.is_dir() and not tmp.is_symlink():
        shutil.rmtree(tmp, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            tmp.unlink()


def _discard(path: Path) -> None:
    """Rename, then delete: a kill during the deletion leaves a temporary, not half of `path`."""
    with temporary(path) as tmp:
        os.rename(path, tmp)
        _sync(path.parent)
        shutil.rmtree(tmp)


def _seal(directory: Path, meta: dict[str, Any]) -> None:
    """Flush every file of `directory` to disk and write the manifest that lists them."""
    files = {}
    for entry in sorted(directory.rglob("*")):
        name = entry.relative_to(directory).as_posix()
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise UserError(
                f"{name} is a link or a special file; expected only regular files and directories"
            )
        if name == MANIFEST:
            raise ValueError(f"{MANIFEST} is written by write_directory, not by fill")
        if entry.is_file():
            files[name] = {"size": entry.stat().st_size, "sha256": file_sha256(entry)}
        _sync(entry)
    # To JSON and back: the hash must be over the values that a reader sees (string keys, lists).
    body = json.loads(json.dumps({"format": FORMAT, "files": files, "meta": meta}))
    text = json.dumps({**body, "sha256": json_sha256(body)}, indent=1, sort_keys=True)
    _write_and_sync(directory / MANIFEST, text.encode())
    _sync(directory)


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest without its hash. CorruptArtifact if it is damaged or has another format,
    ReadFailure if the disk does not read it."""
    if not path.is_dir():
        what = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise CorruptArtifact(path, MANIFEST, f"cannot be read: {path} {what}")
    try:
        # Reading a named pipe would block forever.
        if not stat.S_ISREG(os.lstat(path / MANIFEST).st_mode):
            raise CorruptArtifact(path, MANIFEST, "is not a regular file")
        body = json.loads((path / MANIFEST).read_bytes().decode())
    except FileNotFoundError:
        raise CorruptArtifact(path, MANIFEST, "is missing: the directory is incomplete") from None
    except OSError as error:
        raise ReadFailure(path, MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptArtifact(path, MANIFEST, "is damaged: it is not JSON") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        version = body.get("format") if isinstance(body, dict) else None
        problem = f"has format {version!r}; this version of draftsmith reads {FORMAT}"
        raise CorruptArtifact(path, MANIFEST, problem)
    if body.pop("sha256", None) != json_sha256(body):
        raise CorruptArtifact(path, MANIFEST, "is damaged: it does not match its own hash")
    if not isinstance(body.get("files"), dict) or not isinstance(body.get("meta"), dict):
        raise CorruptArtifact(path, MANIFEST, "has no table of files or no meta")
    return body


def _problem_of(directory: Path, name: str, entry: object, deep: bool) -> str | None:
    """The problem with one file of the manifest, or None. Raises OSError."""
    match entry:
        case {"size": int(size), "sha256": str(sha256)}:
            pass
        case _:
            return "has no size or no hash in the manifest"
    parts = name.split("/")
    if "\0" in name or ".." in parts or PurePosixPath(name).parts != tuple(parts):
        return "is refused: only plain paths inside the directory may be listed"
    steps = [directory.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    if any(step.is_symlink() for step in steps):
        return "is refused: it is reached through a link"
    status = os.lstat(steps[-1])
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != size:
        return f"has {status.st_size} bytes, the manifest says {size}"
    if deep and file_sha256(steps[-1]) != sha256:
        return "does not match its SHA-256 in the manifest: its content was changed"
    return None


def json_sha256(value: Any) -> str:
    """The hash of a JSON value. The order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write_and_sync(file: Path, data: bytes) -> None:
    with open(file, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot flush a directory. There is no better way on them.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)


def _make_directory(path: Path) -> None:
    """mkdir -p, with every new name flushed to disk."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


@contextlib.contextmanager
def _os_errors_named(action: str) -> Iterator[None]:
    """Turn an OSError into a UserError with the failed action and the reason."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _is_full_disk(error):
            raise UserError(f"{action}: the disk is full. Free some space there.") from error
        if isinstance(error, OSError):
            raise UserError(f"{action}: {error}") from error
        raise


def _is_full_disk(error: BaseException | None) -> bool:
    """safetensors reports a full disk only in the message. torch.save to an open file raises
    another error on top of it."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
