#include "paging.h"

#include <algorithm>

namespace heedful {
namespace {

KeyRun sink_keys(const Span& span) {
    const int end = std::min(span.sinks, span.end), pages = (end + kPageLen - 1) / kPageLen;
    return {span.sink_pages, pages, 0, 0, end, 0, span.sink_pages[pages - 1]};
}

KeyRun segment_keys(const Span& span, int segment) {
    const int end = std::min((segment + 1) * kSegment, span.end), all = (span.end + kPageLen - 1) / kPageLen;
    const int first = std::max(segment * kSegment / kPageLen, span.first_page);
    const int end_page = (end + kPageLen - 1) / kPageLen, at = first - span.first_page;
    if (first >= end_page) return {span.pages, 0, span.first_page, end, end, span.window, span.pages[0]};
    const int32_t next = span.pages[std::min(end_page, all - 1) - span.first_page];
    const int begin = std::max(first * kPageLen, span.sinks);
    return {span.pages + at, end_page - first, first, begin, end, span.window, next};
}

}  // namespace

Parts parts_of(const Span& span, int q0, int q1) {
    const int oldest = std::max(span.window > 0 ? q0 - span.window + 1 : 0, span.sinks);
    const int end = (q1 - 1) / kSegment + 1;
    return {span.sinks > 0, std::min(oldest / kSegment, end), end};
}

KeyRun keys_of(const Span& span, const Parts& parts, int part) {
    if (parts.is_sinks(part)) return sink_keys(span);
    return segment_keys(span, parts.first_segment + part - (parts.sinks ? 1 : 0));
}

int candidates_of(const Span& span) { return span.start / kPageLen - 1 - span.selection.local_pages; }

Span span_of_chosen(const Span& span) {
    Span chosen = span;
    chosen.start = (span.selection.num_pages - 1) * kPageLen + span.start % kPageLen;
    chosen.end = chosen.start + 1;
    return chosen;
}

void chosen_pages(const Span& span, int layer, int kv_heads, int kv_head, int32_t* pages) {
    const int count = span.selection.num_pages;
    const int32_t* chosen = span.selection.chosen + (static_cast<size_t>(layer) * kv_heads + kv_head) * count;
    for (int i = 0; i < count; i++) pages[i] = span.pages[chosen[i]];
}

void add_filled_pages(const Span& span, std::vector<int32_t>& pages) {
    for (int page = span.start / kPageLen; page < span.end / kPageLen; page++)
        pages.push_back(span.pages[page - span.first_page]);
}

void bound_page(const Ops& ops, const std::vector<PageBuffer>& arenas, const std::vector<BoundsBuffer>& bounds,
                int32_t page, int kv_head, float* rows) {
    const PageBuffer& arena = arenas[page / kArenaPages];
    const BoundsBuffer& arena_bounds = bounds[page / kArenaPages];
    if (!arena_bounds.base) return;
    ops.read_page(arena, page % kArenaPages, kv_head, rows, nullptr);
    ops.store_bounds(rows, arena.head_dim, arena_bounds, page % kArenaPages, kv_head);
}

void move_page(const Ops& ops, const PageBuffer& from, int from_row, const PageBuffer& to, int to_row, int kv_head,
               float* rows) {
    float *keys = rows, *values = rows + static_cast<size_t>(kPageLen) * from.head_dim;
    ops.read_page(from, from_row, kv_head, keys, values);
    for (int slot = 0; slot < kPageLen; slot++) {
        const size_t at = static_cast<size_t>(slot) * from.head_dim;
        ops.store_row(to, to_row, kv_head, slot, keys + at, values + at);
    }
}

}  // namespace heedful
