"""Prompts that the target writes itself (Magpie, 2406.08464).

A chat model that reads its template up to the place of the user's message goes on with such a
message. So a drafter can be trained where there are few prompts or none. The messages are what the
target has seen in its own training, so they are of many kinds.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.base.artifact import remove_directory, verify_directory, write_directory
from decode.base.errors import UserError
from decode.drafters import DRAFTERS
from decode.draw.sampling import Sampling
from decode.loop.decoding import Decoder
from decode.model.loading import Target
from train.data.chat_tokens import user_prefix
from train.data.read import Examples, read_examples
from train.data.template import has_template
from train.measure.ranks import ALONE, Ranks

FILE = "prompts.jsonl"
# A message is left out if it shares this number of words in a row with a held-out prompt.
PHRASE = 8
SHORTEST = 12  # letters
# Row ids from here on: the draws of the answers, which begin at 0, are independent of those here.
FIRST_ROW = 1 << 40
# Give up if this number times the wanted number was drawn.
ATTEMPTS = 4


@dataclass
class SelfPrompts:
    """The messages that were kept, and how many were left out for which reason."""

    texts: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def require_template(tokenizer: PreTrainedTokenizerBase, stage: str) -> None:
    """Raise UserError if the target cannot write prompts: it has no chat template."""
    if not has_template(tokenizer):
        raise UserError(
            f"stage {stage} lets the target write the prompts (self_prompts), but its tokenizer "
            "has no chat template, so there is no user message to write; leave self_prompts out"
        )


def write_prompts(
    target: Target,
    system: str | None,
    held_out: Iterable[str],
    count: int,
    sampling: Sampling,
    *,
    max_tokens: int,
    batch_size: int,
    seed: int,
    directory: Path,
    ranks: Ranks = ALONE,
    progress: Callable[[int], None] = lambda _: None,
) -> SelfPrompts:
    """Let the target write `count` different user messages.

    system: the run's system message. held_out: texts that no message may quote, the users' of the
    dev and test splits. max_tokens: a message that is longer is left out. directory: for what was
    drawn so far, so that a kill loses little. ranks: the processes that share the draws; all call
    this together, and the messages do not depend on their number. progress: called with the number
    of messages kept so far. Raises UserError if the target writes too few usable messages.
    """
    prefix = user_prefix(target.tokenizer, system)
    decoder = Decoder(
        target.model, DRAFTERS["none"](), eos_token_ids=target.eos_token_ids, sampling=sampling
    )
    ends, forbidden = set(target.eos_token_ids), set()
    for text in held_out:
        forbidden |= phrases(text)
    written = SelfPrompts()
    known: set[str] = set()
    drawn = 0
    while len(written.texts) < count and drawn < ATTEMPTS * count:
        missing = count - len(written.texts)
        rows = range(drawn, drawn + min(max(missing, 8), 8 * batch_size * ranks.world))
        drawn = rows.stop
        mine = rows[ranks.rank :: ranks.world]
        stored = directory / f"{rows.start}-{rows.stop}-{ranks.rank}-of-{ranks.world}"
        made_by = [prefix, sampling.numbers, max_tokens, seed]

        def draw(mine: range = mine) -> list[list[int]]:
            return decoder.decode(
                [prefix] * len(mine),
                max_tokens,
                seed=seed,
                row_ids=[FIRST_ROW + row for row in mine],
                batch_size=batch_size,
            ).outputs

        by_rank = ranks.gather(ranks.together(partial(_kept, stored, made_by, draw)))
        for output in (by_rank[i % ranks.world][i // ranks.world] for i in range(len(rows))):
            text = target.tokenizer.decode(output[:-1], skip_special_tokens=True).strip()
            reason = _reason_against(text, output[-1] in ends, known, forbidden)
            if reason:
                written.dropped[reason] += 1
            elif len(written.texts) < count:
                known.add(text)
                written.texts.append(text)
        progress(len(written.texts))
    if len(written.texts) < count:
        raise UserError(
            f"the target wrote {len(written.texts)} usable prompts of {drawn}; {count} were "
            f"expected. Left out: {dict(written.dropped)}. Ask for fewer (self_prompts), or use "
            "prompts of your own"
        )
    return written


def _kept(path: Path, made_by: list[Any], draw: Callable[[], list[list[int]]]) -> list[list[int]]:
    """What `draw` returns, or what it returned at an earlier start with the same settings."""
    if not path.exists() or verify_directory(path)["made_by"] != made_by:
        outputs = json.dumps(draw())
        if path.exists():
            remove_directory(path)
        meta = {"made_by": made_by}
        write_directory(
            path, lambda tmp: (tmp / FILE).write_text(outputs, encoding="utf-8"), meta=meta
        )
    return json.loads((path / FILE).read_text(encoding="utf-8"))


def _reason_against(text: str, ended: bool, known: set[str], forbidden: set[str]) -> str | None:
    if not ended:
        return "too long"
    if len(text) < SHORTEST:
        return "too short"
    if text in known:
        return "repeated"
    if not forbidden.isdisjoint(phrases(text)):
        return "held out"
    return None


def phrases(text: str) -> set[str]:
    """All runs of PHRASE words. A shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    last = max(len(words) - PHRASE, 0)
    return {" ".join(words[i : i + PHRASE]) for i in range(last + 1)}


def save_self_prompts(directory: Path, stage: str, written: SelfPrompts) -> None:
    """Write the messages as rows of a data file, completely or not at all."""
    rows = "".join(
        json.dumps({"id": f"{stage}-{number}", "prompt": text}) + "\n"
        for number, text in enumerate(written.texts)
    )
    write_directory(directory, lambda path: (path / FILE).write_text(rows, encoding="utf-8"))


def read_self_prompts(directory: Path) -> Examples:
    """The examples of `save_self_prompts`. Raises UserError (CorruptArtifact) if the file is
    damaged."""
    verify_directory(directory)
    return read_examples(str(directory / FILE))[0]
