// The rows of a call of attend, one query of one head each: the query as factors of each kind that keys ask for, and
// what has been summed up so far.
#pragma once

#include <cstring>
#include <limits>
#include <type_traits>

#include "products.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// The rows of queries [q0, q1) of a group, in scratch. Row r is query q0 + r / group, head r % group. Of the three kinds
// of factors those are filled that the formats of the run's keys ask for. Scales turn a product to a score in powers of
// two, or to score / cap where there is a soft cap.
struct Rows {
    int count, channels, blocks;    // channels: padded
    float* floats;                  // (count, channels): f32, f16
    int16_t* shorts;                // (count, channels): q8
    float* short_scales;            // (count)
    int8_t* bytes;                  // (count, blocks, 32): q4
    float* byte_scales;             // (count, blocks)
    int32_t* byte_starts;           // (count, blocks): -8 * sum of a block's codes
    float* maxima;                  // (count), in powers of two
    float* sums;                    // (count, 8): lanes of the sum of weights
    float* values;                  // (count, channels): sum of weight * value
};

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Lays the parts of `rows` out from `at` on, and returns the end. With at = null it only counts bytes.
inline size_t lay_out(Rows& rows, uint8_t* at) {
    size_t used = at ? aligned(reinterpret_cast<uintptr_t>(at)) - reinterpret_cast<uintptr_t>(at) : 63;
    const auto place = [&](auto*& part, size_t count) {
        if (at) part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at + used);
        used += aligned(count * sizeof(*part));
    };
    const size_t count = rows.count, channels = rows.channels, blocks = rows.blocks;
    place(rows.floats, count * channels);
    place(rows.shorts, count * channels + kLanes);  // a row is rounded 16 at a time
    place(rows.short_scales, count);
    place(rows.bytes, count * blocks * kBlock);
    place(rows.byte_scales, count * blocks);
    place(rows.byte_starts, count * blocks);
    place(rows.maxima, count);
    place(rows.sums, count * kLanes);
    place(rows.values, count * channels);
    return used;
}

inline void set_floats(const float* q, int dim, float scale, float* factors) {
    for (int c = 0; c < padded(dim); ++c) factors[c] = c < dim ? q[c] * scale : 0.0f;
}

inline void set_shorts(const float* q, int dim, float scale, int16_t* factors, float* row_scale) {
    constexpr float kLimit = 32767.0f;
    const float step = scale_of(q, dim, kLimit);
    for (int c = 0; c < dim; c += kRounded) round_channels(q + c, dim - c, divisor_of(step), kLimit, factors + c);
    *row_scale = step * scale;
}

// One block of 32 channels, or of what is left of them.
inline void set_bytes(const float* q, int left, float scale, int8_t* codes, float* block_scale, int32_t* start) {
    constexpr float kLimit = 127.0f;
    const float step = scale_of(q, left < kBlock ? left : kBlock, kLimit);
    int32_t sum = 0;
    for (int c = 0; c < kBlock; c += kRounded) {
        alignas(32) int16_t rounded[kRounded];
        round_channels(q + c, left - c, divisor_of(step), kLimit, rounded);
        for (int i = 0; i < kRounded; ++i) {
            codes[c + i] = static_cast<int8_t>(rounded[i]);
            sum += rounded[i];
        }
    }
    *block_scale = step * scale;
    *start = -8 * sum;
}

struct Work {  // what a call of attend was asked
    const PageBuffer* arenas;
    const AttentionShape& shape;
    const KeyRun& keys;
    const QueryRows& queries;
    int group() const { return shape.heads / shape.kv_heads; }
    const PageBuffer& arena(int32_t page) const { return arenas[page / kArenaPages]; }
};

struct Kinds {  // of factors
    bool floats = false, shorts = false, bytes = false;
};

inline Kinds kinds_of(const Work& work) {
    Kinds kinds;
    for (int i = 0; i < work.keys.count; ++i) switch (work.arena(work.keys.pages[i]).format.keys) {
            case KvNumber::f32:
            case KvNumber::f16: kinds.floats = true; break;
            case KvNumber::q8: kinds.shorts = true; break;
            case KvNumber::q4: kinds.bytes = true; break;
        }
    return kinds;
}

inline void set_factors(const float* q, const Work& work, Kinds kinds, const Rows& rows, int r) {
    const int dim = work.shape.head_dim;
    const float scale = work.shape.softcap > 0 ? work.shape.scale / work.shape.softcap : work.shape.scale * kLog2E;
    const size_t at = static_cast<size_t>(r) * rows.channels;
    if (kinds.floats) set_floats(q, dim, scale, rows.floats + at);
    if (kinds.shorts) set_shorts(q, dim, scale, rows.shorts + at, rows.short_scales + r);
    for (int b = 0; kinds.bytes && b < rows.blocks; ++b) {
        const size_t block = static_cast<size_t>(r) * rows.blocks + b;
        set_bytes(q + b * kBlock, dim - b * kBlock, scale, rows.bytes + block * kBlock, rows.byte_scales + block,
                  rows.byte_starts + block);
    }
}

inline void start_rows(const Work& work, Rows& rows) {
    const QueryRows& queries = work.queries;
    const int group = work.group();
    const Kinds kinds = kinds_of(work);
    for (int r = 0; r < rows.count; ++r) {
        const size_t token = queries.q0 - queries.start + r / group;
        const int head = queries.kv_head * group + r % group;
        set_factors(queries.rows + token * queries.stride + head * work.shape.head_dim, work, kinds, rows, r);
        rows.maxima[r] = kNothing;
    }
    std::memset(rows.sums, 0, sizeof(float) * rows.count * kLanes);
    std::memset(rows.values, 0, sizeof(float) * rows.count * rows.channels);
}

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT
