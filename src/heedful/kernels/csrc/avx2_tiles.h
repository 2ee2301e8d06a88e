// Tiles of 8 rows (a panel, a lane each) × up to 6 tokens with AVX2, one 256-bit vector of sums a token; of f32 they are
// in float_tiles.h, of more than two tokens with AVX-512 in wide_tiles.h. And the rounding of activations.
#pragma once

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "float_tiles.h"
#include "tiles.h"
#include "wide_tiles.h"

#if HEEDFUL_AVX2

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kTileTokens = 6;  // at most
constexpr int kPrefetchBytes = 1280;

// Keeps the compiler from computing all products of a block first and adding later, which would spill every register.
void add_now(__m256i& sum) { asm("" : "+x"(sum)); }

__m256 load_halves(const uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

__m256i load_vector(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

__m256i broadcast_four(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, sizeof four);
    return _mm256_set1_epi32(four);
}

int tile_tokens(Format format) { return format == Format::f32 ? kFloatTokens : format == Format::w6 ? 5 : kTileTokens; }

// A lone token's weights are not needed again before all others have passed: they are read past the L3 cache, so that what
// else a step needs (Python's part of it too) stays there.
template <int N>
void prefetch(const uint8_t* at, int bytes) {
    const char* ahead = reinterpret_cast<const char*>(at + kPrefetchBytes);
    for (int i = 0; i < bytes; i += 64) _mm_prefetch(ahead + i, N == 1 ? _MM_HINT_NTA : _MM_HINT_T0);
}

// A tile's sums of one panel; conditions stand outside of the loops, which are unrolled.
template <int N>
void store_tile(__m256 (&sums)[N], const Target& target) {
    const size_t stride = target.stride;
    if (target.rows < kPanelRows) {
        for (int n = 0; n < N; n++) {
            float row[kPanelRows];
            _mm256_storeu_ps(row, sums[n]);
            store_rows(row, target, n);
        }
        return;
    }
    if (target.bias != nullptr) {
        const __m256 bias = _mm256_loadu_ps(target.bias);
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) sums[n] = _mm256_add_ps(sums[n], bias);
    }
    if (target.add) {
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) sums[n] = _mm256_add_ps(_mm256_loadu_ps(target.y + n * stride), sums[n]);
    }
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) _mm256_storeu_ps(target.y + n * stride, sums[n]);
}

// Sums of four products of unsigned and signed bytes a lane. Nibbles: the sums of a block's eight calls, in int16 pairs
// where there is no VNNI; nibble_sum adds the pairs.
#if HEEDFUL_VNNI
__m256i add_nibble_products(__m256i sums, __m256i nibbles, __m256i x) { return _mm256_dpbusd_epi32(sums, nibbles, x); }
__m256i nibble_sum(__m256i sums) { return sums; }
__m256i add_byte_products(__m256i sums, __m256i w, __m256i x) { return _mm256_dpbusd_epi32(sums, w, x); }
__m256i add_two_products(__m256i sums, __m256i w0, __m256i x0, __m256i w1, __m256i x1) {
    return add_byte_products(add_byte_products(sums, w0, x0), w1, x1);
}
#else
__m256i add_nibble_products(__m256i sums, __m256i nibbles, __m256i x) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, x));
}
__m256i nibble_sum(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
__m256i add_byte_products(__m256i sums, __m256i w, __m256i x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
__m256i add_two_products(__m256i sums, __m256i w0, __m256i x0, __m256i w1, __m256i x1) {
    const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(w0, x0), _mm256_maddubs_epi16(w1, x1));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
}
#endif

template <int N>
void tile_w4(const uint8_t* panel, int cols, const Token* tokens, const Target& target) {
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    __m256 sums[N];
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) sums[n] = _mm256_setzero_ps();
    for (int k = 0; k < cols / kBlock; k++, panel += kW4Bytes) {
        prefetch<N>(panel, kW4Bytes);
        __m256i dots[N];
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) dots[n] = _mm256_setzero_si256();
        for (int j = 0; j < 4; j++) {
            const __m256i packed = load_vector(panel + 32 + 32 * j);
            const __m256i low = _mm256_and_si256(packed, low_nibbles);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_nibbles);
            HEEDFUL_UNROLL
            for (int n = 0; n < N; n++) {
                const int8_t* codes = tokens[n].codes + k * kBlock + 4 * j;
                dots[n] = add_nibble_products(dots[n], low, broadcast_four(codes));
                dots[n] = add_nibble_products(dots[n], high, broadcast_four(codes + 16));
                add_now(dots[n]);
            }
        }
        const __m256 scale = load_halves(panel), min = load_halves(panel + 16);
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) {
            const __m256 dot = _mm256_cvtepi32_ps(nibble_sum(dots[n]));
            sums[n] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(tokens[n].scales[k])), sums[n]);
            sums[n] = _mm256_fmadd_ps(min, _mm256_set1_ps(tokens[n].scaled_sums[k]), sums[n]);
        }
    }
    store_tile(sums, target);
}

