"""Faults of a real engine, diagnosed: `python -m tools.diagnosis_engines [NAME …]`. `equal` is a
drafter that it serves without one.

vLLM for CPUs, from DRAFTSMITH_ENGINES, serves a tiny target with a drafter that learnt its texts by
heart. What `draftsmith diagnose` says of it is printed.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decode.model.loading import Target, load_target
from draftsmith.diagnosis.entry import diagnose
from draftsmith.diagnosis.explain import EQUAL
from draftsmith.export.export_directory import export_drafter
from heads.heads_directory import save_heads
from heads.heads_drafter import HeadsDrafter
from tests.diagnosis_controls import GAMMA, prompts, taught_on, texts_of
from tests.mtp_targets import save_mtp_target
from tests.tiny import VOCAB, save_tiny
from tools.audit_engines import serve_vllm
from train.settings.server_config import ServerConfig

PROMPTS = 60
# Attention in vLLM's build for CPUs needs such heads.
HEAD = 32


def plain_target(place: Path) -> None:
    # With ids for mask tokens.
    save_tiny(place, vocab=VOCAB + 8, layers=7, max_positions=512, head_dim=HEAD)


def mtp_target(place: Path) -> None:
    save_mtp_target(place, "glm4_moe", head_dim=HEAD)


# Name: the drafter's kind, what makes the target, the format, and what vLLM is started with. A
# module of MTP is served from the target's own directory.
FAULTS: dict[str, tuple[str, Callable[[Path], None], str, dict[str, Any]]] = {
    EQUAL: ("eagle3", plain_target, "vllm", {"method": "eagle3", "model": "out"}),
    "one_k_norm": ("dflash", plain_target, "vllm", {"method": "dflash", "model": "out"}),
    "fed_state_norm": ("mtp", mtp_target, "mtp", {"method": "mtp"}),
}


def diagnosed(name: str, place: Path) -> str:
    """A row of the table."""
    kind, make_target, form, method = FAULTS[name]
    make_target(place / "target")
    target: Target = load_target(str(place / "target"), dtype="float32", device="cpu")
    texts = texts_of(target)
    drafter = taught_on(texts, kind, one=target)
    assert isinstance(drafter, HeadsDrafter)
    save_heads(place / "taught", drafter.heads, target=target, provenance={"stage": "heads"})
    export_drafter(place / "taught", form, place / "out")
    served = "target" if "model" in method else "out"
    begin = time.monotonic()
    with serve_vllm(place, served, {"num_speculative_tokens": GAMMA} | method, False) as url:
        config = ServerConfig(url=[url], concurrency=1)
        asked = prompts(PROMPTS, 0, texts)
        found = diagnose(url, target, drafter, asked, config, gamma=GAMMA)
    said = found.explanation
    agreement = ", ".join(f"{x} {said.agreement[x]:.2f}" for x in dict.fromkeys((EQUAL, name)))
    seconds = time.monotonic() - begin
    return (
        f"| {kind} | {name} | {said.verdict} | {said.posterior:.4f} | {agreement} | {seconds:.0f} |"
    )


def main(names: Sequence[str]) -> None:
    print("| drafter | fault of vLLM 0.32 | said | posterior | counts that agree | seconds |")
    print("|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            print(diagnosed(name, Path(place)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*FAULTS])
