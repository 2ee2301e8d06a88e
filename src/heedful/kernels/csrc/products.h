// The product of attention in each number format: rows of factors times lanes of eight elements of a page's side.
// pages.h has the layouts. Sums of integers are exact; sums of floats run along channels or tokens.
#pragma once

#include "pages.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kRowTile = 6;  // rows that share a load of keys or values in registers

// ---- f32, f16, q8: what factors and elements are -------------------------------------------------------------------

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

template <class Stored>
struct Plain {
    using Element = Stored;
    using Factor = float;
    using Sums = Floats;
    static constexpr int kDepth = 1;
    static constexpr bool kScaled = false;
    static Sums zero() { return HEEDFUL_VARIANT::splat(0.0f); }
    static Floats load(const Element* p) { return load_floats(p); }
    static Floats splat(const Factor* p) { return HEEDFUL_VARIANT::splat(*p); }
    static Sums add_products(Sums sums, Floats a, Floats b) { return accumulate(sums, a, b); }

private:
    static Floats load_floats(const float* p) { return HEEDFUL_VARIANT::load(p); }
    static Floats load_floats(const uint16_t* p) { return load_halves(p); }
};
using F16 = Plain<uint16_t>;
using F32 = Plain<float>;

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

// ---- q4 -----------------------------------------------------------------------------------------------------------

// A row of factors for the keys: int8 codes in blocks of 32 channels, each block with a scale and -8 times the sum of
// its codes, since a nibble n stands for n - 8.
struct NibbleFactors {
    const int8_t* codes;
    const float* scales;
    const int32_t* starts;
};

