"""Rows that wait: the target reads their prompts, apart from the rows that already decode.

Shapes: B rows that begin together, P different prompts of them.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from decode.base.device import to_device
from decode.base.errors import UserError
from decode.draft import Contexts, Draft
from decode.draw.logits import LogitsProcessor
from decode.loop.parts import Parts
from decode.loop.rows import Rows, RowSettings
from decode.model.cache.cached_model import CachedLM
from decode.model.cache.long_read import LongRead, ReadPart
from decode.model.cache.prefix_cache import PrefixCache
from decode.model.features import Features
from decode.model.forward.few_rows_layers import MOST_TOKENS
from decode.rules.exact import ExactMatch
from decode.text_stream import Stop
from decode.verdict import Scores, Verdict


class PromptReading:
    """New rows whose prompts the target reads, some tokens at a time. Until then they wait in slots
    behind those of the running rows.

    Equal prompts are read once, if the target can copy rows. What the prefix cache knows of a
    prompt is copied, and only the rest is read.

    prefixes, first_target: as for `Decoder`. new: the rows. stays: bool [B], the rows that are not
    given up. copied: int [B], which of the different prompts a row has. count: how many of these
    there are; each takes one row of slots.
    """

    def __init__(
        self, lm: CachedLM, new: Rows, prefixes: PrefixCache | None, first_target: bool
    ) -> None:
        self.lm, self.new = lm, new
        self.prefixes, self.first_target = prefixes, first_target
        self.stays = np.ones(len(new), dtype=bool)
        contexts = new.contexts
        keys: Sequence[object] = range(len(new))
        places = {key: place for place, key in enumerate(keys)}
        if lm.repeats_rows:
            keys = _prompts(contexts)
            # The longest first: those that have tokens left stay next to each other, so masks have
            # no room for others.
            lengths = dict(zip(keys, contexts.lengths.tolist(), strict=True))
            longest = sorted(lengths, key=lengths.__getitem__, reverse=True)
            places = {key: place for place, key in enumerate(longest)}
        self.copied = np.array([places[key] for key in keys], dtype=np.int64)
        self.count = len(places)
        self._read = contexts.of_rows(np.unique(self.copied, return_index=True)[1])
        self._fed = self._read.lengths - (not first_target)
        self._long: LongRead | None = None
        self._begun = False

    @property
    def numbers(self) -> list[int]:
        """The numbers of the rows that stay."""
        numbers: list[int] = self.new.numbers[self.stays].tolist()
        return numbers

    @property
    def left(self) -> int:
        """How many tokens are not read yet, those of an encoder too; at least 1 before the first
        part is read."""
        if self._long is not None:
            return self._long.left
        sources = self._read.sources or ()
        return 0 if self._begun else max(int(self._fed.sum()) + sum(map(len, sources)), 1)

    def begin_anew(self) -> None:
        """Forget what is read. The next part is the first one."""
        self._long, self._begun = None, False

    def read_on(self, place: int, tokens: int) -> int:
        """Read about this number of tokens into the slots of the rows from `place` on, but at least
        one of each prompt in a pass. An encoder reads all of its sources at once, and first: with 0
        tokens too, as the prefix cache is asked. Returns how many were fed."""
        count = 0
        if not self._begun:
            if self._read.sources is not None:
                self.lm.encode(self._read.sources, place)
                count += sum(map(len, self._read.sources))
            self._begun = True
            if self._fed.any():
                self._long = self._begin(place)
        while self.left and count < tokens:
            assert self._long is not None
            count += self.lm.read_on(self._long, tokens - count, place)
        return count

    def part(self, place: int, tokens: int) -> ReadPart | None:
        """What a pass with the running rows reads next, at most this number of tokens; see
        `read_on`. None: it has not begun, or nothing is left."""
        return self._long.part(tokens, place) if self._long is not None and self.left else None

    def _begin(self, place: int) -> LongRead:
        lm, contexts, fed = self.lm, self._read, self._fed
        start = np.zeros(len(fed), dtype=np.int64)
        if self.prefixes is not None:
            start = self.prefixes.reuse(lm, contexts, fed, place)
        # Past the end of a row's prompt is padding. It needs slots too.
        columns = start[:, None] + np.arange(int((fed - start).max()))
        columns = np.minimum(columns, contexts.tokens.shape[1] - 1)
        ids = to_device(np.take_along_axis(contexts.tokens, columns, axis=1), lm.device)
        return LongRead(ids, start, fed - start, pads=lm.pads)

    def result(
        self, place: int, parts: Parts, processors: Sequence[LogitsProcessor]
    ) -> tuple[Verdict, Features | None]:
        """After the last part, with the first slots at `place`, for the rows that stay, which `new`
        and `copied` are from now on: the verdict on an empty draft, which gives the first token of
        each row, and the hidden states of the prompts' tokens. They are None if the drafter
        captures none, or if nothing is read: a prompt of one token, whose first token is drafted
        (`first_target`)."""
        new, device = self.new, self.lm.device
        if not self.stays.all():
            new.keep(np.flatnonzero(self.stays))
            self.copied, self.stays = self.copied[self.stays], self.stays[self.stays]
        logits, features = None, None
        if self._long is not None:
            logits = self._long.logits
            if parts.drafter.captured_layers:
                features = Features(self._states(place), self._fed)
            if not np.array_equal(self.copied, np.arange(self.count)):
                assert logits is not None
                logits = logits[to_device(self.copied, logits.device)]
                features = None if features is None else features.keep_rows(self.copied)
        contexts = new.contexts
        if not self.first_target:  # the first step verifies the first token like all others
            return Verdict.without_draft(len(new), device, logits), features
        assert logits is not None
        nothing = Draft.none(len(new), device)
        scores = Scores(logits, new.sampling, nothing, contexts, processors)
        new.rng.at_lengths(contexts.lengths)
        # Without a draft every other rule draws as exact match does.
        rule = parts.rule if isinstance(parts.rule, ExactMatch) else ExactMatch()
        return Verdict.read(nothing, scores, rule.decide(nothing, scores, new.rng)), features

    def _states(self, place: int) -> Mapping[int, Tensor]:
        """The hidden states of all tokens, [B, n, H]: the slots may have those of reused ones."""
        assert self._long is not None
        lm, rows = self.lm, slice(place, place + self.count)
        if not lm.kept_layers:
            return self._long.features()
        kept = lm.slots.kept_states(rows, int(self._fed.max()))
        return dict(zip(lm.kept_layers, kept, strict=True))


def _prompts(contexts: Contexts) -> list[tuple[int, ...]]:
    """What the target reads of each row."""
    if contexts.sources is not None:
        return [tuple(source) for source in contexts.sources]
    texts = zip(contexts.tokens, contexts.lengths.tolist(), strict=True)
    return [tuple(tokens[:length].tolist()) for tokens, length in texts]


def shares(left: Mapping[int, int], tokens: int) -> dict[int, int]:
    """How many tokens to read next for each of the rows that wait, in their order, of `left`
    tokens each. Half of `tokens` is for the first row, so that it does not wait for ever. The rest
    goes to the shortest ones. Rows with nothing left are among them, with 0.

    >>> shares({0: 900, 1: 30, 2: 700}, 500)
    {0: 250, 1: 30, 2: 220}
    """
    if not left:
        return {}
    first, *others = left
    given = {first: min(left[first], -(-tokens // 2))}
    free = tokens - given[first]
    for row in sorted(others, key=left.__getitem__):
        given[row] = min(left[row], free)
        free -= given[row]
    given[first] = min(left[first], given[first] + free)
    return {row: given[row] for row in left if given[row] or not left[row]}


class WaitingRows:
    """All rows that wait. Their slots are behind those of the running rows. stop, prefixes,
    first_target: as for `Decoder`. readings: in the order of these slots."""

    def __init__(
        self, lm: CachedLM, stop: Stop | None, prefixes: PrefixCache | None, first_target: bool
    ) -> None:
        self.lm, self.stop, self.prefixes, self.first_target = lm, stop, prefixes, first_target
        self.readings: list[PromptReading] = []

    def __iter__(self) -> Iterator[Rows]:
        """Those that began together, together."""
        return (reading.new for reading in self.readings)

    @property
    def count(self) -> int:
        """How many rows of slots they have."""
        return sum(reading.count for reading in self.readings)

    @property
    def settings(self) -> list[RowSettings]:
        """The settings of all rows."""
        return [one for rows in self for one in rows.settings]

    @property
    def numbers(self) -> list[int]:
        """The numbers of all rows that are not given up."""
        return [row for reading in self.readings for row in reading.numbers]

    def begin(self, new: Rows, running: Rows) -> None:
        """Let new rows wait, behind those that do. Raises UserError if memory is missing. After any
        error nothing is changed."""
        lm, known = self.lm, [running, *self]
        reading = PromptReading(lm, new, self.prefixes, self.first_target)
        held = len(running) + self.count
        capacity = max(rows.contexts.tokens.shape[1] for rows in (new, *known))
        usual = {self.stop}
        for stop in new.own_stops().difference(usual, *(rows.own_stops() for rows in known)):
            stop.start()
        # Memory for all rows, before any work. Copies of a prompt take theirs when they join.
        lm.add_rows(len(new), capacity)
        if reading.count < len(new):
            lm.keep_rows(np.arange(held + reading.count))
        self.readings.append(reading)

    def of(self, row: int, running: int) -> tuple[PromptReading, int]:
        """The reading of a row, and the place of its first slots behind those of `running` rows.
        Raises UserError for a row that does not wait."""
        place = running
        for reading in self.readings:
            if row in reading.numbers:
                return reading, place
            place += reading.count
        raise UserError(f"row {row} does not wait; expected one of {self.numbers}")

    def parts(self, running: int, tokens: int) -> list[ReadPart]:
        """What a pass of the `running` rows reads of the prompts: about this number of tokens,
        at least one of each that is read, and no more than the layers in C++ take of those that
        began together."""
        left = {number: one.left for number, one in enumerate(self.readings)}
        given, place, parts = shares(left, tokens), running, []
        for number, reading in enumerate(self.readings):
            if number in given:
                parts.append(reading.part(place, min(given[number], MOST_TOKENS)))
            place += reading.count
        return [part for part in parts if part is not None]

    def make_room(self, reading: PromptReading, place: int, running: int) -> np.ndarray:
        """Have slots for each row of a reading that is complete. Returns the order of all slots in
        which these rows follow the running ones. Raises UserError if memory is missing."""
        slots = np.arange(running + self.count)
        others = slots[running:]
        others = others[(others < place) | (others >= place + reading.count)]
        order = np.concatenate([slots[:running], place + reading.copied, others])
        if len(order) > len(slots):
            self.lm.add_rows(len(order) - len(slots), 0)
        return order

    def give_up(self, reading: PromptReading, place: int, running: int) -> np.ndarray:
        """Forget the rows of a reading. Returns the slots of all others."""
        slots = np.arange(running + self.count)
        reading.new.leave(np.ones(len(reading.new), dtype=bool))
        self.readings.remove(reading)
        return slots[(slots < place) | (slots >= place + reading.count)]
