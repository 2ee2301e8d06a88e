"""Tool calls in what a model writes: found while the text streams, and forced by a grammar.

    parser = ToolCallParser(form, names)
    events = parser.push("some text"); ...; events = parser.flush()

The text is read once, character by character, so however it is cut the same events come, adjacent ones merged, and the
time is linear. What looks like a call and is none comes back as text. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from heedful.request import GrammarSpec
from heedful.text.json_steps import WHITE, JsonSteps
from heedful.text.tool_formats import CALL_ID, ToolChoice, ToolFormat

if TYPE_CHECKING:
    from heedful.text.tokenizer import Tokenizer

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = (*_ARGUMENT_KEYS, "name", "type", "id")
_HEAD_CHARS = 160
"""A name with an id and the marks between them is shorter."""


@dataclass(frozen=True)
class TextDelta:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments; all of a call, joined, are one JSON object."""

    index: int
    json_text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete. A call without it was cut off or broke, and its arguments are no valid JSON."""

    index: int


Event = TextDelta | CallBegin | CallArguments | CallEnd


class ToolCallParser:
    """For one answer. `names`: the tools there are; a call of another is text.

    White space and separators around calls are dropped, and so is an end marker; text next to them keeps its own.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._events: list[Event] = []
        self._read: Callable[[str], None] = self._read_text
        self._held = ""  # the beginning of a marker, perhaps
        self._gap: list[str] = []  # white space at the answer's beginning or behind a call, dropped before a call
        self._is_fresh = True  # nothing but the gap since then
        self._raw: list[str] = []  # of a call so far, to be given back if it is none
        self._has_head = False  # its name stood before its arguments
        self._call = _CallObject(self._names, only_call_keys=False)
        self._in_list = False
        self._index = -1

    def push(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        for char in text:
            self._read(char)
        return self._taken()

    def flush(self) -> list[Event]:
        """The events that are left when the answer has ended."""
        if self._read in (self._read_text, self._read_close):
            if self._held or self._index < 0 or not self._is_fresh:
                self._text(*self._gap, self._held)
        elif not self._call.begun:
            self._text(*self._raw)
        self._gap, self._raw, self._held = [], [], ""
        self._read = self._read_text
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return _merged(events)

    def _text(self, *texts: str) -> None:
        self._events.extend(TextDelta(text) for text in texts if text)

    # Each _read_… takes one character and knows what came before.

    def _read_text(self, char: str) -> None:
        self._held += char
        while self._held:
            if self._held in self._form.opens:
                self._begin(self._held, self._read_opened)
                return
            if any(text.startswith(self._held) for text in self._form.opens):
                return
            first, self._held = self._held[0], self._held[1:]
            self._read_plain(first)

    def _read_plain(self, char: str) -> None:
        """A character that belongs to no marker."""
        if self._is_fresh:
            if char in WHITE or (self._index >= 0 and char in self._form.separators):
                self._gap.append(char)
                return
            if char == "{" and self._form.bare:
                self._begin("", self._read_opened)
                self._read(char)
                return
        self._text(*self._gap, char)
        self._gap, self._is_fresh = [], False

    def _begin(self, marker: str, read: Callable[[str], None]) -> None:
        self._raw, self._gap, self._held = [*self._gap, marker], [], ""
        self._in_list = self._has_head = False
        self._call = _CallObject(self._names, only_call_keys=self._form.bare)
        self._read = read

    def _read_opened(self, char: str) -> None:
        """Behind a marker."""
        if char == "[" and not self._in_list:
            self._in_list = True
            self._raw.append(char)
        elif char in WHITE:
            self._raw.append(char)
        elif char == "{":
            self._read = self._read_object
            self._read_object(char)
        elif self._form.name_end and not self._in_list:
            self._held = ""
            self._read = self._read_head
            self._read_head(char)
        else:
            self._give_back(char)

    def _read_head(self, char: str) -> None:
        """A name before its arguments."""
        if char != "{":
            self._raw.append(char)
            self._held += char
            if len(self._held) > _HEAD_CHARS:
                self._give_back("")
            return
        name = self._held.strip().removesuffix(self._form.name_end).partition(CALL_ID)[0].strip()
        self._held, self._has_head = "", True
        if name not in self._names:
            self._give_back(char)
            return
        for known in f'{{"name":"{name}","arguments":':  # so that the rest is read like any other call
            self._call.step(known)
        self._read = self._read_object
        self._read_object(char)

    def _read_object(self, char: str) -> None:
        call = self._call
        began, ended = call.begun, call.ended
        fits = call.step(char)
        if call.begun and not began:
            self._index += 1
            self._raw = []
            assert call.name is not None
            self._events.append(CallBegin(self._index, call.name))
        if call.out:
            self._events.append(CallArguments(self._index, call.out))
        if call.ended and not ended:
            self._events.append(CallEnd(self._index))
            self._raw = []
        elif fits and (not call.begun or ended):
            self._raw.append(char)
        if call.done or (call.ended and self._has_head):
            self._finish_call()
        elif not fits and call.ended:
            # Only the rest of the object is broken, often just its last brace missing; the call stands.
            rest = "".join(self._raw).strip(WHITE)
            self._finish_call()
            if rest:
                self._text(rest)
                self._is_fresh = False
            self._read(char)
        elif not fits:
            self._give_back(char)

    def _finish_call(self) -> None:
        self._raw, self._is_fresh = [], True
        self._read = self._read_between if self._in_list else self._read_close

    def _read_between(self, char: str) -> None:
        """Behind a call in a list."""
        if char == ",":
            self._call = _CallObject(self._names, only_call_keys=False)
            self._raw = [char]
            self._read = self._read_opened
        elif char == "]":
            self._read = self._read_close
        elif char not in WHITE:
            self._read = self._read_close
            self._read_close(char)

    def _read_close(self, char: str) -> None:
        """Behind a call, where an end marker may come."""
        if char in WHITE and not self._held:
            self._gap.append(char)
            return
        self._held += char
        if self._held in self._form.closes:
            self._held, self._gap = "", []
            self._read = self._read_text
        elif not any(text.startswith(self._held) for text in self._form.closes):
            held, self._held = self._held, ""
            self._read = self._read_text
            for other in held:
                self._read(other)

    def _give_back(self, char: str) -> None:
        """What was read is no call: it is text, and `char` the next character of it."""
        self._text(*self._raw)
        self._raw, self._held = [], ""
        self._is_fresh = False
        self._read = self._read_text
        if char:
            self._read_text(char)


class _CallObject:
    """The JSON object of one call, read character by character.

    `only_call_keys`: an object with other keys is no call.
    """

    def __init__(self, names: Collection[str], *, only_call_keys: bool) -> None:
        self._names = names
        self._only_call_keys = only_call_keys
        self._json = JsonSteps()
        self._key = ""
        self._reading = ""  # "key" or "value", of the object itself
        self._chars: list[str] = []
        self._arguments: str | None = None  # complete, but the name is not known yet
        self._streams = False
        self.name: str | None = None
        self.begun = False
        """Name and arguments, or their beginning, are known: it is a call."""
        self.ended = False
        """The arguments are complete."""
        self.done = False
        """The object is complete."""
        self.out = ""
        """What the last step added to the arguments."""

    def step(self, char: str) -> bool:
        """Whether the object may go on like this, and still be a call."""
        self.out = ""
        json_steps, was, depth = self._json, self._json.state, len(self._json.open)
        if not json_steps.step(char):
            return False
        if self._reading == "value" and depth == 1 and was == "number" and json_steps.state != "number":
            self._reading = ""
        if self._reading:
            return self._continue(char)
        if depth == 1 and json_steps.state == "string" and was in ("first key", "key"):
            self._reading, self._chars = "key", [char]
        elif depth == 1 and was == "value" and json_steps.state != "value":
            return self._begin_value(char)
        if json_steps.state == "done":
            self.done = self.name is not None
            if self.done and not self.begun:
                self._give("{}")
            return self.done
        return True

    def _continue(self, char: str) -> bool:
        """One more character of a key or value."""
        in_string = self._json.state == "string"
        # JSON has no raw control characters in strings.
        kept = json.dumps(char)[1:-1] if char < " " and in_string else char
        if self._streams:
            self.out = kept
        else:
            self._chars.append(kept)
        if self._reading == "key":
            return self._json.state != "colon" or self._end_key()
        return self._json.state != "next" or len(self._json.open) > 1 or self._end_value()

    def _end_key(self) -> bool:
        self._reading, self._key = "", json.loads("".join(self._chars))
        return self._key in _CALL_KEYS or not self._only_call_keys

    def _begin_value(self, char: str) -> bool:
        self._reading, self._chars = "value", [char]
        if self._key == "name" and self.name is None:
            return char == '"'
        if not self._is_arguments():
            return True
        if char == "{" and self.name is not None:
            self._streams = self.begun = True
            self.out = char
        return char in '{"n'  # an object, JSON in a string, null

    def _is_arguments(self) -> bool:
        """Whether the key is that of the arguments; only the first such counts."""
        return self._key in _ARGUMENT_KEYS and not self.begun and self._arguments is None

    def _end_value(self) -> bool:
        self._reading = ""
        text = "".join(self._chars)
        if self._streams:
            self._streams, self.ended = False, True
        elif self._key == "name" and self.name is None:
            name = json.loads(text)
            if name not in self._names:
                return False
            self.name = name
            if self._arguments is not None:
                self._give(self._arguments)
        elif self._is_arguments():
            self._arguments = _object_text(text)
            if self._arguments is None:
                return False
            if self.name is not None:
                self._give(self._arguments)
        return True

    def _give(self, arguments: str) -> None:
        self.begun = self.ended = True
        self.out = arguments


def _object_text(text: str) -> str | None:
    """The JSON object that `text` is, or holds as a string; {} for null; None when it is neither."""
    if text == "null":
        return "{}"
    if text.startswith("{"):
        return text
    inner = json.loads(text)
    try:
        return json.dumps(value, ensure_ascii=False) if isinstance(value := json.loads(inner), dict) else None
    except (ValueError, RecursionError):
        return None


def _merged(events: Sequence[Event]) -> list[Event]:
    """`events` with adjacent texts, and adjacent arguments of a call, joined."""
    merged: list[Event] = []
    for kind, run in groupby(events, key=_kind):
        if kind is TextDelta:
            merged.append(TextDelta("".join(event.text for event in run if isinstance(event, TextDelta))))
        elif kind is CallArguments:
            pieces = [event for event in run if isinstance(event, CallArguments)]
            merged.append(CallArguments(pieces[0].index, "".join(piece.json_text for piece in pieces)))
        else:
            merged.extend(run)
    return merged


def _kind(event: Event) -> type[Event]:
    return type(event)


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, form: ToolFormat, tokenizer: Tokenizer
) -> GrammarSpec:
    """A grammar of exactly one call, of the tool that `choice` names or of any, in the format's own markers.

    `tools` are checked; the arguments fit their `parameters`. Markers that are control tokens are written as such.
    """
    named = [tool["function"] for tool in tools if choice.name in (None, tool["function"]["name"])]
    assert named, (choice, len(tools))
    calls = " | ".join(f"call_{i}" for i in range(len(named)))
    before = [_mark(text, tokenizer) for text in form.opens[:1] if not form.bare]
    after = [_mark(text, tokenizer) for text in form.closes[:1]]
    start, end = form.padding + "[" * form.in_list, "]" * form.in_list + form.padding
    inside = [json.dumps(start)] * bool(start) + [f"({calls})"] + [json.dumps(end)] * bool(end)
    rules = [f"start: {' '.join([*before, *inside, *after])}"]
    rules += [f"call_{i}: {_call_rule(function, form, tokenizer)}" for i, function in enumerate(named)]
    return GrammarSpec("lark", "\n".join(rules))


def _call_rule(function: Mapping[str, Any], form: ToolFormat, tokenizer: Tokenizer) -> str:
    parameters = function.get("parameters")
    schema = {"type": "object", "properties": {}, "additionalProperties": False} if parameters is None else parameters
    arguments = f"%json {json.dumps({'type': 'object', **schema})}"
    if form.name_end:
        return f"{json.dumps(function['name'])} {_mark(form.name_end, tokenizer)} {arguments}"
    head = f'{{"name": "{function["name"]}", "{form.arguments_key}": '
    return f'{json.dumps(head)} {arguments} "}}"'


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A marker in Lark: as the control token that it is, or as plain text."""
    token_id = tokenizer.id_of(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
