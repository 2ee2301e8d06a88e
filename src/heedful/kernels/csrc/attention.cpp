// KV pages and attention over them. Shapes as in ops.h; P: D rounded up to a multiple of 8, channels past D are zero.
//
// A page holds, KV head after KV head, 64 keys then 64 values, every part a multiple of 64 bytes:
//   q8   keys   int8  [8 groups][P / 2 channel pairs][8 tokens][2 channels], then 64 float scales
//        values int8  [32 token pairs][P channels][2 tokens],                then 64 float scales
//   f16  keys   half  [8 groups][P channels][8 tokens]
//        values half  [64 tokens][P channels]
// So both products of attention are the same one: a row of factors times lanes of eight, no sum across lanes, and a
// head's keys and values are one stream. q8: the query is rounded to int16 with one scale a row, the softmax weights
// times the values' scales to int16 with one scale a row and page; products and sums of a page are exact in int32.
//
// A row (one query of one head) goes through a segment's pages in order with its own maximum, sum and accumulators.
// Nothing of a row depends on the rows beside it: integer sums have no order, float sums run along channels or tokens,
// and what a row may not see joins them as an exact zero.
//
// Speeds: ns a row and page (64 keys, D = 64) on one Zen 4 thread at 3.4 GHz, AVX2 only, in the cache; q8 / f16.
//   decode, 3 rows        222 / 361   four vectors a register tile, compiler's own order of instructions
//                         204 / 290   sums held in registers by an empty asm (lanes.h); before, all products of a step
//                                     came first and the sums lay in memory
//                         184 / 242   two vectors for 3 rows
//                         175 / 215   three vectors, two steps and one line prefetched a turn, no test for the prefetch
//   prefill, 96 rows      197 / 173   six rows by two vectors
//                         142 / 173   sums held in registers
//                         138 / 168   softmax in stages over six rows; page read as stored
// - decode of 7040 tokens, 30 layers of 3 KV heads, one thread, ms: q8 13.2 without prefetch, 7.7 with a prefetch one
//   page ahead into the first cache level, **5.0 into the second** (f16 10.4, 6.4).
// - Gave nothing: a page widened once to int16 or float32 for 96 rows (q8 2 % faster, f16 4 % slower than as stored);
//   four vectors for one or three rows; eight for one.
// - Not built: maddubs with queries or weights of 7 bits: it saves a quarter of a product's instructions, and small
//   weights beside a large one would all become zero.

#include <cmath>
#include <cstring>
#include <limits>

#include "lanes.h"
#include "ops.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int kRowTile = 6;  // rows that share a load of keys or values in registers
constexpr int kPageLanes = kPageLen / kLanes;

int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// ---- formats: what a product's factors and elements are -----------------------------------------------------------

struct Q8 {  // two elements a lane and step
    using Element = int8_t;
    using Factor = int16_t;
    using Sums = Ints;
    static constexpr int kDepth = 2;
    static constexpr bool kScaled = true;
    static Sums zero() { return no_ints(); }
    static Shorts load(const Element* p) { return load_pairs(p); }
    static Shorts splat(const Factor* p) { return splat_pair(p); }
    static Sums add_products(Sums sums, Shorts a, Shorts b) { return add_pair_products(sums, a, b); }
};

struct F16 {
    using Element = uint16_t;
    using Factor = float;
    using Sums = Floats;
    static constexpr int kDepth = 1;
    static constexpr bool kScaled = false;
    static Sums zero() { return HEEDFUL_VARIANT::splat(0.0f); }
    static Floats load(const Element* p) { return load_halves(p); }
    static Floats splat(const Factor* p) { return HEEDFUL_VARIANT::splat(*p); }
    static Sums add_products(Sums sums, Floats a, Floats b) { return accumulate(sums, a, b); }
};

// Bytes of one side, the keys or the values, of one KV head in a page: elements, then scales.
template <class Format>
size_t element_bytes(int padded_dim) {
    return static_cast<size_t>(kPageLen) * padded_dim * sizeof(typename Format::Element);
}
template <class Format>
size_t side_bytes(int padded_dim) {
    return element_bytes<Format>(padded_dim) + (Format::kScaled ? kPageLen * sizeof(float) : 0);
}