template <int N>
void tile_w8(const uint8_t* panel, int cols, const Token* tokens, const Target& target) {
    __m256 sums[N];
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) sums[n] = _mm256_setzero_ps();
    for (int k = 0; k < cols / kBlock; k++, panel += kW8Bytes) {
        prefetch<N>(panel, kW8Bytes);
        __m256i dots[N];
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) dots[n] = _mm256_setzero_si256();
        for (int j = 0; j < 8; j++) {
            const __m256i codes = load_vector(panel + 16 + 32 * j), magnitudes = _mm256_abs_epi8(codes);
            HEEDFUL_UNROLL
            for (int n = 0; n < N; n++) {
                const __m256i four = broadcast_four(tokens[n].codes + k * kBlock + 4 * j);
                dots[n] = add_byte_products(dots[n], magnitudes, _mm256_sign_epi8(four, codes));
                add_now(dots[n]);
            }
        }
        const __m256 scale = load_halves(panel);
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) {
            const __m256 dot = _mm256_cvtepi32_ps(dots[n]);
            sums[n] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(tokens[n].scales[k])), sums[n]);
        }
    }
    store_tile(sums, target);
}

template <int N>
void tile_w6(const uint8_t* panel, int cols, const Token* tokens, const Target& target) {
    __m256 sums[N];
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) sums[n] = _mm256_setzero_ps();
    for (int k = 0; k < cols / kBlock; k++, panel += kW6Bytes) {
        prefetch<N>(panel, kW6Bytes);
        __m256i dots[N];
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) dots[n] = _mm256_setzero_si256();
        for (int j = 0; j < 8; j += 2) {
            const __m256i first = load_vector(panel + 32 + 32 * j), second = load_vector(panel + 64 + 32 * j);
            HEEDFUL_UNROLL
            for (int n = 0; n < N; n++) {
                const int8_t* codes = tokens[n].codes + k * kBlock + 4 * j;
                dots[n] = add_two_products(dots[n], first, broadcast_four(codes), second, broadcast_four(codes + 4));
                add_now(dots[n]);
            }
        }
        const __m256 scale = load_halves(panel), min = load_halves(panel + 16);
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) {
            const __m256 dot = _mm256_cvtepi32_ps(dots[n]);
            sums[n] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scale, _mm256_set1_ps(tokens[n].scales[k])), sums[n]);
            sums[n] = _mm256_fmadd_ps(min, _mm256_set1_ps(tokens[n].scaled_sums[k]), sums[n]);
        }
    }
    store_tile(sums, target);
}

template <int N>
void tile_f16(const uint8_t* panel, int cols, const Token* tokens, const Target& target) {
    __m256 even[N], odd[N];
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) even[n] = odd[n] = _mm256_setzero_ps();
    for (int c = 0; c + 1 < cols; c += 2) {
        prefetch<N>(panel + size_t(c) * 16, 64);
        const __m256 first = load_halves(panel + size_t(c) * 16), second = load_halves(panel + size_t(c + 1) * 16);
        HEEDFUL_UNROLL
        for (int n = 0; n < N; n++) {
            even[n] = _mm256_fmadd_ps(first, _mm256_broadcast_ss(tokens[n].f32 + c), even[n]);
            odd[n] = _mm256_fmadd_ps(second, _mm256_broadcast_ss(tokens[n].f32 + c + 1), odd[n]);
        }
    }
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) {
        if (cols % 2 != 0) {
            const __m256 last = load_halves(panel + size_t(cols - 1) * 16);
            even[n] = _mm256_fmadd_ps(last, _mm256_broadcast_ss(tokens[n].f32 + cols - 1), even[n]);
        }
        even[n] = _mm256_add_ps(even[n], odd[n]);
    }
    store_tile(even, target);
}

template <int N>
void tile_of(Format format, const uint8_t* panel, int cols, const Token* tokens, const Target& target) {
    switch (format) {
        case Format::f32: return;  // see float_tiles.h
        case Format::f16: return tile_f16<N>(panel, cols, tokens, target);
        case Format::w4: return tile_w4<N>(panel, cols, tokens, target);
        case Format::w8: return tile_w8<N>(panel, cols, tokens, target);
        case Format::w6: return tile_w6<N>(panel, cols, tokens, target);
    }
}

void tile(Format format, const uint8_t* panel, int cols, const Token* tokens, int count, const Target& target) {
    switch (count) {
        case 1: return tile_of<1>(format, panel, cols, tokens, target);
        case 2: return tile_of<2>(format, panel, cols, tokens, target);
        case 3: return tile_of<3>(format, panel, cols, tokens, target);
        case 4: return tile_of<4>(format, panel, cols, tokens, target);
        case 5: return tile_of<5>(format, panel, cols, tokens, target);
        default: return tile_of<6>(format, panel, cols, tokens, target);
    }
}

