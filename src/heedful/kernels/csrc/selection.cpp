// Page selection (after Quest, arXiv:2406.10774): what each page's keys are like, what a query can hope to find in a page,
// and which pages weigh most. Shapes as in ops.h; P: D rounded up to a multiple of 16, channels past D are zero.
//
// A choice has two stages. Where there are many pages, bounds list those that promise most; then the keys of the listed
// ones are read (weigh_pages, attention.cpp), and those that weigh most are chosen. Bounds alone lose single keys: 7 of 100
// pages with a quarter of a head's attention (docs/log.md).
//
// A page's bounds of one KV head: int8 [P means][P variances] of its keys, channel by channel, then a float scale of
// either. A key at kDeviations standard deviations, if its channels vary independently, scores
//     sum_c q_c·mean_c + kDeviations · sqrt(sum_c q_c²·variance_c);
// an upper confidence bound. Least and largest keys, Quest's bounds, are as long and promise too much: they find half of
// the needles (docs/log.md). What a page promises a KV head is the sum of its share of each query head's softmax.
//
// Queries and their squares are rounded to int16, a step a query head, so that sums are of integers and the same in every
// variant. What that costs: half a step times the sum of the page's magnitudes.

#include <cmath>
#include <cstring>

#include "lanes.h"
#include "ops.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kRows = 2;               // means and variances; a query and its squares
constexpr int kChannels = 2 * kLanes;  // int16 of a vector
constexpr float kCodes = 127.0f;       // of bounds
constexpr float kFactors = 32767.0f;   // of queries
constexpr float kDeviations = 2.0f;
constexpr float kHysteresis = 1.25f;   // times the promise of pages that were chosen last time
constexpr float kLog2e = 1.44269504f;
constexpr int kAhead = 8;              // pages whose bounds are on their way

int padded(int head_dim) { return (head_dim + kChannels - 1) / kChannels * kChannels; }

size_t head_bytes(int channels) { return kRows * (channels + sizeof(float)); }

uint8_t* bounds_of(const BoundsBuffer& bounds, int page, int kv_head, int channels) {
    return bounds.base + page * bounds.page_bytes + kv_head * head_bytes(channels);
}

// ---- bounds of a page ---------------------------------------------------------------------------------------------

// Of 64 keys (64, D), channel by channel; squares of distances are summed, which keeps small variances of large means.
void find_moments(const float* keys, int dim, float* means, float* variances) {
    std::memset(means, 0, sizeof(float) * dim);
    std::memset(variances, 0, sizeof(float) * dim);
    for (int slot = 0; slot < kPageLen; ++slot)
        for (int c = 0; c < dim; ++c) means[c] += keys[static_cast<size_t>(slot) * dim + c];
    for (int c = 0; c < dim; ++c) means[c] *= 1.0f / kPageLen;
    for (int slot = 0; slot < kPageLen; ++slot)
        for (int c = 0; c < dim; ++c) {
            const float apart = keys[static_cast<size_t>(slot) * dim + c] - means[c];
            variances[c] += apart * apart;
        }
    for (int c = 0; c < dim; ++c) variances[c] *= 1.0f / kPageLen;
}

float largest_magnitude(const float* x, int count) {
    float most = 0;
    for (int i = 0; i < count; ++i) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    return most;
}

// x / divisor, rounded half to even, within [-most, most]; what is not a number becomes -most.
float code_of(float x, float divisor, float most) {
    const float code = std::nearbyint(x / divisor);
    return code > -most ? (code < most ? code : most) : -most;
}

// x (dim) as integers, the largest magnitude as `most`; returns their step. Writes nothing past dim.
template <class Code>
float encode(const float* x, int dim, float most, Code* codes) {
    const float step = largest_magnitude(x, dim) / most, divisor = step > 0 ? step : 1.0f;
    for (int c = 0; c < dim; ++c) codes[c] = static_cast<Code>(code_of(x[c], divisor, most));
    return step;
}

// ---- bounds of a query --------------------------------------------------------------------------------------------