template <class Format>
uint8_t* head_of(const PageBuffer& pages, int page, int kv_head) {
    return pages.base + page * pages.page_bytes + 2 * kv_head * side_bytes<Format>(padded(pages.head_dim));
}

// ---- storing ------------------------------------------------------------------------------------------------------

float largest_magnitude(const float* x, int count) {
    Floats best = splat(0.0f);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) best = max(best, abs(load(x + i)));
    float magnitude = largest(best);
    for (; i < count; ++i) magnitude = std::fabs(x[i]) > magnitude ? std::fabs(x[i]) : magnitude;
    return magnitude;
}

// Scale of a row: max abs / limit. A row of zeros has scale 0, and any divisor makes its codes 0.
float scale_of(const float* x, int count, float limit) { return largest_magnitude(x, count) / limit; }
float divisor_of(float scale) { return scale > 0 ? scale : 1.0f; }

Floats bounded(Floats x, float limit) { return min(max(x, splat(-limit)), splat(limit)); }

constexpr int kRounded = 2 * kLanes;  // channels rounded at once

// codes[i] = x[i] / divisor, rounded half to even, in [-limit, limit], for 16 channels; codes past `count` are 0.
void round_channels(const float* x, int count, float divisor, float limit, int16_t* codes) {
    float tail[kRounded] = {};
    if (count < kRounded) {
        std::memcpy(tail, x, sizeof(float) * count);
        x = tail;
    }
    const Floats low = div(load(x), splat(divisor)), high = div(load(x + kLanes), splat(divisor));
    store_pairs(codes, round_to_shorts(bounded(low, limit), bounded(high, limit)));
}

// put(c, code of channel c) for all channels of a row up to P; returns the row's scale.
template <class Put>
float round_to_bytes(const float* x, int dim, Put&& put) {
    constexpr float kLimit = 127.0f;
    const float scale = scale_of(x, dim, kLimit);
    for (int c = 0; c < padded(dim); c += kRounded) {
        int16_t codes[kRounded];
        round_channels(x + c, dim - c, divisor_of(scale), kLimit, codes);
        const int left = padded(dim) - c;
        for (int i = 0; i < (left < kRounded ? left : kRounded); ++i) put(c + i, static_cast<uint8_t>(codes[i]));
    }
    return scale;
}

void store_q8(uint8_t* head, int dim, int slot, const float* key, const float* value) {
    const int channels = padded(dim);
    const size_t scale_at = element_bytes<Q8>(channels) + slot * sizeof(float);
    uint8_t* keys = head + slot / kLanes * kLanes * channels + slot % kLanes * 2;
    float scale = round_to_bytes(key, dim, [&](int c, uint8_t code) { keys[c / 2 * 2 * kLanes + c % 2] = code; });
    std::memcpy(head + scale_at, &scale, sizeof scale);
    uint8_t* side = head + side_bytes<Q8>(channels);
    uint8_t* values = side + slot / 2 * 2 * channels + slot % 2;
    scale = round_to_bytes(value, dim, [&](int c, uint8_t code) { values[2 * c] = code; });
    std::memcpy(side + scale_at, &scale, sizeof scale);
}

