"""Audits the engines that are installed on this machine, each with its kinds of drafts.

`python -m tools.audit_engines` makes the tiny models, starts one engine after the other, audits it
over HTTP with the code of `draftsmith audit`, and prints a row of a table for each. `--only REGEX`
takes those with that in their name.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken

from decode.base.errors import UserError
from decode.drafters.pard import mark_parallel
from decode.model.loading import Target, load_target
from decode.opening.directory import open_drafter, save_drafter
from draftsmith.auditing.audit_options import AuditOptions
from draftsmith.auditing.entry import audit
from draftsmith.auditing.exact import TINY_VOCABULARY, random_prompts
from draftsmith.auditing.findings import Audit, Judgement
from draftsmith.auditing.report import written_p
from draftsmith.auditing.tiny import NOISE, tiny_model, tiny_tokenizer, write_gguf_file, write_tiny
from draftsmith.export import ExportOptions
from draftsmith.export.engine_kinds.libraries import library_serving
from draftsmith.export.engine_kinds.llama_server import FLOAT32, server_version
from draftsmith.export.export_directory import export_drafter
from tests.export import make_heads
from tests.mtp_targets import save_mtp_target
from train.base.console import quieten
from train.engines.child_process import package_version, python_of, serving
from train.engines.launch import launched
from train.engines.programs import find_vllm
from train.settings.server_config import ServerConfig

GAMMA, LONGEST = 3, 200
OPTIONS = AuditOptions(samples=8, max_new_tokens=32, exact=1024)
PROMPTS, CONCURRENCY = 16, 16
# Of a target for EAGLE-3, which reads three layers, and of one for drafts of mask tokens.
DEEP, MASKED = {"num_hidden_layers": 7}, {"num_hidden_layers": 3, "vocab_size": 9}
DEEP_FILE = "gguf/deep.gguf"
EAGLE3 = {"type": "eagle3", "steps": GAMMA}
DFLASH = {"type": "dflash", "layers": 2, "block": GAMMA + 1, "taps": [0, 2]}
# vLLM's build for CPUs reads temperatures of drafts that nothing has written: see
# docs/results/audit.md. A plugin of this name writes them.
REPAIR = """
import torch
from vllm.v1.sample import rejection_sampler


def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)


def register():
    rejection_sampler.expand_batch_to_tokens = expand
