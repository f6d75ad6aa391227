"""What is asked of the decoding thread, and what it answers."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from decode.base.errors import MemoryShortage, UserError
from decode.draw.sampling import Sampling
from decode.loop.batcher import BatchBounds
from decode.loop.rows import RowSettings
from decode.text_stream import AnswerText, Stop
from draftsmith.net.api_error import ApiError
from draftsmith.net.few_lines import server_logger
from draftsmith.serve.batching.answer_tokens import AnswerTokens, NewTokens, Piece, TokenBytes

logger = server_logger(__name__)

STATUS = {
    "full": 503,
    "draining": 503,
    "memory": 503,
    "waited": 429,
    "overran": 504,
    "failed": 500,
    "unread": 408,
}


class Refusal(ApiError):
    """A request gets no answer, or no complete one. retry_after: seconds, if it is worth a retry.

    full: too many texts, or tokens of prompts, wait. draining: the service ends. memory: there is
    no memory for the text now. waited: no row was free in time. overran: it took too long. failed:
    the decode could not go on. unread: the client does not read its answer.
    """

    def __init__(self, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(
            STATUS[reason], message, kind="server_error", code=reason, retry_after=retry_after
        )
        self.reason = reason

    @classmethod
    def of(cls, error: Exception, retry_after: int | None) -> "Refusal":
        """Why an error ends a request. retry_after: if memory is missing."""
        if isinstance(error, MemoryShortage):
            return cls("memory", str(error), retry_after)
        if isinstance(error, UserError):
            return cls("failed", str(error))
        logger.error("a request ends with an error", exc_info=error)
        return cls("failed", f"the decode could not go on: {error}")


@dataclass(frozen=True)
class Job:
    """What a request asks of the decode. prompts: token ids. new_tokens: the most new tokens of
    each text. texts: of each prompt. seed: None: any. stops: strings that end a text. logprobs,
    label: as in `RowSettings`. trace: keep what was drafted. store: its sender allows that the
    service learns from it. shown: special tokens that are in the text."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    sampling: Sampling
    texts: int = 1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    trace: bool = False
    store: bool = False
    label: str | None = None
    shown: frozenset[int] = frozenset()


@dataclass(eq=False)
class AnswerChoice:
    """One text of a request. prompt: its token ids. seed, sample: its random numbers depend on
    both; the texts of one prompt are samples 0, 1, …. reason: why it ended. steps, drafted,
    accepted: its verification passes and draft tokens so far. versions: the versions of the
    drafter, in its first and its last pass. lossy: the last lossy rule that judged its drafts.
    cached: tokens of its prompt that were in the prefix cache; None: there is none, or another text
    read it. suspect: it ran in a pass that failed, and in none since. text: since it has a row."""

    request: "DecodeRequest" = field(repr=False)
    index: int
    prompt: Sequence[int]
    seed: int
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    reason: Literal["stop", "length"] | None = None
    row: int | None = None
    versions: tuple[int, int] = (0, 0)
    lossy: str | None = None
    cached: int | None = None
    suspect: bool = False
    text: AnswerText | None = None
    _last: float = 0.0  # when it got its last tokens
    # Of a traced request's last pass: how many draft tokens were accepted, and the rejected ones.
    _traced: tuple[int, Sequence[int]] = (0, ())
    _entries: AnswerTokens | None = None
    _given: int = 0  # characters in pieces

    @property
    def ids(self) -> Sequence[int]:
        """The prompt with the tokens so far."""
        return [*self.prompt, *self.tokens] if self.tokens else self.prompt

    def begin(self, tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes) -> None:
        """It gets a row, or ends early. It has given the pieces of its tokens so far; a read or
        pass that failed may have added others to its text."""
        job = self.request.job
        shown, ruled = job.shown, job.sampling.grammar is not None
        self.text = AnswerText(tokenizer, job.stops, shown=shown, keep_blank=ruled)
        self.text.add(self.tokens)
        if self._entries is None and (job.logprobs is not None or job.trace):
            self._entries = AnswerTokens(tokenizer, token_bytes, shown, ruled)

    def piece(self, new: NewTokens) -> Piece:
        """What new tokens, which its text has, add to the pieces before."""
        ended = new.reason is not None
        piece = Piece(self.index, "", new.reason, generated=len(self.tokens))
        if self.text is not None:
            piece.text = self.text.take(ended=ended)
            piece.stop = self.text.stopped
        self._given += len(piece.text)
        if self._entries is not None:
            self._entries.add(new)
            piece.tokens = self._entries.take(self._given, ended=ended)
        return piece

    def end(self, max_positions: int, eos: Collection[int]) -> None:
        """Say why the text has ended. max_positions: the max positions of the target. eos: its
        ids."""
        job, last = self.request.job, self.tokens[-1]
        room = max_positions - len(self.prompt)
        stopped = len(self.tokens) < min(job.new_tokens, room)
        stopped = stopped or (not job.ignore_eos and last in eos)
        stopped = stopped or last in job.sampling.stop_token_ids
        # The last token that a text may have can also be the end of a stop string.
        stopped = stopped or (self.text is not None and self.text.stopped is not None)
        self.reason = "stop" if stopped else "length"


