"""Results that are kept outside a model's context: under a short name, readable in pieces, and usable as arguments.

    store = HandleStore()                        # one a conversation: no other sees its handles
    handle = store.keep(value, source="shop__orders")
    handle.lines(0, 20), handle.chars(-200), handle.grep("tea"), handle.path(".rows[0:3]"), handle.count(".rows")
    store.filled({"rows": {"$handle": "h1", "path": ".rows"}}, schema)     # the values in the handles' places

What is read here is the data as it came; `shown` (results.py) makes it fit for a model's eyes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any, Literal

from heedful.errors import McpHandleError
from heedful.mcp.calls.json_path import at

TTL_S = 3600.0
MAX_BYTES = 256 << 20
"""Of a store, all its values together."""
MAX_MATCHES = 20
EXCERPT_CHARS = 200
MAX_NESTING = 64
KEY = "$handle"

Kind = Literal["json", "text", "binary", "link"]


@dataclass(frozen=True)
class Match:
    line: int
    """From 0."""
    excerpt: str
    """Of the line, around the place."""


@dataclass(frozen=True)
class Matches:
    first: tuple[Match, ...]
    total: int
    """Lines with a match, shown or not."""


@dataclass(frozen=True)
class Handle:
    id: str
    kind: Kind
    value: Any
    """A JSON value, a text, or the base64 of what is neither."""
    source: str
    """The tool's name for the model."""
    size_bytes: int
    media_type: str
    until: float
    """On the store's clock."""

    @cached_property
    def text(self) -> str:
        """A text as it is; of an array one element a line, of an object one key, its arrays by elements again."""
        if isinstance(self.value, str):
            return self.value
        encode = json.JSONEncoder(ensure_ascii=False).encode
        if isinstance(self.value, list):
            return "\n".join(map(encode, self.value))
        if isinstance(self.value, dict):
            return "\n".join(line for key, each in self.value.items() for line in _key_lines(encode(key), each, encode))
        return encode(self.value)

    @cached_property
    def json(self) -> Any:
        """The value; of a text that is JSON what it says. Raises McpHandleError for other texts."""
        if self.kind != "text":
            return self.value
        import pydantic_core

        try:
            with suppress(ValueError):
                return pydantic_core.from_json(self.value)  # a third of json's time
            return json.loads(self.value)  # lone surrogates
        except (ValueError, RecursionError):
            raise McpHandleError(f"{self.id} is text and no JSON", "Read it by lines or grep.") from None

    def lines(self, start: int | None = None, stop: int | None = None) -> str:
        """Lines `start:stop`, counted from 0 as Python counts; ended by \\n alone."""
        return "\n".join(self._readable().split("\n")[start:stop])

    def chars(self, start: int | None = None, stop: int | None = None) -> str:
        return self._readable()[start:stop]

    def grep(self, pattern: str, most: int = MAX_MATCHES) -> Matches:
        """Lines that hold `pattern`, letters' case aside: plain text, in which `*` stands for anything within the line
        and `|` for or. Linear in the data."""
        alternatives = [[part for part in each.lower().split("*") if part] for each in pattern.split("|")]
        if not all(alternatives):
            raise McpHandleError(f"{pattern!r:.80} finds every line", "Give the text that a line must hold.")
        found: list[Match] = []
        total = 0
        for number, line in enumerate(self._readable().split("\n")):
            folded = line.lower()
            places = [place for parts in alternatives if (place := _place(folded, parts)) is not None]
            if places:
                total += 1
                if len(found) < most:
                    begin = max(0, min(places) - EXCERPT_CHARS // 4)
                    found.append(Match(number, line[begin : begin + EXCERPT_CHARS]))
        return Matches(tuple(found), total)

    def path(self, path: str) -> Any:
        """What a JSON path (json_path.py) names. Raises McpHandleError."""
        self._check_readable()
        return at(self.json, path)

    def count(self, path: str = "") -> int:
        """Elements of an array, keys of an object, lines of a text, at `path`; 1 for a single value."""
        if isinstance(self.value, str) and self.kind == "text" and not path:
            return self.value.count("\n") + (0 if self.value.endswith("\n") or not self.value else 1)
        found = self.path(path)
        return len(found) if isinstance(found, list | dict) else 1

    def _readable(self) -> str:
        self._check_readable()
        return self.text

    def _check_readable(self) -> None:
        if self.kind == "binary":
            raise McpHandleError(f"{self.id} is {self.media_type} and no text", "Pass it on as an argument.")


class HandleStore:
    """The handles of one conversation. Each lives `ttl_s`; the oldest go where `max_bytes` would be passed."""

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, ttl_s: float = TTL_S, clock: Callable[[], float] = monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._handles: dict[str, Handle] = {}
        self._made = 0

    def __len__(self) -> int:
        self._drop_old()
        return len(self._handles)

    @property
    def held_bytes(self) -> int:
        return sum(handle.size_bytes for handle in self._handles.values())

    def keep(
        self, value: Any, *, source: str, kind: Kind | None = None, media_type: str = "", size_bytes: int | None = None
    ) -> Handle:
        """`size_bytes`: of the value as UTF-8 JSON or text, where it is known. Raises McpHandleError where the value
        alone is over the store's bytes."""
        kind = kind or ("text" if isinstance(value, str) else "json")
        size = encoded_size(value) if size_bytes is None else size_bytes
        if size > self._max_bytes:
            raise McpHandleError(f"a result of {size:,} bytes is not kept: at most {self._max_bytes:,} are")
        self._drop_old()
        while self._handles and self.held_bytes + size > self._max_bytes:
            del self._handles[next(iter(self._handles))]
        self._made += 1
        media = media_type or ("text/plain" if kind == "text" else "application/json")
        handle = Handle(f"h{self._made}", kind, value, source, size, media, self._clock() + self._ttl_s)
        self._handles[handle.id] = handle
        return handle

    def get(self, handle_id: str) -> Handle:
        """Raises McpHandleError where it never was or is no more."""
        self._drop_old()
        if handle_id in self._handles:
            return self._handles[handle_id]
        number = re.fullmatch(r"h([1-9][0-9]{0,8})", handle_id)
        if number and int(number.group(1)) <= self._made:
            raise McpHandleError(f"{handle_id} is no longer kept", "Call the tool again.")
        there = ", ".join(self._handles) or "none"
        raise McpHandleError(f"no result is kept as {handle_id!r:.40}", f"There are: {there}.")

    def filled(self, arguments: Any, schema: Any = True, depth: int = 0) -> Any:
        """`arguments` with each `{"$handle": id}` or `{"$handle": id, "path": path}` replaced by its value; as text
        where `schema` wants a string. Raises McpHandleError."""
        if depth > MAX_NESTING:
            raise McpHandleError(f"arguments are nested more than {MAX_NESTING} levels deep")
        if isinstance(arguments, Mapping):
            if KEY in arguments:
                return self._value_of(arguments, schema)
            return {key: self.filled(each, _at_key(schema, key), depth + 1) for key, each in arguments.items()}
        if isinstance(arguments, list):
            inner = schema.get("items", True) if isinstance(schema, Mapping) else True
            return [self.filled(each, inner, depth + 1) for each in arguments]
        return arguments

    def _value_of(self, reference: Mapping[str, Any], schema: Any) -> Any:
        more = [key for key in reference if key not in (KEY, "path")]
        path = reference.get("path", "")
        if more or not isinstance(reference[KEY], str) or not isinstance(path, str):
            raise McpHandleError("a handle is written {'$handle': 'h1'} or {'$handle': 'h1', 'path': '.rows[0]'}")
        handle = self.get(reference[KEY])
        value = handle.path(path) if path else handle.value
        wants_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        return json.dumps(value, ensure_ascii=False) if wants_text and not isinstance(value, str) else value

    def _drop_old(self) -> None:
        now = self._clock()
        for handle in [each for each in self._handles.values() if each.until <= now]:
            del self._handles[handle.id]


def _key_lines(key: str, value: Any, encode: Callable[[Any], str]) -> Iterator[str]:
    if not isinstance(value, list) or not value:
        yield f"{key}: {encode(value)}"
        return
    yield f"{key}: ["
    yield from map(encode, value)
    yield "]"


def encoded_size(value: Any) -> int:
    """Bytes of a text, or of a value's JSON, in UTF-8."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _at_key(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key, True) if isinstance(properties, Mapping) else True


def _place(line: str, parts: list[str]) -> int | None:
    """Where the first part stands, if all stand in the line in this order: each is looked for once."""
    first: int | None = None
    position = 0
    for part in parts:
        position = line.find(part, position)
        if position < 0:
            return None
        first = position if first is None else first
        position += len(part)
    return first
