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
