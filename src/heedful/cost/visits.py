"""Exact counts of attention's work, from the plan that the kernels execute. Python ints, no rounding, no sampling.

Owns the definition of a token visit and of a KV row (design.md section 2); every other count is made of these. Knows
nothing of bytes, seconds or joules.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heedful.cache.policy import PAGE_LEN, candidate_pages
from heedful.request import Chunk, FormatRun, KeySpan, KVFormat

RowCounts = list[tuple[KVFormat, int]]
"""Rows of keys by the format of their pages; as many rows of values go with them. A format may come twice."""


def attended(start: int, end: int, window: int | None) -> int:
    """Keys seen by the queries at positions [start, end) of one head: Σ min(p + 1, window); None: no window.

    Closed form: while p + 1 <= window the terms are 1, 2, 3, …; after that each is `window`.
    """
    if end - start == 1:  # a decode step, of which there are many
        return end if window is None else min(end, window)
    return _attended_before(end, window) - _attended_before(start, window)


def _attended_before(end: int, window: int | None) -> int:
    rising = end if window is None else min(end, window)
    level = 0 if window is None else (end - rising) * window
    return rising * (rising + 1) // 2 + level


def selected_layers(span: KeySpan) -> list[int]:
    """The span's layers that read chosen pages only."""
    selection = span.selection
    return [] if selection is None else [layer for layer in span.layers if layer >= selection.dense_layers]


def selected_keys(num_pages: int, position: int) -> int:
    """Keys that the query at `position` sees where it reads `num_pages` pages: its own only up to itself."""
    return (num_pages - 1) * PAGE_LEN + position % PAGE_LEN + 1


def visits(span: KeySpan, heads: int) -> int:
    """Token visits of one chunk in one layer group; `heads` are the query heads of a layer."""
    most_seen = None if span.window is None else span.window + span.sinks
    seen, layers = attended(span.start, span.end, most_seen), len(span.layers)
    if span.selection is None:
        return heads * layers * seen
    chosen = len(selected_layers(span))
    return heads * ((layers - chosen) * seen + chosen * selected_keys(span.selection.num_pages, span.start))


def dense_visits(span: KeySpan, heads: int) -> int:
    """What the chunk's queries would have visited in these layers without window and selection."""
    return heads * len(span.layers) * attended(span.start, span.end, None)


def rows_read(span: KeySpan, kv_heads: int) -> RowCounts:
    """Rows of keys that the chunk's queries read: every position that any of them sees, once.

    Of a span with a selection this is known when the step has run, and `selection.chosen` is what was read.
    """
    chosen = selected_layers(span)
    of_head, sinks = kv_heads * (len(span.layers) - len(chosen)), min(span.sinks, span.end)
    if len(span.formats) == 1:
        rows = [(span.formats[0].format, of_head * (sinks + span.end - span.first_key))]
    else:
        rows = [
            (run.format, of_head * (_overlap(run, 0, sinks) + _overlap(run, span.first_key, span.end)))
            for run in span.formats
        ]
    return rows + _rows_chosen(span, chosen, kv_heads) if chosen else rows


def rows_written(span: KeySpan, kv_heads: int) -> tuple[KVFormat, int]:
    """Rows of keys that the chunk stores: those of its own positions, which are in the newest pages' format."""
    return span.formats[-1].format, kv_heads * len(span.layers) * (span.end - span.start)


def rows_moved(chunk: Chunk, kv_heads: int) -> list[tuple[KVFormat, KVFormat, int]]:
    """(format read, format written, rows of keys) of each page that was rewritten before the step."""
    found = []
    for move in chunk.moves:
        span = chunk.spans[move.group]
        precise, main = span.formats[0].format, span.formats[1].format  # the first page stays precise
        found.append((precise, main, kv_heads * len(span.layers) * PAGE_LEN))
    return found


def bounds_read(span: KeySpan, kv_heads: int) -> int:
    """Pages' bounds that were read to list pages: one a KV head, layer and page that may be chosen."""
    selection = span.selection
    if selection is None or selection.listed is None:
        return 0
    pages = span.start // PAGE_LEN + 1
    return kv_heads * len(selected_layers(span)) * candidate_pages(pages, selection.local_pages)


def keys_listed(span: KeySpan, kv_heads: int) -> RowCounts:
    """Rows of keys that were read alone, without their values, to choose pages: those of all listed pages.

    Known, like the rows of chosen pages, when the step has run.
    """
    selection = span.selection
    if selection is None or not selection.renew:
        return []
    layers = selected_layers(span)
    all_rows = kv_heads * len(layers) * selection.listed_pages * PAGE_LEN
    if len(span.formats) == 1:
        return [(span.formats[0].format, all_rows)]
    if selection.listed is not None:
        return _rows_of_pages(span, selection.listed[layers], all_rows)
    end = (1 + selection.listed_pages) * PAGE_LEN
    return [(run.format, kv_heads * len(layers) * _overlap(run, PAGE_LEN, end)) for run in span.formats]


def _overlap(run: FormatRun, begin: int, end: int) -> int:
    return max(0, min(run.end, end) - max(run.begin, begin))


def _rows_chosen(span: KeySpan, layers: list[int], kv_heads: int) -> RowCounts:
    """Chosen pages are full but for the query's own, which is one of the newest."""
    assert span.selection is not None, span
    rows = kv_heads * len(layers) * selected_keys(span.selection.num_pages, span.start)
    return _rows_of_pages(span, span.selection.chosen[layers], rows)


def _rows_of_pages(span: KeySpan, pages: npt.NDArray[np.int32], rows: int) -> RowCounts:
    """Of so many rows in `pages`, by index: all pages are full but those of the newest format."""
    found = []
    for run in span.formats[:-1]:
        inside = (pages >= run.begin // PAGE_LEN) & (pages < run.end // PAGE_LEN)
        found.append((run.format, PAGE_LEN * int(np.count_nonzero(inside))))
        rows -= found[-1][1]
    return [*found, (span.formats[-1].format, rows)]
