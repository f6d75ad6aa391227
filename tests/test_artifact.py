"""Promises 3, 4, 5 and 17 of the artifact store: kills, corruption, full disks, hostile manifests.

The kill tests run in a process of their own that imports nothing but the standard library and
forks once per trial; a fork of pytest itself could inherit another test's threads.
"""

import builtins
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from decode.base import artifact
from decode.base.artifact import (
    CorruptArtifact,
    newest_complete,
    recover,
    remove_directory,
    verify_directory,
    write_directory,
    write_file,
)
from decode.base.errors import UserError
from tests.kills import FullDisk, kill_at_change

ROOT = Path(__file__).resolve().parents[1]
FILES = {"model.bin": bytes(range(256)) * 4, "state/rng.json": b'{"seed": 1}', ".hidden": b"x" * 9}


def fill(tmp: Path) -> None:
    for name, data in FILES.items():
        (tmp / name).parent.mkdir(exist_ok=True)
        (tmp / name).write_bytes(data)


def write(path: Path, version: int = 1) -> None:
    write_directory(path, fill, meta={"version": version})


def contents(directory: Path) -> dict[str, bytes]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def edit_manifest(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and its own hash with it, as somebody who means harm would."""
    body = json.loads((directory / "manifest.json").read_text("utf-8"))
    del body["sha256"]
    edit(body)
    body["sha256"] = artifact.json_sha256(body)
    (directory / "manifest.json").write_text(json.dumps(body), "utf-8")


# --- writing and reading back ---------------------------------------------------------------------


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    path = tmp_path / "new" / "parents" / "step-1"
    write(path)
    assert verify_directory(path) == {"version": 1}
    assert {name: data for name, data in contents(path).items() if name != "manifest.json"} == FILES

    write_directory(path, lambda tmp: write_file(tmp / "only", "ü"), meta={"version": 2})
    assert verify_directory(path) == {"version": 2}
    assert sorted(contents(path)) == ["manifest.json", "only"]
    assert (path / "only").read_bytes() == "ü".encode()
    assert os.listdir(path.parent) == ["step-1"]


def test_meta_comes_back_as_json_values(tmp_path: Path) -> None:
    # Integer keys sort in another order than the strings they become: the hash must not mind.
    meta: dict[Any, Any] = {2: "b", 10: (1, 2), "x": float("inf"), "é": None}
    write_directory(tmp_path / "a", fill, meta=meta)
    assert verify_directory(tmp_path / "a") == {"2": "b", "10": [1, 2], "x": meta["x"], "é": None}
    write_directory(tmp_path / "b", lambda tmp: None)
    assert verify_directory(tmp_path / "b") == {}


def test_additional_files_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / ".gitattributes").write_text("added by a hub", "utf-8")
    verify_directory(tmp_path / "a")


def test_what_we_did_not_write_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work", "utf-8")
    (tmp_path / "file").write_text("x", "utf-8")
    write(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    before = sorted(tmp_path.rglob("*"))
    for name in ("thesis", "file", "link"):
        with pytest.raises(UserError, match=f"{name} exists"):
            write(tmp_path / name, 2)
    assert sorted(tmp_path.rglob("*")) == before
    assert verify_directory(tmp_path / "real") == {"version": 1}

    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    verify_directory(tmp_path / "empty")


def test_an_error_in_fill_leaves_the_old_directory(tmp_path: Path) -> None:
    write(tmp_path / "a")

    def interrupted(tmp: Path) -> None:
        fill(tmp)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_directory(tmp_path / "a", interrupted)
    with pytest.raises(UserError, match="link"):
        write_directory(tmp_path / "a", lambda tmp: (tmp / "link").symlink_to("/etc/passwd"))
    with pytest.raises(UserError, match="special file"):
        write_directory(tmp_path / "a", lambda tmp: os.mkfifo(tmp / "pipe"))
    with pytest.raises(ValueError, match="written by write_directory"):
        write_directory(tmp_path / "a", lambda tmp: write_file(tmp / "manifest.json", "{}"))
    assert verify_directory(tmp_path / "a") == {"version": 1}
    assert os.listdir(tmp_path) == ["a"]


def test_remove_directory(tmp_path: Path) -> None:
    write(tmp_path / "a")
    remove_directory(tmp_path / "a")
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError, match=r"cannot remove .*/a"):
        remove_directory(tmp_path / "a")


def test_write_file_names_the_path(tmp_path: Path) -> None:
    write_file(tmp_path / "new" / "a", b"1")
    write_file(tmp_path / "new" / "a", "2")
    assert contents(tmp_path) == {"new/a": b"2"}
    with pytest.raises(UserError, match=r"cannot write .*/new:"):
        write_file(tmp_path / "new", "in the way is a directory")
    assert contents(tmp_path) == {"new/a": b"2"}


# --- corruption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["0%", "50%", "99%", "flip", "delete", "link", "pipe"])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path / "a")
    file = tmp_path / "a" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "flip":
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage.endswith("%"):
        file.write_bytes(data[: len(data) * int(damage[:-1]) // 100])
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(file)
    with pytest.raises(CorruptArtifact) as caught:
        verify_directory(tmp_path / "a")
    assert caught.value.file == name
    assert name in str(caught.value)
    assert str(tmp_path / "a") in str(caught.value)
    if damage != "flip":
        with pytest.raises(CorruptArtifact):
            verify_directory(tmp_path / "a", deep=False)


def test_a_flip_of_any_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    data = manifest.read_bytes()
    for i in range(len(data)):
        manifest.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(CorruptArtifact, match=r"manifest\.json"):
            verify_directory(tmp_path / "a", deep=False)


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    (tmp_path / "empty").mkdir()
    for name, said in [
        ("none", "does not exist"),
        ("file", "not a directory"),
        ("empty", "incomplete"),
    ]:
        with pytest.raises(CorruptArtifact, match=said):
            verify_directory(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["../secret", "a/../../secret", "/etc/passwd", "", ".", "a//b", "./model.bin", "a\0b"]
)
def test_paths_out_of_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x", "utf-8")
    write(tmp_path / "a")
    edit_manifest(
        tmp_path / "a", lambda body: body["files"].update({name: {"size": 1, "sha256": ""}})
    )
    with pytest.raises(CorruptArtifact, match="refused: only plain paths"):
        verify_directory(tmp_path / "a")


def test_a_linked_directory_inside_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / "state").rename(tmp_path / "outside")
    (tmp_path / "a" / "state").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptArtifact, match="reached through a link"):
        verify_directory(tmp_path / "a")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda body: body.update(format=2), "format 2; this version"),
        (lambda body: body.pop("format"), "format None"),
        (lambda body: body.update(files=[]), "no table of files"),
        (lambda body: body.update(meta=1), "no table of files or no meta"),
        (lambda body: body["files"].update(x=3), "'x' has no size"),
        (lambda body: body["files"].update({"y" * 300: {"size": 1, "sha256": ""}}), "too long"),
    ],
)
def test_strange_manifests_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], said: str
) -> None:
    write(tmp_path / "a")
    edit_manifest(tmp_path / "a", edit)
    with pytest.raises(CorruptArtifact, match=said):
        verify_directory(tmp_path / "a")


@pytest.mark.parametrize("text", ["[1]", "null", "[" * 100_000, "\udcff"])
def test_manifests_of_another_shape_are_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptArtifact, match=r"manifest\.json"):
        verify_directory(tmp_path / "a")


def test_newest_complete_falls_back(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "none", "step") == (None, [])
    for step in (9, 10, 100):
        write(tmp_path / f"step-{step}", step)
    write(tmp_path / "step-best")
    write(tmp_path / "other-200")
    assert newest_complete(tmp_path, "step") == (tmp_path / "step-100", [])

    (tmp_path / "step-100" / "model.bin").write_bytes(b"")
    found, errors = newest_complete(tmp_path, "step")
    assert found == tmp_path / "step-10"
    assert [(error.directory.name, error.file) for error in errors] == [("step-100", "model.bin")]

    (tmp_path / "step-10" / "manifest.json").unlink()
    (tmp_path / "step-9" / "state" / "rng.json").unlink()
    found, errors = newest_complete(tmp_path, "step")
    assert found is None
    assert [error.directory.name for error in errors] == ["step-100", "step-10", "step-9"]


# --- full disks -----------------------------------------------------------------------------------


def opening(disk: FullDisk) -> Callable[..., Any]:
    """`open`, whose files are on this disk."""

    def opened(file: Any, mode: str = "r") -> Any:
        stream: Any = builtins.open(file, mode)  # noqa: SIM115 - the caller closes it
        if "r" not in mode:
            stream.write = disk(stream.write)
        return stream

    return opened


@pytest.mark.parametrize("previous", [True, False])
def test_full_disk_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, previous: bool
) -> None:
    path = tmp_path / "step-1"
    if previous:
        write(path, 1)
    for n in range(1, 100):
        disk = FullDisk(n)
        with monkeypatch.context() as patch:
            patch.setattr(artifact, "open", opening(disk), raising=False)
            patch.setattr(Path, "write_bytes", disk(Path.write_bytes))
            patch.setattr(os, "mkdir", disk(os.mkdir))
            patch.setattr(os, "fsync", disk(os.fsync))
            try:
                write(path, 2)
            except UserError as error:
                assert str(path) in str(error)  # noqa: PT017 - not raised in the last round
                assert "disk is full" in str(error)  # noqa: PT017
            else:
                break
        if previous:
            assert verify_directory(path) == {"version": 1}
        assert os.listdir(tmp_path) == (["step-1"] if previous else [])
    # mkdir 2, files 3, fsync of 3 files and 1 folder, manifest 2, folder 1, parent 1: all seen.
    assert n > 12
    recover(tmp_path)
    assert verify_directory(path) == {"version": 2}
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("previous", [True, False])
def test_failing_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, previous: bool) -> None:
    path = tmp_path / "a"
    rename, failed = os.rename, []
    for n in range(1, 10):
        shutil.rmtree(path, ignore_errors=True)
        if previous:
            write(path, 1)
        calls: list[object] = []

        def fail_once(*args: Any, n: int = n, calls: list[object] = calls) -> None:
            calls.append(args)
            if len(calls) == n:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rename(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail_once)
            try:
                write(path, 2)
                failed.append(False)
            except UserError:
                failed.append(True)
        if not failed[-1]:
            # Failing to remove the old copy is no failure: it is left for recover.
            recover(tmp_path)
            assert verify_directory(path) == {"version": 2}
        elif previous:
            assert verify_directory(path) == {"version": 1}
        assert os.listdir(tmp_path) == (["a"] if previous or not failed[-1] else [])
        if len(calls) < n:
            break
    # Aside, into place, removal of the old copy, none; without an old one: into place, none.
    assert failed == ([True, True, False, False] if previous else [True, False])


def full_for_safetensors(tmp: Path) -> NoReturn:
    raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")


def full_for_torch(tmp: Path) -> NoReturn:
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("full", [full_for_safetensors, full_for_torch])
def test_full_disk_as_libraries_report_it(tmp_path: Path, full: Callable[[Path], None]) -> None:
    with pytest.raises(UserError, match=r"cannot write .*/a: the disk is full"):
        write_directory(tmp_path / "a", full)


def test_other_errors_of_fill_pass_through(tmp_path: Path) -> None:
    def wrong(tmp: Path) -> NoReturn:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        write_directory(tmp_path / "a", wrong)
    assert os.listdir(tmp_path) == []


# --- kills ----------------------------------------------------------------------------------------


def killed_at(n: int, action: Callable[[], object]) -> bool:
    """Run `action` in a fork that is killed at its n-th change to the disk; False if it finished.

    The change itself is not made: a kill after change n is the kill before change n + 1.
    """
    pid = os.fork()
    if pid == 0:
        kill_at_change(n)
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the action failed by itself"
    return False


def check_kills(parent: Path, previous: bool) -> None:
    """Kill the writer at every boundary, then `recover` at every boundary of its own."""
    path = parent / "step-1"
    seen, n, killed = set(), 0, True
    while killed:
        n += 1
        m, recover_killed = 0, True
        while recover_killed:
            m += 1
            shutil.rmtree(parent, ignore_errors=True)
            parent.mkdir()
            if previous:
                write(path, 1)
            killed = killed_at(n, lambda: write(path, 2))
            if path.exists():  # Whatever is visible is complete, before any recovery.
                verify_directory(path)
            recover_killed = killed_at(m, lambda: recover(parent))
            recover(parent)
            left = os.listdir(parent)
            assert left == ["step-1"] or (left == [] and not previous), left
            seen.add(verify_directory(path)["version"] if left else None)
            write(path, 3)
            assert verify_directory(path) == {"version": 3}
    assert seen == {1 if previous else None, 2}, seen
    print(f"{n - 1} boundaries")


@pytest.mark.parametrize("previous", [True, False])
def test_kill_at_every_boundary(tmp_path: Path, previous: bool) -> None:
    script = f"""
import os
from pathlib import Path
from tests.test_artifact import check_kills
os.fsync = lambda fd: None  # a killed process loses nothing that it wrote
check_kills(Path({str(tmp_path / "run")!r}), {previous})
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    # A first write makes 11 changes; replacing adds a rename and the removal of the old directory.
    assert int(done.stdout.split()[0]) >= (20 if previous else 11)


def test_a_write_after_a_kill_needs_no_recover(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    (tmp_path / "a").rename(tmp_path / ".old-a")
    with pytest.raises(UserError, match="disk"):
        write_directory(tmp_path / "a", lambda tmp: (_ for _ in ()).throw(OSError(28, "disk")))
    assert verify_directory(tmp_path / "a") == {"version": 1}
    assert os.listdir(tmp_path) == ["a"]


def test_recover_touches_only_what_is_stale(tmp_path: Path) -> None:
    recover(tmp_path / "none")
    kept = ["notes", ".tmp-notes", ".old-notes", f".tmp-b-{os.getppid()}-0123abcd", ".old-b"]
    for name in kept:
        (tmp_path / name).mkdir()
    write(tmp_path / "b")
    # A live process writes b: its aside copy may be all there is for a moment.
    (tmp_path / ".old-b").rmdir()
    (tmp_path / "b").rename(tmp_path / ".old-b")
    # No other process has this one's id, so what bears it and is not in use is from an earlier run.
    (tmp_path / f".tmp-c-{os.getpid()}-0123abcd").mkdir()
    (tmp_path / "d").mkdir()
    write(tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / ".old-d")
    # Whether a process of another machine lives cannot be seen.
    elsewhere = f".tmp-e-00000000.{os.getpid()}-0123abcd"
    (tmp_path / elsewhere).mkdir()
    recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "d", elsewhere])
    assert verify_directory(tmp_path / "d") == {"version": 1}
    recover(tmp_path, alone=True)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "d"])


def test_recover_beside_a_writer_of_the_same_process(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(tmp: Path) -> None:
        fill(tmp)
        inside.set()
        assert go_on.wait(60)

    writer = threading.Thread(target=write_directory, args=(tmp_path / "a", slow))
    writer.start()
    assert inside.wait(60)
    recover(tmp_path)
    go_on.set()
    writer.join()
    verify_directory(tmp_path / "a")
