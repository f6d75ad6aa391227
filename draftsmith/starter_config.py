"""The config that `draftsmith init` writes: sizes for a machine, a target and its data.

A machine is one of four kinds, or the one at hand. Sizes that depend on the target are computed
from its config with the estimates of `train.loop.estimates`.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import psutil
import torch

import train
from decode.base.device import computes_bfloat16
from decode.base.errors import UserError
from decode.model.loading import Target
from decode.model.memory import slot_bytes
from train.data.read import Example
from train.loop.estimates import activation_bytes, forward_bytes, optimizer_bytes

GIB = 2**30


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
    "heads": "heads on the target's hidden states (EAGLE), with a draft tree",
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
    kind = "8x80gb" if count > 1 else "80gb" if memory > 40 * GIB else "24gb"
    base = MACHINES[kind]
    size = f"{memory / GIB:.0f} GiB"
    title = f"{count} GPUs of {size}" if count > 1 else f"one GPU of {size}"
    batch = base.batch * count // base.devices
    launch = base.launch.replace("--num_processes 8", f"--num_processes {count}")
    return kind, replace(
        base, devices=count, memory=memory, title=title, batch=batch, launch=launch
    )


@dataclass(frozen=True)
class Starter:
    """A config to write. data: as it is named in the config. shapes: the target without weights.
    prompts: some rows of the data that have a prompt. rows: how many rows the data has; None: more
    than were looked at. file: of the config; None: standard output."""

    goal: str
    target: str
    data: str
    machine: Machine
    shapes: Target
    prompts: Sequence[Example]
    rows: int | None
    file: Path | None

    def text(self) -> str:
        """The YAML text. Raises UserError if the target does not fit the machine."""
        self._require_room()
        stages = {"small-lm": self._small_lm, "heads": self._heads, "online": self._online}
        return self._head() + stages[self.goal]()

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def _itemsize(self) -> int:
        return 4 if self.machine.dtype == "float32" else 2

    @property
    def _target_bytes(self) -> int:
        return self.shapes.model.num_parameters() * self._itemsize

    @property
    def _layers(self) -> list[int]:
        """A twelfth of the target's layers, the first ones, at least two."""
        depth: int = self.shapes.model.config.get_text_config().num_hidden_layers
        return list(range(min(depth, max(2, depth // 12))))

    @property
    def _vocabulary(self) -> int | None:
        if self.goal == "heads":
            return None  # vLLM's reader of EAGLE-1 has no draft vocabulary
        size = 32000 if self.machine.cuda else 8000
        return size if self.shapes.vocab_size >= 2 * size else None

    @property
    def _vocabulary_source(self) -> str:
        source = "EAGLE-3's size (2503.01840)" if self.machine.cuda else "the quickstart's size"
        return f"the most frequent tokens only, for a cheaper output layer; {source}"

    @property
    def _length(self) -> int:
        """Tokens of a training text: the median prompt twice, and an answer."""
        tokenizer = self.shapes.tokenizer
        lengths = [len(tokenizer(" ".join(e.user_texts()))["input_ids"]) for e in self.prompts]
        wanted = 2 * int(median(lengths)) + self._answer + 64
        rounded = -(-wanted // 256) * 256
        return min(max(rounded, 512), self.shapes.max_positions)

    @property
    def _answer(self) -> int:
        return max(2, min(self.machine.answer, self.shapes.max_positions // 4))

    @property
    def _rows_together(self) -> int:
        """Answers that are generated together: their keys and values get half of what is free."""
        free = self.machine.memory - self._target_bytes
        size = self._length * slot_bytes(self.shapes.model)
        return max(1, min(64, free // 2 // size))

    @property
    def _batch(self) -> int:
        """The tokens of a training batch: the machine's, halved until the batch fits."""
        model, machine = self.shapes.model, self.machine
        config = model.config.get_text_config()
        layers = 1 if self.goal == "heads" else len(self._layers)
        # A layer of heads is run once for each of the four places that it learns to draft.
        runs = 4 if self.goal == "heads" else layers
        layer = sum(p.numel() for p in model.parameters()) // config.num_hidden_layers
        weights = layers * layer + config.hidden_size * self.shapes.vocab_size
        fixed = self._target_bytes + 4 * weights + optimizer_bytes(weights, average=False)
        tokens = machine.batch
        while tokens > self._length * machine.devices:
            share = tokens // machine.devices
            needed = fixed + forward_bytes(model, share)
            needed += activation_bytes(model, runs, share, self._itemsize)
            if needed < 0.8 * machine.memory:
                break
            tokens //= 2
        return tokens

    def _require_room(self) -> None:
        if self._target_bytes > 0.8 * self.machine.memory:
            raise UserError(
                f"the weights of {self.target} take {self._target_bytes / GIB:.1f} GiB in "
                f"{self.machine.dtype}, and {self.machine.title} has "
                f"{self.machine.memory / GIB:.1f} GiB; expected a target of at most 80% of that. "
                "Name a smaller target, or a larger --machine"
            )

    # --- text -------------------------------------------------------------------------------------

    def _head(self) -> str:
        machine, rows = self.machine, self.machine.rows
        limit = (
            f"  limit: {rows}  # of the train rows; more text makes a better drafter\n"
            if self.rows is None or self.rows > rows
            else ""
        )
        stem = self.file.stem if self.file else self.goal
        name = re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-")
        precision = "precision: bf16  # of the matrix products; weights stay float32\n"
        file = self.file or "CONFIG"
        weights = f"{self._target_bytes / GIB:.1f} GiB"
        schema = Path(train.__file__).parent / "schema.json"
        config, model = self.shapes.model.config.get_text_config(), self.shapes.model
        return f"""\
# yaml-language-server: $schema={schema}
# Trains {GOALS[self.goal]}, on {machine.title}.
#   draftsmith train {file} --dry-run     # the plan: memory, disk and time
#   {machine.launch} {file}
# The target has {model.num_parameters() / 1e6:,.0f}M parameters in {config.num_hidden_layers} \
layers and {self.shapes.vocab_size:,} tokens; its weights
# take {weights} in {machine.dtype}. Sizes and rates without another source are those of
# {machine.source}. docs/reference/config.md has every key.
name: {name or "run"}
target:
  model: {_quoted(self.target)}
  dtype: {machine.dtype}
  device: {"auto" if machine.cuda else "cpu"}
{precision if machine.dtype == "bfloat16" else ""}\
data:
  train: {_quoted(self.data)}
{limit}\
  # No test and no dev are named: this number of prompts, at most a tenth, is split off from train
  # for each. Rows that repeat one of them are left out of train.
  held_out: {max(machine.prompts, 2 * machine.timed)}
  on_bad: skip  # rows that cannot be read, up to max_bad_rate (1%), are counted and skipped
evaluation:
  prompts: {machine.prompts}
  gamma: {4 if machine.cuda else 2}  # draft tokens; the faster the target, the fewer pay off
  max_new_tokens: {min(64 if not machine.cuda else 256, self._answer)}
  timed_prompts: {machine.timed}
  timed_tokens: {min(40 if not machine.cuda else 256, self._answer)}
stages:
  # The target answers the prompts: a drafter learns best from text that the target generates
  # (DistillSpec, 2310.08461).
{self._answers("answers")}\
"""

    def _answers(self, name: str, *others: str) -> str:
        lines = [
            f"- name: {name}",
            "  kind: generate",
            *others,
            f"  max_new_tokens: {self._answer}",
            f"  batch_size: {self._rows_together}  # keys and values: at most half the free memory",
        ]
        return "".join(f"  {line}\n" for line in lines)

    def _dev_answers(self) -> str:
        what = "  # Its answers to dev prompts: agreement with them is logged during training.\n"
        return what + self._answers("dev-answers", "  split: dev", "  prompts: 24")

    def _warm_up(self, epochs: int) -> int:
        """A tenth of the optimizer steps if texts have their full length, at most 20."""
        rows = min(self.rows or self.machine.rows, self.machine.rows)
        return min(20, epochs * rows * self._length // self._batch // 10)

    def _loop(self, epochs: int, rate: str) -> str:
        vocabulary = (
            f"    draft_vocabulary: {self._vocabulary}  # {self._vocabulary_source}\n"
            if self._vocabulary
            else ""
        )
        return f"""\
{vocabulary}\
    max_length: {self._length}
    loop: {{epochs: {epochs}, tokens_per_batch: {self._batch}}}  # all processes together
    optimizer: {{lr: {rate}, warmup_steps: {self._warm_up(epochs)}}}
"""

    def _distill(self, epochs: int, dev: bool) -> str:
        watched = "    dev: {text: dev-answers, samples: 24, every: 60}\n" if dev else ""
        return f"""\
  # The target's first layers learn its distribution. A smaller model with the same tokenizer is
  # often better: drafter: {{model: org/smaller}}.
  - name: distill
    kind: distill
    text: answers
    drafter: {{layers: {self._layers}}}
    losses: {{forward_kl: 1.0}}
    train_embeddings: false
{watched}{self._loop(epochs, self.machine.rate)}"""

    def _small_lm(self) -> str:
        return self._dev_answers() + self._distill(4, True)

    def _heads(self) -> str:
        # On GPUs a pass of the target costs little, and the states of much text would fill a disk.
        states = f"""\
  # The target's hidden states of the text, computed once.
  - name: states
    kind: feature_cache
    text: answers
    max_length: {self._length}
"""
        return f"""\
{self._dev_answers()}{"" if self.machine.cuda else states}\
  # One layer on the target's hidden states (EAGLE, 2401.15077; its learning rate, 3e-5, is for far
  # more text), with the draft tree that pays off at this machine's costs. lk_hybrid is one of the
  # LK losses, which raise the acceptance itself.
  - name: heads
    kind: heads
    text: answers
    heads: {{type: eagle1, depth: 4}}
    features: {"live" if self.machine.cuda else "states"}
    losses: {{lk_hybrid: 0.1}}
    dev: {{text: dev-answers, samples: 24, every: 120}}
    tree: {{width: 6, prompts: 12}}
{self._loop(4, self.machine.rate)}"""

    def _online(self) -> str:
        return f"""\
{self._distill(1, False)}\
  # Then it serves the train prompts in their order, and learns from the tokens that the target
  # rejects (2310.07177). To serve other prompts: data.stream, and no split here.
  - name: online
    kind: online
    drafter: {{stage: distill}}
    split: train
    max_new_tokens: {self._answer}
    batch_size: {min(8, self._rows_together)}
"""


def _quoted(text: str) -> str:
    """As a YAML string: each JSON string is one."""
    return json.dumps(text, ensure_ascii=False)


def data_for(source: str, file: Path | None) -> str:
    """How a config in `file` names a source of data: a file relative to the config, or by its
    absolute path if nobody knows where the config will be (None)."""
    path = Path(source).expanduser()
    if not path.exists():
        return source
    return os.path.relpath(path, file.parent) if file else str(path.absolute())
