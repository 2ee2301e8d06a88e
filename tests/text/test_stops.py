"""Stop strings: any chunking gives what reading the whole text gives, and nothing of a stop string is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.text.stops import StopStrings

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4).map(tuple)
CHUNKS = st.lists(st.text("ab\n", max_size=5), max_size=12)


def shown(stops: tuple[str, ...], chunks: list[str]) -> tuple[str, str | None]:
    reader = StopStrings(stops)
    text = "".join(map(reader.push, chunks)) + reader.flush()
    return text, reader.matched


def by_definition(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, CHUNKS)
def test_chunking_changes_nothing(stops: tuple[str, ...], chunks: list[str]) -> None:
    assert shown(stops, chunks) == by_definition(stops, "".join(chunks))


@given(STOPS, CHUNKS)
def test_only_what_may_become_a_stop_is_held_back(stops: tuple[str, ...], chunks: list[str]) -> None:
    reader = StopStrings(stops)
    given_text = seen = ""
    for chunk in chunks:
        given_text += chunk
        seen += reader.push(chunk)
        if reader.matched is None:
            held = given_text[len(seen) :]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "chunks", "text", "matched"),
    [
        (("<|im_end|>",), ["Hi", "<|im", "_end", "|> more"], "Hi", "<|im_end|>"),
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (("aab",), ["a", "a", "a", "b"], "a", "aab"),  # the held part slides along
        (("bc", "abcd"), ["abcd"], "a", "bc"),  # complete first
        (("bc", "abc"), ["xabc"], "x", "abc"),  # complete together: the longer one
        (("END",), ["the EN"], "the EN", None),
        ((), ["a", "b"], "ab", None),
    ],
)
def test_examples(stops: tuple[str, ...], chunks: list[str], text: str, matched: str | None) -> None:
    assert shown(stops, chunks) == (text, matched)


def test_nothing_is_shown_after_a_match() -> None:
    reader = StopStrings(("x",))
    assert [reader.push("ax"), reader.push("bcd"), reader.flush()] == ["a", "", ""]
