"""Losses and gradients beside those of other trainers: `python -m tools.peers [--write]`
(`make test-peers`).

The same logits go through our losses and through those of TRL, speculators, SpecForge and ModelOpt,
and the same weights and texts through a step of EAGLE-3 here and in speculators. Each peer runs in
an environment of its own. The command prints a table and fails where a difference is larger than
the peer's rounding explains. `--write` stores the table in docs/results/peers.md.
"""

import datetime
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import speculators
from benchmarks.common import describe_machine
from distill.losses import WeightedLoss
from distill.teacher.teacher_signal import TeacherLogits
from tests.export import save_target
from tests.tiny import VOCAB
from tools.child_job import run_job
from train.engines.child_process import package_version

CHILD = Path(__file__).with_name("peers_child.py")
PAGE = Path("docs/results/peers.md")
TOKENS, OUTCOMES = 64, 512
# Differences relative to the largest value. TRL computes in the dtype of the logits, float64 here;
# the others in float32, and a step of EAGLE-3 is float32 on both sides.
FLOAT64, FLOAT32, STEP = 1e-11, 2e-6, 1e-4
HEAD = """\
# Peers

Losses and gradients of this project beside those of other trainers, for the same input.
`python -m tools.peers --write` made this page on {day}, on {machine} (`make test-peers` prints it).
A difference is relative to the largest value.

"""
CONVENTIONS = """
What differs by convention:

- Which positions count: ours masks by the predicted token. SpecForge masks by the token that is
  read, and speculators by the one after it, so both train predictions past the end of a turn.
- A reduced vocabulary, with KL: ours keeps the positions whose likeliest token is not drafted;
  EAGLE-3's own code leaves them out.
- DFlash: ours ends a block at the first token that is not trained; the peers go on into later
  turns.
- Scale: ours sums over depths and divides by predicted tokens; speculators divides by trained
  places. AdamW hardly cares, but a clipping norm acts earlier here.
"""


@dataclass(frozen=True)
class Case:
    """One loss in both implementations."""

    name: str
    peer: str
    package: str
    ours: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    environment: str = "peers"
    bound: float = FLOAT32


def gkd(name: str, beta: float, loss: str | dict[str, Any], temperature: float) -> Case:
    ours = {loss: 1.0} if isinstance(loss, str) else {"jsd": loss}
    options = {"beta": beta, "temperature": temperature}
    return Case(f"{name}, T {temperature}", "trl", "trl", ours, options, temperature, bound=FLOAT64)


def eager(name: str, loss: str, ours: str) -> Case:
    library = "speculators"
    return Case(name, library, library, {ours: 1.0}, {"loss": loss}, environment=library)


CASES = (
    *(gkd("forward KL", 0, "forward_kl", t) for t in (0.7, 1.0, 2.0)),
    *(gkd("reverse KL", 1, "reverse_kl", t) for t in (0.7, 1.0, 2.0)),
    *(gkd(f"JSD, β {b}", b, {"beta": b}, t) for b in (1e-4, 0.1, 0.5, 0.9) for t in (0.7, 2.0)),
    eager("forward KL", "kl_div_loss", "forward_kl"),
    eager("reverse KL", "reverse_kl_div_loss", "reverse_kl"),
    eager("JSD", "js_div_loss", "jsd"),
    eager("total variation", "tv_loss", "total_variation"),
    eager("−log α", "neg_log_acceptance_loss", "negative_log_acceptance"),
    eager("LK hybrid, η 3", "lk_hybrid_loss", "lk_hybrid"),
    Case("−log α", "specforge", "specforge", {"negative_log_acceptance": 1.0}),
    Case("forward KL", "modelopt", "nvidia_modelopt", {"forward_kl": 1.0}),
)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    part: str
    peer: str
    loss: float
    gradient: float
    bound: float

    @property
    def holds(self) -> bool:
        return max(self.loss, self.gradient) <= self.bound

    def cells(self) -> str:
        return f"| {self.part} | {self.peer} | {self.loss:.1e} | {self.gradient:.1e} |"


def main(write: bool) -> int:
    """Print the table. Returns the number of rows that do not hold."""
    rows = [*loss_rows(), *step_rows()]
    lines = ["| part | peer | loss differs by | gradient differs by |", "|---|---|---|---|"]
    lines += [row.cells() for row in rows]
    table = "\n".join(lines) + "\n"
    print(table)
    bad = [row for row in rows if not row.holds]
    for row in bad:
        print(f"{row.part}, {row.peer}: more than {row.bound:.0e}")
    if write and not bad:
        PAGE.parent.mkdir(exist_ok=True)
        machine = describe_machine()["machine"]
        processor = f"{machine['cores']} cores of an {machine['processor']}"
        head = HEAD.format(day=datetime.date.today().isoformat(), machine=processor)
        PAGE.write_text(head + table + CONVENTIONS, encoding="utf-8")
    return len(bad)


def loss_rows() -> list[Row]:
    """Every loss in both implementations, on logits of a drafter that half agrees."""
    teacher = 3 * torch.randn(TOKENS, OUTCOMES, dtype=torch.float64)
    student = teacher / 2 + torch.randn(TOKENS, OUTCOMES, dtype=torch.float64)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        logits = str(Path(place, "logits.safetensors"))
        save_file({"student": student, "teacher": teacher}, logits)
        for environment in dict.fromkeys(case.environment for case in CASES):
            cases = [case for case in CASES if case.environment == environment]
            results = str(Path(place, f"{environment}.safetensors"))
            asked = [{"peer": case.peer, "options": case.options} for case in cases]
            job = {"logits": logits, "cases": asked, "results": results}
            run_job(environment, CHILD, job, speculators.ENVIRONMENT)
            theirs = load_file(results)
            for number, case in enumerate(cases):
                loss, gradient = ours(case, student, teacher)
                version = package_version(environment, case.package)
                rows.append(
                    Row(
                        case.name,
                        f"{case.package} {version}",
                        difference(loss, theirs[f"loss{number}"]),
                        difference(gradient, theirs[f"gradient{number}"]),
                        case.bound,
                    )
                )
    return rows


def ours(case: Case, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Our loss, summed over tokens, and its gradient in `student`."""
    loss = WeightedLoss(
        case.ours,
        teacher_temperature=case.temperature,
        drafter_temperature=case.temperature,
    )
    labels = torch.zeros(len(student), dtype=torch.int64)
    values, gradient = loss.fused(student, TeacherLogits(teacher), labels)
    return values.sum(), gradient


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def step_rows() -> list[Row]:
    """A step of EAGLE-3 with three unrolled steps, over the full vocabulary and a reduced one."""
    with tempfile.TemporaryDirectory() as place:
        target = save_target(Path(place, "target"), layers=7, vocab=VOCAB + 4)
        results, _ = speculators.compare(
            target,
            Path(place),
            lengths=(24,),
            vocabularies=(VOCAB // 2, target.vocab_size),
            texts=2,
            half=False,
        )
    found = speculators.ratios(results)
    version = package_version(speculators.LIBRARY, speculators.LIBRARY)
    return [
        Row(
            f"EAGLE-3, 3 steps, {vocabulary} of {target.vocab_size} tokens drafted",
            f"speculators {version}",
            found[f"loss_difference_speculators_eager_24_{vocabulary}"],
            found[f"gradient_difference_speculators_eager_24_{vocabulary}"],
            STEP,
        )
        for vocabulary in (VOCAB // 2, target.vocab_size)
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main("--write" in sys.argv[1:]))
