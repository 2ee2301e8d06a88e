"""What a chat needs of a terminal: words on it, a status line below a streaming answer, Ctrl-C that stops the answer.

All escape sequences live here. Whoever leaves a `LiveTerminal`, by whatever way but kill -9, leaves the terminal as it
was. Knows nothing of chats.
"""

from __future__ import annotations

import os
import signal
import termios
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn, Self, TextIO

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
_SAVE, _BACK = "\x1b7", "\x1b8"  # DECSC, DECRC: cursor and style
_DOWN, _UP = "\x1bD", "\x1b[A"  # IND scrolls at the bottom and keeps the column
_ALL_ROWS = "\x1b[r"  # DECSTBM without rows; it also sends the cursor home
_ERASE_ROW = "\x1b[2K"
_ERASE_BELOW = "\x1b[J"  # from the cursor on
_FEWEST_ROWS, _FEWEST_COLUMNS = 5, 20
REFRESH_SECONDS = 0.1

# Control characters in a model's words must not control the terminal.
_HARMLESS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t\r"} | {0x0D: None}


def harmless(text: str) -> str:
    return text.translate(_HARMLESS)


class Screen:
    """Where words go. `out`: answers and what commands show; `err`: notes, where `out` is not a terminal."""

    def __init__(self, out: TextIO, err: TextIO, *, is_terminal: bool, is_styled: bool) -> None:
        self.is_terminal = is_terminal
        self.open_line = ""
        """What the cursor's line holds, from the last line break on."""
        self._out = out
        self._err = err
        self._dim = (_DIM, _PLAIN) if is_styled else ("", "")

    def text(self, text: str) -> None:
        """A piece of a line."""
        shown = harmless(text) if self.is_terminal else text
        self.open_line = (self.open_line + shown).rpartition("\n")[2]
        self._out.write(shown)
        self._out.flush()

    def line(self, text: str = "") -> None:
        self.text(text + "\n")

    def note(self, text: str) -> None:
        """A line about the chat, dim; what a pipe reads is free of them."""
        file = self._out if self.is_terminal else self._err
        start, end = self._dim if self.is_terminal else ("", "")
        file.write(f"{start}{harmless(text)}{end}\n")
        file.flush()


class StatusLine:
    """The terminal's last row, kept out of the scrolling by a scroll region (DECSTBM) over the rows above it.

    `size` is asked before every refresh, so a resize needs no signal. Too small a terminal has no status line.
    """

    def __init__(
        self, out: TextIO, size: Callable[[], os.terminal_size], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._size = size
        self._clock = clock
        self._shown_in: os.terminal_size | None = None
        self._refreshed: float | None = None

    def open(self) -> None:
        size = self._size()
        if size.lines < _FEWEST_ROWS or size.columns < _FEWEST_COLUMNS:
            return
        self._shown_in = size
        self._refreshed = None
        # first a free row below the cursor; then the cursor is put back into the region
        self._write(f"{_DOWN}{_SAVE}\x1b[1;{size.lines - 1}r{_BACK}{_UP}")

    def show(self, text: str, open_line: str = "") -> None:
        """`open_line`: what the cursor's line holds. Not every call refreshes."""
        now = self._clock()
        if self._refreshed is not None and now - self._refreshed < REFRESH_SECONDS:
            return
        if fills_its_row(open_line, self._size().columns):
            return  # the next character wraps; where the cursor is moved and put back now, some terminals forget that
        if self._shown_in != self._size():
            self.close()
            self.open()
        if self._shown_in is not None:
            self._refreshed = now
            rows, columns = self._shown_in.lines, self._shown_in.columns
            self._write(f"{_SAVE}\x1b[{rows};1H{_ERASE_ROW}{_DIM}{text[: columns - 1]}{_BACK}")

    def close(self) -> None:
        """Idempotent."""
        if self._shown_in is not None:
            self._shown_in = None
            # after a resize nobody knows which row the text is in, but it is below the cursor, with nothing else
            self._write(f"{_SAVE}{_ALL_ROWS}{_BACK}{_ERASE_BELOW}")

    def _write(self, sequence: str) -> None:
        self._out.write(sequence)
        self._out.flush()


def fills_its_row(line: str, columns: int) -> bool:
    """Whether `line`, wrapped by a terminal, ends in the last column. As good as the widths that Unicode gives."""
    column = 0
    for character in line:
        cells = _cells(character)
        if character == "\t":
            column = min((column // 8 + 1) * 8, columns - 1)
        elif column + cells > columns:
            column = cells
        else:
            column += cells
    return column == columns


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class LiveTerminal:
    """The terminal while an answer streams: a context manager, to be entered once for every answer.

    `status`: None for no status line. `keyboard`: file descriptor of the terminal that somebody types on, or None;
    there keys are not echoed into the answer, and Ctrl-C sets `stopped` instead of raising.
    """

    def __init__(self, status: StatusLine | None, keyboard: int | None) -> None:
        self.stopped = False
        self._status = status
        self._keyboard = keyboard
        self._modes: list[Any] | None = None
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        self.stopped = False
        with ExitStack() as handlers:
            for number, handler in self._signals().items():
                handlers.enter_context(_handled(number, handler))
            handlers.callback(self._give_back)
            self._take()
            self._handlers = handlers.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """While it is entered: as if it were not, so that somebody can be asked something. Ctrl-C still only sets
        `stopped`."""
        self._give_back()
        try:
            yield
        finally:
            self._take()

    def show(self, text: str, open_line: str = "") -> None:
        """The status, as StatusLine.show() has it."""
        if self._status is not None:
            self._status.show(text, open_line)

    def _signals(self) -> dict[signal.Signals, Callable[[int, FrameType | None], None]]:
        if self._status is None and self._keyboard is None:
            return {}
        stop = {} if self._keyboard is None else {signal.SIGINT: self._stop}
        return {**stop, signal.SIGTERM: _leave, signal.SIGHUP: _leave, signal.SIGTSTP: self._suspend}

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets the terminal as it was, and we take it again when we go on."""
        self._give_back()
        with _handled(signal.SIGTSTP, signal.SIG_DFL):
            signal.raise_signal(signal.SIGTSTP)  # stands still here
        self._take()

    def _take(self) -> None:
        if self._keyboard is not None:
            self._modes = termios.tcgetattr(self._keyboard)
            quiet = list(self._modes)
            quiet[3] &= ~termios.ECHO  # local modes
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, quiet)
        if self._status is not None:
            self._status.open()

    def _give_back(self) -> None:
        try:
            if self._status is not None:
                self._status.close()
        finally:
            if self._keyboard is not None and self._modes is not None:
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._modes)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # through every `finally`


@contextmanager
def _handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
