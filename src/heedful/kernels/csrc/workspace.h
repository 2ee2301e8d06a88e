// What the threads of a decoder step share, and what each has for itself. prepare.cpp gets it ready, step.cpp works on it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "inputs.h"
#include "plan.h"
#include "step.h"

namespace heedful {

constexpr int kMostParts = 3;  // of a product: q, k and v

// A x of some tokens, by part of a product. A run's rows lie one after another, each as long as its own rank.
struct Reduced {
    Buffer<float> parts[kMostParts];
    void reserve(int tokens, int most_rank) {
        for (Buffer<float>& part : parts) part.reserve(static_cast<size_t>(tokens) * most_rank);
    }
    // Where token 0 would stand, so that token t of the run is at t · rank; runs of different ranks do not overlap.
    float* rows(const AdapterRun& run, int part, int rank, int most_rank) const {
        return parts[part].get() + static_cast<size_t>(run.begin) * (most_rank - rank);
    }
};

struct SelectionScratch {
    Buffer<float> rows;       // keys of a page
    Buffer<float> prepared;   // a group's queries
    Buffer<int32_t> keys;     // of a choice
    Buffer<int32_t> pages;    // chosen
};

// Of a run of attention items: how many threads have taken. A cache line of its own.
struct alignas(64) NextItem {
    std::atomic<int> taken{0};
};

struct Decoder::Workspace {
    Buffer<float> x, y, qkv, attended, gate, up;
    Buffer<float> sink_queries;                // (T, H·D), where a span has a sink distance
    std::vector<Buffer<float>> cos, sin;       // by rope table: (T, half)
    std::vector<Buffer<float>> sink_cos, sink_sin;  // by rope table and group, at the positions that meet the sinks
    std::vector<SlotGroup> slots;
    std::vector<Buffer<float>> parts;  // by group
    InputBuffers shared;
    std::vector<InputBuffers> own;               // by thread, for a lone token
    Reduced reduced;
    std::vector<Reduced> own_reduced;            // likewise
    std::vector<Buffer<float>> own_parts, own_attended;
    std::vector<Buffer<uint8_t>> scratch;
    std::vector<GroupWork> groups;
    std::vector<GroupSelection> selections;   // by group
    std::vector<SelectionScratch> selecting;  // by thread
    std::unique_ptr<NextItem[]> next_items;  // (layers, threads)
};

}  // namespace heedful
