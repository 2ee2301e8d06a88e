"""Stop strings in streamed text: what may be shown, what must wait, and where the answer ends.

Knows nothing of tokens. The outcome is that of reading the text one character at a time, however it is cut into
chunks: the answer ends as soon as any stop string is complete. When several complete at the same character, the
longest counts, so that nothing of it is shown.
"""

from __future__ import annotations


class StopStrings:
    """`stops`: strings that end the answer and are not part of it; none may be empty.

    Feed every piece of text to `push`, and call `flush` when no more comes.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), stops
        self._stops = stops
        self._held = ""  # longest end of the text so far that a stop string may still grow from
        self.matched: str | None = None
        """The stop string that ended the answer, if any."""

    def push(self, text: str) -> str:
        """The text that is now safe to show. After a match it is always empty."""
        if self.matched is not None:
            return ""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[:start]
        safe_len = len(text) - self._open_len(text)
        self._held = text[safe_len:]
        return text[:safe_len]

    def flush(self) -> str:
        """The text held back, which no stop string can end any more."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first; of those, the one that starts first."""
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _open_len(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
