"""Faults of real engines, diagnosed: `python -m tools.diagnosis_engines [NAME …]`. `equal` is a
drafter that vLLM serves without one.

vLLM for CPUs or llama-server, from DRAFTSMITH_ENGINES, serves a tiny target with a drafter that
learnt its texts. What `draftsmith diagnose` says of it is printed.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from decode.model.loading import Target, load_target
from draftsmith.diagnosis.entry import diagnose
from draftsmith.diagnosis.explain import EQUAL
from draftsmith.export import ExportOptions
from draftsmith.export.export_directory import export_drafter
from heads.heads_directory import save_heads
from heads.heads_drafter import HeadsDrafter
from tests.mtp_targets import save_mtp_target, write_qwen_gguf
from tests.tiny import VOCAB, save_tiny
from tools.audit_engines import serve_llama, serve_vllm
from tools.diagnosis_controls import GAMMA, STEPS, prompts, taught_on, texts_of
from train.settings.server_config import ServerConfig

Serve = Callable[[Path], AbstractContextManager[str]]
PROMPTS = 60
FILE, MODEL = "target.gguf", "model.gguf"  # without and with the module
# Attention in vLLM's build for CPUs needs such heads.
HEAD = 32


def plain_target(place: Path) -> None:
    # With ids for mask tokens.
    save_tiny(place / "target", vocab=VOCAB + 8, layers=7, max_positions=512, head_dim=HEAD)


def mtp_target(place: Path) -> None:
    save_mtp_target(place / "target", "glm4_moe", head_dim=HEAD)


def qwen_target(place: Path) -> None:
    heads = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), HEAD)
    save_mtp_target(place / "target", "qwen3_5_text", **heads)
    write_qwen_gguf(load_target(str(place / "target")), place / FILE)


def in_vllm(served: str, **method: Any) -> Serve:
    return lambda place: serve_vllm(
        place, served, {"num_speculative_tokens": GAMMA} | method, repaired=False
    )


def in_llama(place: Path) -> AbstractContextManager[str]:
    options = {"spec_type": "draft-mtp", "spec_draft_n_max": GAMMA, "spec_draft_p_min": 0}
    return serve_llama(place, f"out/{MODEL}", source="target", **options)


@dataclass(frozen=True)
class Fault:
    """kind: of the drafter. make: writes `target`, and for llama-server a file, to a directory.
    form: of the export `out`. serve: starts the engine. A module of MTP is served in its target.
    steps: of the training."""

    kind: str
    make: Callable[[Path], None]
    form: str
    serve: Serve
    protocol: Literal["completions", "llama-server"] = "completions"
    steps: int = STEPS

    @property
    def ends(self) -> dict[str, Any]:
        """What ends a text beside the target's own tokens: in llama.cpp also its padding."""
        return {"eos_token_ids": (0, 2)} if self.protocol == "llama-server" else {}


FAULTS = {
    EQUAL: Fault("eagle3", plain_target, "vllm", in_vllm("target", method="eagle3", model="out")),
    "one_k_norm": Fault(
        "dflash", plain_target, "vllm", in_vllm("target", method="dflash", model="out")
    ),
    "fed_state_norm": Fault("mtp", mtp_target, "mtp", in_vllm("out", method="mtp")),
    # Texts that are known by heart are drafted right with any first entry.
    "entry_before": Fault("mtp", qwen_target, "mtp-gguf", in_llama, "llama-server", steps=80),
}


def diagnosed(name: str, place: Path) -> str:
    """A row of the table."""
    fault = FAULTS[name]
    fault.make(place)
    target: Target = load_target(str(place / "target"), dtype="float32", device="cpu")
    target = replace(target, **fault.ends)
    texts = texts_of(target)
    drafter = taught_on(texts, fault.kind, one=target, steps=fault.steps)
    assert isinstance(drafter, HeadsDrafter)
    save_heads(place / "taught", drafter.heads, target=target, provenance={"stage": "heads"})
    file = place / FILE
    options = ExportOptions(target=str(file) if file.exists() else None)
    export_drafter(place / "taught", fault.form, place / "out", options)
    begin = time.monotonic()
    with fault.serve(place) as url:
        config = ServerConfig(url=[url], concurrency=1, protocol=fault.protocol)
        asked = prompts(PROMPTS, 0, texts)
        found = diagnose(url, target, drafter, asked, config, gamma=GAMMA)
    said = found.explanation
    agreement = ", ".join(
        f"{x} {said.agreement[x]:.2f}" for x in dict.fromkeys((EQUAL, name, *said.names))
    )
    seconds = time.monotonic() - begin
    return (
        f"| {fault.kind} | {name} | {' or '.join(said.names) or said.verdict} | "
        f"{said.posterior:.4f} | {agreement} | {seconds:.0f} |"
    )


def main(names: Sequence[str]) -> None:
    print("| drafter | fault | said | posterior | counts that agree | seconds |")
    print("|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            print(diagnosed(name, Path(place)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*FAULTS])