// Within the range of half floats: a key beyond it must not become infinite, and the softmax NaN.
float saturated(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

void store_f16(uint8_t* head, int dim, int slot, const float* key, const float* value) {
    const int channels = padded(dim);
    uint16_t* keys = reinterpret_cast<uint16_t*>(head) + slot / kLanes * kLanes * channels + slot % kLanes;
    uint16_t* values = reinterpret_cast<uint16_t*>(head + side_bytes<F16>(channels)) + slot * channels;
    for (int c = 0; c < channels; ++c) {
        keys[c * kLanes] = c < dim ? to_half(saturated(key[c])) : 0;
        values[c] = c < dim ? to_half(saturated(value[c])) : 0;
    }
}

// ---- the product --------------------------------------------------------------------------------------------------

// Where lanes of elements lie: step s of vector v is at data + s * step + v * vector, both in elements.
template <class Format>
struct Lattice {
    const typename Format::Element* data;
    size_t step, vector;
    int first_vector, vectors;  // up to `vectors`
    int begin, end;             // steps
    const uint8_t* ahead;       // the same lattice of the page that is read next
};

// finish(r, v, sum over steps of factors[r][step] * lanes of vector v) for R rows and V vectors from v0 on.
template <class Format, int R, int V, class Finish>
inline void multiply_tile(const typename Format::Factor* factors, size_t row_stride, const Lattice<Format>& b, int v0,
                          Finish&& finish) {
    constexpr size_t kLoadBytes = kLanes * Format::kDepth * sizeof(typename Format::Element);
    typename Format::Sums sums[R][V];
    for (auto& row : sums)
        for (auto& sum : row) sum = Format::zero();
    const auto multiply_step = [&](int s) {
        decltype(Format::load(b.data)) lanes[V];
        for (int v = 0; v < V; ++v) lanes[v] = Format::load(b.data + s * b.step + (v0 + v) * b.vector);
        for (int r = 0; r < R; ++r) {
            const auto factor = Format::splat(factors + r * row_stride + s * Format::kDepth);
            for (int v = 0; v < V; ++v) sums[r][v] = Format::add_products(sums[r][v], factor, lanes[v]);
        }
    };
    const uint8_t* ahead = b.ahead + static_cast<size_t>(v0) * (b.end - b.begin) * kLoadBytes;
    int s = b.begin;
    for (; s + 2 <= b.end; s += 2, ahead += 2 * V * kLoadBytes) {
        for (size_t line = 0; line < 2 * V * kLoadBytes; line += 64) prefetch(ahead + line);
        multiply_step(s);
        multiply_step(s + 1);
    }
    if (s < b.end) multiply_step(s);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) finish(r, v0 + v, to_floats(sums[r][v]));
}

template <class Format, int R, class Finish>
inline void multiply_rows(const typename Format::Factor* factors, size_t row_stride, const Lattice<Format>& b,
                          Finish&& finish) {
    constexpr int kVectors = R <= 2 ? 4 : R == 3 ? 3 : 2;  // as many sums as fit in 16 registers beside what they need
    int v = b.first_vector;
    for (; v + kVectors <= b.vectors; v += kVectors)
        multiply_tile<Format, R, kVectors>(factors, row_stride, b, v, finish);
    for (; v + 2 <= b.vectors; v += 2) multiply_tile<Format, R, 2>(factors, row_stride, b, v, finish);
    if (v < b.vectors) multiply_tile<Format, R, 1>(factors, row_stride, b, v, finish);
}

template <class Format, class Finish>
inline void multiply(int rows, const typename Format::Factor* factors, size_t row_stride, const Lattice<Format>& b,
                     Finish&& finish) {
    switch (rows) {
        case 1: return multiply_rows<Format, 1>(factors, row_stride, b, finish);
        case 2: return multiply_rows<Format, 2>(factors, row_stride, b, finish);
        case 3: return multiply_rows<Format, 3>(factors, row_stride, b, finish);
        case 4: return multiply_rows<Format, 4>(factors, row_stride, b, finish);
        case 5: return multiply_rows<Format, 5>(factors, row_stride, b, finish);
        default: return multiply_rows<Format, kRowTile>(factors, row_stride, b, finish);
    }
}

// ---- rows of a tile -----------------------------------------------------------------------------------------------