// sums[r] = sum over a page's channels of its codes times the factors at factors + r * stride.
template <int R>
void add_products(const int16_t* factors, size_t stride, const int8_t* codes, int channels, int32_t* totals) {
    Ints sums[R];
    for (Ints& sum : sums) sum = no_ints();
    for (int c = 0; c < channels; c += kChannels) {
        const Shorts lanes = load_pairs(codes + c);
        for (int r = 0; r < R; ++r) sums[r] = add_pair_products(sums[r], load_pairs(factors + stride * r + c), lanes);
    }
    for (int r = 0; r < R; ++r) totals[r] = total(sums[r]);
}

constexpr int kAtOnce = 4;  // heads of a group

void add_products(int rows, const int16_t* factors, size_t stride, const int8_t* codes, int channels, int32_t* totals) {
    switch (rows) {
        case 1: return add_products<1>(factors, stride, codes, channels, totals);
        case 2: return add_products<2>(factors, stride, codes, channels, totals);
        case 3: return add_products<3>(factors, stride, codes, channels, totals);
        default: return add_products<kAtOnce>(factors, stride, codes, channels, totals);
    }
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

// x (count), in powers of two, becomes its shares of the sum of factors · 2^x, factors 1 where null; all 0 where nothing
// is a number.
void to_shares(float* x, const float* factors, int count) {
    float most = x[0];
    for (int i = 1; i < count; ++i) most = x[i] > most ? x[i] : most;
    float sum = 0;
    for (int i = 0; i < count; ++i) {
        x[i] = exp2_of(x[i] - most) * (factors ? factors[i] : 1.0f);
        sum += x[i];
    }
    const float divisor = sum > 0 ? sum : 1.0f;
    for (int i = 0; i < count; ++i) x[i] /= divisor;
}

// shares (group, count): the first row becomes the sum of all, more for pages that were chosen last time. page_at(i),
// ascending as `chosen` is: the page that i stands for.
template <class PageAt>
void to_promises(float* shares, int count, int group, PageAt&& page_at, const int32_t* chosen, int num_chosen) {
    for (int g = 1; g < group; ++g)
        for (int i = 0; i < count; ++i) shares[i] += shares[static_cast<size_t>(g) * count + i];
    for (int i = 0, next = 0; i < count; ++i) {
        while (next < num_chosen && chosen[next] < page_at(i)) ++next;
        if (next < num_chosen && chosen[next] == page_at(i)) shares[i] *= kHysteresis;
    }
}

// The `wanted` that promise most, as pages, ascending; of equal ones the first.
template <class PageAt>
void take_best(const float* promises, int32_t* keys, int count, int wanted, PageAt&& page_at, int32_t* taken) {
    for (int i = 0; i < count; ++i) keys[i] = key_of(promises[i]);
    const int32_t threshold = threshold_of(keys, count, wanted);
    int above = 0;
    for (int i = 0; i < count; ++i) above += keys[i] > threshold;
    int equal = wanted - above;  // so many of those at the threshold
    for (int i = 0; i < count; ++i)
        if (keys[i] > threshold || (keys[i] == threshold && equal-- > 0)) *taken++ = page_at(i);
}

}  // namespace

size_t bounds_bytes(int kv_heads, int head_dim) { return kv_heads * head_bytes(padded(head_dim)); }

void store_bounds(const float* keys, int head_dim, const BoundsBuffer& bounds, int page, int kv_head) {
    const int channels = padded(head_dim);
    float moments[kRows][kMaxHeadDim], scales[kRows];
    find_moments(keys, head_dim, moments[0], moments[1]);
    uint8_t* head = bounds_of(bounds, page, kv_head, channels);
    std::memset(head, 0, head_bytes(channels));
    int8_t* codes = reinterpret_cast<int8_t*>(head);
    for (int row = 0; row < kRows; ++row) scales[row] = encode(moments[row], head_dim, kCodes, codes + row * channels);
    std::memcpy(head + kRows * channels, scales, sizeof scales);
}

size_t bounds_query_bytes(int group, int head_dim) {
    return static_cast<size_t>(group) * kRows * (padded(head_dim) * sizeof(int16_t) + sizeof(float));
}

