"""Exact counts of attention's work, from the plan that the kernels execute. Python ints, no rounding, no sampling.

Owns the definition of a token visit and of a KV row (design.md section 2); every other count is made of these. Knows
nothing of bytes, seconds or joules.
"""

from collections import Counter

from heedful.cache.policy import PAGE_LEN
from heedful.request import FormatRun, KeySpan, KVFormat


def attended(start: int, end: int, window: int | None) -> int:
    """Keys seen by the queries at positions [start, end) of one head: Σ min(p + 1, window); None: no window.

    Closed form: while p + 1 <= window the terms are 1, 2, 3, …; after that each is `window`.
    """
    return _attended_before(end, window) - _attended_before(start, window)


def _attended_before(end: int, window: int | None) -> int:
    rising = end if window is None else min(end, window)
    level = 0 if window is None else (end - rising) * window
    return rising * (rising + 1) // 2 + level


def reach(span: KeySpan) -> int | None:
    """Most keys that a query of the span sees; None: no limit."""
    return None if span.window is None else span.window + span.sinks


def selected_layers(span: KeySpan) -> tuple[int, ...]:
    """The span's layers that read chosen pages only."""
    selection = span.selection
    return () if selection is None else tuple(layer for layer in span.layers if layer >= selection.dense_layers)


def selected_keys(span: KeySpan) -> int:
    """Keys that a query sees in a layer of `selected_layers`: whole pages, and its own page up to itself."""
    assert span.selection is not None, span
    return (span.selection.num_pages - 1) * PAGE_LEN + (span.end - 1) % PAGE_LEN + 1


def visits(span: KeySpan, heads: int) -> int:
    """Token visits of one chunk in one layer group; `heads` are the query heads of a layer."""
    chosen = len(selected_layers(span))
    seen = (len(span.layers) - chosen) * attended(span.start, span.end, reach(span))
    return heads * (seen + (chosen * selected_keys(span) if chosen else 0))


def dense_visits(span: KeySpan, heads: int) -> int:
    """What the chunk's queries would have visited in these layers without window and selection."""
    return heads * len(span.layers) * attended(span.start, span.end, None)


def rows_read(span: KeySpan, kv_heads: int) -> Counter[KVFormat]:
    """Rows of keys that the chunk reads, by their pages' format: every position that any of its queries sees, once.

    As many rows of values are read.
    """
    chosen = selected_layers(span)
    rows: Counter[KVFormat] = Counter()
    for run in span.formats:
        keys = _overlap(run, 0, min(span.sinks, span.end)) + _overlap(run, span.first_key, span.end)
        rows[run.format] += kv_heads * (len(span.layers) - len(chosen)) * keys
        if chosen:
            rows[run.format] += _rows_chosen(span, chosen, run, kv_heads)
    return rows


def rows_written(span: KeySpan, kv_heads: int) -> Counter[KVFormat]:
    """Rows of keys that the chunk stores, by format: those of its own positions. As many rows of values are."""
    rows: Counter[KVFormat] = Counter()
    for run in span.formats:
        rows[run.format] += kv_heads * len(span.layers) * _overlap(run, span.start, span.end)
    return rows


def bounds_read(span: KeySpan, kv_heads: int) -> int:
    """Pages' bounds that were read to choose pages, one a KV head, layer and page that is not read in any case."""
    if span.selection is None or not span.selection.renew:
        return 0
    pages = (span.end - 1) // PAGE_LEN + 1
    return kv_heads * len(selected_layers(span)) * (pages - 1 - span.selection.local_pages)


def _overlap(run: FormatRun, begin: int, end: int) -> int:
    return max(0, min(run.end, end) - max(run.begin, begin))


def _rows_chosen(span: KeySpan, layers: tuple[int, ...], run: FormatRun, kv_heads: int) -> int:
    if len(span.formats) == 1:
        return kv_heads * len(layers) * selected_keys(span)
    assert span.selection is not None, span
    first = span.selection.chosen[list(layers)] * PAGE_LEN  # positions where the chosen pages begin
    in_run = first[(first >= run.begin) & (first < run.end)]
    return int((span.end - in_run).clip(max=PAGE_LEN).sum())
