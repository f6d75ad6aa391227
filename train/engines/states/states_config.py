"""The settings of a server that hands out the target's hidden states."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from decode.base.strict import Strict
from train.engines.server_config import EngineServer

# Of vLLM, and set here: which states it writes, and where.
_SET_HERE = ("speculative_config", "kv_transfer_config", "enable_prefix_caching")


class StatesServer(EngineServer):
    """A vLLM that runs the target and writes hidden states to files."""

    launch: Literal["vllm"] | None = None
    """Start vLLM for the stage and stop it at the end."""
    concurrency: int = Field(16, ge=1)
    """The number of requests that one server has at a time."""
    directory: str | None = None
    """Where the files of a server that is up are, as seen from here: the `shared_storage_path` that
    it was started with. Each file is deleted when it is read. With `launch` it may name a fast
    disk; None: the stage's directory."""
    max_gib: float = Field(4.0, gt=0)
    """The size of all files that may exist at a time, in GiB. Requests wait while it is reached."""
    probe_samples: int = Field(2, ge=0)
    """The number of samples whose states are first compared with the target's own, for each server.
    0: not checked."""

    @model_validator(mode="after")
    def _fits(self) -> "StatesServer":
        if self.launch is None and self.directory is None:
            raise ValueError(
                "a server that is up writes its files to a directory; give its path here"
            )
        for name in self.options:
            if name.replace("-", "_") in _SET_HERE:
                raise ValueError(f"options have {name}, which the stage sets itself; leave it out")
        return self

    @property
    def max_bytes(self) -> int:
        """The size of all files that may exist at a time."""
        return int(self.max_gib * 2**30)

    def files(self) -> Path | None:
        """The `directory`, if it is set."""
        return None if self.directory is None else Path(self.directory).expanduser()


class ServedFeatures(Strict):
    """Hidden states that a server makes while the training needs them."""

    server: StatesServer
    """The server."""