// The rows of queries [q0, q1) of a group, in scratch. Row r is query q0 + r / group, head r % group.
template <class Format>
struct Rows {
    int count, channels;               // channels: padded
    typename Format::Factor* factors;  // (count, channels): the queries
    float* scales;  // (count): of a product: to its score in powers of two, or to score / cap where there is a soft cap
    float* maxima;                     // (count), in powers of two
    float* sums;                       // (count, 8): lanes of the sum of weights
    float* values;                     // (count, channels): sum of weight * value
};

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Lays the parts of `rows` out from `at` on, and returns the end. With at = null it only counts bytes.
template <class Format>
size_t lay_out(Rows<Format>& rows, uint8_t* at) {
    size_t used = at ? aligned(reinterpret_cast<uintptr_t>(at)) - reinterpret_cast<uintptr_t>(at) : 63;
    const auto place = [&](auto*& part, size_t count) {
        if (at) part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at + used);
        used += aligned(count * sizeof(*part));
    };
    const size_t count = rows.count, channels = rows.channels;
    place(rows.factors, count * channels + kLanes);  // a row is rounded 16 at a time
    place(rows.scales, count);
    place(rows.maxima, count);
    place(rows.sums, count * kLanes);
    place(rows.values, count * channels);
    return used;
}

void set_factors(const float* q, int dim, float scale, int16_t* factors, float* row_scale) {
    constexpr float kLimit = 32767.0f;
    const float step = scale_of(q, dim, kLimit);
    for (int c = 0; c < dim; c += kRounded) round_channels(q + c, dim - c, divisor_of(step), kLimit, factors + c);
    *row_scale = step * scale;
}

void set_factors(const float* q, int dim, float scale, float* factors, float* row_scale) {
    for (int c = 0; c < padded(dim); ++c) factors[c] = c < dim ? q[c] * scale : 0.0f;
    *row_scale = 1.0f;
}

struct Work {  // what a call of attend_segment was asked
    const PageBuffer& pages;
    const AttentionShape& shape;
    const Span& span;
    int kv_head, q0, q1;
    int group() const { return shape.heads / pages.kv_heads; }
};

template <class Format>
void start_rows(const Work& work, const float* q, int q_stride, Rows<Format>& rows) {
    const int dim = work.pages.head_dim, group = work.group();
    const float scale = work.shape.softcap > 0 ? work.shape.scale / work.shape.softcap : work.shape.scale * kLog2E;
    for (int r = 0; r < rows.count; ++r) {
        const size_t token = work.q0 - work.span.start + r / group;
        const float* row = q + token * q_stride + (work.kv_head * group + r % group) * dim;
        set_factors(row, dim, scale, rows.factors + static_cast<size_t>(r) * rows.channels, rows.scales + r);
        rows.maxima[r] = kNothing;
    }
    std::memset(rows.sums, 0, sizeof(float) * rows.count * kLanes);
    std::memset(rows.values, 0, sizeof(float) * rows.count * rows.channels);
}

// ---- softmax of one page ------------------------------------------------------------------------------------------

struct Slots {  // of a page
    int begin, end;
    bool all() const { return begin == 0 && end == kPageLen; }
};

// cap * tanh(x) in powers of two.
Floats capped(Floats x, float cap) {
    const Floats within_one = max(min(x, splat(10.0f)), splat(-10.0f));  // tanh(10) is 1 in float32
    const Floats power = exp2_of(mul(within_one, splat(-2 * kLog2E)));   // e^-2x
    const Floats one = splat(1.0f);
    return mul(div(sub(one, power), add(one, power)), splat(cap * kLog2E));
}

// Scores and then weights of a tile of rows over one page, and what a page's sums are worth.
struct PageTile {
    alignas(32) float scores[kRowTile][kPageLen];  // in powers of two
    alignas(32) float maxima[kLanes];              // by row, as the rest
    alignas(32) float before[kLanes];              // factor of the sums so far
    alignas(32) float steps[kLanes];               // value of 1 in the factors of the values
    Slots slots[kRowTile];
    int rows;
};

inline Floats slots_of(Floats x, Slots slots, int i, float other) {
    return within(x, slots.begin - i * kLanes, slots.end - i * kLanes, splat(other));
}

// Caps and masks the scores of row r, and returns their largest.
inline float finish_scores(float* scores, Slots slots, float softcap) {
    Floats most = splat(kNothing);
    for (int i = 0; i < kPageLanes; ++i) {
        Floats lanes = load(scores + i * kLanes);
        if (softcap > 0) lanes = capped(lanes, softcap);
        if (!slots.all()) lanes = slots_of(lanes, slots, i, kNothing);
        if (softcap > 0 || !slots.all()) store(scores + i * kLanes, lanes);
        most = max(most, lanes);
    }
    return largest(most);
}

