// What the threads of a step share out: attention in items, tokens to store, pages to choose. Decided once a step, the
// same for all layers of a group.
//
// Attention work is cut into items (chunk, KV head, tile of queries), and where those are few (decoding a long context)
// also by their parts (paging.h), whose results are merged in order. Neither changes a bit of the result.
#pragma once

#include <vector>

#include "buffer.h"
#include "step.h"

namespace heedful {

constexpr int kQueryTile = 32;

// Queries [q0, q1) of one chunk for one KV head over parts [p0, p1) of their keys; result: where the partial results go
// when parts are shared out, null when this item merges them itself.
struct Item {
    const Span* span;
    int first_token, kv_head, q0, q1;
    Parts parts;
    int p0, p1;
    float* result;
};

// Partial results of one query and head, to be merged into out of one token.
struct MergeJob {
    const float* parts;
    size_t stride;
    int count, token, head;
    bool rotated;
};

// Tokens [begin, end) of a chunk whose positions share eight slots of a page: one thread stores them.
struct SlotGroup {
    int chunk, begin, end;
};

// A span whose query, of one token, chooses pages anew; where the bounds of its candidates go, (H, candidates), and what
// listed pages weigh, (H, listed_pages) each.
struct Renewal {
    const Span* span;
    int token;
    float *bounds, *maxima, *sums;
    bool lists() const { return span->selection.listed != nullptr; }
};

struct GroupWork {
    std::vector<Item> items;
    std::vector<MergeJob> merges;  // empty when the items merge for themselves
};

// What one layer group does about page selection in a step.
struct GroupSelection {
    std::vector<int32_t> filled;  // pages whose bounds are to be stored
    bool any = false;
    int dense_layers = 0;         // the selecting spans' own
    std::vector<Span> spans;      // as the layers from there on read them
    GroupWork work;               // in those layers
    std::vector<Renewal> renewals;
    Buffer<float> parts, bounds, weights;
    std::vector<int32_t> candidates;  // 1, 2, ...: listed where all are
    bool covers(int layer) const { return any && layer >= dense_layers; }
};

// Cut one group's attention over `spans` (chunks, groups) into items; results lie in `results` where parts are shared
// out.
void plan_group(const Step& step, const Span* spans, int group, const DecoderConfig& c, int threads, GroupWork& work,
                Buffer<float>& results);

// A group's filled pages, selecting spans and renewals.
void plan_selection(const Step& step, int group, const DecoderConfig& c, int threads, GroupSelection& selection);

// The chunks' tokens by eight slots.
void cut_slots(const Step& step, std::vector<SlotGroup>& slots);

}  // namespace heedful
