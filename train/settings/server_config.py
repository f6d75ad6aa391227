"""The settings of a server that runs the target: of one that answers prompts in place of the decode
loop, and of one that hands out hidden states."""

import os
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from decode.base.errors import UserError
from decode.base.strict import Strict

# Of vLLM, and set by the stage: which states it writes, and where.
_SET_HERE = ("speculative_config", "kv_transfer_config", "enable_prefix_caching")


def server_address(url: str) -> SplitResult | None:
    """The parts of a server's address; None: it is none. A user and a password are not taken:
    addresses stand in reports."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    is_named = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return (
        parts if is_named and not (parts.query or parts.fragment or "@" in parts.netloc) else None
    )


class EngineServer(Strict):
    """A server that runs the target: one that is up (`url`), or one for this stage (`launch`)."""

    url: str | list[str] | None = None
    """The address of the server, `http://HOST:PORT`, without `/v1`. Several servers share the
    work."""
    launch: Literal["vllm", "llama-server"] | None = None
    """Start this engine for the stage and stop it at the end. vLLM comes from the environment of
    `python`; llama-server from the one that `make engine-llama` makes, else from the path."""
    python: str | None = None
    """For `launch: vllm`, the Python of the environment that has vLLM, such as
    `/home/me/vllm/bin/python`. None: the environment that `make engine-vllm` makes, which has a
    build for CPUs, else the one that runs draftsmith."""
    on_cpu: bool = False
    """Let a build for CPUs run a target of more than two billion parameters, which takes long."""
    options: dict[str, Any] = {}
    """Options of the engine that is started, such as `{gpu_memory_utilization: 0.6}`."""
    model: str | None = None
    """The name that the server has for the model. None: the first that it lists."""
    key_env: str | None = None
    """The environment variable with the server's API key. None: no key is sent."""
    concurrency: int = Field(64, ge=1)
    """The number of requests that one server has at a time."""
    retries: int = Field(8, ge=0)
    """The number of further attempts after a broken connection or a status 408, 409, 429 or 5xx."""
    timeout_seconds: float = Field(600.0, gt=0)
    """The longest wait for one answer, and for a started engine until it is ready."""

    @model_validator(mode="after")
    def _has_server(self) -> "EngineServer":
        if (self.url is None) == (self.launch is None):
            raise ValueError("a server has either url or launch; give one of them")
        if self.options and self.launch is None:
            raise ValueError("options are for an engine that is started; they need launch")
        if self.launch != "vllm" and (self.python is not None or self.on_cpu):
            raise ValueError("python and on_cpu are for an engine that is started: launch: vllm")
        for url in self.urls:
            parts = server_address(url)
            if parts is None:
                raise ValueError(f"server.url is {url!r}; expected http://HOST:PORT")
            if parts.path.rstrip("/").endswith("/v1"):
                raise ValueError(f"server.url is {url!r}; leave /v1 out")
        return self

    @property
    def urls(self) -> list[str]:
        """The addresses of servers that are up."""
        urls = [self.url] if isinstance(self.url, str) else self.url or []
        return [url.rstrip("/") for url in urls]

    def leaves_states(self) -> None:
        """Raise ValueError if `options` decide whether a started vLLM writes hidden states."""
        for name in self.options:
            if name.replace("-", "_") in _SET_HERE:
                raise ValueError(f"options have {name}, which the stage sets itself; leave it out")

    def key(self) -> str | None:
        """The API key. Raises UserError if its variable is not set."""
        key = None if self.key_env is None else os.environ.get(self.key_env)
        if self.key_env is not None and not key:
            raise UserError(
                f"server.key_env names {self.key_env}, which is not set or empty; expected the "
                "name of a variable with the server's API key"
            )
        return key


class ServerConfig(EngineServer):
    """A server that answers prompts."""

    protocol: Literal["completions", "llama-server"] = "completions"
    """`completions`: `/v1/completions` of vLLM, SGLang and others. `llama-server`: its own
    `/completion`."""
    probe_prompts: int = Field(4, ge=0)
    """The number of prompts that are first answered greedily, to see that the server runs the
    target. 0: not checked."""
    max_unusable: float = Field(0.1, ge=0, le=1)
    """The share of `part_prompts` answers that may be unusable, and are left out, before the stage
    stops."""
    keep_states: bool = False
    """Let a vLLM that is started write the hidden states that a later `feature_cache` stores, in
    the requests of the answers. It then has no prefix cache, and reads two tokens of a text in a
    step."""

    @model_validator(mode="after")
    def _can_keep(self) -> "ServerConfig":
        if self.keep_states and self.launch != "vllm":
            raise ValueError("keep_states needs launch: vllm")
        if self.keep_states:
            self.leaves_states()
        return self

    @property
    def spoken(self) -> str:
        """The protocol, also of an engine that is started."""
        return "llama-server" if self.launch == "llama-server" else self.protocol


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
        self.leaves_states()
        return self

    @property
    def max_bytes(self) -> int:
        return int(self.max_gib * 2**30)


class ServedFeatures(Strict):
    """Hidden states that a server makes while the training needs them."""

    server: StatesServer
    """The server."""