// Scores become weights, 2^(score - maximum); their sum joins `sums` (8 lanes).
inline void exponentiate(float* scores, float maximum, float before, float* sums) {
    Floats sum = mul(load(sums), splat(before));
    for (int i = 0; i < kPageLen; i += kLanes) {
        const Floats weight = exp2_of(sub(load(scores + i), splat(maximum)));
        store(scores + i, weight);
        sum = add(sum, weight);
    }
    store(sums, sum);
}

// Multiplies weights by the values' scales and returns the largest product.
inline float scale_weights(float* weights, Slots slots, const float* value_scales) {
    Floats most = splat(0.0f);
    for (int i = 0; i < kPageLanes; ++i) {
        Floats product = mul(load(weights + i * kLanes), load(value_scales + i * kLanes));
        if (!slots.all()) product = slots_of(product, slots, i, 0.0f);  // an unused slot's scale may be anything
        store(weights + i * kLanes, product);
        most = max(most, product);
    }
    return largest(most);
}

// Per row: the new maximum, the factor of what came before, the weights and their sum.
template <class Format>
void weigh(Rows<Format>& rows, int r0, float softcap, PageTile& tile) {
    alignas(32) float old[kLanes] = {};
    for (int r = 0; r < tile.rows; ++r) {
        const float most = finish_scores(tile.scores[r], tile.slots[r], softcap);
        old[r] = rows.maxima[r0 + r];
        tile.maxima[r] = most > old[r] ? most : old[r];
        rows.maxima[r0 + r] = tile.maxima[r];
    }
    for (int r = tile.rows; r < kLanes; ++r) tile.maxima[r] = 0;
    store(tile.before, exp2_of(sub(load(old), load(tile.maxima))));
    for (int r = 0; r < tile.rows; ++r)
        exponentiate(tile.scores[r], tile.maxima[r], tile.before[r], rows.sums + static_cast<size_t>(r0 + r) * kLanes);
}

// Weights -> factors of the values, in place for floats.
inline const float* share_out(PageTile& tile, const float*, float*) {
    store(tile.steps, splat(1.0f));
    return tile.scores[0];
}

inline const int16_t* share_out(PageTile& tile, const float* value_scales, int16_t* factors) {
    constexpr float kLeast = 1e-30f;  // below it the reciprocal overflows; such values are zero beside any others
    alignas(32) float most[kLanes] = {};
    for (int r = 0; r < tile.rows; ++r) most[r] = scale_weights(tile.scores[r], tile.slots[r], value_scales);
    store(tile.steps, mul(load(most), splat(1 / 32767.0f)));
    alignas(32) float inverses[kLanes];
    store(inverses, where_at_least(load(tile.steps), kLeast, div(splat(1.0f), load(tile.steps))));
    for (int r = 0; r < tile.rows; ++r) {
        const Floats inverse = splat(inverses[r]);
        const float* weights = tile.scores[r];
        for (int i = 0; i < kPageLen; i += 2 * kLanes)
            store_pairs(factors + r * kPageLen + i,
                        round_to_shorts(mul(load(weights + i), inverse), mul(load(weights + i + kLanes), inverse)));
    }
    return factors;
}

// ---- one page -----------------------------------------------------------------------------------------------------

template <class Format>
struct PageView {
    const typename Format::Element *keys, *values;
    const float *key_scales, *value_scales;  // only where the format has them
    const uint8_t* ahead;                    // the page that is read next
};

// Page `index` of the span; behind the last one nothing is known, so `ahead` is that page itself.
template <class Format>
PageView<Format> view(const Work& work, int index) {
    const int channels = padded(work.pages.head_dim);
    const int pages = (work.span.end + kPageLen - 1) / kPageLen - work.span.first_page;
    const int next = index + 1 < pages ? index + 1 : index;
    const uint8_t* keys = head_of<Format>(work.pages, work.span.pages[index], work.kv_head);
    const uint8_t* values = keys + side_bytes<Format>(channels);
    const size_t scales_at = element_bytes<Format>(channels);
    return {reinterpret_cast<const typename Format::Element*>(keys),
            reinterpret_cast<const typename Format::Element*>(values),
            reinterpret_cast<const float*>(keys + scales_at),
            reinterpret_cast<const float*>(values + scales_at),
            head_of<Format>(work.pages, work.span.pages[next], work.kv_head)};
}

