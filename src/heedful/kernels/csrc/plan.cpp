#include "plan.h"

#include <algorithm>
#include <utility>

namespace heedful {
namespace {

// One group's attention as items that merge for themselves.
void cut_queries(const Step& step, const Span* spans, int group, const DecoderConfig& c, std::vector<Item>& items) {
    items.clear();
    for (int chunk = 0; chunk < step.chunks; chunk++) {
        const Span& span = spans[chunk * step.groups + group];
        for (int q0 = span.start; q0 < span.end; q0 += kQueryTile) {
            const int q1 = std::min(span.end, q0 + kQueryTile);
            const Parts parts = parts_of(span, q0, q1);
            for (int head = 0; head < c.kv_heads; head++)
                items.push_back({&span, step.chunk_starts[chunk], head, q0, q1, parts, 0, parts.count(), nullptr});
        }
    }
}

}  // namespace

void plan_group(const Step& step, const Span* spans, int group, const DecoderConfig& c, int threads, GroupWork& work,
                Buffer<float>& results) {
    work.merges.clear();
    cut_queries(step, spans, group, c, work.items);
    if (static_cast<int>(work.items.size()) >= 4 * threads) {
        std::reverse(work.items.begin(), work.items.end());  // the longest first
        return;
    }
    const std::vector<Item> whole = std::move(work.items);
    const int share = c.heads / c.kv_heads;
    const auto stride_of = [&](const Item& item) { return static_cast<size_t>(item.q1 - item.q0) * share * (c.head_dim + 2); };
    size_t floats = 0;
    for (const Item& item : whole) floats += stride_of(item) * item.p1;
    float* next = results.reserve(floats);
    work.items.clear();
    for (const Item& item : whole) {
        const size_t stride = stride_of(item);
        for (int q = item.q0; q < item.q1; q++)
            for (int g = 0; g < share; g++)
                work.merges.push_back({next + (static_cast<size_t>(q - item.q0) * share + g) * (c.head_dim + 2), stride, item.p1,
                                       item.first_token + q - item.span->start, item.kv_head * share + g, item.span->rotated});
        for (int p = 0; p < item.p1; p++, next += stride) {
            Item piece = item;
            piece.p0 = p, piece.p1 = p + 1, piece.result = next;
            work.items.push_back(piece);
        }
    }
}

void plan_selection(const Step& step, int group, const DecoderConfig& c, int threads, GroupSelection& selection) {
    selection.filled.clear();
    selection.renewals.clear();
    selection.any = false;
    size_t bounds = 0, weights = 0;
    for (int chunk = 0; chunk < step.chunks; chunk++) {
        const Span& span = step.spans[chunk * step.groups + group];
        add_filled_pages(span, selection.filled);
        if (span.selection.num_pages == 0) continue;
        selection.any = true;
        selection.dense_layers = span.selection.dense_layers;
        if (!span.selection.renew) continue;
        selection.renewals.push_back({&span, step.chunk_starts[chunk], nullptr, nullptr, nullptr});
        if (span.selection.listed) bounds += static_cast<size_t>(c.heads) * candidates_of(span);
        weights += static_cast<size_t>(c.heads) * 2 * span.selection.listed_pages;
        for (int page = static_cast<int>(selection.candidates.size()); page < candidates_of(span); page++)
            selection.candidates.push_back(1 + page);
    }
    if (!selection.any) return;
    float *next_bounds = selection.bounds.reserve(bounds), *next_weights = selection.weights.reserve(weights);
    for (Renewal& renewal : selection.renewals) {
        const size_t listed = static_cast<size_t>(c.heads) * renewal.span->selection.listed_pages;
        renewal.bounds = next_bounds;
        if (renewal.lists()) next_bounds += static_cast<size_t>(c.heads) * candidates_of(*renewal.span);
        renewal.maxima = next_weights;
        renewal.sums = next_weights + listed;
        next_weights += 2 * listed;
    }
    selection.spans.assign(step.spans, step.spans + static_cast<size_t>(step.chunks) * step.groups);
    for (Span& span : selection.spans)
        if (span.selection.num_pages > 0) span = span_of_chosen(span);
    plan_group(step, selection.spans.data(), group, c, threads, selection.work, selection.parts);
}

void cut_slots(const Step& step, std::vector<SlotGroup>& slots) {
    constexpr int kShared = 8;
    slots.clear();
    for (int chunk = 0; chunk < step.chunks; chunk++) {
        const int first = step.chunk_starts[chunk], last = step.chunk_starts[chunk + 1];
        const int start = step.spans[chunk * step.groups].start;
        for (int begin = first; begin < last;) {
            const int end = std::min(last, begin + kShared - (start + begin - first) % kShared);
            slots.push_back({chunk, begin, end});
            begin = end;
        }
    }
}

}  // namespace heedful
