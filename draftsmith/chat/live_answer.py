"""An answer that grows on a terminal, above a line with its figures so far."""

from itertools import accumulate

from rich.cells import chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text


class LiveAnswer:
    """Draws a text that grows, after each step. To be used as a context.

    text: what is appended to it is drawn at the next `draw`. A line that is complete is printed
    once and stays. The last line and the figures are drawn anew each time. At the end the figures
    go away, and what stays is the text as if it was printed at once.
    """

    def __init__(self, console: Console, text: Text) -> None:
        self._console, self._text = console, text
        self._printed = 0  # characters in complete lines
        self._live = Live(console=console, auto_refresh=False, transient=True)

    @staticmethod
    def works_on(console: Console) -> bool:
        """Whether this console can draw a line again."""
        return console.is_terminal and not console.is_dumb_terminal

    def __enter__(self) -> "LiveAnswer":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(Text())
        self._live.stop()
        self._console.print(self._text[self._printed :], soft_wrap=True)

    def draw(self, figures: Text) -> None:
        """Show the text so far, and the figures in one line below it."""
        rest = self._text[self._printed :]
        *complete, last = rest.split("\n", allow_blank=True)
        for line in complete:
            self._console.print(line, soft_wrap=True)
        self._printed += len(rest) - len(last)
        # Rows as the terminal will break the line when it is printed. No row above the top of the
        # screen could be erased, so only the latest ones are drawn.
        width, height = self._console.size
        lengths = [len(row) for row in chop_cells(last.plain, width)]
        rows = last.divide(list(accumulate(lengths))[:-1])
        figures.truncate(width, overflow="ellipsis")
        self._live.update(Group(*rows[-max(1, height - 2) :], figures), refresh=True)
