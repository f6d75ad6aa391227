"""Every causal family of the installed transformers, tried at small size, as a table.

    python -m tools.families [NAME ...] [--seconds 200] [--results FILE] [--write]

Of each family a small model with random weights is made from its default config. Its greedy text
must be that of its own forward over the whole text, or it must be refused by name. Each family runs
in a process of its own, with a limit of time and memory. --write replaces the rows of the families
in docs/reference/families.md; without names, all.
"""

import argparse
import copy
import json
import logging
import multiprocessing
import re
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.drafters.small_lm import SmallLMDrafter
from decode.loop.decoding import Decoder
from decode.model.cache.prefix_cache import prefix_cache
from decode.model.identity import fingerprint
from decode.model.loading import Target
from decode.model.small_copy import small_model
from decode.opening.directory import open_drafter
from decode.shapes import SHAPES
from distill.untrained_student import student_from_layers
from tests.stages import make_stage, run_stage, stage_context
from tests.tiny import own_text, tiny_tokenizer
from tools.markdown import table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "families.md"
MEMORY = 6 << 30  # bytes of address space beyond those of the parent
TOKENS = 10
PROMPTS = [[(n * n * 3 + 1) % 251 + 9 for n in range(length)] for length in (5, 19)]
SAME = "same"
LONGEST = 300  # characters of a refusal on the page
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0]]  # of the trees

# What the default config of a family lacks, or what makes its kinds of layers occur.
SETTINGS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "jamba": {"num_hidden_layers": 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}


class Trials:
    """What is tried with a family, by the column of the table."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.texts = [own_text(model, prompt, TOKENS) for prompt in PROMPTS]

    def alone(self) -> str:
        decoder = Decoder(self.model, DRAFTERS["none"]())
        return self._judged([decoder.decode([prompt], TOKENS).outputs[0] for prompt in PROMPTS])

    def ragged(self) -> str:
        return self._decoded(DRAFTERS["none"]())

    def chains(self) -> str:
        return self._decoded(SmallLMDrafter(self._near()))

    def trees(self) -> str:
        return self._decoded(SmallLMDrafter(self._near(), shape=SHAPES["static"](paths=PATHS)))

    def prefix_cache(self) -> str:
        prefixes = prefix_cache(self.model)
        if prefixes is None:
            return "none"
        decoder = Decoder(self.model, DRAFTERS["ngram"](), prefixes=prefixes)
        again = [self._judged(decoder.decode(PROMPTS, TOKENS).outputs) for _ in range(2)]
        return again[1] if prefixes.reused else "nothing reused"

    def skip(self) -> str:
        return self._decoded(DRAFTERS["skip"](exit=1))

    def student(self) -> str:
        return self._decoded(SmallLMDrafter(student_from_layers(self.model, [0, 1]).eval()))

    def heads(self) -> str:
        tokenizer = tiny_tokenizer()
        identity = fingerprint(tokenizer, self.model.config)
        target = Target(self.model, tokenizer, "family", None, identity, ())
        loop = {"epochs": 1, "tokens_per_batch": 1000}
        heads = {"type": "medusa", "heads": 2}
        with tempfile.TemporaryDirectory() as directory:
            context = stage_context(Path(directory), target)
            stage = make_stage("heads", "heads", heads=heads, loop=loop)
            with torch.enable_grad():
                drafter = run_stage(context, stage).drafter
            assert drafter is not None
            return self._decoded(open_drafter(str(drafter), target))

    def _near(self) -> Any:
        """A model like this one, which drafts right and wrong tokens."""
        near = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(1)
        for weight in near.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1 * weight.std())
        return near

    def _decoded(self, drafter: Any) -> str:
        return self._judged(Decoder(self.model, drafter, gamma=3).decode(PROMPTS, TOKENS).outputs)

    def _judged(self, texts: list[list[int]]) -> str:
        return SAME if texts == self.texts else "other text"


COLUMNS = ("alone", "ragged", "chains", "trees", "prefix_cache", "skip", "student", "heads")


def family_model(name: str) -> Any:
    """A small model of a family. None if no config or model can be made without more settings."""
    try:
        config = CONFIG_MAPPING[name](**SETTINGS.get(name, {}))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return None
        config.is_decoder = True  # BERT and its relatives can be both
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return small_model(kind[0] if isinstance(kind, tuple) else kind, config)
    except Exception:  # whatever a family's config raises
        return None


def try_family(name: str) -> dict[str, str]:
    """The result of each column. Without a model, there is none."""
    model = family_model(name)
    if model is None:
        return {}
    try:
        trials = Trials(model)
    except Exception:
        return {}
    return {column: _result(getattr(trials, column)) for column in COLUMNS}


def _result(trial: Callable[[], str]) -> str:
    try:
        return trial()
    except UserError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"


def in_own_process(name: str, seconds: float) -> dict[str, str]:
    """`try_family` with a limit of time and memory."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, sender))
    process.start()
    sender.close()
    try:
        done = receiver.poll(seconds)
        return receiver.recv() if done else dict.fromkeys(COLUMNS, f"takes over {seconds:g} s")
    except EOFError:
        return dict.fromkeys(COLUMNS, "the process died")
    finally:
        process.kill()
        process.join()


