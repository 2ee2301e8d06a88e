"""Which positions are looked at closely, so that any run takes bounded time, memory and bytes. Ints only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_ANSWER_QUERIES = 256
MOST_PROMPT_QUERIES = 128
MOST_MAP_STEPS = 64
MOST_MAP_CELLS = 360_000
"""Of the page map: layers, and their mean, times steps times pages; a byte each."""
MOST_LENS_POSITIONS = 16


@dataclass(frozen=True)
class Samples:
    """Positions, ascending."""

    queries: tuple[int, ...]
    """Whose attention rows are rebuilt."""
    map_rows: tuple[int, ...]
    """Indices into `queries`: those that the page map shows."""
    lens: tuple[int, ...]
    """Whose hidden states the logit lens reads after every layer: the token that follows each is what it should say."""


def choose_samples(prompt_len: int, computed_len: int, pages: int, layers: int) -> Samples:
    """All positions where they are few; else evenly spread ones, more of the answer than of the prompt."""
    prompt_len = min(prompt_len, computed_len)
    asked = spread(0, prompt_len, MOST_PROMPT_QUERIES)
    answered = spread(prompt_len, computed_len, MOST_ANSWER_QUERIES)
    queries = asked + answered
    most = max(1, min(MOST_MAP_STEPS, MOST_MAP_CELLS // ((layers + 1) * pages)))
    rows = spread(0, len(queries), most) if not answered else _map_rows(len(asked), len(queries), most)
    first = max(0, prompt_len - 1)  # it predicts the answer's first token
    return Samples(queries, rows, spread(first, computed_len, MOST_LENS_POSITIONS))


def _map_rows(asked: int, queries: int, most: int) -> tuple[int, ...]:
    """A quarter for the prompt, or what the answer leaves."""
    answered = queries - asked
    of_prompt = max(most // 4, most - answered)
    of_prompt = min(of_prompt, asked)
    return spread(0, asked, of_prompt) + spread(asked, queries, most - of_prompt)


def spread(begin: int, end: int, most: int) -> tuple[int, ...]:
    """At most so many of [begin, end), evenly apart, the last one among them."""
    count = min(most, end - begin)
    if count <= 0:
        return ()
    if count == 1:
        return (end - 1,)
    return tuple(int(at) for at in np.linspace(begin, end - 1, count).round())
