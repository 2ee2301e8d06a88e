"""What a request says that can be an argument: numbers, quoted texts, times of day, dates, addresses, paths, places.

    said = Request.of("What time is it in Tokyo?")
    said.mentions("zone")             # [Mention("zone", "Asia/Tokyo", 19, 24)]
    said.words                        # its words that mean something, with their places

Rules about English text, none about any server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from heedful.mcp.catalogue.bm25 import stem, words
from heedful.mcp.delegation.places import places_in

Kind = Literal["number", "quoted", "clock", "date", "url", "path", "folder", "zone"]

_QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|(?<!\w)'([^']+)'(?!\w)|`([^`]+)`")
_URL = re.compile(r"https?://[^\s<>\"']*[^\s<>\"'.,;:!?)]")
_PATH = re.compile(
    r"(?<![\w/])(?:~?/|\.{1,2}/)?(?:[\w.-]+/)*[\w-][\w.-]*\.[A-Za-z][A-Za-z0-9]{0,7}\b|(?<![\w/:])/[\w./-]+"
)
_FOLDER = re.compile(
    r"\b(?:folder|directory|dir)\s+(?:called\s+|named\s+)?([\w./-]*\w)"
    r"|(?<=\b)(?!(?:the|this|that|a|my|our|your|current|allowed|in|of|which|each|every|what)\b)([\w./-]*\w)\s+(?:folder|directory)\b",
    re.IGNORECASE,
)
_CLOCK = re.compile(
    r"\b(\d{1,2})(?:[:.](\d\d))?\s*(am|pm|a\.m\.|p\.m\.)(?!\w)|\b(\d{1,2}):(\d\d)\b|\b(noon|midnight)\b", re.I
)
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_NUMBER = re.compile(r"(?<![\w.,/:-])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w/:-]|[.,]\d)")
_SPELLED = {
    word: number
    for number, word in enumerate(re.findall(r"\w+", "two three four five six seven eight nine ten eleven twelve"), 2)
}
_WORD = re.compile(r"[^\W_]+(?:['’][^\W\d_]+)?(?:_[^\W_]+)*")
_ASKING = frozenset(
    re.findall(
        r"\w+",
        """
        which who whom whose when where why much many any all there exist exists available tell show give get
        list print display see find look know want need say says said read called named name names right now
        current currently exactly just here still yet please thanks hello hi hey ok okay number count total make
        made did does happen take about out checked everything anything something things stuff one ones each
        every also contain contains hold holds inside moment whole am not hows whats wheres whos whens cant id
        ill im wrote
        """,
    )
)
_WHAT_IS = re.compile(r"^(?:what|how|where|who|when)['’]?s$", re.IGNORECASE)


_ORDER = re.compile(
    r"(?:(?:please|now|then|ok|okay|and|can you|could you|would you|i want to|i want you to|i'd like to|let's)[,\s]+)*"
    r"(?:add(?!\s+-?\d)|append|apply|book|buy|cancel|change|check\s?out|commit|copy|create|delete|deploy|disable|drop|edit|empty|"
    r"enable|erase|forget|insert|install|invite|keep|make|mark|merge|move|note|order|overwrite|pay|publish|push|put|"
    r"record|remember|remove|rename|replace|reserve|reset|restore|revert|save|schedule|send|set|stage|start|stop|store|"
    r"switch|toggle|trigger|turn|undo|unstage|update|upload|write)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Mention:
    kind: Kind
    value: Any
    start: int
    end: int


@dataclass(frozen=True)
class Word:
    """One that means something: neither article nor preposition, nor what any question has."""

    text: str
    start: int
    end: int

    @property
    def stems(self) -> list[str]:
        return words(self.text)


@dataclass(frozen=True)
class Request:
    text: str
    found: tuple[Mention, ...]

    @classmethod
    def of(cls, text: str) -> Request:
        return cls(text, tuple(sorted(_mentions(text), key=lambda each: (each.start, each.end))))

    def mentions(self, *kinds: Kind) -> list[Mention]:
        return [each for each in self.found if each.kind in kinds]

    @cached_property
    def words(self) -> tuple[Word, ...]:
        found = (Word(match[0], *match.span()) for match in _WORD.finditer(self.text))
        return tuple(word for word in found if _means_something(word.text))

    @cached_property
    def asked_part(self) -> tuple[int, int]:
        """The last sentence that asks or orders, else the last: what stands before it tells of the case."""
        sentences = [match.span() for match in re.finditer(r"\S.*?(?:[.!?]+(?=\s|$)|$)", self.text, re.DOTALL)]
        asking = [span for span in sentences if self.text[slice(*span)].endswith("?")]
        return (asking or sentences or [(0, len(self.text))])[-1]

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.text, re.IGNORECASE) is not None

    @property
    def asks_count(self) -> bool:
        return self.has(r"\bhow many\b|\bnumber of\b|\bcount\b")

    @property
    def goes_on(self) -> bool:
        """Whether it only says what the question before is to be asked of: "and in Paris?"."""
        return self.has(r"^\s*(?:and|what about|how about|also|same for)\b") and len(self.text.split()) <= 7

    @property
    def newest(self) -> tuple[int, int] | None:
        """Where it says that it is about the newest of something, and not about several."""
        several = r"(?!\s+(?:\d|few|two|three|four|five|six|seven|eight|nine|ten|couple))"
        found = re.search(rf"\b(?:last|latest|newest|most recent)\b{several}", self.text, re.IGNORECASE)
        return found.span() if found else None

    @property
    def asks_whether(self) -> bool:
        """Whether something is there at all."""
        return self.has(r"^\W*(?:is|are) there\b")

    @property
    def asks(self) -> bool:
        """Whether it is a question, or an order to show something."""
        return self.has(
            r"\?\s*$|^\W*(?:please\s+)?(?:what|which|who|whose|when|where|how|is|are|does|do|did|was|were|can|could|show|"
            r"list|give|tell|print|read|get|find|display|open|count|look|search|summari[sz]e|describe)\b"
        )

    @property
    def asks_data(self) -> bool:
        """Whether it may be a question about rows: for a number, an extreme, a list."""
        return self.asks and self.has(
            r"\bhow (?:many|much)\b|\b(?:number|names?) of\b|\b(?:count|average|mean|total|sum|most|least|fewest)\b|"
            r"\w+est\b|\b(?:which|who|what|list|show|tables?|rows?|database)\b"
        )


def orders_change(text: str) -> bool:
    """Whether it begins with an order to make or change something, which no reading does."""
    return _ORDER.match(text.strip()) is not None


def occurrences(value: str, text: str) -> list[tuple[int, int]]:
    """Where a value's words stand in a text as whole words: letters' case, _ for a space and a plural's s aside."""
    parts = [re.escape(part) for part in re.findall(r"[^\W_]+|[^\w\s]+", value)]
    if not parts:
        return []
    body = r"[\s_-]*".join(parts)
    if not value[-1:].isalnum():
        return [match.span() for match in re.finditer(body, text, re.IGNORECASE)]
    found = [match.span() for match in re.finditer(rf"(?<!\w){body}(?:e?s)?(?![\w])", text, re.IGNORECASE)]
    single = re.sub(r"(?:ies|s)$", lambda match: "y" if match[0] == "ies" else "", value)
    if found or single == value or len(single) < 3:
        return found
    return occurrences(single, text)


