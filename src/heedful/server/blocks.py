"""A chat's events as blocks, one after another: runs of text, and calls. Responses and Messages are made of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from heedful.server.ids import new_id
from heedful.text.tool_calls import CallArguments, CallBegin, CallEnd, Event, TextDelta


@dataclass(eq=False)
class Block:
    """A run of text, or a call: then it has a name, and `text` is JSON."""

    index: int
    id: str
    name: str | None = None
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False
    """False while it grows, and for good where the answer was cut off inside of it."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Opened:
    block: Block


@dataclass(frozen=True)
class Grew:
    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    block: Block


Step = Opened | Grew | Closed


class BlockReader:
    """For one answer. `text_prefix`, `call_prefix`: how the blocks' ids begin."""

    def __init__(self, *, text_prefix: str, call_prefix: str) -> None:
        self._text_prefix = text_prefix
        self._call_prefix = call_prefix
        self._open: Block | None = None
        self.blocks: list[Block] = []

    def read(self, events: Iterable[Event]) -> list[Step]:
        return [step for event in events for step in self._read(event)]

    def close(self, *, is_cut: bool) -> list[Step]:
        """The answer has ended; `is_cut`: at its limit, so that what is open stays incomplete."""
        return self._close(is_complete=not is_cut)

    def _read(self, event: Event) -> list[Step]:
        match event:
            case TextDelta():
                opened = [] if self._open is not None and self._open.name is None else self._begin(None)
                return [*opened, *self._grow(event.text)]
            case CallBegin():
                return self._begin(event.name)
            case CallArguments():
                return self._grow(event.json_text)
            case CallEnd():
                assert self._open is not None, event
                self._open.is_complete = True
                return self._close(is_complete=True)

    def _begin(self, name: str | None) -> list[Step]:
        closed = self._close(is_complete=True)
        prefix = self._text_prefix if name is None else self._call_prefix
        self._open = Block(len(self.blocks), new_id(prefix), name)
        self.blocks.append(self._open)
        return [*closed, Opened(self._open)]

    def _grow(self, text: str) -> list[Step]:
        assert self._open is not None, text
        self._open.pieces.append(text)
        return [Grew(self._open, text)]

    def _close(self, *, is_complete: bool) -> list[Step]:
        """A call is complete only by its own end."""
        block, self._open = self._open, None
        if block is None:
            return []
        block.is_complete = block.is_complete if block.name is not None else is_complete
        return [Closed(block)]
