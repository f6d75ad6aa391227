"""Parts of a generate stage from a server's answers."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from decode.base.errors import UserError
from decode.model.loading import Target
from train.data.corpus import Corpus, write_answers
from train.data.read import Example, spread
from train.engines.answers.check_model import check_model
from train.engines.answers.known_parts import AnswerPart
from train.engines.answers.protocols import (
    Answer,
    AnswerReader,
    AskSettings,
    WantedAnswer,
    request_name,
)
from train.engines.ask_servers import REFUSED, UNANSWERED, ask_servers
from train.engines.launch import engine_in_words, launched
from train.engines.states.answer_states import SPARE_TOKENS, AnswerStates
from train.engines.states.open_states import MODULES, shared_files
from train.measure.ranks import Ranks
from train.settings.server_config import ServerConfig

Kept = tuple[list[int], dict[int, Tensor]]  # tokens that were read, and [n, H] by captured layer


class PartWriter:
    """Turns missing parts into rows to ask for, and their answers into parts.

    on_progress: called with the number of rows that have an answer and the number of tokens, both
    of this process. A row that a journal has counts as answered, and its tokens do not count.
    on_whole: called with a part whose answers have all come, before it is written.
    """

    def __init__(
        self,
        corpus: Corpus,
        parts: Sequence[AnswerPart],
        max_unusable: float,
        on_progress: Callable[[int, int], None],
        on_whole: Callable[[AnswerPart], None],
    ) -> None:
        self._corpus, self._parts, self._max_unusable = corpus, parts, max_unusable
        self._on_progress, self._on_whole = on_progress, on_whole
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
        self._on_whole(part)
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
    layers: Sequence[int],
    on_states: Callable[[AnswerPart, Mapping[int, list[int]], Mapping[int, Kept]], None],
    on_progress: Callable[[int, str], None],
    say: Callable[[str], None],
) -> int:
    """Write the missing parts of this process from answers of servers. Returns the number of tokens
    that were generated now.

    examples: all that the stage asks, also those of finished parts. directory: the directory of the
    stage. ranks: the processes that share each server's `concurrency`, and an engine that is
    started. layers: those whose hidden states a started vLLM writes. on_states: called with a part,
    its answers and the states of its rows, before the part is written.
    on_progress: called with the number of answered rows and a note. say: called with the engine
    that is started, and with the name of a server that is lost. Raises UserError; then every answer
    that has come is in a journal.
    """
    # All ranks ask the engine that the first one starts, which may have no missing part itself.
    if not any(ranks.gather(bool(parts)) if config.launch else [parts]):
        return 0
    longest = 0
    if config.launch:
        longest = ranks.main_only(lambda: max(map(len, corpus.prompts(examples))))
    limit = longest + settings.max_new_tokens
    if layers and limit + SPARE_TOKENS > target.max_positions:
        say(f"a text may fill the target's {target.max_positions} positions, so no states are kept")
        layers = []
    begin = time.perf_counter()

    def progress(answered: int, tokens: int) -> None:
        on_progress(answered, f"{tokens / (time.perf_counter() - begin):.0f} tokens/s")

    with ExitStack() as stack:
        engine, asked = dict[str, Any](), settings
        states: AnswerStates | None = None
        if layers:
            limit += SPARE_TOKENS
            files = stack.enter_context(shared_files(directory, ranks))
            states = AnswerStates(target, layers, files, limit, config.timeout_seconds)
            engine = {"options": states.options, "modules": MODULES}
            asked = replace(settings, whole_in=target.max_positions)

        def keep(part: AnswerPart) -> None:
            if states is not None:
                found = {row: states.take(request_name(row)) for row in part.keys}
                answers = {row: answer.tokens for row, answer in part.answers.items()}
                on_states(part, answers, {row: kept for row, kept in found.items() if kept})

        if config.launch and ranks.is_main:
            say(engine_in_words(config))
        urls = stack.enter_context(launched(config, target, limit, directory, ranks, **engine))
        if config.probe_prompts and parts:
            probes = corpus.prompts(spread(examples, config.probe_prompts))
            check_model(urls, probes, target, config, settings)
        reader = AnswerReader.of_target(target, asked)
        writer = PartWriter(corpus, parts, config.max_unusable, progress, keep)
        begin = time.perf_counter()
        concurrency = max(1, config.concurrency // ranks.world)
        ask_servers(urls, writer.rows(), config, asked, reader, writer.add, concurrency, say)
    return writer.tokens
