"""Which files a caller of heedful's MCP server can have read, and how a long one is taken apart."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import BadParameter
from heedful.mcp.server.files import MAX_FILE_BYTES, Roots
from heedful.mcp.server.summary import (
    MAX_CANDIDATES,
    MIN_ROOM,
    NOTE_TOKENS,
    Summarizer,
    central,
    sentences,
    split,
    steps,
)


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """Two roots, a secret beside them, and ways to it."""
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "deep").mkdir(parents=True)
    second.mkdir()
    (tmp_path / "secret.txt").write_text("the secret")
    (first / "a.txt").write_text("\ufefffirst a")
    (first / "deep" / "b.txt").write_text("deep b", encoding="utf-8")
    (second / "a.txt").write_text("second a")
    (second / "c.txt").write_text("Grüße", encoding="utf-8")
    (first / "link.txt").symlink_to(tmp_path / "secret.txt")
    (first / "inner_link.txt").symlink_to(first / "a.txt")
    (first / "away").symlink_to(tmp_path)
    (first / "binary").write_bytes(b"a\0b")
    (first / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (first / "empty.txt").write_text(" \n")
    (first / "big.txt").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    os.mkfifo(first / "pipe")
    return Roots([first, second])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "first a"),
        ("./a.txt", "first a"),
        ("deep/b.txt", "deep b"),
        ("c.txt", "Grüße"),
        ("ROOT/first/deep/b.txt", "deep b"),
        ("ROOT/second/a.txt", "second a"),
    ],
)
def test_files_under_the_roots_are_read(roots: Roots, tmp_path: Path, name: str, text: str) -> None:
    assert roots.read_text(name.replace("ROOT", str(tmp_path))) == text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../secret.txt", "has .. in it"),
        ("deep/../a.txt", "has .. in it"),
        ("ROOT/first/../secret.txt", "has .. in it"),
        ("ROOT/secret.txt", "is under none of the allowed folders"),
        ("/etc/passwd", "is under none of the allowed folders"),
        ("ROOT/firstly/a.txt", "is under none of the allowed folders"),
        ("link.txt", "symbolic link"),
        ("inner_link.txt", "symbolic link"),
        ("away/secret.txt", "symbolic link"),
        ("away/first/a.txt", "symbolic link"),
        ("deep", "no regular file"),
        ("ROOT/first", "is a folder"),
        ("pipe", "no regular file"),
        ("nothing.txt", "there is no nothing.txt"),
        ("a.txt/b", "no folder"),
        ("binary", "zero bytes"),
        ("latin.txt", "not UTF-8 text (byte 2)"),
        ("empty.txt", "is empty"),
        ("big.txt", "over 4,194,304 bytes"),
        ("", "is no path"),
        ("a\0b", "is no path"),
    ],
)
def test_others_are_not_and_nothing_of_them_is_told(roots: Roots, tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(BadParameter) as caught:
        roots.read_text(name.replace("ROOT", str(tmp_path)))
    assert said in caught.value.message
    assert "the secret" not in str(caught.value)


def test_a_folder_that_becomes_a_link_leads_nowhere(roots: Roots, tmp_path: Path) -> None:
    (tmp_path / "first" / "deep").rename(tmp_path / "first" / "moved")
    (tmp_path / "first" / "deep").symlink_to(tmp_path)
    with pytest.raises(BadParameter, match="symbolic link"):
        roots.read_text("deep/secret.txt")


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="is no folder"):
        Roots([tmp_path / "nothing"])


# ---- Pieces -------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab \n\u2028", max_size=400), st.integers(1, 40))
def test_pieces_are_the_text_and_none_is_too_long(text: str, most: int) -> None:
    pieces = split(text, most, len)
    assert "".join(pieces).strip() == text.strip()
    assert all(len(piece) <= most for piece in pieces)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_pieces_are_as_long_as_whole_lines_allow(lengths: list[int]) -> None:
    lines = ["x" * length + "\n" for length in lengths]
    pieces = split("".join(lines), 24, len)
    for piece, following in pairwise(pieces):
        assert len(piece) + len(following.splitlines(keepends=True)[0]) > 24


class Writer:
    """Answers with so many words; counts what it was asked for."""

    def __init__(self, words: int) -> None:
        self.words = words
        self.prompts: list[str] = []

    async def write(self, prompt: str, most_tokens: int, tell: Any) -> Any:
        self.prompts.append(prompt)
        text = " ".join(["note"] * min(self.words, most_tokens))
        receipt = SimpleNamespace(to_dict=lambda: {"output_tokens": 1})
        return SimpleNamespace(text=text, finish_reason="stop", receipt=receipt)


@pytest.mark.parametrize("lines", [1, 10, 2_000, 40_000])
@pytest.mark.parametrize("words", [0, 3, NOTE_TOKENS])
def test_rounds_of_notes_come_to_an_end_as_announced(lines: int, words: int) -> None:
    import asyncio

    writer, reports = Writer(words), []

    async def report(done: float, total: float, message: str) -> None:
        reports.append((done, total))

    def count(text: str) -> int:
        return len(text.split())

    text = "a line of text\n" * lines
    room = MIN_ROOM
    found = asyncio.run(Summarizer(writer.write, count, room, report).summary(text, 50, "ships"))
    assert found.tokens == 4 * lines
    assert len(writer.prompts) == len(found.receipts) == len(reports) <= reports[0][1] == steps(found.pieces, room)
    assert [done for done, _ in reports] == list(range(len(reports)))
    assert all("about ships" in prompt for prompt in writer.prompts)
    read = "".join(prompt.partition(":\n")[2].rpartition("\n\n")[0] for prompt in writer.prompts[: found.pieces])
    assert read == text, "each piece once, in order"


def test_quotes_are_sentences_of_the_text() -> None:
    text = (
        "# A heading\n\nThe first sentence says that 3.5 tons, of www.whale.example,\nwent out to sea. Short. "
        "Why did not one of all those ships come back again?\n\n"
        "- a list that has no full stop at its end but goes on\n\n" + "x" * 400
    )
    assert sentences(text) == [
        "The first sentence says that 3.5 tons, of www.whale.example, went out to sea.",
        "Why did not one of all those ships come back again?",
        "- a list that has no full stop at its end but goes on",
    ]
    many = " ".join(f"This is sentence number {number:04} of a rather long text." for number in range(1000))
    assert len(sentences(many)) == MAX_CANDIDATES
    assert "0999" not in sentences(many)[0]
    assert int(sentences(many)[-1][24:28]) > 990


def test_the_most_central_rows_that_differ() -> None:
    rows = np.array([[1, 0], [0.6, 0.8], [0.61, 0.79], [0.8, 0.6], [0, 1]], dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert central(rows, None, 1) == [2], "nearest to the mean, by hand"
    assert central(rows, rows[0], 2) == [0, 3]
    assert central(rows, rows[1], 3) == [0, 1, 4], "the two that are nearly the first are left out"


def test_too_little_room_is_refused() -> None:
    async def report(done: float, total: float, message: str) -> None: ...

    with pytest.raises(BadParameter, match="max_tokens: leaves 100 tokens"):
        Summarizer(Writer(1).write, len, 100, report)
