"""Run by a Python that has the library: `grammar_child.py JOB ANSWER PROGRESS`.

JOB: {library: llguidance or xgrammar, tokenizer: its directory, schemas: JSON Schemas, texts: token
ids for each schema, or null: then they are drawn}. ANSWER: the library's version, seconds to read
the tokenizer and to compile each schema, milliseconds of each mask, MiB of memory that came with
them, the texts, and how many of each text's tokens the library takes.
"""

import importlib.metadata
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

LONGEST = 80  # tokens of a text that is drawn


class LLGuidance:
    """Matchers of llguidance."""

    def __init__(self, tokenizer: Any) -> None:
        import llguidance.hf

        self.library = llguidance
        self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, len(tokenizer))

    def compile(self, schema: dict[str, Any]) -> Any:
        matcher, compact = self.library.LLMatcher, {"whitespace_flexible": False}
        grammar = matcher.grammar_from_json_schema(json.dumps(schema), defaults=compact)
        return matcher(self.tokenizer, grammar)

    def mask(self, matcher: Any) -> bytes:
        return bytes(matcher.compute_bitmask())

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))


class XGrammar:
    """Matchers of xgrammar."""

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self.library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        self.compiler = xgrammar.GrammarCompiler(info)
        self.bits = xgrammar.allocate_token_bitmask(1, len(tokenizer))

    def compile(self, schema: dict[str, Any]) -> Any:
        compact: Any = {"any_whitespace": False, "separators": (",", ":")}
        grammar = self.compiler.compile_json_schema(json.dumps(schema), **compact)
        return self.library.GrammarMatcher(grammar)

    def mask(self, matcher: Any) -> bytes:
        matcher.fill_next_token_bitmask(self.bits)
        return bytes(self.bits.numpy().tobytes())

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


def main(job_file: str, answer_file: str, _: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    before = _memory()
    begin = time.perf_counter()
    library: Any = {"llguidance": LLGuidance, "xgrammar": XGrammar}[job["library"]](tokenizer)
    reading = time.perf_counter() - begin
    compiling, masks, texts, taken = [], list[float](), [], []
    for number, schema in enumerate(job["schemas"]):
        begin = time.perf_counter()
        matcher = library.compile(schema)
        compiling.append(time.perf_counter() - begin)
        given = None if job["texts"] is None else job["texts"][number]
        text, times = _walk(library, matcher, given, len(tokenizer), tokenizer.eos_token_id)
        masks += times
        texts.append(text)
        taken.append(len(times))
    answer = {
        "version": importlib.metadata.version(job["library"]),
        "tokenizer_seconds": reading,
        "compile_seconds": compiling,
        "mask_ms": masks,
        "memory_mib": (_memory() - before) / 1024,
        "texts": texts,
        "taken": taken,
    }
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def _walk(
    library: Any, matcher: Any, text: list[int] | None, size: int, end: int
) -> tuple[list[int], list[float]]:
    """The tokens, drawn up to `end` if `text` is None, and the milliseconds of the masks before
    those that are taken."""
    draw, walked, times = random.Random(0), list[int](), list[float]()
    for place in range(LONGEST if text is None else len(text)):
        begin = time.perf_counter()
        bits = library.mask(matcher)
        seconds = time.perf_counter() - begin
        if text is None:
            allowed = [x for x in range(size) if bits[x // 8] >> x % 8 & 1]
            if not allowed:
                break
            token = draw.choice(allowed)
        else:
            token = text[place]
        if not library.take(matcher, token):
            break
        walked.append(token)
        times.append(1000 * seconds)
        if token == end:
            break
    return (walked if text is None else text), times


def _memory() -> int:
    """KiB, at the most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
