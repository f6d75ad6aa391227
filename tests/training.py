"""A training small enough to be repeated dozens of times, in this process or in ones of its own.

A GPT-2 of one layer learns fixed samples of random tokens with dropout on; a step takes
milliseconds. What a process leaves is compared through its last checkpoint (`left_behind`).
"""

import functools
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

import train.report.plots
from decode.base.errors import UserError
from distill.distillation_loss import Distillation
from distill.losses import WeightedLoss
from tests.tiny import tiny_model
from train.base.console import Reporter
from train.base.exit_status import ExitStatus
from train.data.batches import Inputs
from train.data.chat_tokens import Sample
from train.data.training_text import FixedText
from train.loop.checkpoint import Stopped
from train.loop.trainer import Trainer
from train.loop.training_task import TrainingProgress, TrainingTask
from train.settings.optimizer_config import GroupConfig, OptimizerConfig
from train.settings.training import LoopConfig

ROOT = Path(__file__).parent.parent
VOCAB = 40
OPTIMIZER = {"lr": 1e-2, "warmup_steps": 2, "clip": 1.0}
# Everything of an optimizer that has state of its own.
RICH = OPTIMIZER | {
    "ema": 0.9,
    "weight_decay": 0.1,
    "groups": {"*wte*": GroupConfig(lr=3e-3), "*.bias": GroupConfig(weight_decay=0.0)},
}
LOOP = {"epochs": 100, "tokens_per_batch": 36, "accumulation": 2, "save_every": 2, "log_every": 1}


class Lines(Reporter):
    """Keeps what is said instead of printing it."""

    def __init__(self) -> None:
        super().__init__(silent=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def tiny_samples() -> list[Sample]:
    """11 samples of 6 to 10 tokens, the first 2 or 3 of which are the prompt."""
    g = torch.Generator().manual_seed(0)
    return [
        Sample(
            f"s{i}",
            torch.randint(3, VOCAB, (6 + i % 5,), generator=g).tolist(),
            [False] * (2 + i % 2) + [True] * (4 + i % 5 - i % 2),
        )
        for i in range(11)
    ]


def tiny_student(dropout: float = 0.1) -> Any:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return tiny_model("gpt2", layers=1, hidden=16, heads=2, vocab=VOCAB, **rates)


def tiny_trainer(
    directory: Path,
    steps: int,
    *,
    dropout: float = 0.1,
    optimizer: dict[str, Any] = OPTIMIZER,
    hook: Callable[[Inputs], None] = lambda given: None,
    trace: list[list[str]] | None = None,
    reporter: Reporter | None = None,
    allow_changes: bool = False,
    module: Any = None,
    measure: Any = None,
    accelerator: Accelerator | None = None,
    profile_steps: int | None = None,
    flops: Any = None,
    **loop: Any,
) -> Trainer:
    """hook: called with each batch before its forward. trace: gets each batch's sample ids."""

    def step(module: Any, given: Inputs, names: Sequence[str]) -> Any:
        if trace is not None:
            trace.append(list(names))
        hook(given)
        return module(**given)

    terms = WeightedLoss({"cross_entropy": 1.0})
    return Trainer(
        accelerator or Accelerator(cpu=True),
        reporter or Lines(),
        TrainingTask(
            "tiny",
            module or Distillation(tiny_student(dropout), terms),
            step,
            terms.names,
            FixedText(tiny_samples()),
            pad_id=0,
            measure=measure,
            deciding="score",
            flops=flops,
        ),
        LoopConfig(**(LOOP | {"max_steps": steps} | loop)),
        OptimizerConfig(**optimizer),
        directory,
        allow_changes=allow_changes,
        profile_steps=profile_steps,
    )


def random_states() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), *rest]


def scramble() -> None:
    """Random states that no training was begun with, as another process may have."""
    seed = time.perf_counter_ns() % 2**31
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Everything that a further step depends on, by name; tensors as they are."""
    found: dict[str, Any] = {f"weight {k}": v for k, v in trainer.module.state_dict().items()}
    for number, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"optimizer {number} {k}": v for k, v in state.items()}
    for i, shard in enumerate(trainer.average.shards if trainer.average else []):
        found[f"average {i}"] = shard
    return found | {"random": random_states()}


# Where states were computed in other batches, a CPU without AVX-512 gives other bits.
TOLERANCE = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-5


def assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Up to TOLERANCE."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=name)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit by bit, in the same dtypes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if torch.is_tensor(value):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def figures(progress: TrainingProgress | dict[str, Any]) -> list[dict[str, float]]:
    return progress.history if isinstance(progress, TrainingProgress) else progress["history"]


def steps_kept(directory: Path) -> list[int]:
    names = (path.name for path in (directory / "checkpoints").glob("step-*"))
    return sorted(int(name.removeprefix("step-")) for name in names)


def left_behind(directory: Path) -> dict[str, Any]:
    """Weights, averages, optimizer and figures of the newest checkpoint."""
    newest = directory / "checkpoints" / f"step-{steps_kept(directory)[-1]}"
    found: dict[str, Any] = dict(load_file(newest / "model.safetensors"))
    for file in newest.glob("average-0.safetensors"):
        found |= {f"average {k}": v for k, v in load_file(file).items()}
    stored = torch.load(newest / "optimizer.bin", weights_only=True)
    for number, state in stored["state"].items():
        found |= {f"optimizer {number} {k}": v for k, v in state.items()}
    progress = json.loads((newest / "trainer.json").read_text("utf-8"))["progress"]
    return found | {"history": progress["history"]}


def begin_anew() -> None:
    """Take accelerate's state out of this process, as another process would begin."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Killed(BaseException):
    """Stands for a kill: no handler of ours may catch it."""