// Slots of the page at `position` that row r may see.
Slots visible(const Work& work, int position, int row) {
    const int query = work.q0 + row / work.group();
    const int begin = work.span.window > 0 ? query - work.span.window + 1 - position : 0;
    const int end = query + 1 - position;
    return {begin > 0 ? begin : 0, end < kPageLen ? end : kPageLen};
}

template <class Format>
void score(const Rows<Format>& rows, int r0, const PageView<Format>& page, int first_slot, int end_slot,
           PageTile& tile) {
    const int channels = rows.channels;
    const Lattice<Format> keys{page.keys, static_cast<size_t>(kLanes) * Format::kDepth,
                               static_cast<size_t>(kLanes) * channels, first_slot / kLanes,
                               (end_slot + kLanes - 1) / kLanes, 0, channels / Format::kDepth, page.ahead};
    const auto keep = [&](int r, int v, Floats products) {
        if (Format::kScaled)
            products = mul(products, mul(splat(rows.scales[r0 + r]), load(page.key_scales + v * kLanes)));
        store(tile.scores[r] + v * kLanes, products);
    };
    multiply(tile.rows, rows.factors + static_cast<size_t>(r0) * channels, channels, keys, keep);
}

template <class Format>
void add_values(Rows<Format>& rows, int r0, const PageView<Format>& page, int first_slot, int end_slot,
                const PageTile& tile, const typename Format::Factor* factors) {
    const int channels = rows.channels;
    const Lattice<Format> values{page.values, static_cast<size_t>(channels) * Format::kDepth,
                                 static_cast<size_t>(kLanes) * Format::kDepth, 0, channels / kLanes,
                                 first_slot / Format::kDepth, (end_slot + Format::kDepth - 1) / Format::kDepth,
                                 page.ahead + side_bytes<Format>(channels)};
    const auto add_to_sums = [&](int r, int v, Floats products) {
        float* sum = rows.values + static_cast<size_t>(r0 + r) * channels + v * kLanes;
        store(sum, mul_add(products, splat(tile.steps[r]), mul(load(sum), splat(tile.before[r]))));
    };
    multiply(tile.rows, factors, kPageLen, values, add_to_sums);
}

// Rows [r0, r0 + count), at most kRowTile of them, over one page.
template <class Format>
void attend_row_tile(const Work& work, Rows<Format>& rows, int r0, int count, int position,
                     const PageView<Format>& page) {
    PageTile tile;
    tile.rows = count;
    for (int r = 0; r < count; ++r) tile.slots[r] = visible(work, position, r0 + r);
    const int first = tile.slots[0].begin, end = tile.slots[count - 1].end;  // what any of the rows may see
    score(rows, r0, page, first, end, tile);
    weigh(rows, r0, work.shape.softcap, tile);
    alignas(32) typename Format::Factor rounded[kRowTile * kPageLen];
    add_values(rows, r0, page, first, end, tile, share_out(tile, page.value_scales, rounded));
}

// Rows [r0, r1) over the page at `position`.
template <class Format>
void attend_page(const Work& work, Rows<Format>& rows, int r0, int r1, int position) {
    const PageView<Format> page = view<Format>(work, position / kPageLen - work.span.first_page);
    if (Format::kScaled)
        for (size_t at = element_bytes<Format>(rows.channels); at < side_bytes<Format>(rows.channels); at += 64) {
            prefetch(page.ahead + at);
            prefetch(page.ahead + side_bytes<Format>(rows.channels) + at);
        }
    for (int r = r0; r < r1; r += kRowTile)
        attend_row_tile(work, rows, r, r1 - r < kRowTile ? r1 - r : kRowTile, position, page);
}

// ---- one segment --------------------------------------------------------------------------------------------------