"""
ENTRY = "[vllm.general_plugins]\nrepair = repair:register\n"


def write_models(place: Path) -> None:
    """The models of `draftsmith audit-models`, and those that other drafters need."""
    write_tiny(place)
    for name, shape in (("deep", DEEP), ("masked", MASKED)):
        tiny_model(**shape).save_pretrained(place / name)
        tokenizer = tiny_tokenizer()
        if name == "masked":
            tokenizer.add_tokens([AddedToken("<mask>", special=True)])
        tokenizer.save_pretrained(place / name)
    (place / "gguf").mkdir()
    write_gguf_file(place / DEEP_FILE, tiny_model(**DEEP))
    deep, masked = _target(place, "deep"), _target(place, "masked")
    make_heads(place / "eagle3", deep, EAGLE3, moved=0.02)
    export_drafter(place / "eagle3", "vllm", place / "eagle3-vllm")
    gguf = ExportOptions(target=str(place / DEEP_FILE))
    of_file = _target(place, DEEP_FILE)
    make_heads(place / "eagle3-of-file", of_file, EAGLE3, moved=0.02)
    export_drafter(place / "eagle3-of-file", "llama-server", place / "eagle3-gguf", gguf)
    make_heads(place / "dflash", masked, DFLASH, moved=0.02)
    export_drafter(place / "dflash", "vllm", place / "dflash-vllm")
    model = tiny_model(NOISE, **MASKED)
    mark_parallel(model.config, MASKED["vocab_size"] - 1)

    def write(path: Path) -> None:
        model.save_pretrained(path)
        masked.tokenizer.save_pretrained(path)

    save_drafter(place / "pard", "pard", write, target=masked, provenance={})
    export_drafter(place / "pard", "vllm", place / "pard-vllm", ExportOptions(gamma=GAMMA))
    save_mtp_target(place / "with-mtp", "mellum")
    plugin = place / "modules" / "repair-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "entry_points.txt").write_text(ENTRY, "utf-8")
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: repair\nVersion: 1.0\n", "utf-8")
    (plugin.parent / "repair.py").write_text(REPAIR, "utf-8")


def _target(place: Path, name: str) -> Target:
    return load_target(str(place / name), dtype="float32", device="cpu")


@dataclass(frozen=True)
class Engine:
    """serve: starts it over the models in a directory, and gives its address. drafter: the one of
    our own loop, a path there or a specification; None: not compared."""

    name: str
    drafts: str
    serve: Callable[[Path], AbstractContextManager[str]]
    target: str = "target"
    drafter: str | None = None
    protocol: Literal["completions", "llama-server"] = "completions"

    def audit(self, place: Path) -> tuple[Audit, float]:
        """With the seconds until the engine was ready."""
        begin = time.monotonic()
        target = _target(place, self.target)
        drafter = self.drafter
        if drafter is not None and (place / drafter).exists():
            drafter = str(place / drafter)
        with self.serve(place) as url:
            ready = time.monotonic() - begin
            found = audit(
                url,
                target,
                random_prompts(target, PROMPTS),
                # The texts of a large vocabulary are too many to be enumerated.
                OPTIONS if target.token_count <= TINY_VOCABULARY else replace(OPTIONS, exact=0),
                drafter=None if drafter is None else open_drafter(drafter, target),
                gamma=GAMMA,
                protocol=self.protocol,
                concurrency=CONCURRENCY,
            )
        return found, ready


@contextmanager
def serve_vllm(
    place: Path, target: str, method: dict[str, Any] | None, repaired: bool = True
) -> Iterator[str]:
    options: dict[str, Any] = {
        "max_num_seqs": 64,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    if method is not None:
        method = dict(method)
        if "model" in method:
            method["model"] = str(place / method["model"])
        options["speculative_config"] = {"num_speculative_tokens": GAMMA} | method
    config = ServerConfig(launch="vllm", options=options)
    modules = place / "modules" if repaired else None
    with launched(config, _target(place, target), LONGEST, place, modules=modules) as (url,):
        yield url


@contextmanager
def serve_llama(
    place: Path, target: str, source: str | None = None, **options: Any
) -> Iterator[str]:
    """source: the directory that the file was made from, where only llama.cpp reads the file."""
    exactly = FLOAT32 | {"metrics": True}
    if "model_draft" in options:
        options["model_draft"] = str(place / options["model_draft"])
    config = ServerConfig(launch="llama-server", concurrency=8, options=exactly | options)
    served = replace(_target(place, source or target), name=str(place / target))
    with launched(config, served, LONGEST, place) as (url,):
        yield url


@contextmanager
def _draftsmith(place: Path, target: str, drafter: str) -> Iterator[str]:
    if (place / drafter).exists():
        drafter = str(place / drafter)
    command = [
        str(Path(sys.executable).with_name("draftsmith")), "serve", "--target", str(place / target),
        "--drafter", drafter, "--gamma", str(GAMMA), "--port", "{port}", "--dtype", "float32",
    ]  # fmt: skip
    with serving("draftsmith serve", command, "/health", os.environ) as server:
        yield f"http://127.0.0.1:{server.port}"


@contextmanager
def _library(place: Path, kind: str, target: str, drafter: str) -> Iterator[str]:
    python = sys.executable if kind == "transformers" else str(python_of(kind))
    drafter = str(place / drafter) if (place / drafter).exists() else drafter
    ends = list(_target(place, target).eos_token_ids)
    with library_serving(kind, python, place / target, drafter, GAMMA, ends) as url:
        yield url


NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SHORT_NGRAM = {"size_n": 2, "size_m": GAMMA}


def _of_vllm(
    drafts: str, method: Any, drafter: str | None = None, target: str = "target"
) -> Engine:
    name = "vLLM, repaired" if method else "vLLM"
    return Engine(name, drafts, partial(serve_vllm, target=target, method=method), target, drafter)


def _of_llama(
    drafts: str,
    spec_type: str,
    drafter: str | None = None,
    target: str = "target.gguf",
    **more: Any,
) -> Engine:
    options = {"spec_type": spec_type} | more
    serve = partial(serve_llama, target=target, **options)
    return Engine("llama-server", drafts, serve, target, drafter, "llama-server")


def _of_ours(drafts: str, drafter: str, target: str = "target") -> Engine:
    serve = partial(_draftsmith, target=target, drafter=drafter)
    return Engine("draftsmith serve", drafts, serve, target, drafter)


def _of_library(kind: str, drafts: str, drafter: str, target: str = "target") -> Engine:
    return Engine(
        kind, drafts, partial(_library, kind=kind, target=target, drafter=drafter), target
    )


def _drafting(file: str) -> dict[str, Any]:
    return {"model_draft": file, "spec_draft_n_max": GAMMA, "spec_draft_p_min": 0}


ENGINES = [
    _of_vllm("none", None),
    Engine("vLLM", "n-gram", partial(serve_vllm, target="target", method=NGRAM, repaired=False)),
    _of_vllm("n-gram", NGRAM),
    _of_vllm("a small LM", {"method": "draft_model", "model": "drafter"}, "drafter"),
    _of_vllm("EAGLE-1", {"method": "eagle", "model": "eagle-vllm"}, "eagle"),
    _of_vllm("EAGLE-3", {"method": "eagle3", "model": "eagle3-vllm"}, "eagle3", "deep"),
    _of_vllm(
        "PARD",
        {"method": "draft_model", "parallel_drafting": True, "model": "pard-vllm"},
        "pard",
        "masked",
    ),
    _of_vllm("DFlash", {"method": "dflash", "model": "dflash-vllm"}, "dflash", "masked"),
    _of_llama("none", "none"),
    _of_llama("a small LM", "draft-simple", "drafter.gguf", **_drafting("drafter.gguf")),
    _of_llama(
        "a small LM, drawn", "draft-simple", **_drafting("drafter.gguf"),
        spec_draft_sampling="probabilistic",
    ),
    _of_llama(
        "EAGLE-3", "draft-eagle3", "eagle3-of-file", DEEP_FILE,
        **_drafting("eagle3-gguf/drafter.gguf"),
        # It takes the likeliest ten of eight tokens otherwise.
        spec_draft_backend_sampling=False,
    ),
    *(
        _of_llama(
            kind, kind, **{f"spec_{kind.replace('-', '_')}_{k}": v for k, v in SHORT_NGRAM.items()}
        )
        for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
    ),
    _of_llama(
        "ngram-mod", "ngram-mod", spec_ngram_mod_n_match=2, spec_ngram_mod_n_min=1,
        spec_ngram_mod_n_max=GAMMA,
    ),
    _of_llama("ngram-cache", "ngram-cache", spec_draft_n_max=GAMMA),
    _of_ours("n-gram", "ngram:max_n=3,min_n=1"),
    _of_ours("a small LM", "drafter"),
    _of_ours("EAGLE-1", "eagle"),
    _of_ours("EAGLE-3", "eagle3", "deep"),
    _of_ours("DFlash", "dflash", "masked"),
    _of_ours("PARD", "pard", "masked"),
    _of_library("transformers", "a small LM", "drafter"),
    _of_library("transformers", "n-gram", "lookup"),
    _of_library("transformers", "MTP", "mtp", "with-mtp"),
    _of_library("openvino", "none", "none"),
    _of_library("openvino", "a small LM", "drafter"),
    _of_library("openvino", "n-gram", "lookup"),
]  # fmt: skip


def version(engine: Engine) -> str:
    if engine.name.startswith("vLLM"):
        build = find_vllm()
        return build.version if build else ""
    if engine.name == "llama-server":
        return server_version()
    of_library = {"openvino": package_version("openvino", "openvino_genai")}
    return of_library.get(engine.name) or metadata.version(engine.name.split()[0])


def row(engine: Engine, found: Audit, seconds: Sequence[float]) -> str:
    """A row of the table."""
    wrong = [f"{x.group} {x.name}" for x in found.findings if x.verdict is not Judgement.EQUAL]
    tests = [x for x in found.findings if x.p is not None]
    least = [
        min((x for x in tests if x.group == group), key=lambda x: x.p or 0.0, default=None)
        for group in ("sampled", "exact")
    ]
    power = [x.sees for x in found.findings if x.name == "u by probability"]
    accepted = [x.detail for x in found.findings if x.name.startswith("acceptance")]
    return " | ".join(
        (
            f"{engine.name} {version(engine)}", engine.drafts, str(int(found.exit_status)),
            ", ".join(wrong) or "nothing", *(written_p(x) if x else "" for x in least), *power,
            "; ".join(accepted), "+".join(f"{each:.0f}" for each in seconds),
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression of names: ENGINE, DRAFTS")
    only: str = parser.parse_args().only
    torch.set_num_threads(1)
    quieten()
    print("engine", "drafts", "status", "not equal", "least p, sampled", "exact", "would have seen",
          "acceptance", "seconds to start + audit", sep=" | ")  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "models"
        write_models(place)
        for engine in ENGINES:
            if not re.search(only, f"{engine.name}, {engine.drafts}", re.IGNORECASE):
                continue
            try:
                found, ready = engine.audit(place)
            except UserError as error:
                print(engine.name, engine.drafts, f"did not run: {error}", sep=" | ", flush=True)
                continue
            print(row(engine, found, (ready, found.subject["seconds"])), flush=True)
            details = [x for x in found.findings if x.verdict is not Judgement.EQUAL]
            for finding in details:
                print("   ", finding.group, finding.name, finding.detail[:300], finding.p)


if __name__ == "__main__":
    main()
