"""Every assistant turn of chats, as an example of its own that ends before it."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from decode.base.errors import UserError
from train.data.read import Example, LazyExamples, select

TURN = "#turn-"  # in the id of an earlier turn, before the number of messages in front of it


class Turns(LazyExamples):
    """The prompts of all assistant turns of chats, in order. The last one of a chat is the chat
    itself, with its id. Chats are read when they are asked for; a prompt takes 16 bytes of memory.
    """

    def __init__(self, chats: Sequence[Example], index: np.ndarray) -> None:
        """index: int64 [n, 2], the number of a chat, and how many of its messages are the prompt;
        0: the chat itself."""
        self._chats, self._index = chats, index

    @classmethod
    def of(cls, chats: Sequence[Example]) -> "Turns":
        """All turns of these chats. Raises UserError for an id that looks like that of a turn."""
        index = array("q")
        for row, chat in enumerate(chats):
            if TURN in chat.id:
                raise UserError(
                    f"{chat.source}: the id {chat.id!r} has {TURN!r}, which names turns; rename "
                    "it, or leave turns: every out"
                )
            for end in (*_ends(chat)[:-1], 0):
                index.extend((row, end))
        return cls(chats, np.array(index, np.int64).reshape(-1, 2))

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Example]:
        chats = select(self._chats, self._index[:, 0])
        for chat, end in zip(chats, self._index[:, 1].tolist(), strict=True):
            yield turn(chat, end) if end else chat

    def select(self, rows: Sequence[int] | np.ndarray) -> "Turns":
        return Turns(self._chats, self._index[np.asarray(rows, np.int64)])


def turn(chat: Example, end: int) -> Example:
    """The chat up to an earlier answer, which `end` messages precede."""
    messages = (chat.messages or ())[:end]
    prompt = messages[0]["content"] if len(messages) == 1 else None
    return replace(chat, id=f"{chat.id}{TURN}{end}", messages=messages, prompt=prompt)


def _ends(chat: Example) -> list[int]:
    """The numbers of messages before each answer, also before one that is still to come."""
    roles = [message["role"] for message in chat.messages or ()]
    return [
        end
        for end in range(1, len(roles) + 1)
        if roles[end - 1] in ("user", "tool") and [*roles, "assistant"][end] == "assistant"
    ]
