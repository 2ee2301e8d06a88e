"""Exact counts of attention's work, from the plan that the kernels execute. Python ints, no rounding, no sampling.

Owns the definition of a token visit and of a KV row (design.md section 2); every other count is made of these. Knows
nothing of bytes, seconds or joules.
"""

from heedful.request import KeySpan


def attended(start: int, end: int, window: int | None) -> int:
    """Keys seen by the queries at positions [start, end) of one head: Σ min(p + 1, window); None: no window.

    Closed form: while p + 1 <= window the terms are 1, 2, 3, …; after that each is `window`.
    """
    return _attended_before(end, window) - _attended_before(start, window)


def _attended_before(end: int, window: int | None) -> int:
    rising = end if window is None else min(end, window)
    level = 0 if window is None else (end - rising) * window
    return rising * (rising + 1) // 2 + level


def visits(span: KeySpan, heads: int) -> int:
    """Token visits of one chunk in one layer group; `heads` are the query heads of a layer."""
    return heads * len(span.layers) * attended(span.start, span.end, span.window)


def dense_visits(span: KeySpan, heads: int) -> int:
    """What the chunk's queries would have visited in these layers without the window."""
    return heads * len(span.layers) * attended(span.start, span.end, None)


def rows_read(span: KeySpan, kv_heads: int) -> int:
    """KV rows that the chunk reads: the key and the value of every position that any of its queries sees, once."""
    return 2 * kv_heads * len(span.layers) * (span.end - span.first_key)


def rows_written(span: KeySpan, kv_heads: int) -> int:
    """KV rows that the chunk stores: the key and the value of each of its own positions."""
    return 2 * kv_heads * len(span.layers) * (span.end - span.start)