void prepare_bounds_query(const float* q, int group, int head_dim, void* prepared) {
    const int channels = padded(head_dim);
    float* steps = static_cast<float*>(prepared);
    int16_t* factors = reinterpret_cast<int16_t*>(steps + kRows * group);
    std::memset(prepared, 0, bounds_query_bytes(group, head_dim));
    float squares[kMaxHeadDim];
    for (int g = 0; g < group; ++g, q += head_dim, steps += kRows, factors += kRows * channels) {
        for (int c = 0; c < head_dim; ++c) squares[c] = q[c] * q[c];
        steps[0] = encode(q, head_dim, kFactors, factors);
        steps[1] = encode(squares, head_dim, kFactors, factors + channels);
    }
}

void bound_pages(const BoundsBuffer* arenas, const int32_t* pages, int count, int kv_head, int group, int head_dim,
                 const void* prepared, float* out, size_t stride) {
    const int channels = padded(head_dim);
    const float* steps = static_cast<const float*>(prepared);
    const int16_t* factors = reinterpret_cast<const int16_t*>(steps + kRows * group);
    const size_t next = static_cast<size_t>(kRows) * channels;  // head's factors
    const auto head_at = [&](int i) {
        return bounds_of(arenas[pages[i] / kArenaPages], pages[i] % kArenaPages, kv_head, channels);
    };
    for (int i = 0; i < count; ++i) {
        const uint8_t* ahead = head_at(i + kAhead < count ? i + kAhead : count - 1);
        for (size_t line = 0; line < head_bytes(channels); line += 64) prefetch(ahead + line);
        const uint8_t* head = head_at(i);
        const int8_t* codes = reinterpret_cast<const int8_t*>(head);
        float scales[kRows];
        std::memcpy(scales, head + kRows * channels, sizeof scales);
        for (int g = 0; g < group; g += kAtOnce) {
            const int rows = group - g < kAtOnce ? group - g : kAtOnce;
            int32_t means[kAtOnce], squares[kAtOnce];
            add_products(rows, factors + next * g, next, codes, channels, means);
            add_products(rows, factors + next * g + channels, next, codes + channels, channels, squares);
            for (int r = 0; r < rows; ++r) {
                const float* step = steps + kRows * (g + r);
                const float mean = static_cast<float>(means[r]) * (step[0] * scales[0]);
                const float variance = static_cast<float>(squares[r]) * (step[1] * scales[1]);
                out[(g + r) * stride + i] = mean + kDeviations * std::sqrt(variance);
            }
        }
    }
}

void list_pages(float* bounds, int group, float scale, int32_t* keys, int count, int wanted, const int32_t* chosen,
                int num_chosen, int32_t* listed) {
    const auto page_at = [](int i) { return 1 + i; };
    for (int g = 0; g < group; ++g) {
        float* row = bounds + static_cast<size_t>(g) * count;
        for (int i = 0; i < count; ++i) row[i] *= scale * kLog2e;
        to_shares(row, nullptr, count);
    }
    to_promises(bounds, count, group, page_at, chosen, num_chosen);
    take_best(bounds, keys, count, wanted, page_at, listed);
}

void choose_pages(float* maxima, const float* sums, int group, int32_t* keys, const int32_t* listed, int count, int pages,
                  int local_pages, int num_pages, int32_t* chosen) {
    const int local = pages - 1 - local_pages, wanted = num_pages - 2 - local_pages;
    const auto page_at = [&](int i) { return listed[i]; };
    if (wanted > 0) {
        for (int g = 0; g < group; ++g) {
            const size_t row = static_cast<size_t>(g) * count;
            to_shares(maxima + row, sums + row, count);
        }
        to_promises(maxima, count, group, page_at, chosen, num_pages);
        take_best(maxima, keys, count, wanted, page_at, chosen + 1);
    }
    chosen[0] = 0;
    for (int i = 0; i <= local_pages; ++i) chosen[1 + wanted + i] = local + i;
}

}  // namespace heedful::HEEDFUL_VARIANT