# A part of a text, or why the request ends.
Event = Piece | Refusal


@dataclass(eq=False)
class DecodeRequest:
    """A job, and its texts on their way. deliver: called in the decoding thread with each event,
    never after `cancel` has been seen or a refusal delivered. random_bits: makes seeds. begun: when
    the last of its texts got a row; None: they all wait. `RequestBatcher.submit` takes it."""

    job: Job
    deliver: Callable[[Event], None]
    random_bits: InitVar[Callable[[int], int]]
    choices: list[AnswerChoice] = field(init=False, default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    begun: float | None = None
    _shared: RowSettings = field(init=False, repr=False)  # of the rows of all texts

    def __post_init__(self, random_bits: Callable[[int], int]) -> None:
        job = self.job
        for prompt in job.prompts:
            # Equal prompts of one request get different texts, unless it names a seed.
            seed = random_bits(62) if job.seed is None else job.seed
            for sample in range(job.texts):
                self.choices.append(AnswerChoice(self, len(self.choices), prompt, seed, sample))

    def take(self, stop: Stop, draft_temperature: float | None) -> RowSettings:
        """Make what all its texts are decoded with. draft_temperature: None: as the texts'."""
        job, drafts = self.job, None
        if draft_temperature is not None:
            drafts = replace(job.sampling, temperature=draft_temperature)
        self._shared = RowSettings(
            job.sampling,
            stop=stop,
            ignore_eos=job.ignore_eos,
            logprobs=job.logprobs,
            draft_sampling=drafts,
            label=job.label,
        )
        return self._shared

    def settings(self, choice: AnswerChoice) -> RowSettings:
        """Of a text's row."""
        # Tokens that it has got already are a part of the prompt now.
        return replace(self._shared, seed=choice.seed, answered=len(choice.tokens))


def each_once(prompts: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """The prompts without those that are the same object: the texts of one prompt share it."""
    return list({id(prompt): prompt for prompt in prompts}.values())


@dataclass(frozen=True)
class RequestBounds(BatchBounds):
    """What a service holds at most.

    max_waiting: texts that may wait besides. max_wait: seconds until the first text of a request
    has a row. max_seconds: the time from the row of its last text to its end. held_tokens: the
    tokens of prompts that wait for a row. A longer prompt may wait if it is the only one.

    Raises UserError for a number that is out of range."""

    max_waiting: int = 64
    max_wait: float = 60.0
    max_seconds: float = 600.0
    held_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        least_of = {"max_waiting": 0, "row_tokens": 0}
        for name in ("max_rows", "max_waiting", "prefill_tokens", "row_tokens", "held_tokens"):
            least = least_of.get(name, 1)
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; expected at least {least}")
        for name in ("max_wait", "max_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}; expected seconds above 0")

    @property
    def capacity(self) -> int:
        """How many texts the service holds."""
        return self.max_rows + self.max_waiting
