"""Texts from a command line, a file or stdin, one a line; and one of them shortened to stand on a line."""

from __future__ import annotations

import sys
from pathlib import Path

from heedful.errors import BadParameter

SHOWN_CHARACTERS = 40
"""Of a text that is shown to say which one is meant."""


def listed_texts(verb: str, given: list[str], file: Path | None) -> list[str]:
    """TEXTS, then the file's lines; lines of stdin when neither is given or TEXTS is "-". An empty line is a text.

    Raises BadParameter where there is none.
    """
    reads_stdin = given == ["-"] or (not given and file is None)
    if reads_stdin and given != ["-"] and sys.stdin.isatty():
        raise BadParameter("TEXT", "is missing", f'Give texts: heedful {verb} "one text" "another", or pipe lines in.')
    found = [] if given == ["-"] else list(given)
    if file is not None:
        found += _read_lines(file, "--file")
    if reads_stdin:
        found += _read_lines(Path("-"), "TEXT")
    if not found:
        raise BadParameter("TEXT", "is missing: there are no lines", "Give at least one text.")
    return found


def shortened(text: str) -> str:
    """On one line, without what would move a cursor."""
    line = "".join(c if c.isprintable() else " " for c in text[: SHOWN_CHARACTERS + 1])
    return line if len(text) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def print_cut(dropped: tuple[int, ...]) -> None:
    """To stderr: tokens of each text that were cut off, if any were."""
    if sum(dropped):
        texts = sum(map(bool, dropped))
        print(f"heedful: {sum(dropped):,} tokens of {texts:,} texts were cut to fit the model", file=sys.stderr)


def _read_lines(path: Path, option: str) -> list[str]:
    """Lines as editors count them; what ends the last one is not meant."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        text = data.decode("utf-8")
    except OSError as e:
        raise BadParameter(option, f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadParameter(option, f"{path} is not UTF-8 text (byte {e.start:,})", "Convert it first.") from e
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]
