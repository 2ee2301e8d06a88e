"""Guessing what comes next from what was said before (prompt lookup), and giving up where that does not pay.

    drafter = Drafter(prompt_ids)
    guessed = drafter.guess(most=8)      # ids that followed the newest three tokens when they last occurred
    drafter.judge(len(guessed), right)   # how many of them the model then said

Pure integers. Guesses never change what is said, only how many steps it takes: the engine keeps those that the model
chooses itself. Wrong ones are dear on a CPU, where a step's time grows with its tokens: the length doubles where all
were right, halves where half were wrong, and at 0 guessing rests, longer each time.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
FIRST_GUESS = 4
LONGEST_GUESS = 12
SHORTEST_REST = 16  # tokens
LONGEST_REST = 512


class Drafter:
    """One sequence's guesses. `token_ids` is the sequence's own list, which grows."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._follows: dict[tuple[int, ...], int] = {}
        """Three tokens → position after their latest occurrence, the newest three left out."""
        self._indexed = NGRAM  # n-grams that end before this position are in _follows
        self._length = FIRST_GUESS
        self._rest_until = 0
        self._rest = SHORTEST_REST

    def guess(self, most: int) -> list[int]:
        """Up to `most` ids; [] where nothing like it was said before, or while guessing rests."""
        self._index()
        ids = self._token_ids
        if len(ids) < max(NGRAM + 1, self._rest_until) or most < 1:
            return []
        at = self._follows.get(tuple(ids[-NGRAM:]))
        if at is None:
            return []
        guessed: list[int] = []
        for position in range(at, at + min(most, self._length)):  # runs into the guesses where a text repeats itself
            guessed.append(ids[position] if position < len(ids) else guessed[position - len(ids)])
        return guessed

    def judge(self, guessed: int, right: int) -> None:
        """After a step: of so many guesses so many were right."""
        if not guessed:
            return
        if right == guessed:
            self._length = min(LONGEST_GUESS, 2 * self._length)
            self._rest = SHORTEST_REST
        elif 2 * right < guessed:
            self._length //= 2
        if not self._length:
            self._length = FIRST_GUESS // 2
            self._rest_until = len(self._token_ids) + self._rest
            self._rest = min(LONGEST_REST, 2 * self._rest)

    def _index(self) -> None:
        ids = self._token_ids
        for end in range(self._indexed, len(ids)):
            self._follows[tuple(ids[end - NGRAM : end])] = end
        self._indexed = max(self._indexed, len(ids))
