"""Answers of a generate stage that come from servers."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from decode.base.errors import UserError
from decode.model.loading import Target
from train.data.answer_files import AnswerFiles, draw_number
from train.data.corpus import Corpus
from train.data.read import spread
from train.engines.answers.check_model import check_model
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

# The tokens that were read, and [n, H] by captured layer.
ReadText = tuple[list[int], dict[int, Tensor]]


def ask_missing(
    wanted: AnswerFiles,
    numbers: Sequence[int],
    corpus: Corpus,
    target: Target,
    config: ServerConfig,
    settings: AskSettings,
    *,
    together: int,
    ranks: Ranks,
    layers: Sequence[int],
    on_states: Callable[[Mapping[int, list[int]], Mapping[int, ReadText]], None],
    on_answer: Callable[[str], None],
    say: Callable[[str], None],
) -> tuple[int, Counter[str]]:
    """Let servers make the answers of this process that are missing, and keep each as it comes.
    Returns the number of tokens that were generated, and how many answers were left out for which
    reason.

    numbers: of the missing ones. together: of so many answers, a share of `max_unusable` may be
    left out, and the states are written together. ranks: the processes that share each server's
    `concurrency`, and an engine that is started. layers: those whose hidden states a started vLLM
    writes. on_states: called with some answers and their states, by number. on_answer: called with
    a note. say: called with the engine that is started, and with the name of a server that is lost.
    Raises UserError; then every answer that has come is kept.
    """
    # All ranks ask the engine that the first one starts, which may have no missing part itself.
    if not any(ranks.gather(bool(numbers)) if config.launch else [numbers]):
        return 0, Counter()
    longest = 0
    if config.launch:
        longest = ranks.main_only(lambda: max(map(len, corpus.each_prompt(wanted.examples))))
    limit = longest + settings.max_new_tokens
    if layers and limit + SPARE_TOKENS > target.max_positions:
        say(f"a text may fill the target's {target.max_positions} positions, so no states are kept")
        layers = []
    tokens, left_out = 0, Counter[str]()
    asked = dict[int, int]()  # the number of the answer to a request
    newest = dict[int, Answer]()
    states: AnswerStates | None = None

    def rows() -> Iterator[WantedAnswer]:
        prompts = corpus.each_prompt(wanted.examples_of(numbers))
        for number, prompt in zip(numbers, prompts, strict=True):
            row = WantedAnswer(draw_number(wanted.keys[number]), prompt)
            asked[row.number] = number
            yield row

    def add(row: WantedAnswer, answer: Answer) -> None:
        nonlocal tokens
        number = asked.pop(row.number)
        newest[number] = answer
        tokens += len(answer.tokens)
        if answer.left_out:
            left_out[answer.left_out] += 1
        else:
            known: dict[str, Any] = {"finish_reason": answer.finish_reason}
            known |= {"retokenized": True} if answer.retokenized else {}
            wanted.add({number: {"tokens": answer.tokens} | known})
        _require_few(newest.values(), config.max_unusable, together)
        if len(newest) == together:
            keep()
        on_answer(f"{tokens / (time.perf_counter() - begin):.0f} tokens/s")

    def keep() -> None:
        if states is not None:
            names = {number: request_name(draw_number(wanted.keys[number])) for number in newest}
            found = {number: states.take(name) for number, name in names.items()}
            answers = {number: answer.tokens for number, answer in newest.items()}
            on_states(answers, {number: kept for number, kept in found.items() if kept})
        newest.clear()

    with ExitStack() as stack:
        engine, sent = dict[str, Any](), settings
        if layers:
            limit += SPARE_TOKENS
            files = stack.enter_context(shared_files(wanted.directory, ranks))
            states = AnswerStates(target, layers, files, limit, config.timeout_seconds)
            engine = {"options": states.options, "modules": MODULES}
            sent = replace(settings, whole_in=target.max_positions)
        if config.launch and ranks.is_main:
            say(engine_in_words(config))
        urls = stack.enter_context(
            launched(config, target, limit, wanted.directory, ranks, **engine)
        )
        if config.probe_prompts and numbers:
            probes = corpus.prompts(spread(wanted.examples, config.probe_prompts))
            check_model(urls, probes, target, config, settings)
        reader = AnswerReader.of_target(target, sent)
        begin = time.perf_counter()
        concurrency = max(1, config.concurrency // ranks.world)
        ask_servers(urls, rows(), config, sent, reader, add, concurrency, say)
        keep()
    return tokens, left_out


def _require_few(answers: Collection[Answer], most: float, together: int) -> None:
    """Raise UserError if too many of these answers cannot be used."""
    bad = Counter(answer.left_out for answer in answers if answer.left_out)
    if bad.total() > most * together:
        why = REFUSED, UNANSWERED
        said = {answer.finish_reason for answer in answers if answer.left_out in why}
        raise UserError(
            f"{bad.total()} of {len(answers)} answers cannot be used: "
            f"{dict(bad)}{' '.join(['.', *sorted(said)[:1]])}. Raise server.max_unusable to leave "
            "them out; the others are kept, and the same command asks for these again"
        )