template <int P, int N>
void tile_f32(const Matrix& w, int p, const Activations& x, int t, const Result& y) {
    const size_t panel_floats = panel_bytes(w) / sizeof(float);
    const float* panels = reinterpret_cast<const float*>(w.panels) + p * panel_floats;
    __m256 sums[P][N];
    sum_float_tile(panels, panel_floats, w.cols, x.f32 + size_t(t) * w.cols, sums);
    HEEDFUL_UNROLL
    for (int i = 0; i < P; i++) store_tile(sums[i], y.of(w, p + i, t));
}

using FloatTile = void (*)(const Matrix& w, int p, const Activations& x, int t, const Result& y);
template <int P, int... N>
constexpr std::array<FloatTile, sizeof...(N)> float_tiles(std::integer_sequence<int, N...>) {
    return {tile_f32<P, N + 1>...};
}
constexpr auto kFloatTiles1 = float_tiles<1>(std::make_integer_sequence<int, kFloatTokens>());
constexpr auto kFloatTiles2 = float_tiles<kFloatPanels>(std::make_integer_sequence<int, kFloatTokens>());

// Panels [p0, p1) × tokens [t0, t1), which fit a cache.
void multiply_floats(const Matrix& w, const Activations& x, int t0, int t1, int p0, int p1, const Result& y) {
    for (int p = p0; p < p1;) {
        const int panels = p + kFloatPanels <= p1 ? kFloatPanels : 1;
        const auto& tiles = panels > 1 ? kFloatTiles2 : kFloatTiles1;
        for (int t = t0, count; t < t1; t += count) {
            count = even_share(t1 - t, kFloatTokens);
            tiles[count - 1](w, p, x, t, y);
        }
        p += panels;
    }
}

#if HEEDFUL_VNNI

template <Format F, int N>
void tile_wide(const Matrix& w, int p, const WideInput& x, int t, const Result& y) {
    const size_t bytes = panel_bytes(w);
    __m512 sums[N];
    sum_wide_tile<F>(w.panels + p * bytes, bytes, int(bytes / x.blocks), x, sums);
    __m256 rows[2][N];
    HEEDFUL_UNROLL
    for (int n = 0; n < N; n++) {
        rows[0][n] = _mm512_castps512_ps256(sums[n]);
        rows[1][n] = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums[n]), 1));
    }
    for (int i = 0; i < 2; i++) store_tile(rows[i], y.of(w, p + i, t));
}

// Fewer are bound by memory, and one panel after the other is one stream.
constexpr int kLeastWideTokens = 3;

using WideTile = void (*)(const Matrix& w, int p, const WideInput& x, int t, const Result& y);
template <Format F, int... N>
constexpr std::array<WideTile, sizeof...(N)> wide_tiles(std::integer_sequence<int, N...>) {
    return {tile_wide<F, N + kLeastWideTokens>...};
}
constexpr auto kWideCounts = std::make_integer_sequence<int, kWideTokens - kLeastWideTokens + 1>();
constexpr auto kWideW4 = wide_tiles<Format::w4>(kWideCounts);
constexpr auto kWideW6 = wide_tiles<Format::w6>(kWideCounts);
constexpr auto kWideW8 = wide_tiles<Format::w8>(kWideCounts);

// Panels [p0, p1), an even number, × tokens [t0, t1), which fit a cache.
void multiply_wide(const Matrix& w, const Activations& x, int t0, int t1, int p0, int p1, const Result& y) {
    const auto& tiles = w.format == Format::w4 ? kWideW4 : w.format == Format::w6 ? kWideW6 : kWideW8;
    const size_t blocks = w.cols / kBlock;
    std::vector<int32_t> starts(w.format == Format::w8 ? (t1 - t0) * blocks : 0);
    for (size_t i = 0; i < starts.size(); i++) starts[i] = w8_start(x.codes + (t0 * blocks + i) * kBlock);
    for (int p = p0; p < p1; p += 2) {
        for (int t = t0, count; t < t1; t += count) {
            count = even_share(t1 - t, kWideTokens);
            const Token token = token_of(w.format, x, t);
            const WideInput in{token.codes, token.scales, token.scaled_sums, starts.data() + (t - t0) * blocks, blocks};
            tiles[count - kLeastWideTokens](w, p, in, t, y);
        }
    }
}

#endif

// Largest magnitude of 32 floats. NaN is ignored or not, as it falls.
float abs_max(const float* x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 largest = _mm256_setzero_ps();
    for (int i = 0; i < kBlock; i += 8) {
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// codes[i] = x[i] * inverse, rounded half to even. Returns their sum.
int round_block(const float* x, float inverse, int8_t* codes) {
    const __m256 factor = _mm256_set1_ps(inverse);
    __m256i whole[4];
    for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
    const __m256i halves0 = _mm256_packs_epi32(whole[0], whole[1]), halves1 = _mm256_packs_epi32(whole[2], whole[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work within 128-bit lanes
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(halves0, halves1), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
    const __m256i fours = _mm256_madd_epi16(_mm256_add_epi16(halves0, halves1), _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT

#endif