def is_within(word: Word, spans: Iterable[tuple[int, int]]) -> bool:
    return any(start <= word.start and word.end <= end for start, end in spans)


def _means_something(word: str) -> bool:
    plain = word.lower()
    if plain in _ASKING or _WHAT_IS.match(plain):
        return False
    return plain.isdigit() or (len(plain) > 1 and bool(words(word)))


def _mentions(text: str) -> Iterator[Mention]:
    covered: list[tuple[int, int]] = []
    quotes: list[tuple[int, int]] = []

    def free(start: int, end: int) -> bool:
        return all(end <= other[0] or other[1] <= start for other in covered)

    for match in _URL.finditer(text):
        covered.append(match.span())
        yield Mention("url", match[0], *match.span())
    for match in _QUOTED.finditer(text):
        if free(*match.span()):
            quotes.append(match.span())
            yield Mention("quoted", next(part for part in match.groups() if part is not None), *match.span())
    for match in _CLOCK.finditer(text):
        clock = _clock(match)
        if clock is not None and free(*match.span()):
            covered.append(match.span())
            yield Mention("clock", clock, *match.span())
    for match in _DATE.finditer(text):
        covered.append(match.span())
        yield Mention("date", match[0], *match.span())
    for match in _PATH.finditer(text):
        if free(*match.span()):
            covered.append(match.span())
            yield Mention("path", match[0], *match.span())
    for match in _FOLDER.finditer(text):
        group = 1 if match[1] else 2
        if free(*match.span(group)) and stem(match[group].lower()) not in _NO_FOLDER:
            yield Mention("folder", match[group], *match.span(group))
    covered += quotes
    for match in _NUMBER.finditer(text):
        if free(*match.span()):
            number = float(match[0].replace(",", ""))
            yield Mention("number", int(number) if number.is_integer() else number, *match.span())
    for match in re.finditer(r"[a-z]+", text.lower()):
        if match[0] in _SPELLED and free(*match.span()):
            yield Mention("number", _SPELLED[match[0]], *match.span())
    for zone, start, end in places_in(text):
        if free(start, end):
            yield Mention("zone", zone, start, end)


_NO_FOLDER = {
    stem(word) for word in re.findall(r"\w+", "the this that a my our your current allowed is are in of has have")
}


def _clock(match: re.Match[str]) -> str | None:
    """HH:MM, of 24 hours; None for no time of day."""
    if match[6]:
        return "12:00" if match[6].lower() == "noon" else "00:00"
    hour, minute = int(match[1] or match[4]), int(match[2] or match[5] or 0)
    if match[3]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if match[3].lower().startswith("p") else 0)
    return f"{hour:02}:{minute:02}" if hour < 24 and minute < 60 else None
