"""The conversation on a terminal, or through a pipe: messages, commands, colours, figures."""

import contextlib
import io
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from decode.base.artifact import write_file
from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.stats import finite
from draftsmith.chat.conversation import ChatReply, Conversation
from draftsmith.chat.live_answer import LiveAnswer
from train.report.format_figures import format_number

DRAFTED, ASIDE = "green", "dim"
PROMPT = "> "
SVG_WIDTH = 98  # characters
COMMANDS = {
    "/trace": "drafts and verdicts of the last answer's last drafted step",
    "/plain": "plain decoding on or off",
    "/drafter SPEC": "draft with another drafter",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/quit": "end (also Ctrl-D; Ctrl-C ends an answer)",
}
# Escape sequences and other controls. A model's text must not steer the terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Fonts that a picture would load from elsewhere.
_FONT_FACES = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)


def make_console(colour: bool) -> Console:
    """The console on standard output. colour: False as with NO_COLOR."""
    return Console(highlight=False, color_system="auto" if colour else None)


@dataclass
class Terminal:
    """Reads messages and commands, and shows answers, until the input ends.

    console: if it is a terminal, accepted draft tokens have a colour; else the text of answers goes
    to it, and everything else to `asides`. read: the next line, None at the end. It gets the prompt
    to show. open_drafter: for `/drafter`. transcript: what a terminal shows, message by
    message. answers: with their figures.
    """

    conversation: Conversation
    console: Console
    asides: Console
    read: Callable[[str], str | None]
    open_drafter: Callable[[str], Drafter]
    transcript: list[Text] = field(default_factory=list)
    answers: list[ChatReply] = field(default_factory=list)

    def run(self) -> None:
        """Talk until the input ends or `/quit`."""
        while True:
            try:
                line = self.read(PROMPT if self.console.is_terminal else "")
            except KeyboardInterrupt:
                self.say("(Ctrl-D or /quit ends the program)")
                continue
            except UserError as error:
                self.say(f"error: {error}")
                continue
            if line is None:
                return
            text = line.strip()
            if text.startswith("/"):
                if not self.command(text):
                    return
            elif text:
                self.answer(text)

    def command(self, text: str) -> bool:
        """Obey a command. Returns False for the one that ends the program."""
        name, _, argument = text.partition(" ")
        conversation = self.conversation
        if name == "/quit":
            return False
        if name == "/trace":
            self.say(conversation.trace() or "(nothing was drafted yet)")
        elif name == "/plain":
            conversation.plain = not conversation.plain
            self.say(f"(plain decoding is {'on' if conversation.plain else 'off'})")
        elif name == "/reset":
            conversation.reset()
            self.say("(the conversation begins again)")
        elif name == "/drafter":
            self._change_drafter(argument.strip())
        elif name == "/help":
            self.say("\n".join(f"{command:<14} {what}" for command, what in COMMANDS.items()))
        else:
            self.say(f"(there is no command {name}; /help lists them)")
        return True

    def _change_drafter(self, spec: str) -> None:
        if not spec:
            self.say("(name a drafter: /drafter ngram, or /drafter DIRECTORY)")
            return
        try:
            self.conversation.use(self.open_drafter(spec))
        except UserError as error:
            self.say(f"error: {error}")
            return
        self.say(f"(the drafter is {spec})")

    def answer(self, text: str) -> None:
        """Ask the target, and show its answer and figures. Ctrl-C ends the answer."""
        colourful = Text()
        live = LiveAnswer(self.console, colourful) if LiveAnswer.works_on(self.console) else None

        def write(piece: str, drafted: bool) -> None:
            style = DRAFTED if drafted else ""
            colourful.append(_CONTROLS.sub("�", piece), style)
            if live is None:
                self._write(piece, style)

        def follow(answer: ChatReply) -> None:
            if live is not None:
                live.draw(Text(figures_line(answer), ASIDE))

        try:
            with _interrupts() as interrupted, live or contextlib.nullcontext():
                answer = self.conversation.ask(text, write, interrupted, follow)
                if live is None:
                    self._write("\n", "")
        except UserError as error:
            self.say(f"error: {error}")
            return
        self.answers.append(answer)
        figures = figures_line(answer)
        self.say(figures)
        self.transcript += [Text(PROMPT + text, "bold"), colourful, Text(figures, ASIDE), Text()]

    def say(self, text: str) -> None:
        """Print something that is not part of an answer."""
        self.asides.print(Text(text, ASIDE), soft_wrap=True)

    def _write(self, piece: str, style: str) -> None:
        if self.console.is_terminal:
            visible = Text(_CONTROLS.sub("�", piece), style)
            self.console.print(visible, end="", soft_wrap=True)
        else:
            # A pipe may have an encoding that lacks some characters.
            encoding = getattr(self.console.file, "encoding", None) or "utf-8"
            self.console.file.write(piece.encode(encoding, "replace").decode(encoding))
        self.console.file.flush()


def figures_line(answer: ChatReply) -> str:
    """The figures of an answer in one line."""
    counts, plain = answer.counts, answer.plain_seconds
    parts = []
    if answer.stopped:
        parts.append("stopped")
    if answer.forgotten:
        parts.append(f"the oldest {answer.forgotten} turns no longer fit into the context")
    if answer.tokens_per_second is None:
        parts.append(f"{len(answer.tokens)} tokens by plain decoding")
    else:
        parts.append(f"{counts.tokens_per_step:.2f} tokens per step")
        parts.append(f"acceptance rate {format_number(finite(counts.acceptance_rate))}")
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if plain is not None and answer.tokens_per_second is None:
        parts.append(f"{1 / plain:.1f} tokens/s ({answer.plain_steps} steps timed)")
    elif finite(counts.acceptance_rate) is None:
        parts.append("no drafts to compare with plain decoding")
    elif plain is None:
        parts.append("too few plain steps timed yet to compare with plain decoding")
    else:
        parts.append(f"{answer.speedup:.2f}× plain decoding ({answer.plain_steps} steps timed)")
    return f"[{', '.join(parts)}]"


def write_svg(path: Path, transcript: list[Text], title: str) -> None:
    """Write a picture of the conversation, in which nothing is loaded from elsewhere."""
    console = Console(record=True, width=SVG_WIDTH, file=io.StringIO(), highlight=False)
    for text in transcript:
        console.print(text)
    fonts = _FONT_FACES.sub("", CONSOLE_SVG_FORMAT)
    write_file(path, console.export_svg(title=title, code_format=fonts))


def read_line(prompt: str) -> str | None:
    """A line of standard input, None at its end. Raises UserError for one that is not text in the
    encoding of standard input."""
    try:
        if not sys.stdin.isatty():
            # Bytes: a text stream that met a wrong byte loses the lines after it.
            return sys.stdin.buffer.readline().decode(sys.stdin.encoding) or None
        # Lets `input` edit lines and recall earlier ones. Not every Python has it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise UserError(
            f"a line has the byte 0x{error.object[error.start]:02x}, which is not "
            f"{error.encoding}; expected a message in that encoding. The line was left out"
        ) from error


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed meanwhile. It ends the answer between two steps, so that
    no step is cut in half. The second one raises KeyboardInterrupt."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
