// From a step's spans to what the ops of attention take: runs of keys. Knows nothing of number formats or threads.
#pragma once

#include <vector>

#include "ops.h"

namespace heedful {

constexpr int kSegment = 512;  // main keys that one softmax runs over before parts are merged, at absolute positions

// Which pages the one query of a span reads, in layers from `dense_layers` on: `num_pages`, for each KV head its own.
struct Selection {
    int num_pages = 0;    // of each KV head: the first, the last, `local_pages` before it, and those that weigh most
    int local_pages = 0;
    int dense_layers = 0;
    bool renew = false;         // else the last choice is read again
    int32_t* chosen = nullptr;  // (layers, K, num_pages) by index in the sequence, ascending
    int listed_pages = 0;       // whose keys are read to renew it
    int32_t* listed = nullptr;  // (layers, K, listed_pages) likewise, written; null: all candidates are
    bool covers(int layer) const { return num_pages > 0 && layer >= dense_layers; }
};

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
    Selection selection = {};  // only where there is one query and neither window nor sinks: first_page is 0
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

// Pages of the span among which a selection chooses: those that are not read in any case. The second one is the first.
int candidates_of(const Span& span);

// The pages that a selection reads, one after another as if nothing lay between them: a segment is eight of them. Its
// `pages` are those of `span` still; chosen_pages lists them for one layer and KV head.
Span span_of_chosen(const Span& span);
void chosen_pages(const Span& span, int layer, int kv_heads, int kv_head, int32_t* pages);

// Appends the pages whose last slot the span's tokens fill.
void add_filled_pages(const Span& span, std::vector<int32_t>& pages);

// Store the bounds of a full page's keys as they lie there, for one KV head. Does nothing where the page's arena has no
// bounds. rows: scratch of 64 * D floats.
void bound_page(const Ops& ops, const std::vector<PageBuffer>& arenas, const std::vector<BoundsBuffer>& bounds,
                int32_t page, int kv_head, float* rows);

// Rewrite the rows of a page into one of another format, for one KV head. rows: scratch of 2 * 64 * D floats.
void move_page(const Ops& ops, const PageBuffer& from, int from_row, const PageBuffer& to, int to_row, int kv_head,
               float* rows);

}  // namespace heedful
