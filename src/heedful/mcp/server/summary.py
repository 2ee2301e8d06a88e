"""A summary of a text of any length by a model that sees little at a time: notes on each piece, then a summary of the
notes, of which there may be several rounds. Beside it sentences of the text itself, which no model has written: small
ones invent.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heedful.errors import BadParameter

if TYPE_CHECKING:
    from heedful.engine.answer import Completion

MAX_PIECE_TOKENS = 1500
"""Attention over a piece costs its square, and small models keep less in mind than they can read."""
NOTE_TOKENS = 96
_NOTE_SLACK = 16
"""Tokens between two notes, and those by which one may grow when it is encoded again."""
MIN_ROOM = 4 * NOTE_TOKENS
"""Of a piece: with less a round of notes is hardly shorter than what it is about."""

MIN_QUOTE_CHARS, MAX_QUOTE_CHARS = 40, 300
MAX_CANDIDATES = 256
SAME_COSINE = 0.85
_SENTENCE = re.compile(r"[^\s.!?](?:[^.!?\n]|[.!?](?=\S)|\n(?!\s*\n))*(?:[.!?]|$|(?=\n\s*\n))")
"""Up to a full stop, or an empty line."""

Vectors = npt.NDArray[np.float32]
Tell = Callable[[int], Awaitable[None]]
"""Tokens so far."""
Write = Callable[[str, int, Tell], Awaitable["Completion"]]
"""(prompt, most tokens, whom to tell)"""
Count = Callable[[str], int]
Report = Callable[[float, float, str], Awaitable[None]]


@dataclass(frozen=True)
class Summary:
    text: str
    tokens: int
    """Of the whole text."""
    pieces: int
    finish_reason: str
    receipts: tuple[Mapping[str, Any], ...]


class Summarizer:
    """`room`: tokens of text that fit into a prompt."""

    def __init__(self, write: Write, count: Count, room: int, report: Report) -> None:
        if room < MIN_ROOM:
            raise BadParameter("max_tokens", f"leaves {max(0, room)} tokens of context for the text", "Ask for fewer.")
        self._write = write
        self._count = count
        self._room = min(room, MAX_PIECE_TOKENS)
        self._report = report

    async def summary(self, text: str, most_tokens: int, focus: str | None) -> Summary:
        pieces = split(text, self._room, self._count)
        tokens, num_pieces = sum(self._count(piece) for piece in pieces), len(pieces)
        rounds, done = steps(num_pieces, self._room), 0
        receipts: list[Mapping[str, Any]] = []
        while len(pieces) > 1:
            notes = []
            for number, piece in enumerate(pieces, 1):
                told = (done, rounds, f"piece {number} of {len(pieces)}")
                completion = await self._written(_of_piece(piece, focus), NOTE_TOKENS, *told)
                receipts.append(completion.receipt.to_dict())
                notes.append(completion.text.strip())
                done += 1
            pieces = split("\n\n".join(notes), self._room, self._count)
        prompt = _of_all(pieces[0], focus, is_notes=num_pieces > 1)
        last = await self._written(prompt, most_tokens, done, rounds, "writing the summary")
        receipts.append(last.receipt.to_dict())
        return Summary(last.text.strip(), tokens, num_pieces, last.finish_reason, tuple(receipts))

    async def _written(self, prompt: str, most_tokens: int, done: int, rounds: int, message: str) -> Completion:
        """Each answer is one step of the whole, and progress within it a part of that."""

        async def tell(tokens: int) -> None:
            await self._report(done + min(tokens / most_tokens, 0.99), rounds, message)

        await tell(0)
        return await self._write(prompt, most_tokens, tell)


def split(text: str, most_tokens: int, count: Count) -> list[str]:
    """Pieces of whole lines, as long as they may be; a line that is longer alone is cut into equal parts."""
    pieces: list[str] = []
    piece, piece_tokens = "", 0
    for line in _short_lines(text, most_tokens, count):
        tokens = count(line)
        if piece and piece_tokens + tokens > most_tokens:
            pieces.append(piece)
            piece, piece_tokens = "", 0
        piece += line
        piece_tokens += tokens
    return [*pieces, piece] if piece.strip() or not pieces else pieces


def _short_lines(text: str, most_tokens: int, count: Count) -> list[str]:
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        parts = 1
        while True:
            size = -(-len(line) // parts)
            cut = [line[start : start + size] for start in range(0, len(line), size)]
            if size == 1 or all(count(part) <= most_tokens for part in cut):
                found += cut
                break
            parts *= 2
    return found


def steps(pieces: int, room: int) -> int:
    """Answers that are written for so many pieces, at most."""
    notes_in_piece = room // (NOTE_TOKENS + _NOTE_SLACK)
    assert notes_in_piece >= 2, room
    total = 1
    while pieces > 1:
        total += pieces
        pieces = -(-pieces // notes_in_piece)
    return total


def sentences(text: str) -> list[str]:
    """Candidates for quotes: of a length that says something, at most so many, evenly from all of the text."""
    found = [" ".join(match.group().split()) for match in _SENTENCE.finditer(text)]
    fit = list(dict.fromkeys(each for each in found if MIN_QUOTE_CHARS <= len(each) <= MAX_QUOTE_CHARS))
    step = max(1.0, len(fit) / MAX_CANDIDATES)
    return [fit[int(number * step)] for number in range(min(len(fit), MAX_CANDIDATES))]


def central(vectors: Vectors, about: Vectors | None, most: int) -> list[int]:
    """Rows (N, D) of length 1 nearest to `about` (D,), or to the middle of all, no two of them nearly the same; in the
    order of the rows."""
    middle = vectors.mean(axis=0) if about is None else about
    chosen: list[int] = []
    for row in sorted(range(len(vectors)), key=lambda row: -float(vectors[row] @ middle)):
        if len(chosen) == most:
            break
        if all(float(vectors[row] @ vectors[other]) < SAME_COSINE for other in chosen):
            chosen.append(row)
    return sorted(chosen)


def _of_piece(piece: str, focus: str | None) -> str:
    return f"Part of a longer text:\n{piece}\n\nWhat this part says{_about(focus)}, in two or three sentences:"


def _of_all(text: str, focus: str | None, *, is_notes: bool) -> str:
    what = "Notes on a text, in order" if is_notes else "Text"
    return f"{what}:\n{text}\n\nSummary of the text{_about(focus)}:"


def _about(focus: str | None) -> str:
    return f" about {focus}" if focus else ""
