"""Starts an inference engine that answers prompts for one stage, and stops it at the end.

Of several processes the first one starts it, and all of them ask it.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from decode.base.artifact import temporary
from decode.base.device import dtype_name
from decode.base.errors import UserError
from decode.base.install_command import install_command
from decode.base.paths import from_home
from decode.draw.sampling_config import SamplingConfig
from decode.model.loading import Target, target_gguf
from decode.model.model_names import EMBEDDED_PREFIX
from train.base.exit_status import ExitStatus
from train.base.launcher import cores, environment_of_one, on_several_machines
from train.base.platforms import require_posix
from train.engines.child_process import model_directory, python_of, serving
from train.engines.programs import VLLM_ENVIRONMENT, find_vllm, llama_server_program
from train.measure.ranks import ALONE, Ranks
from train.settings.server_config import EngineServer, ServerConfig

LARGE = 2e9  # parameters, from which a build for CPUs is refused unless it is asked for


def require_server(config: EngineServer, target: Target) -> None:
    """Raise UserError for everything that is known to be missing before a server is asked. Servers
    that are up are not asked yet: they may start while earlier stages run."""
    config.key()
    if importlib.util.find_spec("httpx2") is None:
        raise UserError(f"a server needs httpx2; run {install_command('serve')}")
    if config.launch:
        require_posix("server.launch")
    if config.launch and on_several_machines():
        raise UserError(
            "server.launch starts one engine on this machine, but the run's processes are on "
            "several; start the engine yourself and set server.url"
        )
    # A plan without weights may be made on another machine than the run's.
    if config.launch == "vllm" and target.has_weights:
        _require_vllm(config, target)
    if config.launch == "llama-server":
        if target.has_weights and llama_server_program() is None:
            raise UserError(
                "llama-server is not installed; install it with make engine-llama, or start a "
                "server yourself and set server.url"
            )
        if not target.name.startswith(EMBEDDED_PREFIX) and not target.name.endswith(".gguf"):
            raise UserError(
                f"llama-server needs a GGUF file, but the target is {target.name}; set "
                "server.launch: vllm, or name a .gguf file as the target"
            )


def _require_vllm(config: EngineServer, target: Target) -> None:
    build = find_vllm(config.python)
    if build is None:
        raise UserError(
            f"server.launch: vllm finds vLLM neither in {python_of('vllm')} nor in the environment "
            "that runs draftsmith. Install it in an environment of its own and set server.python "
            "to the Python there; on a CPU make engine-vllm; or start a server yourself and set "
            "server.url"
        )
    size = target.model.num_parameters()
    if build.for_cpu and size > LARGE and not config.on_cpu:
        raise UserError(
            f"server.launch: vllm would run {target.name}, {size / 1e9:.1f} billion parameters, on "
            f"the CPU: it finds {build}. Set server.python to the Python of an environment with "
            "vLLM for GPUs, or server.url; server.on_cpu: true runs it on the CPU"
        )


def require_states(config: ServerConfig, sampling: SamplingConfig, target: Target) -> None:
    """Raise UserError if a vLLM cannot write the states of answers that are sampled so. It writes
    them as a drafter does: it refuses min_p beside one, and its build for CPUs then draws as if the
    temperature were another."""
    problem = "min_p" if sampling.min_p else None
    # A plan without weights may be made on another machine than the run's.
    if sampling.temperature and problem is None and target.has_weights:
        build = find_vllm(config.python)
        problem = "a temperature on a CPU" if build is not None and build.for_cpu else None
    if problem:
        raise UserError(
            f"server.keep_states: vLLM cannot draw with {problem} while it writes hidden states; "
            "leave keep_states out, and feature_cache reads the answers once more"
        )


def engine_in_words(config: EngineServer) -> str:
    """Which engine is started, or which servers are asked."""
    if config.launch == "vllm":
        return f"starting {find_vllm(config.python)}"
    return f"starting {llama_server_program()}" if config.launch else ", ".join(config.urls)


@contextmanager
def launched(
    config: EngineServer,
    target: Target,
    longest: int,
    directory: Path,
    ranks: Ranks = ALONE,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    modules: Path | None = None,
) -> Iterator[list[str]]:
    """The address of a started engine in a list; of servers that are up, their addresses.

    longest: prompt and answer in tokens. directory: for the engine's log, and for the target as a
    model directory if it has none. ranks: the processes that ask. The first one starts the engine
    and stops it when all have left this context. options: the options of the engine, before those
    of the config. modules: a directory that vLLM can import from. Raises UserError with the end of
    the log and its path if the engine does not start. It is stopped at the end, also after errors
    and SIGTERM, and it does not outlive the process that started it.
    """
    name = config.launch
    if name is None:
        yield config.urls
        return
    with ExitStack() as stack:

        def start() -> str:
            if not ranks.is_main:
                return ""
            arguments = _as_arguments({**options, **config.options})
            return stack.enter_context(
                _engine(config, name, target, longest, directory, arguments, modules)
            )

        url = ranks.together(start)
        yield [ranks.gather(url)[0]]
        ranks.gather(None)


@contextmanager
def _engine(
    config: EngineServer,
    name: str,
    target: Target,
    longest: int,
    directory: Path,
    arguments: Sequence[str],
    modules: Path | None,
) -> Iterator[str]:
    """The address of a started engine."""
    env = environment_of_one(cores())
    with temporary(directory / "served-target") as copy:
        if name == "vllm":
            # Nothing that is not its own is imported, but for `modules`.
            flags = ["-I"]
            if modules is not None:
                flags, env["PYTHONPATH"] = ["-s", "-P"], str(modules)
            build = find_vllm(config.python)
            assert build is not None, "require_server found it"
            command = [str(build.python), *flags, *_vllm_arguments(target, longest, copy)]
            if build.for_cpu:
                env = dict(VLLM_ENVIRONMENT) | env
                env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        else:
            command = _llama_command(target, longest, config.concurrency)
        command += arguments
        with (
            _sigterm_raises(),
            serving(
                name,
                command,
                "/health",
                env,
                log_file=directory / f"{name}.log",
                ready_seconds=config.timeout_seconds,
            ) as server,
        ):
            yield f"http://127.0.0.1:{server.port}"


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what was started is stopped. Only the main thread
    can handle signals; in another one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitStatus.STOPPED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _vllm_arguments(target: Target, longest: int, directory: Path) -> list[str]:
    """directory: for the target, if it is neither a model directory nor a hub id."""
    name, revision = target.name, [] if target.revision is None else ["--revision", target.revision]
    if from_home(name).exists() or name.startswith(EMBEDDED_PREFIX):
        name, revision = str(model_directory(target, directory)), []
    return [
        # Its build for CPUs refuses `vllm serve`, which asks for the version of another package.
        "-m", "vllm.entrypoints.openai.api_server",
        "--model", name, *revision,
        "--host", "127.0.0.1", "--port", "{port}",
        "--dtype", dtype_name(target.dtype),
        "--max-model-len", str(min(longest, target.max_positions)),
        "--generation-config", "vllm",
    ]  # fmt: skip


def _llama_command(target: Target, longest: int, slots: int) -> list[str]:
    file, threads = target_gguf(target.name), cores()
    # By itself it takes all physical cores, also those that this process may not use.
    limited = ["-t", str(threads)] if threads < (os.cpu_count() or 1) else []
    return [
        str(llama_server_program()), "-m", str(file), "--host", "127.0.0.1", "--port", "{port}",
        "-np", str(slots), "-c", str(slots * min(longest + 1, target.max_positions)), *limited,
    ]  # fmt: skip


def _as_arguments(options: Mapping[str, Any]) -> list[str]:
    """{gpu_memory_utilization: 0.6} → --gpu-memory-utilization 0.6. true: the name alone. false:
    --no-NAME. Mappings and lists: JSON."""
    arguments = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            arguments += [f"--{flag}", text]
    return arguments
