"""Patterns that a policy finds in texts: its own regular expressions, and those of personal data and of code.

Python's matcher takes exponential time for a repeat within a repeat, so such patterns are refused, and long texts are
searched piece by piece: what is left of a pattern's appetite is bounded by a piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from heedful.errors import PolicyError

MOST_CHARS = 500
PIECE_CHARS = 4_000
OVERLAP_CHARS = 500
"""Of a piece with the one before: what a pattern finds across a border."""

_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()*+?|]|\{[0-9]*,?[0-9]*\}|.", re.S)
_EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{1,63}")
_PHONE = re.compile(r"(?<![\w.])\+?[0-9][0-9 ()/-]{7,16}[0-9](?![\w])")
_IBAN = re.compile(r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(r"(?<![0-9])(?:[0-9][ -]?){12,18}[0-9](?![0-9])")
_SSN = re.compile(r"(?<![0-9-])[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9-])")
_CODE = re.compile(
    r"```|^\s{0,8}(?:def|class|import|from|return|if|for|while|fn|func|let|const|var|public|#include)\b.*[:;{(]\s*$"
    r"|;\s*$|\bSELECT\b.{1,200}\bFROM\b",
    re.M,
)


def compiled(text: str, where: str) -> re.Pattern[str]:
    """Raises PolicyError for what is no pattern, or one whose time could grow without bounds."""
    if len(text) > MOST_CHARS:
        raise PolicyError(where, f"has {len(text):,} characters; patterns have at most {MOST_CHARS}")
    try:
        found = re.compile(text, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise PolicyError(where, f"{text!r:.80} is no regular expression: {error}") from None
    if re.search(r"\\[1-9]|\(\?P=", text):
        raise PolicyError(where, f"{text!r:.80} refers back to a group, which can take very long", _SIMPLER)
    if _repeats_within_repeat(text):
        raise PolicyError(where, f"{text!r:.80} repeats something that repeats, which can take very long", _SIMPLER)
    return found


_SIMPLER = "Write it without: for instance [a-z]+ in place of ([a-z]+)+."


def _repeats_within_repeat(text: str) -> bool:
    """Whether a group that holds an unbounded repeat, or alternatives, is itself repeated without a bound."""
    holds = [False]
    closed: bool | None = None
    """What the group that ends right here holds."""
    for token in _PART.findall(text):
        if token == "(":
            holds.append(False)
        elif token == ")" and len(holds) > 1:
            closed = holds.pop()
            continue
        elif token in "*+" or (token.startswith("{") and token.endswith(",}")):
            if closed:
                return True
            holds[-1] = True
        elif token == "|":
            holds[-1] = holds[-1] or len(holds) > 1
        if closed is not None:
            holds[-1] = holds[-1] or closed
        closed = None
    return False


def pieces(text: str) -> Iterator[str]:
    """All of a text, in pieces that overlap."""
    for start in range(0, max(1, len(text) - OVERLAP_CHARS), PIECE_CHARS - OVERLAP_CHARS):
        yield text[start : start + PIECE_CHARS]


def found_in(pattern: re.Pattern[str], text: str) -> bool:
    return any(pattern.search(piece) for piece in pieces(text))


def has_pii(text: str) -> bool:
    """Whether something in it looks like an e-mail address, a telephone number, an IBAN, a payment card or a US social
    security number. A pattern's guess: names and addresses are not found."""
    return any(map(_piece_has_pii, pieces(text)))


def _piece_has_pii(text: str) -> bool:
    return (
        _EMAIL.search(text) is not None
        or _SSN.search(text) is not None
        or any(_is_iban(found[0]) for found in _IBAN.finditer(text))
        or any(_passes_luhn(found[0]) for found in _CARD.finditer(text))
        or any(_is_phone(found[0]) for found in _PHONE.finditer(text))
    )


def has_code(text: str) -> bool:
    return found_in(_CODE, text)


def _is_phone(text: str) -> bool:
    """Digits in groups, or after a plus: a long number alone is none."""
    digits = sum(c.isdigit() for c in text)
    groups = re.split(r"[ ()/-]+", text.strip())
    return 9 <= digits <= 15 and (text.startswith("+") or (text.startswith("0") and len(groups) > 1))


def _is_iban(text: str) -> bool:
    """ISO 13616: the number that it spells is 1 modulo 97."""
    letters = text.replace(" ", "")
    spelt = "".join(str(int(c, 36)) for c in letters[4:] + letters[:4])
    return 15 <= len(letters) <= 34 and int(spelt) % 97 == 1


def _passes_luhn(text: str) -> bool:
    digits = [int(c) for c in text if c.isdigit()][::-1]
    doubled = (sum(divmod(2 * d, 10)) for d in digits[1::2])
    return len(set(digits)) > 1 and (sum(digits[::2]) + sum(doubled)) % 10 == 0