// finish(r, g, scores of the eight tokens of group g) for R rows, one after another, and V groups from g0 on.
template <int R, int V, class Finish>
inline void multiply_nibble_groups(const NibbleFactors& rows, int blocks, const uint8_t* keys, int g0,
                                   const uint8_t* ahead, Finish&& finish) {
    const size_t group_bytes = static_cast<size_t>(blocks) * kQ4KeyBytes;
    Floats scores[R][V];
    for (auto& row : scores)
        for (auto& score : row) score = splat(0.0f);
    for (int b = 0; b < blocks; ++b) {
        const size_t at = g0 * group_bytes + static_cast<size_t>(b) * kQ4KeyBytes;
        NibbleSums sums[R][V];
        for (auto& row : sums)
            for (auto& sum : row) sum = no_nibble_sums();
        for (int v = 0; v < 4; ++v) {
            NibbleQuads quads[V];
            for (int g = 0; g < V; ++g) quads[g] = load_nibbles(keys + at + g * group_bytes + 2 * kLanes + 32 * v);
            for (int r = 0; r < R; ++r) {
                const int8_t* codes = rows.codes + (r * blocks + b) * kBlock + 4 * v;
                const Quads low = splat_quad(codes), high = splat_quad(codes + 16);
                for (int g = 0; g < V; ++g) sums[r][g] = add_quad_products(sums[r][g], quads[g].low, low);
                for (int g = 0; g < V; ++g) sums[r][g] = add_quad_products(sums[r][g], quads[g].high, high);
            }
        }
        for (int g = 0; g < V; ++g) {
            for (int line = 0; line < kQ4KeyBytes; line += 64) prefetch(ahead + at + g * group_bytes + line);
            const Floats scales = load_halves(reinterpret_cast<const uint16_t*>(keys + at + g * group_bytes));
            for (int r = 0; r < R; ++r) {
                const int i = r * blocks + b;
                const Floats products = to_floats(finish_nibble_sums(sums[r][g], rows.starts[i]));
                scores[r][g] = mul_add(products, mul(scales, splat(rows.scales[i])), scores[r][g]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < V; ++g) finish(r, g0 + g, scores[r][g]);
}

// Groups [first, end).
template <int R, class Finish>
inline void multiply_nibble_keys(const NibbleFactors& rows, int blocks, const uint8_t* keys, int first, int end,
                                 const uint8_t* ahead, Finish&& finish) {
    constexpr int kGroups = R <= 3 ? 2 : 1;
    int g = first;
    for (; g + kGroups <= end; g += kGroups)
        multiply_nibble_groups<R, kGroups>(rows, blocks, keys, g, ahead, finish);
    for (; g < end; ++g) multiply_nibble_groups<R, 1>(rows, blocks, keys, g, ahead, finish);
}

template <class Finish>
inline void multiply_nibble_keys(int count, const NibbleFactors& rows, int blocks, const uint8_t* keys, int first,
                                 int end, const uint8_t* ahead, Finish&& finish) {
#if HEEDFUL_AVX2
    switch (count) {
        case 1: return multiply_nibble_keys<1>(rows, blocks, keys, first, end, ahead, finish);
        case 2: return multiply_nibble_keys<2>(rows, blocks, keys, first, end, ahead, finish);
        case 3: return multiply_nibble_keys<3>(rows, blocks, keys, first, end, ahead, finish);
        case 4: return multiply_nibble_keys<4>(rows, blocks, keys, first, end, ahead, finish);
        case 5: return multiply_nibble_keys<5>(rows, blocks, keys, first, end, ahead, finish);
        default: return multiply_nibble_keys<kRowTile>(rows, blocks, keys, first, end, ahead, finish);
    }
#else  // plain loops gain nothing from rows that share nibbles, and take long to compile
    for (int r = 0; r < count; ++r) {
        const NibbleFactors row{rows.codes + r * blocks * kBlock, rows.scales + r * blocks, rows.starts + r * blocks};
        const auto finish_row = [&](int, int g, Floats sums) { finish(r, g, sums); };
        multiply_nibble_keys<1>(row, blocks, keys, first, end, ahead, finish_row);
    }
#endif
}

// Words of eight tokens for the channels of a block: groups [first, end), `step` bytes apart; channels in `vectors`.
struct NibbleValues {
    const uint8_t* words;
    size_t step;
    int vectors, first, end;
    const uint8_t* ahead;  // where the same words of the page that is read next are
};

// finish(r, v, starts[r] + sum over tokens of factors[r][token] * nibble) for R rows and V vectors from v0 on.
template <int R, int V, class Finish>
inline void multiply_nibble_tile(const int16_t* factors, const int32_t* starts, const NibbleValues& b, int v0,
                                 Finish&& finish) {
    constexpr int kWordBytes = 4 * kLanes;
    Ints sums[R][V];
    for (int r = 0; r < R; ++r)
        for (auto& sum : sums[r]) sum = splat_int(starts[r]);
    const auto add_pairs = [&](const Shorts* lanes, int token) {
        for (int r = 0; r < R; ++r) {
            const Shorts factor = splat_pair(factors + r * kPageLen + token);
            for (int v = 0; v < V; ++v) sums[r][v] = add_pair_products(sums[r][v], factor, lanes[v]);
        }
    };
    for (int g = b.first; g < b.end; ++g) {
        const size_t at = g * b.step + v0 * kWordBytes;
        for (int line = 0; line < V * kWordBytes; line += 64) prefetch(b.ahead + at + line);
        Ints words[V];
        Shorts lanes[V];
        for (int v = 0; v < V; ++v) words[v] = load_ints(b.words + at + v * kWordBytes);
        for (int v = 0; v < V; ++v) lanes[v] = nibble_pairs<0>(words[v]);
        add_pairs(lanes, g * kLanes);
        for (int v = 0; v < V; ++v) lanes[v] = nibble_pairs<1>(words[v]);
        add_pairs(lanes, g * kLanes + 2);
        for (int v = 0; v < V; ++v) lanes[v] = nibble_pairs<2>(words[v]);
        add_pairs(lanes, g * kLanes + 4);
        for (int v = 0; v < V; ++v) lanes[v] = nibble_pairs<3>(words[v]);
        add_pairs(lanes, g * kLanes + 6);
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) finish(r, v0 + v, to_floats(sums[r][v]));
}

template <int R, class Finish>
inline void multiply_nibble_values(const int16_t* factors, const int32_t* starts, const NibbleValues& b,
                                   Finish&& finish) {
    constexpr int kVectors = R <= 2 ? 4 : 2;
    int v = 0;
    for (; v + kVectors <= b.vectors; v += kVectors) multiply_nibble_tile<R, kVectors>(factors, starts, b, v, finish);
    for (; v < b.vectors; ++v) multiply_nibble_tile<R, 1>(factors, starts, b, v, finish);
}

template <class Finish>
inline void multiply_nibble_values(int rows, const int16_t* factors, const int32_t* starts, const NibbleValues& b,
                                   Finish&& finish) {
#if HEEDFUL_AVX2
    switch (rows) {
        case 1: return multiply_nibble_values<1>(factors, starts, b, finish);
        case 2: return multiply_nibble_values<2>(factors, starts, b, finish);
        case 3: return multiply_nibble_values<3>(factors, starts, b, finish);
        case 4: return multiply_nibble_values<4>(factors, starts, b, finish);
        case 5: return multiply_nibble_values<5>(factors, starts, b, finish);
        default: return multiply_nibble_values<kRowTile>(factors, starts, b, finish);
    }
#else
    for (int r = 0; r < rows; ++r) {
        const auto finish_row = [&](int, int v, Floats sums) { finish(r, v, sums); };
        multiply_nibble_values<1>(factors + r * kPageLen, starts + r, b, finish_row);
    }
#endif
}

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT
