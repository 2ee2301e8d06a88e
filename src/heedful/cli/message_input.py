"""From typed or piped lines to messages. Owns the grammar of input and the set-up of line editing.

A line is a message. One that ends with a backslash goes on in the next line; lines between two lines of three quotation
marks are one message, as they are. Text pasted into a terminal arrives as one line with line breaks in it. A message
that begins with one slash is a command: that is for others to know, but see `escaped`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

from heedful.errors import BadParameter, UsageError

PROMPT = "> "
CONTINUATION_PROMPT = ". "
QUOTES = '"""'


class Lines(Protocol):
    def next_line(self, prompt: str) -> str:
        """Without its line break. Raises EOFError at the end, KeyboardInterrupt at Ctrl-C, UsageError for bad UTF-8."""
        ...

    def remember(self, message: str) -> None:
        """Offer it again when somebody looks back through the input."""
        ...


def escaped(text: str) -> str:
    """`text` as it has to be typed to be sent: a first slash doubled."""
    return "/" + text if text.startswith("/") else text


class MessageReader:
    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def read(self) -> str | None:
        """The next message or command, as if typed in one go; None at the end. Blank ones are passed over."""
        try:
            while not (message := self._message()).strip():
                pass
        except EOFError:
            return None
        self._lines.remember(message)
        return message

    def read_answer(self, question: str) -> str:
        """One line, as it is; "" at the end."""
        try:
            return self._lines.next_line(question)
        except EOFError:
            return ""

    def _message(self) -> str:
        line = self._lines.next_line(PROMPT)
        return escaped(self._block()) if line.strip() == QUOTES else self._continued(line)

    def _block(self) -> str:
        return "\n".join(self._until(lambda line: line.strip() == QUOTES))

    def _continued(self, line: str) -> str:
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1].removesuffix("\\")
            try:
                parts.append(self._lines.next_line(CONTINUATION_PROMPT))
            except EOFError:
                break
        return "\n".join(parts)

    def _until(self, is_end: Callable[[str], bool]) -> Iterable[str]:
        """The end of the input ends a block too."""
        try:
            while not is_end(line := self._lines.next_line(CONTINUATION_PROMPT)):
                yield line
        except EOFError:
            return


class PipedLines:
    """Lines of a file or pipe, UTF-8."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def next_line(self, prompt: str) -> str:
        try:
            line = self._file.readline()
        except UnicodeDecodeError as error:
            raise BadParameter("stdin", "is not UTF-8 text", "Convert it first.") from error
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def remember(self, message: str) -> None:
        pass


class TypedLines:
    """Lines that somebody types, with editing, and recall of `earlier` messages and of those since."""

    def __init__(self, earlier: Iterable[str]) -> None:
        self._add_to_recall = _line_editing()
        for message in earlier:
            self.remember(message)

    def next_line(self, prompt: str) -> str:
        try:
            return input(prompt)
        except UnicodeDecodeError as error:
            raise UsageError("what was typed is not UTF-8 text", "Set the terminal to UTF-8.") from error

    def remember(self, message: str) -> None:
        self._add_to_recall(message)


def _line_editing() -> Callable[[str], object]:
    """Makes input() edit lines; returns what adds a message to its recall. Some builds of Python cannot: no recall."""
    try:
        import readline
    except ImportError:
        return lambda message: None
    readline.set_auto_history(False)  # recall whole messages, not their lines
    # With it a paste of several lines is one line until Enter. GNU Readline has it off before 8.1.
    readline.parse_and_bind("set enable-bracketed-paste on")
    return readline.add_history


def strict_text(file: TextIO, *, is_utf8: bool) -> TextIO:
    """`file` such that malformed text raises instead of passing; before anything was read from it."""
    reconfigure = getattr(file, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="strict", **({"encoding": "utf-8"} if is_utf8 else {}))
    return file


def stdin_is_typed() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
