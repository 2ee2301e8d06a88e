"""What becomes of lines: messages, however they are spread; and line editing as a terminal user meets it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pexpect
import pytest

import heedful
from heedful.cli.message_input import MessageReader, PipedLines, escaped, strict_text
from heedful.errors import BadParameter


def messages(text: str) -> list[str]:
    reader = MessageReader(PipedLines(io.StringIO(text)))
    return list(iter(reader.read, None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("no line break at the end", ["no line break at the end"]),
        ("\n  \none\n\n", ["one"]),
        ("", []),
        ("one\\\ntwo\\\nthree\nfour\n", ["one\ntwo\nthree", "four"]),
        ("one\\\n", ["one"]),
        ("one\\", ["one"]),
        ('\\\n\none\n"""\n\n"""\n', ["one"]),
        ("\\\none", ["\none"]),
        ('"""\none\n\n  two\\\n"""\nthree\n', ["one\n\n  two\\", "three"]),
        (' """ \none\n"""\n', ["one"]),
        ('"""\nit never ends\n', ["it never ends"]),
        ('say """\n', ['say """']),
        ("/cost\n//cost\n", ["/cost", "//cost"]),
        ('"""\n/cost\n"""\n', ["//cost"]),
    ],
)
def test_lines_become_messages(text: str, expected: list[str]) -> None:
    assert messages(text) == expected


@pytest.mark.parametrize(("text", "typed"), [("a/b", "a/b"), ("/a", "//a"), ("", "")])
def test_a_first_slash_is_typed_twice(text: str, typed: str) -> None:
    assert escaped(text) == typed


class TypedScript:
    def __init__(self, lines: Iterable[str | type[BaseException]]) -> None:
        self.prompts: list[str] = []
        self.recall: list[str] = []
        self._lines = iter(lines)

    def next_line(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def remember(self, message: str) -> None:
        self.recall.append(message)


def test_whole_messages_are_recalled_as_they_would_be_typed() -> None:
    lines = TypedScript(["a\\", "b", '"""', "/c", '"""', "", "/cost"])
    reader = MessageReader(lines)
    assert [reader.read() for _ in range(3)] == ["a\nb", "//c", "/cost"]
    assert lines.recall == ["a\nb", "//c", "/cost"]
    assert lines.prompts == ["> ", ". ", "> ", ". ", ". ", "> ", "> "]


def test_ctrl_c_drops_a_message_that_is_half_typed() -> None:
    lines = TypedScript(['"""', "half", KeyboardInterrupt, "whole"])
    reader = MessageReader(lines)
    with pytest.raises(KeyboardInterrupt):
        reader.read()
    assert reader.read() == "whole"
    assert lines.recall == ["whole"]


def test_malformed_text_is_refused() -> None:
    file = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="latin-1")
    reader = MessageReader(PipedLines(strict_text(file, is_utf8=True)))
    with pytest.raises(BadParameter, match="stdin: is not UTF-8"):
        reader.read()


def test_a_pipe_is_utf8_with_any_line_breaks() -> None:
    file = io.TextIOWrapper(io.BytesIO("é\r\nb\n".encode()), encoding="ascii", errors="surrogateescape")
    reader = MessageReader(PipedLines(strict_text(file, is_utf8=True)))
    assert [reader.read(), reader.read(), reader.read()] == ["é", "b", None]


ECHO_MESSAGES = """
import sys
from heedful.cli.message_input import MessageReader, TypedLines, strict_text
strict_text(sys.stdin, is_utf8=False)
reader = MessageReader(TypedLines(["an earlier one"]))
while (message := reader.read()) is not None:
    print("GOT", ascii(message))
"""


def test_on_a_terminal_lines_are_edited_recalled_and_pasted(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    environment = {**os.environ, "PYTHONPATH": str(Path(heedful.__file__).parents[1]), "TERM": "xterm"}
    inputrc = tmp_path / "inputrc"
    inputrc.write_text("set enable-bracketed-paste off\n")  # the default of older versions
    environment |= {"LC_ALL": "C.UTF-8", "INPUTRC": str(inputrc)}
    child = pexpect.spawn(sys.executable, ["-c", ECHO_MESSAGES], env=environment, encoding="utf-8", timeout=30)
    left, up = "\x1b[D", "\x1b[A"
    for keys, got in [
        (f"wörd{left}{left}{left}{left}a \r", "'a w\\xf6rd'"),
        ("\x1b[200~first\r  second\rthird\x1b[201~ and more\r", "'first\\n  second\\nthird and more'"),
        ("one\\\rtwo\r", "'one\\ntwo'"),
        (f"{up}!\r", "'one\\ntwo!'"),
        (f"{up}{up}{up}{up}{up}\r", "'an earlier one'"),
    ]:
        child.expect_exact("\x1b[?2004h")  # asks the terminal to mark what is pasted
        child.expect_exact("> ")
        child.send(keys)
        child.expect(r"GOT ([^\r\n]*)\r\n")
        assert child.match[1] == got
    child.expect_exact("> ")
    child.send("\x04")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
