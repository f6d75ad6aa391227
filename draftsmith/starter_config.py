"""The config that `draftsmith init` writes: sizes for a machine, a target and its data. They are
filled into configs/starter.yaml.j2.

A machine is one of five kinds, or the one at hand. Sizes that depend on the target are computed
from its config with the estimates of `train.loop.estimates`.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import configs
import train
from decode.base.errors import UserError
from decode.base.paths import from_home
from decode.base.processor import computes_bfloat16
from decode.model.hidden_states import FINAL
from decode.model.loading import Target
from decode.model.memory import expanded_bytes, slot_bytes
from heads.layers.target_layers import auxiliary_layers
from train.data.read import Example
from train.loop.estimates import activation_bytes, forward_bytes, optimizer_bytes

GIB = 2**30
# With vLLM six times as many rows are answered in the time that our own loop would take: a guess.
SERVED = 6


@dataclass(frozen=True)
class Machine:
    """What a config is made for. memory: bytes of one device. rows, prompts: the largest number of
    train rows and of evaluated prompts that it is sensible to use. answer: tokens of an answer.
    batch: tokens of a training batch, over all devices. rate: the learning rate. source: the
    shipped config with these sizes."""

    title: str
    devices: int
    memory: int
    dtype: str
    rows: int
    prompts: int
    timed: int
    answer: int
    batch: int
    rate: str
    source: str
    launch: str = "draftsmith train"

    @property
    def cuda(self) -> bool:
        return "GPU" in self.title


_QUICK = "configs/quickstart.yaml"
_ONE = "configs/recipes/qwen3_8b_1x80gb.yaml"
_HALF = f"{_ONE}, halved"
_EIGHT = "configs/recipes/qwen3_8b_8x80gb.yaml"
MACHINES = {
    "cpu": Machine("a CPU", 1, 16 * GIB, "float32", 360, 42, 12, 80, 1024, "2e-3", _QUICK),
    "24gb": Machine(
        "one GPU of 24 GB", 1, 24 * GIB, "bfloat16", 5000, 100, 10, 256, 8192, "1e-4", _HALF
    ),
    "48gb": Machine(
        "one GPU of 48 GB", 1, 48 * GIB, "bfloat16", 7500, 100, 10, 512, 8192, "1e-4", _HALF
    ),
    "80gb": Machine(
        "one GPU of 80 GB", 1, 80 * GIB, "bfloat16", 10000, 100, 10, 512, 16384, "1e-4", _ONE
    ),
    "8x80gb": Machine(
        "eight GPUs of 80 GB",
        8,
        80 * GIB,
        "bfloat16",
        40000,
        200,
        20,
        512,
        131072,
        "1e-4",
        _EIGHT,
        "accelerate launch --multi_gpu --num_processes 8 --mixed_precision bf16 -m train",
    ),
}
GOALS = {
    "small-lm": "a small language model from the target's first layers",
    "heads": "heads on the target's hidden states (EAGLE)",
    "online": "a small language model that goes on learning while it serves",
}


def this_machine() -> tuple[str, Machine]:
    """The kind of this machine, and its sizes with the memory that this machine has."""
    count = torch.cuda.device_count()
    if not count:
        dtype = "bfloat16" if computes_bfloat16(torch.device("cpu")) else "float32"
        memory = int(psutil.virtual_memory().total)
        return "cpu", replace(MACHINES["cpu"], memory=memory, dtype=dtype)
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(count))
    one = "80gb" if memory > 60 * GIB else "48gb" if memory > 40 * GIB else "24gb"
    kind = "8x80gb" if count > 1 else one
    base = MACHINES[kind]
    size = f"{memory / GIB:.0f} GiB"
    title = f"{count} GPUs of {size}" if count > 1 else f"one GPU of {size}"
    batch = base.batch * count // base.devices
    launch = base.launch.replace("--num_processes 8", f"--num_processes {count}")
    return kind, replace(
        base, devices=count, memory=memory, title=title, batch=batch, launch=launch
    )


def first_layers(depth: int) -> list[int]:
    """A twelfth of a target's layers, the first ones, at least two."""
    return list(range(min(depth, max(2, depth // 12))))


@dataclass(frozen=True)
class Starter:
    """A config to write. data: as it is named in the config. shapes: the target without weights.
    prompts: some rows of the data that have a prompt. rows: how many rows the data has; None: more
    than were looked at. file: the file of the config; None: standard output. engine: the one that
    will serve the drafter; None: our own loop, or any."""

    goal: str
    target: str
    data: str
    machine: Machine
    shapes: Target
    prompts: Sequence[Example]
    rows: int | None
    file: Path | None
    engine: str | None = None

    def text(self) -> str:
        """The YAML text. Raises UserError if the target does not fit the machine."""
        self._require_room()
        environment = Environment(
            loader=FileSystemLoader(Path(configs.__file__).parent),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        # Each JSON string is a YAML string.
        environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
        return environment.get_template("starter.yaml.j2").render(
            starter=self,
            machine=self.machine,
            goal=GOALS[self.goal],
            file=self.file or "CONFIG",
            schema=Path(train.__file__).parent / "schema.json",
            parameters=self.shapes.model.num_parameters(),
            depth=self.shapes.model.config.get_text_config().num_hidden_layers,
            gib=GIB,
        )

    @property
    def name(self) -> str:
        """Of the run."""
        stem = self.file.stem if self.file else self.goal
        return re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-") or "run"

    @property
    def _itemsize(self) -> int:
        return 4 if self.machine.dtype == "float32" else 2

    @property
    def target_bytes(self) -> int:
        """Of the target's weights."""
        return self.shapes.model.num_parameters() * self._itemsize

    @property
    def layers(self) -> list[int]:
        """The target's layers that a small language model starts from."""
        return first_layers(self.shapes.model.config.get_text_config().num_hidden_layers)

    @property
    def heads(self) -> str:
        """The kind of heads. Engines that read EAGLE-3 read it with a draft vocabulary; it needs a
        target of a few layers."""
        try:
            _ = self.captured_layers
        except UserError:
            return "eagle1"
        return "eagle1" if self.engine is None else "eagle3"

    @property
    def captured_layers(self) -> list[int]:
        """The layers whose hidden states EAGLE-3 and its loss read."""
        layers: int = self.shapes.model.config.get_text_config().num_hidden_layers
        return [*auxiliary_layers(layers), FINAL]

    @property
    def steps(self) -> int:
        """The number of steps that the heads learn to draft."""
        return 7 if self.heads == "eagle3" and self.machine.cuda else 4

    @property
    def rate(self) -> str:
        """The learning rate."""
        eagle3 = self.goal == "heads" and self.heads == "eagle3"
        return "1e-3" if eagle3 and not self.machine.cuda else self.machine.rate

    @property
    def engine_answers(self) -> bool:
        """Whether vLLM writes the answers. It has its own copy of the target, beside the run's."""
        fits = self.target_bytes < 0.3 * self.machine.memory
        return self.engine == "vllm" and self.machine.cuda and fits

    @property
    def most_rows(self) -> int:
        """The largest number of train rows: more where vLLM answers them."""
        return self.machine.rows * (SERVED if self.engine_answers else 1)

    @property
    def usual_vocabulary(self) -> int:
        return 32000 if self.machine.cuda else 8000

    @property
    def vocabulary(self) -> int | None:
        """Tokens of the drafter's output layer. None: all of the target's."""
        if self.heads == "eagle1" if self.goal == "heads" else self.engine is not None:
            return None  # a layout without a draft vocabulary
        size = self.usual_vocabulary
        return size if self.shapes.vocab_size >= 2 * size else None

    @property
    def length(self) -> int:
        """Tokens of a training text: the median prompt twice, and an answer."""
        tokenizer = self.shapes.tokenizer
        lengths = [len(tokenizer(" ".join(e.user_texts()))["input_ids"]) for e in self.prompts]
        wanted = 2 * int(median(lengths)) + self.answer + 64
        rounded = -(-wanted // 256) * 256
        return min(max(rounded, 512), self.shapes.max_positions)

    @property
    def answer(self) -> int:
        """Tokens of an answer."""
        return max(2, min(self.machine.answer, self.shapes.max_positions // 4))

    @property
    def rows_together(self) -> int:
        """Answers that are generated together: their keys and values get half of what is free."""
        free = self.machine.memory - self.target_bytes
        model = self.shapes.model
        size = self.length * (slot_bytes(model) + expanded_bytes(model))
        return max(1, min(64, free // 2 // size))

    @property
    def batch(self) -> int:
        """The tokens of a training batch: the machine's, halved until the batch fits."""
        tokens, devices = self.machine.batch, self.machine.devices
        while tokens > self.length * devices:
            if self._training_bytes(tokens // devices) < 0.8 * self.machine.memory:
                break
            tokens //= 2
        return tokens

    def _training_bytes(self, tokens: int) -> int:
        """Of a training with this number of tokens on a device."""
        model = self.shapes.model
        config = model.config.get_text_config()
        layers = 1 if self.goal == "heads" else len(self.layers)
        # A layer of heads is run once for each of the places that it learns to draft.
        runs = self.steps if self.goal == "heads" else layers
        layer = sum(p.numel() for p in model.parameters()) // config.num_hidden_layers
        weights = layers * layer + config.hidden_size * self.shapes.vocab_size
        fixed = self.target_bytes + 4 * weights + optimizer_bytes(weights, average=False)
        activations = activation_bytes(model, runs, tokens, self._itemsize)
        return fixed + forward_bytes(model, tokens) + activations

    def _require_room(self) -> None:
        if self.target_bytes > 0.8 * self.machine.memory:
            raise UserError(
                f"the weights of {self.target} take {self.target_bytes / GIB:.1f} GiB in "
                f"{self.machine.dtype}, and {self.machine.title} has "
                f"{self.machine.memory / GIB:.1f} GiB; expected a target of at most 80% of that. "
                "Name a smaller target, or a larger --machine"
            )
        needed = self._training_bytes(min(self.length, self.machine.batch))
        if needed > self.machine.memory:
            raise UserError(
                f"a training for {self.target} takes about {needed / GIB:.1f} GiB with one text of "
                f"{self.length} tokens, and {self.machine.title} has "
                f"{self.machine.memory / GIB:.1f} GiB. Name a smaller target, or a larger --machine"
            )


def data_for(source: str, file: Path | None) -> str:
    """How a config in `file` names a source of data: a file relative to the config, or by its
    absolute path if nobody knows where the config will be (None)."""
    path = from_home(source)
    if not path.exists():
        return source
    return os.path.relpath(path, file.parent) if file else str(path.absolute())
