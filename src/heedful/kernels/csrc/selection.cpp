// Page selection (Quest, arXiv:2406.10774): bounds of a page's keys, what a query can at most find in a page, and which
// pages promise most. Shapes as in ops.h; P: D rounded up to a multiple of 8, channels past D are zero.
//
// A page's bounds of one KV head: int8 [P channels][least, largest], then one float scale, then 4 bytes of padding. So both halves of max(q·hi, q·lo) are one product of pairs: a query's channel stands as [min(q, 0),
// max(q, 0)], and lane by lane pairs are multiplied and summed as in attention over 8-bit keys.
//
// Queries are rounded to int16 with one step for the heads that share a KV head, so that the largest of their sums is
// found among integers and is the same in every variant. What that costs: a bound is off by at most half a step times
// the sum of the larger bound of each channel, 1.5e-5 of max |q| · Σ max(|lo|, |hi|).

#include <cmath>
#include <cstring>

#include "lanes.h"
#include "ops.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kPair = 2;
constexpr float kCodes = 127.0f;       // of bounds
constexpr float kFactors = 32767.0f;   // of queries
constexpr float kHysteresis = 0.1f;    // of the range of bounds, for pages that were chosen last time
constexpr int kAhead = 8;              // pages whose bounds are on their way

int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

size_t head_bytes(int channels) { return static_cast<size_t>(kPair) * channels + 2 * sizeof(float); }

uint8_t* bounds_of(const BoundsBuffer& bounds, int page, int kv_head, int channels) {
    return bounds.base + page * bounds.page_bytes + kv_head * head_bytes(channels);
}

// ---- bounds of a page ---------------------------------------------------------------------------------------------

// Least and largest of 64 keys (64, D), channel by channel.
void find_range(const float* keys, int dim, float* least, float* most) {
    std::memcpy(least, keys, sizeof(float) * dim);
    std::memcpy(most, keys, sizeof(float) * dim);
    for (int slot = 1; slot < kPageLen; ++slot) {
        const float* key = keys + static_cast<size_t>(slot) * dim;
        for (int c = 0; c < dim; ++c) least[c] = key[c] < least[c] ? key[c] : least[c];
        for (int c = 0; c < dim; ++c) most[c] = key[c] > most[c] ? key[c] : most[c];
    }
}

float larger_magnitude(float a, float b) { return std::fabs(a) > std::fabs(b) ? std::fabs(a) : std::fabs(b); }

// What is not a number becomes -127.
int8_t code_of(float x) { return static_cast<int8_t>(x > -kCodes ? (x < kCodes ? x : kCodes) : -kCodes); }

// ---- bounds of a query --------------------------------------------------------------------------------------------

// Sum over a page's channels of both products of pairs, largest among the rows.
template <int R>
int32_t largest_sum(const int16_t* factors, const int8_t* bounds, int channels) {
    Ints sums[R];
    for (Ints& sum : sums) sum = no_ints();
    for (int c = 0; c < kPair * channels; c += kPair * kLanes) {
        const Shorts lanes = load_pairs(bounds + c);
        for (int r = 0; r < R; ++r)
            sums[r] = add_pair_products(sums[r], load_pairs(factors + kPair * channels * r + c), lanes);
    }
    int32_t most = total(sums[0]);
    for (int r = 1; r < R; ++r) {
        const int32_t sum = total(sums[r]);
        most = sum > most ? sum : most;
    }
    return most;
}

int32_t largest_sum(int rows, const int16_t* factors, const int8_t* bounds, int channels) {
    switch (rows) {
        case 1: return largest_sum<1>(factors, bounds, channels);
        case 2: return largest_sum<2>(factors, bounds, channels);
        case 3: return largest_sum<3>(factors, bounds, channels);
        default: break;
    }
    int32_t most = largest_sum<4>(factors, bounds, channels);
    if (rows > 4) {
        const int32_t rest = largest_sum(rows - 4, factors + 4 * kPair * channels, bounds, channels);
        most = rest > most ? rest : most;
    }
    return most;
}

// ---- the choice ---------------------------------------------------------------------------------------------------

