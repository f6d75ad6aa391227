"""A conversation with a target: every answer is one decode, with timed plain steps in between."""

import copy
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.loop.decoding import Decoder, Decoding
from decode.model.cache.prefix_cache import DEFAULT_BYTES, prefix_cache
from decode.model.loading import Target
from decode.settings import DecodeSettings
from decode.stats import Counts, Tally
from decode.text import prompt_ids
from decode.text_stream import TextStream
from decode.trace import format_trace
from decode.verification import Verification

# One step in OFTEN is plain and timed until ENOUGH are timed, then one in RARELY.
OFTEN, RARELY, ENOUGH = 6, 24, 8
LATEST = 32  # the plain steps of late that count
FEWEST = 3  # plain steps that a comparison needs

# Called with a piece of the answer, and whether it comes from an accepted draft token.
Write = Callable[[str, bool], None]


@dataclass(frozen=True)
class ChatReply:
    """An answer and its figures.

    tokens: token ids, with the EOS if it was emitted. counts: the counts of the steps that drafted
    or could have; a timed plain step is not among them. seconds: the seconds of the same steps.
    plain_seconds: median of a plain step, None with fewer than FEWEST. plain_steps: how many it is
    the median of.
    forgotten: turns that were left out because the context is full. stopped: it was interrupted.
    """

    text: str
    tokens: list[int]
    counts: Counts
    seconds: float
    plain_seconds: float | None
    plain_steps: int
    forgotten: int
    stopped: bool

    @property
    def tokens_per_second(self) -> float | None:
        """Without the time to read the prompt. None: no step drafted."""
        return self.counts.emitted / self.seconds if self.counts.steps else None

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of plain steps. None: too few steps of a kind."""
        speed = self.tokens_per_second
        return None if speed is None or self.plain_seconds is None else speed * self.plain_seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values. Figures by position are in the counts."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            **self.counts.to_dict(),
            "tokens_per_second": self.tokens_per_second,
            "plain_seconds": self.plain_seconds,
            "plain_steps": self.plain_steps,
            "speedup": self.speedup,
            "forgotten": self.forgotten,
            "stopped": self.stopped,
        }


class Conversation:
    """Messages so far, and how the next answer is decoded.

    max_new_tokens: the most new tokens of one answer. system: a first message, or None. plain: no
    step drafts. What the target has read of earlier turns is reused
    (`decode.model.cache.prefix_cache`). In 16 bits an answer is therefore the same as without reuse
    only within rounding.

    Raises UserError if messages cannot be formatted for the target, and as `use`.

    A step in OFTEN (later: in RARELY) is plain in any case. Its time is what plain decoding takes
    per token in this conversation. The text does not depend on it: a lossless rule gives the same
    text, or the same distribution, with any drafts.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        settings: DecodeSettings,
        *,
        max_new_tokens: int = 256,
        seed: int = 0,
        system: str | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
        self.target, self.settings = target, settings
        self.max_new_tokens, self.seed, self.plain = max_new_tokens, seed, False
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._prefixes = prefix_cache(target.model, DEFAULT_BYTES)
        self._plain_seconds: deque[float] = deque(maxlen=LATEST)
        self._since_plain = 0
        self._turn = 0
        self._last_drafted: Verification | None = None
        self._accepted = 0  # draft tokens of the latest pass
        self._decoder: Decoder | None = None
        self.messages = list(self._system)
        # A template that is missing, or refuses a system message, is an error now.
        prompt_ids([*self._system, {"role": "user", "content": "a"}], target.tokenizer)
        self.use(drafter)

    def use(self, drafter: Drafter) -> None:
        """Draft with this drafter from now on. Raises UserError, and changes nothing, if it does
        not fit the target or the settings."""
        decoder, _ = self.settings.decoder(self.target, drafter)
        self._positions = decoder.lm.max_positions
        self._drafter, self._decoder = drafter, None

    def reset(self) -> None:
        """Forget all messages. The times of plain steps stay."""
        self.messages = list(self._system)
        self._last_drafted = None

    def ask(
        self,
        text: str,
        write: Write,
        stopped: Callable[[], bool] = lambda: False,
        follow: Callable[[ChatReply], None] | None = None,
    ) -> ChatReply:
        """Answer a message. write: gets the pieces of the answer as they become final. stopped: is
        asked before each step; True ends the answer, which stays in the conversation. follow: gets
        the answer so far after each step; the time that it takes is in no figure.

        Raises UserError, and forgets the message, if it cannot be answered.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            prompt, forgotten = self._prompt()
            pieces = _Pieces(self.target.tokenizer, write)
            answer = self._decode(prompt, pieces, forgotten, stopped, follow)
        except BaseException:
            self.messages = before
            raise
        self._turn += 1
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def trace(self) -> str | None:
        """The drafts of the last answer's last step that drafted, with their verdicts. None: no
        step did."""
        drafted = self._last_drafted
        return None if drafted is None else format_trace(drafted, self.target.tokenizer)

    def _prompt(self) -> tuple[list[int], int]:
        """The token ids of the conversation, and how many of its oldest turns were removed so that
        an answer has room."""
        room = self._positions - min(self.max_new_tokens, self._positions // 2)
        first, forgotten = len(self._system), 0
        while True:
            ids = prompt_ids(self.messages, self.target.tokenizer)
            if len(ids) <= room or len(self.messages) <= first + 2:
                return ids, forgotten
            del self.messages[first : first + 2]
            forgotten += 1

    def _ready(self, prompt: Sequence[int]) -> Decoder:
        if self._decoder is None:
            # A policy learns what drafts cost from the steps; measuring it would take longer than
            # an answer. A shape that is planned by costs cannot.
            measured = prompt if self.settings.plans else None
            decoder, _ = self.settings.decoder(self.target, self._drafter, measured)
            decoder.prefixes = self._prefixes
            decoder.observers.append(self._observe)
            self._decoder = decoder
        return self._decoder

    def _observe(self, verification: Verification) -> None:
        self._accepted = int(verification.accepted[0])
        if verification.drafted[0]:
            # A copy keeps the tensors, which the loop drops. No pass writes into those of another.
            self._last_drafted = copy.copy(verification)

    def _decode(
        self,
        prompt: list[int],
        pieces: "_Pieces",
        forgotten: int,
        stopped: Callable[[], bool],
        follow: Callable[[ChatReply], None] | None,
    ) -> ChatReply:
        decoder = self._ready(prompt)
        # The first token comes from reading the prompt, before any pass is observed.
        self._last_drafted, self._accepted = None, 0

        def add(_: int, tokens: list[int]) -> None:
            pieces.add(tokens, self._accepted)

        decoding = Decoding(
            decoder,
            [prompt],
            self.max_new_tokens,
            seed=self.seed,
            row_ids=[self._turn],
            on_tokens=add,
            rows=1,
            slots=decoder.slots(len(prompt), self.max_new_tokens),
        )
        figures = _Figures(decoding.decoder.policy.max_depth, self._plain_seconds)

        def answer(was_stopped: bool) -> ChatReply:
            figures.count(decoding.steps)
            return figures.answer(pieces.text, decoding.outputs[0], forgotten, was_stopped)

        was_stopped = False
        while not decoding.finished:
            if stopped():
                decoding.drop(0)
                was_stopped = True
                break
            pause = OFTEN if len(self._plain_seconds) < ENOUGH else RARELY
            is_plain = self.plain or self._since_plain + 1 >= pause
            self._since_plain = 0 if is_plain else self._since_plain + 1
            figures.kinds.append(is_plain)
            decoding.step(0 if is_plain else None)
            if follow is not None:
                follow(answer(False))
        pieces.end()
        decoding.clock.finish()
        return answer(was_stopped)


class _Figures:
    """The figures of an answer, step by step. plain_seconds: the times of plain steps in the
    conversation; those of this answer are added to it."""

    def __init__(self, max_depth: int, plain_seconds: deque[float]) -> None:
        self.kinds: list[bool] = []  # of each step, whether it is plain
        self._plain_seconds = plain_seconds
        self._tally = Tally(1, max_depth)
        self._seconds = 0.0
        self._counted = 0

    def count(self, steps: Sequence[Verification]) -> None:
        """Count the steps that are new and have their times. On a CUDA device times come later."""
        for step in steps[self._counted :]:
            taken = step.draft_s + step.verify_s + step.overhead_s
            if not taken:
                return
            if self.kinds[self._counted]:
                self._plain_seconds.append(taken)
            else:
                self._tally.add(step)
                self._seconds += taken
            self._counted += 1

    def answer(self, text: str, tokens: list[int], forgotten: int, stopped: bool) -> ChatReply:
        """The answer with the figures of the steps that were counted."""
        known = len(self._plain_seconds)
        median = statistics.median(self._plain_seconds) if known >= FEWEST else None
        counts = self._tally.pooled()
        return ChatReply(text, tokens, counts, self._seconds, median, known, forgotten, stopped)


class _Pieces:
    """The text of an answer, token by token. A character belongs to the token that completes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Write) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=True)
        self._write = write
        self._drafted = False
        self.text = ""

    def add(self, tokens: Sequence[int], accepted: int) -> None:
        """The tokens of a step. The first `accepted` ones were drafted."""
        for place, token in enumerate(tokens):
            self._drafted = place < accepted
            self._say(self._stream.add([token]))

    def end(self) -> None:
        self._say(self._stream.end())

    def _say(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._write(piece, self._drafted)
