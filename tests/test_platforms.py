"""What differs between systems."""

import platform
from pathlib import Path

import pytest

from decode.base.errors import UserError
from draftsmith.auditing.verify_export import require_engine
from tools.imports import ROOT
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


@pytest.mark.parametrize(
    ("system", "machine", "release", "named"),
    [
        ("Linux", "x86_64", "6.1.0", "Linux"),
        ("Linux", "aarch64", "6.1.0", "Linux on other processors"),
        ("Linux", "x86_64", "5.15.167.4-microsoft-standard-WSL2", "WSL 2"),
        ("Darwin", "arm64", "25.0.0", "macOS"),
        ("Windows", "AMD64", "11", "Windows"),
    ],
)
def test_doctor_readme_and_page_say_the_same_of_a_system(
    system: str, machine: str, release: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("system", system), ("machine", machine), ("release", release)):
        monkeypatch.setattr(platform, name, lambda value=value: value)
    name, _, state = platforms.platform_support().partition(", ")
    assert name == named
    for page in ("README.md", "docs/platforms.md"):
        text = (ROOT / page).read_text("utf-8")
        row = next(line for line in text.splitlines() if line.startswith(f"| {named}"))
        assert ("never tried" in row) == ("never tried" in state), page
        assert ("written for" in row) == ("written for" in state), page