def at_batch(number: int, action: Callable[[], object]) -> Callable[[Any], None]:
    """A hook that acts before the forward of the batch of this number, from 1."""
    seen: list[int] = []

    def hook(batch: Any) -> None:
        seen.append(1)
        if len(seen) == number:
            action()

    return hook


def die() -> None:
    raise Killed


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def before_call(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int = 0,
    action: Callable[[], object] = die,
) -> list[tuple[Any, ...]]:
    """Act before the call of this number, from 1, of a function of `owner`. Returns the arguments
    of its calls so far."""
    original, calls = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            action()
        return original(*args, **kwargs)

    patch.setattr(owner, name, counted)
    return calls


# --- processes ------------------------------------------------------------------------------------


def forked(action: Callable[[], object], *, rank: int = 0, world: int = 1, port: int = 0) -> int:
    """Start `action` in a fork of this process, which must not have computed anything yet; its id.

    The fork ends with 0, with ExitStatus.STOPPED for Stopped, 2 for UserError (its message goes to
    stderr), 1 for anything else.
    """
    pid = os.fork()
    if pid:
        return pid
    if world > 1:
        # As `accelerate launch` tells its processes.
        os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(world), "RANK": str(rank)}
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    _leave_after(action)


def _leave_after(action: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        action()
        code = 0
    except Stopped:
        code = ExitStatus.STOPPED
    except UserError as error:
        os.write(2, f"UserError: {error}\n".encode())
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def status_of(pid: int) -> int:
    """What a process ended with; −9 for one that was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# What trainings import, also late: a fork that has it begins to train at once.
PRELOADED = [
    "train.run.run",
    "draftsmith.cli.main",
    "torch._dynamo",
    "deepspeed",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tests.training",
]


@functools.cache
def _fork_server() -> Any:
    """Processes of this context are forks of one process, which imports PRELOADED once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # A process that has asked CUDA what there is hands it to no fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


def _call(code: str, environment: dict[str, str], streams: Sequence[Path]) -> None:
    gc.freeze()  # as tests/conftest.py does, and this
    train.report.plots.can_plot = lambda: False
    os.environ.clear()
    os.environ |= environment
    os.chdir(ROOT)
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    exec(code, {})


def in_new_process(module: str, call: str) -> subprocess.CompletedProcess[str]:
    """A call of a test module in a process that has computed nothing and has no other threads, so
    that it can fork; pytest itself may have both."""
    code = f"from pathlib import Path\nfrom {module} import *\n{call}"
    with tempfile.TemporaryDirectory() as directory:
        streams = [Path(directory) / name for name in ("out", "err")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = _fork_server().Process(target=_call, args=(code, environment, streams))
        process.start()
        process.join(240)
        if process.is_alive():
            process.kill()
            process.join()
        out, err = (stream.read_text(errors="replace", encoding="utf-8") for stream in streams)
    assert process.exitcode == 0, err[-3000:]
    return subprocess.CompletedProcess(code, process.exitcode, out, err)


def two_ranks(action: Callable[[int], object]) -> list[int]:
    """What both ranks of a DDP training end with; a rank that is left alone is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = [
        forked(lambda rank=rank: action(rank), rank=rank, world=2, port=port) for rank in (0, 1)
    ]
    first, status = os.wait()
    found = {first: os.waitstatus_to_exitcode(status)}
    (other,) = set(pids) - {first}
    for _ in range(1200):
        ended, status = os.waitpid(other, os.WNOHANG)
        if ended:
            found[other] = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    else:
        os.kill(other, signal.SIGKILL)
        found[other] = status_of(other)
    return [found[pid] for pid in pids]


def ids_of(trace: Sequence[Sequence[str]]) -> list[str]:
    return [name for batch in trace for name in batch]