// Ascends as x does, with 0 and -0 equal.
int32_t key_of(float x) {
    const float no_negative_zero = x + 0.0f;
    int32_t bits;
    std::memcpy(&bits, &no_negative_zero, sizeof bits);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

int count_from(const int32_t* keys, int count, int32_t least) {
    int found = 0;
    for (int i = 0; i < count; ++i) found += keys[i] >= least;
    return found;
}

// The largest key that at least `wanted` >= 1 keys reach, or a smaller one that as many reach: by halving the range.
int32_t threshold_of(const int32_t* keys, int count, int wanted) {
    int64_t low = keys[0], high = keys[0];  // the threshold is in [low, high]
    for (int i = 1; i < count; ++i) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    while (low < high) {
        const int64_t middle = high - (high - low) / 2;
        const int reached = count_from(keys, count, static_cast<int32_t>(middle));
        if (reached == wanted) return static_cast<int32_t>(middle);
        if (reached > wanted) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return static_cast<int32_t>(low);
}

// Adds the bonus of candidates (bounds[i] is page 1 + i) that were chosen last time.
void favour_last(float* bounds, int count, const int32_t* chosen, int num_chosen) {
    float least = bounds[0], most = bounds[0];
    for (int i = 1; i < count; ++i) {
        least = bounds[i] < least ? bounds[i] : least;
        most = bounds[i] > most ? bounds[i] : most;
    }
    const float bonus = kHysteresis * (most - least);
    for (int i = 0; i < num_chosen; ++i)
        if (chosen[i] >= 1 && chosen[i] <= count) bounds[chosen[i] - 1] += bonus;
}

// The `wanted` best candidates as page indices, ascending; of equal ones the first.
void take_best(const int32_t* keys, int count, int wanted, int32_t* chosen) {
    const int32_t threshold = threshold_of(keys, count, wanted);
    int above = 0;
    for (int i = 0; i < count; ++i) above += keys[i] > threshold;
    int equal = wanted - above;  // so many of those at the threshold
    for (int i = 0; i < count; ++i)
        if (keys[i] > threshold || (keys[i] == threshold && equal-- > 0)) *chosen++ = 1 + i;
}

}  // namespace

size_t bounds_bytes(int kv_heads, int head_dim) { return kv_heads * head_bytes(padded(head_dim)); }

void store_bounds(const float* keys, int head_dim, const BoundsBuffer& bounds, int page, int kv_head) {
    const int channels = padded(head_dim);
    float least[kMaxHeadDim], most[kMaxHeadDim];
    find_range(keys, head_dim, least, most);
    float magnitude = 0;
    for (int c = 0; c < head_dim; ++c) {
        const float larger = larger_magnitude(least[c], most[c]);
        magnitude = larger > magnitude ? larger : magnitude;
    }
    const float scale = magnitude / kCodes, divisor = scale > 0 ? scale : 1.0f;
    uint8_t* head = bounds_of(bounds, page, kv_head, channels);
    std::memset(head, 0, head_bytes(channels));
    int8_t* codes = reinterpret_cast<int8_t*>(head);
    for (int c = 0; c < head_dim; ++c) {
        codes[kPair * c] = code_of(std::floor(least[c] / divisor));
        codes[kPair * c + 1] = code_of(std::ceil(most[c] / divisor));
    }
    std::memcpy(head + kPair * channels, &scale, sizeof scale);
}

size_t bounds_query_bytes(int group, int head_dim) {
    return static_cast<size_t>(group) * kPair * padded(head_dim) * sizeof(int16_t);
}

float prepare_bounds_query(const float* q, int group, int head_dim, int16_t* factors) {
    const int count = group * head_dim, channels = padded(head_dim);
    float magnitude = 0;
    for (int i = 0; i < count; ++i) magnitude = std::fabs(q[i]) > magnitude ? std::fabs(q[i]) : magnitude;
    const float step = magnitude / kFactors, divisor = step > 0 ? step : 1.0f;
    std::memset(factors, 0, bounds_query_bytes(group, head_dim));
    for (int r = 0; r < group; ++r, q += head_dim, factors += kPair * channels)
        for (int c = 0; c < head_dim; c += kLanes) {
            float lanes[kLanes] = {};
            std::memcpy(lanes, q + c, sizeof(float) * (head_dim - c < kLanes ? head_dim - c : kLanes));
            const Floats codes = div(load(lanes), splat(divisor));
            alignas(32) int16_t rounded[2 * kLanes];  // the negative ones, then the positive ones
            store_pairs(rounded, round_to_shorts(min(codes, splat(0.0f)), max(codes, splat(0.0f))));
            for (int i = 0; i < kLanes; ++i) {
                factors[kPair * (c + i)] = rounded[i];
                factors[kPair * (c + i) + 1] = rounded[kLanes + i];
            }
        }
    return step;
}

void bound_pages(const BoundsBuffer* arenas, const int32_t* pages, int count, int kv_head, int group, int head_dim,
                 const int16_t* factors, float step, float* out) {
    const int channels = padded(head_dim);
    const auto head_at = [&](int i) {
        return bounds_of(arenas[pages[i] / kArenaPages], pages[i] % kArenaPages, kv_head, channels);
    };
    for (int i = 0; i < count; ++i) {
        const uint8_t* ahead = head_at(i + kAhead < count ? i + kAhead : count - 1);
        for (size_t line = 0; line < head_bytes(channels); line += 64) prefetch(ahead + line);
        const uint8_t* head = head_at(i);
        float scale;
        std::memcpy(&scale, head + kPair * channels, sizeof scale);
        out[i] = static_cast<float>(largest_sum(group, factors, reinterpret_cast<const int8_t*>(head), channels)) *
                 (step * scale);
    }
}

void choose_pages(float* bounds, int32_t* keys, int pages, int local_pages, int num_pages, int32_t* chosen) {
    const int local = pages - 1 - local_pages, count = local - 1, wanted = num_pages - 2 - local_pages;
    if (wanted > 0) {
        favour_last(bounds, count, chosen, num_pages);
        for (int i = 0; i < count; ++i) keys[i] = key_of(bounds[i]);
        take_best(keys, count, wanted, chosen + 1);
    }
    chosen[0] = 0;
    for (int i = 0; i <= local_pages; ++i) chosen[1 + wanted + i] = local + i;
}

}  // namespace heedful::HEEDFUL_VARIANT
