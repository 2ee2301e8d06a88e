"""JSON read one character at a time, without going back: is this still a JSON value, and is it complete?

Raw control characters in strings are let through, since models write them; whoever passes the text on escapes them.
"""

from __future__ import annotations

WHITE = " \t\n\r"
MAX_DEPTH = 200

_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
# RFC 8259's number: what each state becomes with a digit from 1 to 9, a 0 and other characters.
_NUMBERS: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", "1": "whole"},
    "zero": {".": "point", "e": "power"},
    "whole": {"0": "whole", "1": "whole", ".": "point", "e": "power"},
    "point": {"0": "decimals", "1": "decimals"},
    "decimals": {"0": "decimals", "1": "decimals", "e": "power"},
    "power": {"0": "digits", "1": "digits", "+": "sign", "-": "sign"},
    "sign": {"0": "digits", "1": "digits"},
    "digits": {"0": "digits", "1": "digits"},
}
_NUMBER_ENDS = ("zero", "whole", "decimals", "digits")
_NUMBER_STARTS = {"-": "minus", "0": "zero"}
_CLASSES = {**dict.fromkeys("23456789", "1"), "E": "e"}


class JsonSteps:
    """One JSON value. After `step` returned False it is of no more use."""

    def __init__(self) -> None:
        self.state = "value"
        """What may come next: value, item (or the array's end), first key (or the object's end), key, colon, next (a
        comma or the end); or what is being read: string, escape, hex, literal, number; at last: done."""
        self.open: list[str] = []
        """The brackets that are open."""
        self._in_key = False
        self._rest = ""  # of a literal
        self._hex_left = 0
        self._number = ""

    def step(self, char: str) -> bool:
        """Whether `char` may follow."""
        if self.state == "number":
            number = _NUMBERS[self._number].get(_CLASSES.get(char, char))
            if number is not None:
                self._number = number
                return True
            if self._number not in _NUMBER_ENDS:
                return False
            self._end_value()
        if self.state in ("string", "escape", "hex", "literal"):
            return self._inside(char)
        if char in WHITE:
            return True
        return self._between(char)

    def _inside(self, char: str) -> bool:
        """A character of a string or literal."""
        if self.state == "string":
            if char == '"':
                self._end_string()
            elif char == "\\":
                self.state = "escape"
            return True
        if self.state == "escape":
            self.state, self._hex_left = ("hex", 4) if char == "u" else ("string", 0)
            return char in '"\\/bfnrtu'
        if self.state == "hex":
            self._hex_left -= 1
            if not self._hex_left:
                self.state = "string"
            return char in "0123456789abcdefABCDEF"
        expected, self._rest = self._rest[0], self._rest[1:]
        if not self._rest:
            self._end_value()
        return char == expected

    def _between(self, char: str) -> bool:
        """A character that begins, parts or ends values."""
        if self.state in ("value", "item"):
            return (char == "]" and self.state == "item" and self._close("[")) or self._begin_value(char)
        if self.state in ("first key", "key"):
            if char == "}" and self.state == "first key":
                return self._close("{")
            self.state, self._in_key = "string", True
            return char == '"'
        if self.state == "colon":
            self.state = "value"
            return char == ":"
        if self.state == "next" and char == ",":
            self.state = "key" if self.open[-1] == "{" else "value"
            return True
        if self.state == "next" and char in "}]":
            return self._close("{" if char == "}" else "[")
        return False

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self.open.append(char)
            self.state = "first key" if char == "{" else "item"
            return len(self.open) <= MAX_DEPTH
        if char == '"':
            self.state, self._in_key = "string", False
        elif char in _LITERALS:
            self.state, self._rest = "literal", _LITERALS[char]
        elif char in "-0123456789":
            self.state, self._number = "number", _NUMBER_STARTS.get(char, "whole")
        else:
            return False
        return True

    def _close(self, bracket: str) -> bool:
        if self.open.pop() != bracket:
            return False
        self._end_value()
        return True

    def _end_string(self) -> None:
        if self._in_key:
            self.state = "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self.state = "next" if self.open else "done"