def _child(name: str, sender: Connection) -> None:
    used = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    sender.send(try_family(name))


def page(results: dict[str, dict[str, str]]) -> str:
    """The page of docs/reference with these results."""
    refusals: list[str] = []
    rows = []
    for name, cells in sorted(results.items()):
        if not cells:
            continue
        rows.append([f"`{name}`", *(_cell(cells[column], refusals) for column in COLUMNS)])
    untried = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(results))
    unmade = sorted(f"`{name}`" for name, cells in results.items() if not cells)
    heads = ["family", *(column.replace("_", " ") for column in COLUMNS)]
    return "\n".join(
        [
            "# Families of models",
            "",
            "Generated by `python -m tools.families --write`, with transformers "
            f"{transformers.__version__}. Small random",
            "models, greedy text in float32: `same` as that of the model's own forward over the",
            "whole text, or refused by name (a number, below). The columns: one row; rows of",
            "different lengths; drafts of a small model, as chains and as trees; known beginnings;",
            "drafts of the first layer; a student of two layers; Medusa heads after a step of",
            "training. `–`: this kind has none.",
            "",
            *table(heads, rows),
            "",
            *(f"{number}. {words}" for number, words in enumerate(refusals, 1)),
            "",
            f"Not made small from their default configs: {', '.join(unmade)}.",
            "",
            *(
                [f"Not tried yet: {', '.join(f'`{name}`' for name in untried)}.", ""]
                * bool(untried)
            ),
        ]
    )


def _cell(result: str, refusals: list[str]) -> str:
    if not result.startswith("refused: "):
        return {"none": "–"}.get(result, result)
    words = result.removeprefix("refused: ")
    words = re.sub(r"\b[A-Z]\w*(ForCausalLM|LMHeadModel|Generation|Decoder)\b", "the model", words)
    words = words if len(words) < LONGEST else words[:LONGEST] + " …"
    if words not in refusals:
        refusals.append(words)
    return f"{refusals.index(words) + 1}"


def main() -> int:
    """Returns how many results are neither the same text nor a refusal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--results", type=Path, help="a file that keeps results between calls")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_grad_enabled(False)
    bad = 0
    kept = given.results if given.results and given.results.exists() else None
    results = json.loads(kept.read_text("utf-8")) if kept else {}
    for name in given.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if name in results:
            continue
        results[name] = in_own_process(name, given.seconds)
        odd = {k: v for k, v in results[name].items() if v not in (SAME, "none")}
        print(name, odd or SAME if results[name] else "not made", flush=True)
        bad += sum(not v.startswith("refused: ") for v in odd.values())
        if given.results:
            given.results.write_text(json.dumps(results), "utf-8")
    if given.write:
        PAGE.write_text(page(results), "utf-8")
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
