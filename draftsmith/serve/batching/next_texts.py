"""Which texts get the free rows."""

from collections import Counter
from collections.abc import Collection, Iterable

from draftsmith.serve.batching.requests import AnswerChoice


def next_texts(
    waiting: Iterable[AnswerChoice], running: Collection[AnswerChoice], max_rows: int
) -> list[AnswerChoice]:
    """The next texts that begin together, of those that wait in this order. None if no row is free
    or no text may begin.

    A free row goes to the request that has the fewest rows, and of these to the one that came
    first. So a request of many texts does not hold up the others. After a pass that failed, its
    texts begin one by one, until the next pass.
    """
    free = max_rows - len(running)
    alone = any(choice.suspect for choice in running)
    ready = [choice for choice in waiting if not (alone and choice.suspect)]
    if free < 1 or not ready:
        return []
    rows = Counter(choice.request for choice in running)
    first = min(ready, key=lambda choice: rows[choice.request])
    others = [rows[choice.request] for choice in ready if choice.request is not first.request]
    # As many as until another request has as few rows.
    count = max(min(free, min(others) - rows[first.request]), 1) if others else free
    return _alike(first, ready)[:count]


def _alike(first: AnswerChoice, waiting: Iterable[AnswerChoice]) -> list[AnswerChoice]:
    """The texts of a request that can begin together with its first one: they have the same prompt.
    A text that begins again has its own."""
    if first.tokens or first.suspect:
        return [first]
    return [
        choice
        for choice in waiting
        if choice.request is first.request and choice.prompt is first.prompt and not choice.tokens
    ]
