"""How the chat shows answers and drawings: colours and a live picture on a terminal, plain text elsewhere."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from minipaged.chat.answers import Answer, Memory, fork_line
from minipaged.chat.interrupts import can_set_handlers
from minipaged.chat.session import ChatSession
from minipaged.viz.drawing import Drawing
from minipaged.viz.text import draw_view
from minipaged.viz.views import hue, letter

if TYPE_CHECKING:
    from rich.console import Console


class PlainScreen:
    """Writes plain text: answers to ``out``, everything about them to ``notes``."""

    def __init__(self, out: IO[str] | None = None, notes: IO[str] | None = None):
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr

    def show_answer(self, session: ChatSession, text: str, has_picture: bool = False) -> Answer:
        """Have the session answer and show the text as it comes, then the line about it."""
        answer = self._stream(session, text, has_picture)
        if has_picture and answer.memory is not None:
            self.draw(answer.memory)
        self.note(str(answer))
        if answer.is_context_full:
            self.note("The context is full, so the answer ends here; /reset begins a new conversation.")
        elif answer.finish_reason == "length":
            self.note(f"The answer was cut after {answer.num_tokens} tokens, as --max-tokens says.")
        return answer

    def show_fork(self, session: ChatSession, n: int, text: str | None = None) -> list[Answer]:
        """Have the session answer n times; show the continuations, the blocks they shared, and what that saved."""
        self._stream_fork(session, n, text)
        seq_ids = session.memory.seq_ids if session.memory else []
        for index, answer in enumerate(session.answers):
            seq_id = seq_ids[index] if index < len(seq_ids) else None
            self._write_label(_fork_label(index, seq_id, answer), seq_id)
            self.write(answer.text + "\n")
        if session.memory is not None:
            self.draw(session.memory)
        temperature = session.last_params.temperature or 0.0
        self.note(fork_line(session.answers, temperature, session.has_chat_temperature))
        self._note_cuts(session)
        return session.answers

    def _stream_fork(self, session: ChatSession, n: int, text: str | None) -> None:
        """Run the continuations. They come at the same time, so plain text has to wait until they are there."""
        with stop_on_ctrl_c(session):
            for _ in session.fork(n, text):
                pass

    def _note_cuts(self, session: ChatSession) -> None:
        cut = [answer for answer in session.answers if answer.finish_reason == "length"]
        if any(answer.is_context_full for answer in cut):
            self.note(session.room_line)
        elif cut:
            self.note(f"{len(cut)} were cut after {cut[0].num_tokens} tokens, as --max-tokens says.")

    def _stream(self, session: ChatSession, text: str, has_picture: bool) -> Answer:
        with stop_on_ctrl_c(session):
            for piece in session.respond(text):
                self.write(piece)
        self.write("\n")
        assert session.answer is not None
        return session.answer

    def write(self, text: str) -> None:
        """Write a piece of an answer."""
        self._out.write(text)
        self._out.flush()

    def _write_label(self, label: str, seq_id: int | None) -> None:
        self.write(label + "\n")

    def note(self, line: str) -> None:
        """Write a line that is no part of an answer."""
        print(line, file=self._notes, flush=True)

    def draw(self, memory: Memory) -> None:
        """Draw a picture of the cache; of several sequences, with the line about what they shared."""
        self._draw_view(memory)
        if memory.sharing_line is not None:
            self.note(memory.sharing_line)

    def _draw_view(self, memory: Memory) -> None:
        self.note(str(draw_view(memory.view)))


class TerminalScreen(PlainScreen):
    """Writes to a terminal with rich: dim lines, coloured drawings, and a picture that moves with the answer."""

    def __init__(self, console: "Console | None" = None):
        from rich.console import Console

        self.console = console or Console(highlight=False, soft_wrap=True)
        super().__init__(self.console.file, self.console.file)

    def write(self, text: str) -> None:
        """Write a piece of an answer, without the control characters that would move the cursor."""
        super().write(printable(text))

    def note(self, line: str) -> None:
        """Write a dim line."""
        self.console.print(line, style="dim", markup=False, highlight=False, soft_wrap=False)

    def _write_label(self, label: str, seq_id: int | None) -> None:
        self.console.print(label, style="dim" if seq_id is None else hue(seq_id), markup=False, highlight=False)

    def _draw_view(self, memory: Memory) -> None:
        self.console.print(self._drawing(memory).rich())

    def _drawing(self, memory: Memory) -> Drawing:
        # Half the rows for the pool, half for the table, and some for headings, legend and the answer's last lines.
        max_rows = max(3, min(8, (self.console.height - 12) // 2))
        return draw_view(memory.view, width=self.console.width, max_rows=max_rows)

    def _stream(self, session: ChatSession, text: str, has_picture: bool) -> Answer:
        with without_echo():
            return self._stream_live(session, text) if has_picture else super()._stream(session, text, False)

    def _stream_live(self, session: ChatSession, text: str) -> Answer:
        from rich.live import Live
        from rich.text import Text

        line = ""  # the unfinished line; finished ones scroll up above the picture
        with (
            stop_on_ctrl_c(session),
            Live(console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop") as live,
        ):
            for piece in session.respond(text):
                *finished, line = (line + printable(piece)).split("\n")
                for whole in finished:
                    live.console.print(Text(whole))
                live.update(self._live_picture(line, session), refresh=True)
        self.write(line + "\n")
        assert session.answer is not None
        return session.answer

    def _live_picture(self, line: str, session: ChatSession) -> Any:
        """Return the end of the answer with the cache as it is now below it."""
        from rich.console import Group
        from rich.text import Text

        shown = Text(line[-4 * self.console.width :])
        memory = session.look()
        return Group(shown, Text(), self._drawing(memory).rich()) if memory is not None else shown

    def _stream_fork(self, session: ChatSession, n: int, text: str | None) -> None:
        """Show the last words of every continuation and the cache below them, while they come."""
        from rich.live import Live

        texts = [""] * n
        with (
            without_echo(),
            stop_on_ctrl_c(session),
            Live(console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop") as live,
        ):
            for pieces in session.fork(n, text):
                texts = [text + printable(piece) for text, piece in zip(texts, pieces, strict=True)]
                live.update(self._live_fork(texts, session), refresh=True)

    def _live_fork(self, texts: list[str], session: ChatSession) -> Any:
        """Return a line for each continuation, as many as leave room for the picture, and the cache below them."""
        from rich.console import Group
        from rich.text import Text

        memory = session.look()
        drawing = self._drawing(memory) if memory else Drawing(())
        num_lines = max(3, self.console.height - len(drawing.lines) - 2)
        lines = [_last_words(f"{index}: ", text, self.console.width - 1) for index, text in enumerate(texts)]
        shown = Text("\n".join(lines[:num_lines]), no_wrap=True, overflow="crop")
        return Group(shown, drawing.rich(), Text((memory.sharing_line if memory else None) or ""))


def make_screen() -> PlainScreen:
    """Return the screen that fits standard output."""
    return TerminalScreen() if sys.stdout.isatty() else PlainScreen()


def _fork_label(index: int, seq_id: int | None, answer: Answer) -> str:
    """Return the line above a continuation."""
    sequence = "" if seq_id is None else f", sequence {letter(seq_id)}"
    return f"-- {index}{sequence}: {answer.num_tokens} tokens, seed {answer.seed}"


def _last_words(label: str, text: str, width: int) -> str:
    """Return the label and as much of the text's end as fits behind it on one line."""
    from rich.cells import cell_len

    words = " ".join(text[-width:].split())
    while words and cell_len(label) + cell_len(words) > width:
        words = words[1:]
    return label + words


def printable(text: str) -> str:
    r"""Leave out control characters except line breaks and tabs: no answer may move the cursor or set a title.

    Example:
        >>> printable("red: \x1b[31m, bell: \x07, next\nline")
        'red: [31m, bell: , next\nline'
    """
    return "".join(char for char in text if char in "\n\t" or not ("\0" <= char < " " or "\x7f" <= char < "\xa0"))


@contextmanager
def without_echo() -> Iterator[None]:
    """Keep what is typed during an answer off the screen, where it would stand in the answer; the prompt gets it."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    local_modes = before[3] & ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, [*before[:3], local_modes, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


@contextmanager
def stop_on_ctrl_c(session: ChatSession) -> Iterator[None]:
    """Let Ctrl-C end the answer after the token at hand; a second one ends it wherever it is."""

    def stop(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        session.stop()

    if not can_set_handlers():
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
