// KV pages and attention over them. Shapes as in ops.h; P: D rounded up to a multiple of 8, the channels past D are zero.
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
// A row (one query of one head) goes through the pages of a segment in order with its own maximum, sum and accumulators.
// Nothing of a row depends on the rows beside it: integer sums have no order, float sums run along channels or tokens.

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
constexpr int kRowTile = 6;       // rows that share a load of keys or values in registers
constexpr int kWidenFrom = 12;    // rows from which converting a page once beats converting it in every row tile
constexpr int kPageLanes = kPageLen / kLanes;

int padded(int head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// ---- formats: what a product's factors and elements are -----------------------------------------------------------

struct PairsOf {  // common to int8 and int16: two elements a lane and step
    using Factor = int16_t;
    using Sums = Ints;
    static constexpr int kDepth = 2;
    static Sums zero() { return no_ints(); }
    static Shorts splat(const int16_t* p) { return splat_pair(p); }
    static Sums add_products(Sums sums, Shorts a, Shorts b) { return add_pair_products(sums, a, b); }
};
struct BytePairs : PairsOf {
    using Element = int8_t;
    static Shorts load(const int8_t* p) { return load_pairs(p); }
};
struct ShortPairs : PairsOf {
    using Element = int16_t;
    static Shorts load(const int16_t* p) { return load_pairs(p); }
};

struct SinglesOf {
    using Factor = float;
    using Sums = Floats;
    static constexpr int kDepth = 1;
    static Sums zero() { return HEEDFUL_VARIANT::splat(0.0f); }
    static Floats splat(const float* p) { return HEEDFUL_VARIANT::splat(*p); }
    static Sums add_products(Sums sums, Floats a, Floats b) { return mul_add(a, b, sums); }
};
struct Halves : SinglesOf {
    using Element = uint16_t;
    static Floats load(const uint16_t* p) { return load_halves(p); }
};
struct Singles : SinglesOf {
    using Element = float;
    static Floats load(const float* p) { return HEEDFUL_VARIANT::load(p); }
};

struct Q8 {
    static constexpr bool kScaled = true;
    using Stored = BytePairs;
    using Wide = ShortPairs;
    using Factor = int16_t;
};
struct F16 {
    static constexpr bool kScaled = false;
    using Stored = Halves;
    using Wide = Singles;
    using Factor = float;
};

// Bytes of one KV head's keys or values in a page: elements, then scales.
template <class Format>
size_t element_bytes(int padded_dim) {
    return static_cast<size_t>(kPageLen) * padded_dim * sizeof(typename Format::Stored::Element);
}
template <class Format>
size_t half_bytes(int padded_dim) {
    return element_bytes<Format>(padded_dim) + (Format::kScaled ? kPageLen * sizeof(float) : 0);
}

template <class Format>
uint8_t* head_of(const PageBuffer& pages, int page, int kv_head) {
    return pages.base + page * pages.page_bytes + 2 * kv_head * half_bytes<Format>(padded(pages.head_dim));
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

// codes[i] = x[i] / scale, rounded half to even, in [-limit, limit]; (padded) codes, zero past `count`.
void round_row(const float* x, int count, float scale, float limit, int16_t* codes) {
    for (int i = 0; i < count; i += 2 * kLanes) {
        float lanes[2 * kLanes] = {};
        std::memcpy(lanes, x + i, sizeof(float) * (count - i < 2 * kLanes ? count - i : 2 * kLanes));
        const Floats low = div(load(lanes), splat(scale)), high = div(load(lanes + kLanes), splat(scale));
        const Floats most = splat(limit), least = splat(-limit);
        int16_t rounded[2 * kLanes];
        store_pairs(rounded, round_to_shorts(min(max(low, least), most), min(max(high, least), most)));
        const int room = padded(count) - i;
        std::memcpy(codes + i, rounded, sizeof(int16_t) * (room < 2 * kLanes ? room : 2 * kLanes));
    }
}

// One row of codes and its scale = max abs / limit; a row of zeros has scale 0.
float quantize_row(const float* x, int count, float limit, int16_t* codes) {
    const float scale = largest_magnitude(x, count) / limit;
    if (scale > 0) {
        round_row(x, count, scale, limit, codes);
    } else {
        std::memset(codes, 0, sizeof(int16_t) * padded(count));
    }
    return scale;
}

constexpr int kChannelsAtOnce = 256;  // a row is quantized into a buffer on the stack; more channels are refused in Python

void store_q8(uint8_t* head, int dim, int slot, const float* key, const float* value) {
    int16_t codes[kChannelsAtOnce];
    const int channels = padded(dim);
    const size_t scales_at = element_bytes<Q8>(channels);
    float scale = quantize_row(key, dim, 127.0f, codes);
    std::memcpy(head + scales_at + slot * sizeof(float), &scale, sizeof scale);
    uint8_t* pair = head + slot / kLanes * kLanes * channels + slot % kLanes * 2;
    for (int c = 0; c < channels; c += 2, pair += 2 * kLanes) {
        pair[0] = static_cast<uint8_t>(codes[c]);
        pair[1] = static_cast<uint8_t>(codes[c + 1]);
    }
    uint8_t* values = head + half_bytes<Q8>(channels);
    scale = quantize_row(value, dim, 127.0f, codes);
    std::memcpy(values + scales_at + slot * sizeof(float), &scale, sizeof scale);
    uint8_t* to = values + slot / 2 * 2 * channels + slot % 2;
    for (int c = 0; c < channels; ++c) to[2 * c] = static_cast<uint8_t>(codes[c]);
}

void store_f16(uint8_t* head, int dim, int slot, const float* key, const float* value) {
    const int channels = padded(dim);
    uint16_t* keys = reinterpret_cast<uint16_t*>(head) + slot / kLanes * kLanes * channels + slot % kLanes;
    uint16_t* values = reinterpret_cast<uint16_t*>(head + half_bytes<F16>(channels)) + slot * channels;
    for (int c = 0; c < channels; ++c) {
        keys[c * kLanes] = c < dim ? to_half(key[c]) : 0;
        values[c] = c < dim ? to_half(value[c]) : 0;
    }
}

// ---- the product --------------------------------------------------------------------------------------------------

// Where lanes of elements lie: step s of vector v is at data + s * step + v * vector, both in elements.
template <class Element>
struct Lattice {
    const Element* data;
    size_t step, vector;
    int vectors;
    int begin, end;        // steps
    const uint8_t* ahead;  // the same lattice one page on, for the prefetcher; null: nothing to fetch
};

// finish(r, v, sum over steps of factors[r][step] * lanes of vector v) for R rows and V vectors from v0 on.
template <class Multiply, int R, int V, class Finish>
inline void multiply_tile(const typename Multiply::Factor* factors, size_t row_stride,
                          const Lattice<typename Multiply::Element>& b, int v0, Finish&& finish) {
    constexpr size_t kBytesAStep = V * 16;
    typename Multiply::Sums sums[R][V];
    for (auto& row : sums)
        for (auto& sum : row) sum = Multiply::zero();
    const uint8_t* ahead = b.ahead ? b.ahead + static_cast<size_t>(v0) * (b.end - b.begin) * 16 : nullptr;
    for (int s = b.begin; s < b.end; ++s) {
        if (ahead) {
            prefetch(ahead);
            ahead += kBytesAStep;
        }
        decltype(Multiply::load(b.data)) lanes[V];
        for (int v = 0; v < V; ++v) lanes[v] = Multiply::load(b.data + s * b.step + (v0 + v) * b.vector);
        for (int r = 0; r < R; ++r) {
            const auto factor = Multiply::splat(factors + r * row_stride + s * Multiply::kDepth);
            for (int v = 0; v < V; ++v) sums[r][v] = Multiply::add_products(sums[r][v], factor, lanes[v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) finish(r, v0 + v, to_floats(sums[r][v]));
}

template <class Multiply, int R, class Finish>
inline void multiply_rows(const typename Multiply::Factor* factors, size_t row_stride,
                          const Lattice<typename Multiply::Element>& b, int v0, Finish&& finish) {
    constexpr int kVectors = R <= 3 ? 4 : 2;
    int v = v0;
    for (; v + kVectors <= b.vectors; v += kVectors) multiply_tile<Multiply, R, kVectors>(factors, row_stride, b, v, finish);
    for (; v < b.vectors; ++v) multiply_tile<Multiply, R, 1>(factors, row_stride, b, v, finish);
}

template <class Multiply, class Finish>
inline void multiply(int rows, const typename Multiply::Factor* factors, size_t row_stride,
                     const Lattice<typename Multiply::Element>& b, int v0, Finish&& finish) {
    switch (rows) {
        case 1: return multiply_rows<Multiply, 1>(factors, row_stride, b, v0, finish);
        case 2: return multiply_rows<Multiply, 2>(factors, row_stride, b, v0, finish);
        case 3: return multiply_rows<Multiply, 3>(factors, row_stride, b, v0, finish);
        case 4: return multiply_rows<Multiply, 4>(factors, row_stride, b, v0, finish);
        case 5: return multiply_rows<Multiply, 5>(factors, row_stride, b, v0, finish);
        default: return multiply_rows<Multiply, 6>(factors, row_stride, b, v0, finish);
    }
}

// ---- rows of a tile -----------------------------------------------------------------------------------------------

// The rows of queries [q0, q1) of a group, in scratch. Row r is query q0 + r / group, head r % group.
template <class Format>
struct Rows {
    int count, channels;               // channels: padded
    typename Format::Factor* factors;  // (count, channels): the queries
    float* scales;                     // (count): from a product to a score, in powers of two; before a soft cap: to score / cap
    float* maxima;                     // (count), in powers of two
    float* sums;                       // (count, 8): lanes of the sum of weights
    float* values;                     // (count, channels): sum of weight * value
    typename Format::Wide::Element *keys_wide, *values_wide;  // one page, converted: (64, channels) each
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
    place(rows.factors, count * channels);
    place(rows.scales, count);
    place(rows.maxima, count);
    place(rows.sums, count * kLanes);
    place(rows.values, count * channels);
    place(rows.keys_wide, kPageLen * channels);
    place(rows.values_wide, kPageLen * channels);
    return used;
}

void set_factors(const float* q, int dim, float scale, int16_t* factors, float* row_scale) {
    *row_scale = quantize_row(q, dim, 32767.0f, factors) * scale;
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

// What a page's weights (64 of them, 2^(score - maximum)) are multiplied with, and what came before has to be.
struct Shares {
    float before;  // factor of the sums so far
    float step;    // value of 1 in the factors
};

inline Shares share_out(Floats (&weights)[kPageLanes], Slots, const float*, float before, float* factors) {
    for (int i = 0; i < kPageLanes; ++i) store(factors + i * kLanes, weights[i]);
    return {before, 1.0f};
}

inline Shares share_out(Floats (&weights)[kPageLanes], Slots slots, const float* value_scales, float before,
                        int16_t* factors) {
    constexpr float kLeast = 1e-30f;  // below it the reciprocal overflows; such values are zero beside any others
    Floats most = splat(0.0f);
    for (int i = 0; i < kPageLanes; ++i) {
        weights[i] = mul(weights[i], load(value_scales + i * kLanes));
        if (!slots.all())  // an unused slot's scale may be anything
            weights[i] = within(weights[i], slots.begin - i * kLanes, slots.end - i * kLanes, splat(0.0f));
        most = max(most, weights[i]);
    }
    const float step = largest(most) / 32767.0f;
    const Floats inverse = splat(step > kLeast ? 1.0f / step : 0.0f);
    for (int i = 0; i < kPageLanes; i += 2)
        store_pairs(factors + i * kLanes, round_to_shorts(mul(weights[i], inverse), mul(weights[i + 1], inverse)));
    return {before, step};
}

// Scores of a row (64, in powers of two) -> factors of its values; moves the row's maximum and sum.
template <class Factor>
inline Shares weigh(const float* scores, Slots slots, float softcap, const float* value_scales, float* maximum,
                    float* sums, Factor* factors) {
    Floats lanes[kPageLanes];
    Floats most = splat(kNothing);
    for (int i = 0; i < kPageLanes; ++i) {
        lanes[i] = load(scores + i * kLanes);
        if (softcap > 0) lanes[i] = capped(lanes[i], softcap);
        if (!slots.all())
            lanes[i] = within(lanes[i], slots.begin - i * kLanes, slots.end - i * kLanes, splat(kNothing));
        most = max(most, lanes[i]);
    }
    const float page_maximum = largest(most);
    const float now = page_maximum > *maximum ? page_maximum : *maximum;
    const float before = exp2_of(*maximum - now);
    *maximum = now;
    for (auto& lane : lanes) lane = exp2_of(sub(lane, splat(now)));
    Floats sum = mul_add(load(sums), splat(before), lanes[0]);
    for (int i = 1; i < kPageLanes; ++i) sum = add(sum, lanes[i]);
    store(sums, sum);
    return share_out(lanes, slots, value_scales, before, factors);
}

// ---- one page -----------------------------------------------------------------------------------------------------

template <class Element>
struct PageView {
    const Element *keys, *values;
    const float *key_scales, *value_scales;  // null where the format has none
    const uint8_t *keys_ahead, *values_ahead;
};

// Slots of the page at `position` that row r may see.
Slots visible(const Work& work, int position, int row) {
    const int query = work.q0 + row / work.group();
    const int begin = work.span.window > 0 ? query - work.span.window + 1 - position : 0;
    const int end = query + 1 - position;
    return {begin > 0 ? begin : 0, end < kPageLen ? end : kPageLen};
}

// Slots that any of rows [r0, r1) may see.
Slots visible(const Work& work, int position, int r0, int r1) {
    return {visible(work, position, r0).begin, visible(work, position, r1 - 1).end};
}

// Rows [r0, r0 + count), at most kRowTile of them, over one page.
template <class Format, class Multiply>
void attend_row_tile(const Work& work, Rows<Format>& rows, int r0, int count, int position,
                     const PageView<typename Multiply::Element>& page) {
    alignas(32) float scores[kRowTile][kPageLen];
    alignas(32) typename Format::Factor weights[kRowTile][kPageLen];
    Shares shares[kRowTile];
    const Slots slots = visible(work, position, r0, r0 + count);
    const int channels = rows.channels;

    const size_t key_step = kLanes * Multiply::kDepth;
    const Lattice<typename Multiply::Element> keys{
        page.keys, key_step, key_step * channels / Multiply::kDepth, (slots.end + kLanes - 1) / kLanes, 0,
        channels / Multiply::kDepth, page.keys_ahead};
    multiply<Multiply>(count, rows.factors + static_cast<size_t>(r0) * channels, channels, keys, slots.begin / kLanes,
                       [&](int r, int v, Floats products) {
                           Floats scale = splat(rows.scales[r0 + r]);
                           if (Format::kScaled) scale = mul(scale, load(page.key_scales + v * kLanes));
                           store(scores[r] + v * kLanes, Format::kScaled ? mul(products, scale) : products);
                       });

    for (int r = 0; r < count; ++r)
        shares[r] = weigh(scores[r], visible(work, position, r0 + r), work.shape.softcap, page.value_scales,
                          rows.maxima + r0 + r, rows.sums + static_cast<size_t>(r0 + r) * kLanes, weights[r]);

    const size_t value_vector = kLanes * Multiply::kDepth;
    const Lattice<typename Multiply::Element> values{
        page.values, static_cast<size_t>(channels) * Multiply::kDepth, value_vector, channels / kLanes,
        slots.begin / Multiply::kDepth, (slots.end + Multiply::kDepth - 1) / Multiply::kDepth, page.values_ahead};
    multiply<Multiply>(count, weights[0], kPageLen, values, 0, [&](int r, int v, Floats products) {
        float* sum = rows.values + static_cast<size_t>(r0 + r) * channels + v * kLanes;
        store(sum, mul_add(products, splat(shares[r].step), mul(load(sum), splat(shares[r].before))));
    });
}

template <class Format, class Multiply>
void attend_rows(const Work& work, Rows<Format>& rows, int r0, int r1, int position,
                 PageView<typename Multiply::Element> page) {
    for (int r = r0; r < r1; r += kRowTile) {
        attend_row_tile<Format, Multiply>(work, rows, r, r1 - r < kRowTile ? r1 - r : kRowTile, position, page);
        page.keys_ahead = page.values_ahead = nullptr;  // fetched once is enough
    }
}

void widen(const int8_t* from, size_t count, int16_t* to) {
    for (size_t i = 0; i < count; i += 2 * kLanes) store_pairs(to + i, load_pairs(from + i));
}
void widen(const uint16_t* from, size_t count, float* to) {
    for (size_t i = 0; i < count; i += kLanes) store(to + i, load_halves(from + i));
}

// The page of sequence slot `index`, and where the one that will be read next lies.
template <class Format>
PageView<typename Format::Stored::Element> view(const Work& work, int index) {
    using Element = typename Format::Stored::Element;
    const int channels = padded(work.pages.head_dim);
    const uint8_t* head = head_of<Format>(work.pages, work.span.pages[index], work.kv_head);
    const uint8_t* values = head + half_bytes<Format>(channels);
    PageView<Element> page{reinterpret_cast<const Element*>(head), reinterpret_cast<const Element*>(values),
                           nullptr, nullptr, nullptr, nullptr};
    if (Format::kScaled) {
        page.key_scales = reinterpret_cast<const float*>(head + element_bytes<Format>(channels));
        page.value_scales = reinterpret_cast<const float*>(values + element_bytes<Format>(channels));
    }
    const int pages = (work.span.end + kPageLen - 1) / kPageLen - work.span.first_page;
    if (index + 1 < pages) {
        page.keys_ahead = head_of<Format>(work.pages, work.span.pages[index + 1], work.kv_head);
        page.values_ahead = page.keys_ahead + half_bytes<Format>(channels);
    }
    return page;
}

// Rows [r0, r1) over the page at `position`.
template <class Format>
void attend_page(const Work& work, Rows<Format>& rows, int r0, int r1, int position) {
    const auto page = view<Format>(work, position / kPageLen - work.span.first_page);
    if (r1 - r0 < kWidenFrom) return attend_rows<Format, typename Format::Stored>(work, rows, r0, r1, position, page);
    widen(page.keys, static_cast<size_t>(kPageLen) * rows.channels, rows.keys_wide);
    widen(page.values, static_cast<size_t>(kPageLen) * rows.channels, rows.values_wide);
    attend_rows<Format, typename Format::Wide>(
        work, rows, r0, r1, position,
        {rows.keys_wide, rows.values_wide, page.key_scales, page.value_scales, nullptr, nullptr});
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
    return 2 * kv_heads * (format == KvFormat::q8 ? half_bytes<Q8>(channels) : half_bytes<F16>(channels));
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

void attend_segment(const PageBuffer& pages, const AttentionShape& shape, const Span& span, const float* q, int q_stride,
                    int kv_head, int q0, int q1, int segment, float* part, void* scratch) {
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
