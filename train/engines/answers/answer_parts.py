"""Parts of a generate stage from a server's answers."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from decode.base.errors import UserError
from decode.model.loading import Target
from train.data.corpus import Corpus, write_answers
from train.data.read import Example, spread
from train.engines.answers.check_model import check_model
from train.engines.answers.known_parts import AnswerPart
from train.engines.answers.protocols import Answer, AnswerReader, AskSettings, WantedAnswer
from train.engines.ask_servers import REFUSED, UNANSWERED, ask_servers
from train.engines.launch import engine_in_words, launched
from train.measure.ranks import Ranks
from train.settings.server_config import ServerConfig


class PartWriter:
    """Turns missing parts into rows to ask for, and their answers into parts.

    on_progress: called with the number of rows that have an answer and the number of tokens, both
    of this process. A row that a journal has counts as answered, and its tokens do not count.
    """

    def __init__(
        self,
        corpus: Corpus,
        parts: Sequence[AnswerPart],
        max_unusable: float,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._corpus, self._parts, self._max_unusable = corpus, parts, max_unusable
        self._on_progress = on_progress
        self._open: dict[int, AnswerPart] = {}  # by row number
        self._answered = self.tokens = 0

    def rows(self) -> Iterator[WantedAnswer]:
        """The rows without an answer, in order. A part is opened when its first row is wanted."""
        for part in self._parts:
            numbers = list(part.keys)
            part.answers = part.journal.read(part.keys)
            self._answered += len(part.answers)
            if self._finish(part):
                continue
            missing = [number for number in numbers if number not in part.answers]
            self._open |= dict.fromkeys(missing, part)
            jobs = zip(numbers, part.jobs, strict=True)
            prompts = self._corpus.prompts(e for n, (e, _) in jobs if n not in part.answers)
            for number, prompt in zip(missing, prompts, strict=True):
                yield WantedAnswer(number, prompt)

    def add(self, row: WantedAnswer, answer: Answer) -> None:
        """Keep an answer; write its part if that is whole. Raises UserError if too many of the
        part's answers cannot be used."""
        part = self._open.pop(row.number)
        if answer.left_out != UNANSWERED:  # another run asks again, as long as the part is open
            part.journal.add(row.number, answer, part.keys[row.number])
        part.answers[row.number] = answer
        self._answered += 1
        self.tokens += len(answer.tokens)
        self._finish(part)
        self._on_progress(self._answered, self.tokens)

    def _finish(self, part: AnswerPart) -> bool:
        if len(part.answers) < len(part.jobs):
            return False
        answers = [part.answers[number] for number in part.keys]
        left_out = Counter(answer.left_out for answer in answers if answer.left_out)
        # The last part, which is smaller, may have as many as the others.
        if left_out.total() > self._max_unusable * max(len(part.jobs) for part in self._parts):
            why = REFUSED, UNANSWERED
            said = {answer.finish_reason for answer in answers if answer.left_out in why}
            raise UserError(
                f"{left_out.total()} of {len(answers)} answers for {part.directory} cannot be "
                f"used: {dict(left_out)}{' '.join(['.', *sorted(said)[:1]])}. Raise "
                "server.max_unusable to leave them out, or delete its open answers "
                f"({part.journal.path}) to ask again"
            )
        rows = [
            {
                "id": example.id,
                "sample": sample,
                "key": key,
                "tokens": answer.tokens,
                "finish_reason": answer.finish_reason,
            }
            for (example, sample), key, answer in zip(
                part.jobs, part.keys.values(), answers, strict=True
            )
            if not answer.left_out
        ]
        retokenized = sum(answer.retokenized for answer in answers if not answer.left_out)
        write_answers(
            part.directory,
            rows,
            part.meta | {"left_out": left_out, "retokenized": retokenized},
        )
        part.journal.remove()
        part.answers = {}
        return True


def write_server_parts(
    parts: Sequence[AnswerPart],
    examples: Sequence[Example],
    corpus: Corpus,
    target: Target,
    config: ServerConfig,
    settings: AskSettings,
    *,
    directory: Path,
    ranks: Ranks,
    on_progress: Callable[[int, str], None],
    say: Callable[[str], None],
) -> int:
    """Write the missing parts of this process from answers of servers. Returns the number of tokens
    that were generated now.

    examples: all that the stage asks, also those of finished parts. directory: the directory of the
    stage. ranks: the processes that share each server's `concurrency`, and an engine that is
    started.
    on_progress: called with the number of answered rows and a note. say: called with the engine
    that is started, and with the name of a server that is lost. Raises UserError; then every answer
    that has come is in a journal.
    """
    # All ranks ask the engine that the first one starts, which may have no missing part itself.
    if not any(ranks.gather(bool(parts)) if config.launch else [parts]):
        return 0
    longest = 0
    if config.launch and ranks.is_main:  # it starts the engine
        longest = max(len(corpus.prompts([example])[0]) for example in examples)
    begin = time.perf_counter()

    def progress(answered: int, tokens: int) -> None:
        on_progress(answered, f"{tokens / (time.perf_counter() - begin):.0f} tokens/s")

    reader = AnswerReader.of_target(target, settings)
    writer = PartWriter(corpus, parts, config.max_unusable, progress)
    limit = longest + settings.max_new_tokens
    if config.launch and ranks.is_main:
        say(engine_in_words(config))
    with launched(config, target, limit, directory, ranks) as urls:
        if config.probe_prompts and parts:
            probes = corpus.prompts(spread(examples, config.probe_prompts))
            check_model(urls, probes, target, config, settings)
        begin = time.perf_counter()
        concurrency = max(1, config.concurrency // ranks.world)
        ask_servers(urls, writer.rows(), config, settings, reader, writer.add, concurrency, say)
    return writer.tokens
