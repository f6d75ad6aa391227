"""Writes the JSON schema of configs, which editors read, whenever the package is built. This is so
for a wheel and for an editable install. The rest is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithSchema(build_py):
    def run(self) -> None:
        sys.path.insert(0, str(ROOT))
        from train.run.config import schema_text

        (ROOT / "train" / "schema.json").write_text(schema_text(), encoding="utf-8")
        super().run()


setup(cmdclass={"build_py": BuildWithSchema})
