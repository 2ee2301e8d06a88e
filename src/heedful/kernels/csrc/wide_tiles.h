// Products of integer panels in 512-bit vectors: matmul.cpp's tiles for more than two tokens where there is AVX-512 VNNI.
// A vector holds two panels, 16 rows; a tile is two panels × up to 12 tokens. Sums of a block of 32 columns are exact
// integers and the float operations of a row are those of the narrow tiles in the same order, so results are theirs.
//
// w8 has signed codes on both sides, and the instruction takes unsigned ones on one: it gets w + 128, and 128 times the
// sum of the token's codes is taken off, exactly.
#pragma once

#include <cstring>

#include "ops.h"
#include "variant.h"

#if HEEDFUL_VNNI

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kWideTokens = 12;

// What the tile reads: of its first token, the others one after another. A token has `blocks` blocks.
struct WideInput {
    const int8_t* codes;
    const float* scales;
    const float* scaled_sums;
    const int32_t* starts;  // of sums, w8 alone
    size_t blocks;
};

// Element n of things `stride` apart, from pointers to every fourth: so all addresses fit the registers.
constexpr int kStrideGroup = 4;
template <int N, class T>
struct Strided {
    const T* at[(N + kStrideGroup - 1) / kStrideGroup];
    size_t stride;
    Strided(const T* first, size_t stride) : stride(stride) {
        for (int g = 0; g < (N + kStrideGroup - 1) / kStrideGroup; g++) at[g] = first + g * kStrideGroup * stride;
    }
    const T* of(int n) const { return at[n / kStrideGroup] + n % kStrideGroup * stride; }
    void advance(size_t count) {
        HEEDFUL_UNROLL
        for (int g = 0; g < (N + kStrideGroup - 1) / kStrideGroup; g++) at[g] += count;
    }
};

inline void keep_order(__m512i& sum) { asm volatile("" : "+v"(sum)); }  // as add_now: no spills

// 32 bytes of each of two panels.
inline __m512i load_both(const uint8_t* first, const uint8_t* second) {
    const __m512i low = _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
    return _mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
}

inline __m512 load_both_halves(const uint8_t* first, const uint8_t* second) {
    const __m256i low = _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)), 1));
}

template <int N>
inline void add_quads(__m512i (&dots)[N], __m512i weights, const Strided<N, int8_t>& codes, int column) {
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) {
        int32_t four;
        std::memcpy(&four, codes.of(n) + column, sizeof four);
        dots[n] = _mm512_dpbusd_epi32(dots[n], weights, _mm512_set1_epi32(four));
        keep_order(dots[n]);
    }
}

// Adds the exact sums of a block, of two panels' codes at `first` and `second`, with the tokens' codes.
template <Format F, int N>
inline void dot_block(__m512i (&dots)[N], const uint8_t* first, const uint8_t* second, const Strided<N, int8_t>& codes) {
    if constexpr (F == Format::w4) {
        const __m512i mask = _mm512_set1_epi8(15);
        HEEDFUL_UNROLL
        for (int j = 0; j < 4; j++) {
            const __m512i both = load_both(first + 32 * j, second + 32 * j);
            add_quads(dots, _mm512_and_si512(both, mask), codes, 4 * j);
            add_quads(dots, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask), codes, 16 + 4 * j);
        }
    } else {
        const __m512i flip = _mm512_set1_epi8(char(-128));
        HEEDFUL_UNROLL
        for (int j = 0; j < 8; j++) {
            const __m512i both = load_both(first + 32 * j, second + 32 * j);
            add_quads(dots, F == Format::w8 ? _mm512_xor_si512(both, flip) : both, codes, 4 * j);
        }
    }
}

// sums[n] = rows of two panels, `panel_bytes` apart, times token n. block_bytes: of a panel's 32 columns.
template <Format F, int N>
inline void sum_wide_tile(const uint8_t* panel, size_t panel_bytes, int block_bytes, const WideInput& x,
                          __m512 (&sums)[N]) {
    constexpr int kCodesAt = F == Format::w8 ? 16 : 32;
    Strided<N, int8_t> codes(x.codes, x.blocks * kBlock);
    Strided<N, float> scales(x.scales, x.blocks), scaled_sums(x.scaled_sums, x.blocks);
    Strided<N, int32_t> starts(x.starts, x.blocks);
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) sums[n] = _mm512_setzero_ps();
    for (size_t k = 0; k < x.blocks; k++) {
        const uint8_t* other = panel + panel_bytes;
        __m512i dots[N];
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++)
            dots[n] = F == Format::w8 ? _mm512_set1_epi32(*starts.of(n)) : _mm512_setzero_si512();
        dot_block<F>(dots, panel + kCodesAt, other + kCodesAt, codes);
        const __m512 scale = load_both_halves(panel, other);
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) {
            const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(*scales.of(n)));
            sums[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[n]), factor, sums[n]);
        }
        codes.advance(kBlock);
        scales.advance(1);
        if (F == Format::w8) {
            starts.advance(1);
        } else {
            const __m512 min = load_both_halves(panel + 16, other + 16);
            HEEDFUL_UNROLL
            for (int n = 0; n < N; n++) sums[n] = _mm512_fmadd_ps(min, _mm512_set1_ps(*scaled_sums.of(n)), sums[n]);
            scaled_sums.advance(1);
        }
        panel += block_bytes;
    }
}

// What a w8 block's sum starts from: -128 times the sum of a token's 32 codes.
inline int32_t w8_start(const int8_t* codes) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), x);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return -128 * _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT

#endif
