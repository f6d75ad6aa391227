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
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.artifact import verify_directory, write_directory
from decode.drafters import DRAFTERS
from decode.errors import UserError
from decode.loop import Decoder
from decode.sampling import Sampling
from decode.target.loading import Target
from train.data.chat import user_prefix
from train.data.read import Examples, read_examples
from train.data.template import has_template

FILE = "prompts.jsonl"
# A message is left out if it has so many words in a row in common with a held-out prompt.
PHRASE = 8
SHORTEST = 12  # letters
# Row ids from here on: the draws of the answers, which begin at 0, are independent of those here.
FIRST_ROW = 1 << 40
# Give up if so many times the wanted number were drawn.
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
    progress: Callable[[int], None] = lambda _: None,
) -> SelfPrompts:
    """Let the target write `count` different user messages.

    system: the run's system message. held_out: texts that no message may quote, the users' of the
    dev and test splits. max_tokens: a message that is longer is left out. progress: called with the
    number of messages kept so far. Raises UserError if the target writes too few usable messages.
    """
    prefix = user_prefix(target.tokenizer, system)
    decoder = Decoder(
        target.model,
        DRAFTERS["none"](),
        eos_token_ids=target.eos_token_ids,
        sampling=sampling,
    )
    ends, forbidden = set(target.eos_token_ids), set()
    for text in held_out:
        forbidden |= phrases(text)
    written = SelfPrompts()
    known: set[str] = set()
    drawn = 0
    while len(written.texts) < count and drawn < ATTEMPTS * count:
        missing = count - len(written.texts)
        rows = range(drawn, drawn + min(max(missing, 8), 8 * batch_size))
        drawn = rows.stop
        outputs = decoder.decode(
            [prefix] * len(rows),
            max_tokens,
            seed=seed,
            row_ids=[FIRST_ROW + row for row in rows],
            batch_size=batch_size,
        ).outputs
        for output in outputs:
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


def save_prompts(directory: Path, stage: str, written: SelfPrompts) -> None:
    """Write the messages as rows of a data file, completely or not at all."""
    lines = [
        json.dumps({"id": f"{stage}-{number}", "prompt": text})
        for number, text in enumerate(written.texts)
    ]

    def fill(path: Path) -> None:
        (path / FILE).write_text("\n".join(lines) + "\n")

    write_directory(directory, fill)


def read_prompts(directory: Path) -> Examples:
    """The examples of `save_prompts`. Raises UserError (CorruptArtifact) if the file is damaged."""
    verify_directory(directory)
    return read_examples(str(directory / FILE))[0]
