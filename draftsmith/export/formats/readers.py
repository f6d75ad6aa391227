"""Which inference engine reads which layout, in which of its releases, and where it ran.

The plan of a run, `init --engine`, `export`, `--verify`, the README of an export,
docs/reference/readers.md and the table in README.md all read this table. Seen: the release was run
here, or its source read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from decode.base.errors import UserError


@dataclass(frozen=True)
class EngineRelease:
    """title: as its authors write it. newest: the newest release that was seen; empty: none was,
    and what it reads is what its documentation says. aliases: other names that users may give."""

    title: str
    newest: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reads:
    """since: the oldest release that was seen to read the layout. until: the last one that does;
    None: the newest does. note: what a reader needs, or what it lacks. ran: the release in which
    drafts of an export were counted here, on a CPU (docs/results/engines.md, docs/results/mtp.md);
    empty: it never ran there. unread: options of heads that it takes and does not know, so that it
    drafts other tokens without a word."""

    since: str
    until: str | None = None
    note: str = ""
    ran: str = ""
    unread: tuple[str, ...] = ()


KNOWN = {
    "transformers": EngineRelease("transformers", "5.24"),
    "vllm": EngineRelease("vLLM", "0.33"),
    "sglang": EngineRelease("SGLang", "0.5.23"),
    "llama-server": EngineRelease("llama.cpp", "11434", ("llama.cpp", "gguf")),
    "openvino": EngineRelease("OpenVINO GenAI", "2026.4"),
    "speculators": EngineRelease("the library speculators", "0.9"),
    "mlx": EngineRelease("MLX-LM", ""),
    "tgi": EngineRelease("TGI", ""),
}

_GPU = "in its newer runner, which has no CPU"
_EAGLE31 = ("fc_norm", "norm_output")
# By layout, and then by engine.
READERS: dict[str, dict[str, Reads]] = {
    "hf": {
        "transformers": Reads("5.17", ran="5.23"),
        "vllm": Reads("0.32", ran="0.32"),
        "sglang": Reads("0.5.23"),
        "mlx": Reads(""),
        "openvino": Reads(
            "2026.4", note="converts it; with a draft model it ignores sampling", ran="2026.4"
        ),
    },
    "gguf": {"llama-server": Reads("11434", ran="11434")},
    "pard": {"vllm": Reads("0.32", ran="0.32")},
    "medusa": {"vllm": Reads("0.32", "0.32", ran="0.32"), "tgi": Reads("")},
    "eagle1": {"vllm": Reads("0.32", ran="0.32")},
    "eagle1-sglang": {"sglang": Reads("0.5.23")},
    "eagle3": {
        "vllm": Reads("0.32", ran="0.32"),
        "sglang": Reads("0.5.23", note="not the norms of EAGLE-3.1", unread=_EAGLE31),
        "openvino": Reads(
            "2026.4",
            note="not the norms of EAGLE-3.1; told the layers",
            ran="2026.4",
            unread=(*_EAGLE31, "norm_before_residual", "norm_before_fc"),
        ),
    },
    "eagle3-gguf": {"llama-server": Reads("11434", ran="11434")},
    "dflash-gguf": {"llama-server": Reads("11434", ran="11434")},
    "dspark-gguf": {"llama-server": Reads("11434", ran="11434")},
    "dflash2-gguf": {"llama-server": Reads("11434", ran="11434")},
    "speculators": {"vllm": Reads("0.32", ran="0.32"), "speculators": Reads("0.9")},
    "p_eagle": {"vllm": Reads("0.32", ran="0.32")},
    "speculators-peagle": {"vllm": Reads("0.32", ran="0.32"), "speculators": Reads("0.9")},
    "dflash": {
        "vllm": Reads("0.32", ran="0.32"),
        "sglang": Reads("0.5.23", note="not on a CPU"),
        "openvino": Reads("2026.4", ran="2026.4"),
    },
    "speculators-dflash": {"vllm": Reads("0.32", ran="0.32"), "speculators": Reads("0.9")},
    "dspark": {"vllm": Reads("0.32", note=_GPU)},
    "speculators-dspark": {"vllm": Reads("0.32", note=_GPU), "speculators": Reads("0.9")},
    "dflash2": {"vllm": Reads("0.32", note=_GPU), "sglang": Reads("0.5.23", note="not on a CPU")},
    "domino": {"sglang": Reads("0.5.23", note="on a GPU, in bfloat16")},
    "speculators-dflash2": {"vllm": Reads("0.32", note=_GPU), "speculators": Reads("0.9")},
    "speculators-xpress": {"vllm": Reads("0.33", note=_GPU), "speculators": Reads("0.9")},
    "mtp": {"vllm": Reads("0.32", ran="0.32")},
    "speculators-mtp": {"speculators": Reads("0.9")},
    "mtp-gguf": {"llama-server": Reads("11434", note="Qwen3.5 only", ran="11434")},
    "draftsmith": {},
}


def engine_names(layout: str) -> tuple[str, ...]:
    """Return the names that users may give to the engines which read a layout."""
    readers = READERS[layout]
    return tuple(name for engine in readers for name in (engine, *KNOWN[engine].aliases))


def up_to(layout: str, engine: str) -> str:
    """Return which releases of an engine read a layout, if the newest does not; else nothing.

    >>> up_to("medusa", "vllm"), up_to("eagle3", "vllm")
    (' up to 0.32', '')
    """
    until = READERS[layout][engine].until
    return "" if until is None else f" up to {until}"


def require_read(name: str, layout: str, used: Iterable[str], what: str) -> None:
    """Raise UserError if an engine reads a layout and not all options of heads that are used. name:
    of the engine; that of a layout is any of its readers. what: the drafter, for the message."""
    readers = READERS[layout]
    if name in readers and (unread := [x for x in used if x in readers[name].unread]):
        fitting = [other for other, reads in readers.items() if not {*unread} & {*reads.unread}]
        raise UserError(
            f"{what} has {' and '.join(unread)}, which {name} does not read; train it without, or "
            f"serve it with {' or '.join(fitting)}"
        )


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, which name a release.

    >>> release_of("0.33.1+cpu"), release_of("0.33") > release_of("0.9")
    ((0, 33), True)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def outdated(layout: str, name: str) -> str | None:
    """Return what to say if the newest release of an engine does not read a layout that older ones
    did; None if it does, or never did. name: any of the engine's."""
    for engine, reads in READERS[layout].items():
        if name in (engine, *KNOWN[engine].aliases) and reads.until is not None:
            known = KNOWN[engine]
            return (
                f"{known.title} reads layout {layout} up to {reads.until}, and {known.newest} does "
                "not"
            )
    return None
