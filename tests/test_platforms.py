"""What differs between systems."""

import platform
from pathlib import Path

import pytest

from decode.base.errors import UserError
from draftsmith.auditing.verify_export import require_engine
from train.base import platforms
from train.base.file_lock import lock_file


def test_a_lock_is_for_one_or_for_those_that_share_it(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.touch()
    with file.open("rb") as first, file.open("rb") as second, file.open("rb") as third:
        lock_file(first.fileno(), shared=True)
        lock_file(second.fileno(), shared=True)
        with pytest.raises((BlockingIOError, PermissionError)):
            lock_file(third.fileno())
        first.close()
        second.close()
        lock_file(third.fileno(), wait=True)


def test_what_needs_posix_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms.os, "name", "nt")
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(UserError, match=r"--verify vllm needs Linux or macOS, and this is Windows"):
        require_engine("vllm")
    assert platforms.support().startswith("Windows, not tried")
