// Products of f32 panels: matmul.cpp's tiles for them. A panel is [C / 2 pairs of columns][8 rows][2 columns], so that a
// vector holds both columns of some rows and meets a token's two inputs, broadcast together: half the loads of one column
// at a time, and the two sums of a row (even, odd) lie side by side.
//
// A tile is 1 or 2 panels × some tokens, its sums in registers: with AVX-512 a vector a panel, up to 12 tokens × 2 panels;
// with AVX2 two vectors a panel, up to 6 tokens.
#pragma once

#include <cstring>

#include "ops.h"
#include "variant.h"

#if HEEDFUL_AVX2

namespace heedful::HEEDFUL_VARIANT {
namespace {

// Loops over a tile's tokens must be unrolled before anything else, or their accumulators live in memory.
#define HEEDFUL_UNROLL _Pragma("GCC unroll 16")

// The bits of two floats, wherever they lie.
inline double two_floats(const float* at) {
    double both;
    std::memcpy(&both, at, sizeof both);
    return both;
}

#if HEEDFUL_VNNI

constexpr int kFloatTokens = 12, kFloatPanels = 2, kFloatVectors = 1;
using Pairs = __m512;  // of columns, of 8 rows

inline Pairs no_pairs() { return _mm512_setzero_ps(); }
inline Pairs load_pairs_of(const float* at) { return _mm512_loadu_ps(at); }
inline Pairs splat_pair_of(const float* at) { return _mm512_castpd_ps(_mm512_set1_pd(two_floats(at))); }
inline Pairs add_products(Pairs w, Pairs x, Pairs sums) {
    sums = _mm512_fmadd_ps(w, x, sums);
    asm volatile("" : "+v"(sums));  // keeps the compiler from pulling products of a tile apart, which spills sums
    return sums;
}
inline __m256 even_plus_odd(const Pairs* sums) {
    const __m256 low = _mm512_castps512_ps256(*sums);
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(*sums), 1));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(low, high)), 0b11011000));
}

#else

constexpr int kFloatTokens = 6, kFloatPanels = 1, kFloatVectors = 2;
using Pairs = __m256;  // of columns, of 4 rows

inline Pairs no_pairs() { return _mm256_setzero_ps(); }
inline Pairs load_pairs_of(const float* at) { return _mm256_loadu_ps(at); }
inline Pairs splat_pair_of(const float* at) { return _mm256_castpd_ps(_mm256_set1_pd(two_floats(at))); }
inline Pairs add_products(Pairs w, Pairs x, Pairs sums) {
    sums = _mm256_fmadd_ps(w, x, sums);
    asm volatile("" : "+x"(sums));
    return sums;
}
inline __m256 even_plus_odd(const Pairs* sums) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(sums[0], sums[1])), 0b11011000));
}

#endif

constexpr int kPairFloats = 2 * kPanelRows;

// sums[p][n] = panel p times token n. panels: `panel_floats` apart; x: (N, cols), tokens `cols` apart.
template <int P, int N>
inline void sum_float_tile(const float* panels, size_t panel_floats, int cols, const float* x, __m256 (&sums)[P][N]) {
    constexpr int V = kFloatVectors, kGroup = 4;
    Pairs pairs[P][N][V];
    HEEDFUL_UNROLL
    for (int p = 0; p < P; p++)
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++)
            HEEDFUL_UNROLL
            for (int v = 0; v < V; v++) pairs[p][n][v] = no_pairs();
    const size_t stride = size_t(cols);
    const float* at[(N + kGroup - 1) / kGroup];
    for (int g = 0; g < (N + kGroup - 1) / kGroup; g++) at[g] = x + g * kGroup * stride;
    const float* end = x + cols / 2 * 2;
    const float* w = panels;
    while (at[0] < end) {
        Pairs weights[P][V];
        HEEDFUL_UNROLL
        for (int p = 0; p < P; p++)
            HEEDFUL_UNROLL
            for (int v = 0; v < V; v++) weights[p][v] = load_pairs_of(w + p * panel_floats + v * (kPairFloats / V));
        w += kPairFloats;
        _mm_prefetch(reinterpret_cast<const char*>(w + 20 * kPairFloats), _MM_HINT_T0);
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) {
            const Pairs both = splat_pair_of(at[n / kGroup] + n % kGroup * stride);
            HEEDFUL_UNROLL
            for (int p = 0; p < P; p++)
                HEEDFUL_UNROLL
                for (int v = 0; v < V; v++) pairs[p][n][v] = add_products(weights[p][v], both, pairs[p][n][v]);
        }
        HEEDFUL_UNROLL
        for (int g = 0; g < (N + kGroup - 1) / kGroup; g++) at[g] += 2;
    }
    if (cols % 2 != 0) {  // the panel's last odd column is zero, the token has none
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) {
            const float last[2] = {at[n / kGroup][n % kGroup * stride], 0.0f};
            const Pairs both = splat_pair_of(last);
            HEEDFUL_UNROLL
            for (int p = 0; p < P; p++)
                HEEDFUL_UNROLL
                for (int v = 0; v < V; v++)
                    pairs[p][n][v] = add_products(load_pairs_of(w + p * panel_floats + v * (kPairFloats / V)), both,
                                                  pairs[p][n][v]);
        }
    }
    HEEDFUL_UNROLL
    for (int p = 0; p < P; p++)
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) sums[p][n] = even_plus_odd(pairs[p][n]);
}

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT

#endif
