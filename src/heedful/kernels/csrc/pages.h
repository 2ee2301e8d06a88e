// How a page lies in memory, and the rounding of rows to it; for pages.cpp, which writes and reads pages, and
// attention.cpp, which computes on them. D channels a head; P: D rounded up to a multiple of 8; B blocks of 32.
//
// A page holds, KV head after KV head, the side of the keys and the side of the values, each a multiple of 64 bytes and
// each in its own number format. Channels past D are zero.
//   f32, f16  keys   [8 groups][P channels][8 tokens]
//             values [64 tokens][P channels]
//   q8        keys   int8 [8 groups][P / 2 channel pairs][8 tokens][2 channels], then 64 float scales
//             values int8 [32 token pairs][P channels][2 tokens],                then 64 float scales
//   q4        keys   [8 groups][B blocks] of 144 bytes: half scale[8 tokens], then 4 vectors v of 32 bytes; byte
//                    4 t + j of a vector holds channels 4 v + j (low nibble) and 16 + 4 v + j (high nibble) of token t
//             values uint32 [8 groups][P channels]: bits 4 i of the low half hold token 2 i, of the high half token
//                    2 i + 1 of the group's eight; then half scales [B blocks][64 tokens]
// So the product of attention is always a row of factors times lanes of eight, no sum across lanes, and a head's keys
// and values are one stream.
#pragma once

#include <cmath>

#include "lanes.h"
#include "ops.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kPageGroups = kPageLen / kLanes;
constexpr int kQ4KeyBytes = 2 * kLanes + 4 * 32;  // of 8 tokens and 32 channels

inline int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }
inline int blocks_of(int head_dim) { return (head_dim + kBlock - 1) / kBlock; }

// Bytes of the elements of a side, which scales follow: all of it where there are none.
inline size_t element_bytes(KvNumber number, int head_dim) {
    const size_t elements = static_cast<size_t>(kPageLen) * padded(head_dim);
    switch (number) {
        case KvNumber::f32: return elements * sizeof(float);
        case KvNumber::f16: return elements * sizeof(uint16_t);
        case KvNumber::q8: return elements;
        case KvNumber::q4: return elements / 2;
    }
    return 0;
}

// Bytes of one side of one KV head in a page.
inline size_t key_side_bytes(KvNumber number, int head_dim) {
    if (number == KvNumber::q4) return static_cast<size_t>(kPageGroups) * blocks_of(head_dim) * kQ4KeyBytes;
    return element_bytes(number, head_dim) + (number == KvNumber::q8 ? kPageLen * sizeof(float) : 0);
}
inline size_t value_side_bytes(KvNumber number, int head_dim) {
    if (number != KvNumber::q4) return key_side_bytes(number, head_dim);
    return element_bytes(number, head_dim) + static_cast<size_t>(blocks_of(head_dim)) * kPageLen * sizeof(uint16_t);
}

inline uint8_t* key_side(const PageBuffer& pages, int row, int kv_head) {
    const size_t head_bytes =
        key_side_bytes(pages.format.keys, pages.head_dim) + value_side_bytes(pages.format.values, pages.head_dim);
    return pages.base + row * pages.page_bytes + kv_head * head_bytes;
}
inline uint8_t* value_side(const PageBuffer& pages, int row, int kv_head) {
    return key_side(pages, row, kv_head) + key_side_bytes(pages.format.keys, pages.head_dim);
}

inline float largest_magnitude(const float* x, int count) {
    Floats best = splat(0.0f);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) best = max(best, abs(load(x + i)));
    float magnitude = largest(best);
    for (; i < count; ++i) magnitude = std::fabs(x[i]) > magnitude ? std::fabs(x[i]) : magnitude;
    return magnitude;
}

// Scale of a row: max abs / limit. A row of zeros has scale 0, and any divisor makes its codes 0.
inline float scale_of(const float* x, int count, float limit) { return largest_magnitude(x, count) / limit; }
inline float divisor_of(float scale) { return scale > 0 ? scale : 1.0f; }

inline Floats bounded(Floats x, float limit) { return min(max(x, splat(-limit)), splat(limit)); }

constexpr int kRounded = 2 * kLanes;  // channels rounded at once

// codes[i] = x[i] / divisor, rounded half to even, in [-limit, limit], for 16 channels; codes past `count` are 0.
inline void round_channels(const float* x, int count, float divisor, float limit, int16_t* codes) {
    float tail[kRounded] = {};
    if (count < kRounded) {
        if (count > 0) std::memcpy(tail, x, sizeof(float) * count);
        x = tail;
    }
    const Floats low = div(load(x), splat(divisor)), high = div(load(x + kLanes), splat(divisor));
    store_pairs(codes, round_to_shorts(bounded(low, limit), bounded(high, limit)));
}

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT
