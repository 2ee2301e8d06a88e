// From a step's spans to what the ops of attention take: runs of keys. Knows nothing of number formats or threads.
#pragma once

#include "ops.h"

namespace heedful {

constexpr int kSegment = 512;  // main keys that one softmax runs over before parts are merged, at absolute positions

// What one sequence's chunk reads in a layer group: queries at [start, end). A query sees the main keys, those from
// `sinks` on that its window reaches, and the keys before `sinks`.
struct Span {
    int start, end;
    int window;            // 0: none; else a query sees itself and the window - 1 positions before it
    int first_page;        // index in the sequence of pages[0]
    const int32_t* pages;  // of positions [first_page * 64, end)
    int sinks;             // 0: none; else the first so many keys are a part of their own
    const int32_t* sink_pages;
    int sink_distance;  // queries beyond this position meet the sinks as if they stood there; -1: as they stand
    bool rotated;       // queries, keys, values by a Hadamard matrix
};

// A query's keys in parts, each with a softmax of its own until they are merged in this order: the sinks, if there are
// any, then segments [first_segment, end_segment) of main keys.
struct Parts {
    bool sinks;
    int first_segment, end_segment;
    int count() const { return (sinks ? 1 : 0) + end_segment - first_segment; }
    bool is_sinks(int part) const { return sinks && part == 0; }
};

// Of queries [q0, q1) of the span.
Parts parts_of(const Span& span, int q0, int q1);

// The keys of one part.
KeyRun keys_of(const Span& span, const Parts& parts, int part);

// Rewrite the rows of a page into one of another format, for one KV head. rows: scratch of 2 * 64 * D floats.
void move_page(const Ops& ops, const PageBuffer& from, int from_row, const PageBuffer& to, int to_row, int kv_head,
               float* rows);

}  // namespace heedful