template <class Format>
void write_part(const Rows<Format>& rows, int head_dim, float* part) {
    for (int r = 0; r < rows.count; ++r, part += head_dim + 2) {
        part[0] = rows.maxima[r] * kLn2;
        part[1] = total(load(rows.sums + static_cast<size_t>(r) * kLanes));
        std::memcpy(part + 2, rows.values + static_cast<size_t>(r) * rows.channels, sizeof(float) * head_dim);
    }
}

template <class Format>
void attend_segment_of(const Work& work, const float* q, int q_stride, int segment, float* part, void* scratch) {
    const Span& span = work.span;
    Rows<Format> rows{};
    rows.count = (work.q1 - work.q0) * work.group();
    rows.channels = padded(work.pages.head_dim);
    lay_out(rows, static_cast<uint8_t*>(scratch));
    start_rows(work, q, q_stride, rows);
    const int first = segment * kSegment, end = first + kSegment < span.end ? first + kSegment : span.end;
    for (int at = first > span.first_page * kPageLen ? first : span.first_page * kPageLen; at < end; at += kPageLen) {
        const int begin_query = work.q0 > at ? work.q0 : at;
        const int last_seen_by = span.window > 0 ? at + kPageLen - 1 + span.window : work.q1;
        const int end_query = work.q1 < last_seen_by ? work.q1 : last_seen_by;
        if (begin_query >= end_query) continue;
        attend_page(work, rows, (begin_query - work.q0) * work.group(), (end_query - work.q0) * work.group(), at);
    }
    write_part(rows, work.pages.head_dim, part);
}

template <class Format>
size_t scratch_bytes_of(const PageBuffer& pages, const AttentionShape& shape, int queries) {
    Rows<Format> rows{};
    rows.count = queries * (shape.heads / pages.kv_heads);
    rows.channels = padded(pages.head_dim);
    return lay_out(rows, nullptr);
}

}  // namespace

size_t page_bytes(KvFormat format, int kv_heads, int head_dim) {
    const int channels = padded(head_dim);
    return 2 * kv_heads * (format == KvFormat::q8 ? side_bytes<Q8>(channels) : side_bytes<F16>(channels));
}

void store_row(const PageBuffer& pages, int page, int kv_head, int slot, const float* key, const float* value) {
    if (pages.format == KvFormat::q8) {
        store_q8(head_of<Q8>(pages, page, kv_head), pages.head_dim, slot, key, value);
    } else {
        store_f16(head_of<F16>(pages, page, kv_head), pages.head_dim, slot, key, value);
    }
}

size_t attend_scratch_bytes(const PageBuffer& pages, const AttentionShape& shape, int queries) {
    return pages.format == KvFormat::q8 ? scratch_bytes_of<Q8>(pages, shape, queries)
                                        : scratch_bytes_of<F16>(pages, shape, queries);
}

void attend_segment(const PageBuffer& pages, const AttentionShape& shape, const Span& span, const float* q,
                    int q_stride, int kv_head, int q0, int q1, int segment, float* part, void* scratch) {
    const Work work{pages, shape, span, kv_head, q0, q1};
    if (pages.format == KvFormat::q8) {
        attend_segment_of<Q8>(work, q, q_stride, segment, part, scratch);
    } else {
        attend_segment_of<F16>(work, q, q_stride, segment, part, scratch);
    }
}

void merge_segments(const float* parts, size_t part_stride, int segments, int head_dim, float* out) {
    float maximum = kNothing, sum = 0;
    for (int s = 0; s < segments; ++s) maximum = parts[s * part_stride] > maximum ? parts[s * part_stride] : maximum;
    std::memset(out, 0, sizeof(float) * head_dim);
    for (int s = 0; s < segments; ++s) {
        const float* part = parts + s * part_stride;
        const float weight = exp2_of((part[0] - maximum) * kLog2E);
        sum += weight * part[1];
        for (int c = 0; c < head_dim; ++c) out[c] += weight * part[2 + c];
    }
    for (int c = 0; c < head_dim; ++c) out[c] /= sum;
}

}  // namespace heedful::HEEDFUL_VARIANT
