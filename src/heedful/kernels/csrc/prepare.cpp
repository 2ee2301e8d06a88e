// Before a decoder step's threads start: room for every intermediate result, positions as cosines and sines, and the work
// cut into items (plan.cpp).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "workspace.h"

namespace heedful {
namespace {

// position(t): where token t stands.
template <typename Position>
void fill_rope(const RopeTable& rope, int tokens, Position&& position, Buffer<float>& cos, Buffer<float>& sin) {
    const size_t half = rope.inv_freq.size();
    float *c = cos.reserve(tokens * half + 1), *s = sin.reserve(tokens * half + 1);
    for (int t = 0; t < tokens; t++)
        for (size_t i = 0; i < half; i++) {
            const float angle = static_cast<float>(position(t)) * rope.inv_freq[i];
            c[t * half + i] = std::cos(angle) * rope.scaling;
            s[t * half + i] = std::sin(angle) * rope.scaling;
        }
}

}  // namespace

void Decoder::reserve(const Step& step) {
    Workspace& w = *work_;
    const size_t T = step.tokens, C = config.hidden, HD = static_cast<size_t>(config.heads) * config.head_dim;
    const size_t I = config.intermediate, widest = std::max({C, HD, I});
    std::memcpy(w.x.reserve(T * C), step.embedded, T * C * sizeof(float));
    w.y.reserve(T * C);
    w.qkv.reserve(T * (HD + 2 * static_cast<size_t>(config.kv_heads) * config.head_dim));
    w.attended.reserve(T * HD);
    w.gate.reserve(T * I);
    if (config.gated_mlp) w.up.reserve(T * I);
    w.shared.reserve(static_cast<int>(T), static_cast<int>(widest));
    if (!step.adapted.empty()) w.reduced.reserve(step.tokens, most_rank);
    w.groups.resize(step.groups);
    w.parts.resize(step.groups);
    int most_parts = 1;
    for (int i = 0; i < step.chunks * step.groups; i++)
        most_parts = std::max(most_parts, parts_of(step.spans[i], step.spans[i].start, step.spans[i].end).count());
    const int share = config.heads / config.kv_heads;
    const AttentionShape shape{config.heads, config.kv_heads, config.head_dim, 1.0f, 0.0f};
    for (int thread = 0; thread < pool_.threads(); thread++) {
        w.own[thread].reserve(1, static_cast<int>(widest));
        if (!step.adapted.empty()) w.own_reduced[thread].reserve(1, most_rank);
        w.own_attended[thread].reserve(HD);
        w.own_parts[thread].reserve(static_cast<size_t>(kQueryTile) * share * (config.head_dim + 2) * most_parts);
        w.scratch[thread].reserve(ops_.attend_scratch_bytes(shape, kQueryTile));
        SelectionScratch& selecting = w.selecting[thread];
        selecting.rows.reserve(static_cast<size_t>(kPageLen) * config.head_dim);
        selecting.prepared.reserve(ops_.bounds_query_bytes(share, config.head_dim) / sizeof(float));
        for (int i = 0; i < step.chunks * step.groups; i++) {
            const Selection& selection = step.spans[i].selection;
            selecting.pages.reserve(std::max(selection.num_pages, selection.listed_pages));
            selecting.keys.reserve(step.spans[i].start / kPageLen + 1);
        }
    }
}

// cos and sin of the tokens' positions, and of those from which queries meet the sinks.
void Decoder::place(const Step& step) {
    Workspace& w = *work_;
    w.cos.resize(ropes.size());
    w.sin.resize(ropes.size());
    w.sink_cos.resize(ropes.size() * step.groups);
    w.sink_sin.resize(ropes.size() * step.groups);
    for (size_t r = 0; r < ropes.size(); r++)
        fill_rope(ropes[r], step.tokens, [&](int t) { return step.positions[t]; }, w.cos[r], w.sin[r]);
    std::vector<int> positions(step.tokens);
    for (int group = 0; group < step.groups; group++) {
        bool apart = false;
        for (int chunk = 0; chunk < step.chunks; chunk++) {
            const int distance = step.spans[chunk * step.groups + group].sink_distance;
            apart = apart || distance >= 0;
            for (int t = step.chunk_starts[chunk]; t < step.chunk_starts[chunk + 1]; t++)
                positions[t] = distance >= 0 ? std::min<int>(step.positions[t], distance) : step.positions[t];
        }
        if (!apart) continue;
        w.sink_queries.reserve(static_cast<size_t>(step.tokens) * config.heads * config.head_dim);
        for (size_t r = 0; r < ropes.size(); r++) {
            const size_t table = r * step.groups + group;
            fill_rope(ropes[r], step.tokens, [&](int t) { return positions[t]; }, w.sink_cos[table], w.sink_sin[table]);
        }
    }
}

void Decoder::plan(const Step& step) {
    Workspace& w = *work_;
    cut_slots(step, w.slots);
    w.selections.resize(step.groups);
    for (int g = 0; g < step.groups; g++) {
        plan_group(step, step.spans, g, config, pool_.threads(), w.groups[g], w.parts[g]);
        plan_selection(step, g, config, pool_.threads(), w.selections[g]);
    }
}

}  // namespace heedful
