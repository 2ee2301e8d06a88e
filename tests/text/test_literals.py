"""The scanner against what the words of its contract say, tried position by position."""

from hypothesis import example, given
from hypothesis import strategies as st

from heedful.text.literals import LiteralScanner

LITERALS = st.sets(st.text("ab<|>", max_size=5), max_size=8)
TEXTS = st.text("ab<|>", max_size=30)


def longest_at(literals: set[str], text: str, start: int) -> str:
    return max((lit for lit in literals if text.startswith(lit, start)), key=len, default="")


@given(LITERALS, TEXTS)
def test_split_takes_the_leftmost_and_then_the_longest_literal(literals: set[str], text: str) -> None:
    expected: list[tuple[str, bool]] = []
    position = 0
    while position < len(text):
        found = longest_at(literals, text, position)
        if found:
            expected.append((found, True))
        elif expected and not expected[-1][1]:
            expected[-1] = (expected[-1][0] + text[position], False)
        else:
            expected.append((text[position], False))
        position += max(1, len(found))
    assert list(LiteralScanner(literals).split(text)) == expected


@given(LITERALS, TEXTS)
@example({"|b", "|b<"}, "|b")
def test_everything_is_found_everywhere(literals: set[str], text: str) -> None:
    scanner = LiteralScanner(literals)
    assert list(scanner.starts(text)) == [i for i in range(len(text)) if longest_at(literals, text, i)]
    for i in range(len(text)):
        ends = sorted((i + len(lit) for lit in literals if lit and text.startswith(lit, i)), reverse=True)
        assert list(scanner.ends(text, i)) == ends
    tails = [i for i in range(len(text)) if any(lit.startswith(text[i:]) and lit != text[i:] for lit in literals)]
    assert scanner.open_tail(text) == min(tails, default=len(text))
