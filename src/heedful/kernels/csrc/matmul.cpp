// Matrix products of panelled weights with activations, and the quantization of activations that the integer formats
// need. R rows, C columns, T tokens; W (R, C) in panels (pack.cpp has their layout), x (T, C), y (T, R) with a stride.
//
// For the integer formats a token's 32 columns are int8 codes with a scale: one integer sum of 32 products a row, then
// one float fused multiply-add with scale · scale, and for w4 and w6 one more with min · (scale · sum of codes).
// w4: all eight maddubs results of a block add up in int16 (8 · 2 · 15 · 127 = 30480). w6: two of them (4 · 63 · 127 =
// 32004). w8: maddubs(|w|, x with w's sign), at most 2 · 128 · 127 = 32512, so code -128 of w is right too; activations
// never have it.
// f32 and f16: even columns add up in one float, odd ones in another (two chains hide the latency), then even + odd.
//
// A row of a token is one chain of float operations in the order of columns, whatever tile it is computed in: so it is
// the same to the bit for any T, token range and panel range.
//
// A tile is 8 rows (a panel, a lane each) × up to 6 tokens; f32 has tiles of its own (float_tiles.h), and so have more than
// two tokens where there is AVX-512 (wide_tiles.h). T = 1 is a tile of one: bound by memory, panels streaming.
// For more, tokens go in blocks that fit the L2 cache with their scales, and each panel visits a whole block.
//
// Measured on SmolLM2-135M's layers (66 MB of w4, 212 MFLOP a token), Zen 4 VM with 2 cores, AVX2, others idle:
//   T = 1, 2 threads: 1.45 ms = 46 GB/s; 1 thread: 2.4 ms = 27 GB/s. Head of 30 MB w8: 0.47 ms (it fits the L3 cache).
//   T = 2, 4, 8: 1.6, 2.5, 5.0 ms. T = 512: 304 ms = 357 GOP/s; a thread alone w4 200, w8 119, f16 92, f32 88 GOP/s.
// 96 tokens × MiniLM's matrices (384 and 1,536 columns) from the L3 cache, one thread of a Xeon with AVX-512 at about 3 GHz,
// GOP/s of its own processor time, others busy: f32 AVX2 78, with AVX-512 135..155 (MKL, through PyTorch, 120..160);
//   256-bit VNNI w6 195, w8 125, w4 198; two panels to a 512-bit vector: 283, 273, 286, bound by loads, as every token's
//   pointer came from memory; pointers to every fourth token, in registers: w6 325, w8 330, w4 310. Without AVX-512: 157, 97.
//   Portable (SSE2), 1 thread: T = 1 24 ms, T = 32 23 GOP/s; w8 17..22, f32 16, f16 6 (a conversion in software).
// Tried:
//   w6, 1 thread of a Zen 3 VM, GOP/s of its own processor time: tiles of 5 tokens 147, of 6 127 (a register too many),
//     of 4 135; w8 with 5 tokens 86, 6 93; w4 140; PyTorch's f32 product 75..85.
//   plain loops over a tile's tokens: the compiler kept accumulators in memory, 147 GOP/s; unrolled by pragma, and with
//     products added at once (add_now): 200.
//   tiles of 4, 5, 6 tokens × 1 panel and 2, 3, 4 tokens × 2 panels: within 5 % of each other; two panels never ahead.
//   floats with one chain of sums instead of even and odd: not built; at T = 1 a chain's latency, 4 cycles for 16 bytes
//     of f16, is slower than the memory.
//   portable with int8 products and nibbles taken one by one: 2-3 times slower; floats, tokens in the inner loop: 2-4.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "float_tiles.h"
#include "half.h"
#include "ops.h"
#include "variant.h"
#include "wide_tiles.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kW4Bytes = 160, kW6Bytes = 288, kW8Bytes = 272;  // a panel's bytes per 32 columns
constexpr float kSmallestAbsMax = 1e-30f;      // a block with less counts as zero: 127 / max stays finite

size_t panel_bytes(const Matrix& w) {
    switch (w.format) {
        case Format::f32: return size_t(w.cols + w.cols % 2) * kPanelRows * 4;
        case Format::f16: return size_t(w.cols) * kPanelRows * 2;
        case Format::w4: return size_t(w.cols / kBlock) * kW4Bytes;
        case Format::w8: return size_t(w.cols / kBlock) * kW8Bytes;
        case Format::w6: return size_t(w.cols / kBlock) * kW6Bytes;
    }
    return 0;
}

// One token's part of Activations: f32 for the float formats, the others for the integer ones.
struct Token {
    const float* f32;
    const int8_t* codes;
    const float* scales;
    const float* scaled_sums;
};

Token token_of(Format format, const Activations& x, int t) {
    const size_t column = size_t(t) * x.cols, block = size_t(t) * (x.cols / kBlock);
    if (has_integers(format)) return {nullptr, x.codes + column, x.scales + block, x.scaled_sums + block};
    return {x.f32 + column, nullptr, nullptr, nullptr};
}

// Where a tile's results go: y[row] (+)= sum + bias[row] for the panel's first `rows` rows.
struct Target {
    float* y;
    int stride, rows;
    const float* bias;
    bool add;
};

// All results: (T, R) with a stride, added to or not.
struct Result {
    float* y;
    int stride;
    const float* bias;
    bool add;
    Target of(const Matrix& w, int p, int t) const {
        const int row = p * kPanelRows;
        return {y + size_t(t) * stride + row, stride, std::min(kPanelRows, w.rows - row),
                bias != nullptr ? bias + row : nullptr, add};
    }
};

// How many of `left` tokens the next tile of at most `most` takes, so that all tiles are of nearly equal size.
int even_share(int left, int most) {
    const int tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

void store_rows(const float* sums, const Target& target, int n) {
    float* y = target.y + size_t(n) * target.stride;
    for (int r = 0; r < target.rows; r++) {
        const float value = target.bias != nullptr ? sums[r] + target.bias[r] : sums[r];
        y[r] = target.add ? y[r] + value : value;
    }
}

#if HEEDFUL_AVX2

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

#else

constexpr int kTileTokens = 8;

int tile_tokens(Format) { return kTileTokens; }

// 32 columns of a panel of any integer format: weight = scale[r] * code[r][i] + min[r].
struct Block {
    float scale[kPanelRows], min[kPanelRows];
    int16_t code[kPanelRows][kBlock];  // wide: compilers know how to multiply shorts and add up pairs
};

void widen(const int8_t* codes, int16_t* out) {
    for (int i = 0; i < kBlock; i++) out[i] = codes[i];
}

void unpack_w4(const uint8_t* packed, Block& out) {
    int8_t codes[kBlock];
    for (int r = 0; r < kPanelRows; r++) {
        out.scale[r] = load_half(packed + 2 * r);
        out.min[r] = load_half(packed + 16 + 2 * r);
        for (int j = 0; j < 4; j++) {
            uint32_t both;
            std::memcpy(&both, packed + 32 + 32 * j + 4 * r, 4);
            const uint32_t low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
            std::memcpy(codes + 4 * j, &low, 4);
            std::memcpy(codes + 16 + 4 * j, &high, 4);
        }
        widen(codes, out.code[r]);
    }
}

// w8 and w6: `codes_at` bytes of scales, and of minima where there are any, come before the codes.
void unpack_bytes(const uint8_t* packed, int codes_at, Block& out) {
    int8_t codes[kBlock];
    for (int r = 0; r < kPanelRows; r++) {
        out.scale[r] = load_half(packed + 2 * r);
        out.min[r] = codes_at == 32 ? load_half(packed + 16 + 2 * r) : 0;
        for (int j = 0; j < 8; j++) std::memcpy(codes + 4 * j, packed + codes_at + 32 * j + 4 * r, 4);
        widen(codes, out.code[r]);
    }
}

int dot(const int16_t* a, const int16_t* b) {
    int sum = 0;
    for (int i = 0; i < kBlock; i++) sum += a[i] * b[i];
    return sum;
}

void add_block(const Block& block, const Token& token, int k, float* sums) {
    int16_t codes[kBlock];
    widen(token.codes + k * kBlock, codes);
    for (int r = 0; r < kPanelRows; r++) {
        sums[r] += float(dot(block.code[r], codes)) * (block.scale[r] * token.scales[k]);
        sums[r] += block.min[r] * token.scaled_sums[k];
    }
}

void tile_integers(Format format, const uint8_t* panel, int cols, const Token* tokens, int count,
                   const Target& target) {
    float sums[kTileTokens][kPanelRows] = {};
    Block block;
    for (int k = 0; k < cols / kBlock; k++) {
        if (format == Format::w4) unpack_w4(panel + size_t(k) * kW4Bytes, block);
        else if (format == Format::w6) unpack_bytes(panel + size_t(k) * kW6Bytes, 32, block);
        else unpack_bytes(panel + size_t(k) * kW8Bytes, 16, block);
        for (int n = 0; n < count; n++) add_block(block, tokens[n], k, sums[n]);
    }
    for (int n = 0; n < count; n++) store_rows(sums[n], target, n);
}

void load_column(Format format, const uint8_t* panel, int c, float* weights) {
    if (format == Format::f32) {  // pairs of columns
        const uint8_t* pair = panel + size_t(c / 2) * kPanelRows * 8 + c % 2 * 4;
        for (int r = 0; r < kPanelRows; r++) std::memcpy(weights + r, pair + r * 8, 4);
        return;
    }
    for (int r = 0; r < kPanelRows; r++) weights[r] = load_half(panel + (size_t(c) * kPanelRows + r) * 2);
}

void tile_floats(Format format, const uint8_t* panel, int cols, const Token* tokens, int count, const Target& target) {
    float parity[2][kTileTokens][kPanelRows] = {};  // even and odd columns
    for (int c = 0; c < cols; c++) {
        float weights[kPanelRows];
        load_column(format, panel, c, weights);
        for (int n = 0; n < count; n++) {
            const float x = tokens[n].f32[c];
            for (int r = 0; r < kPanelRows; r++) parity[c % 2][n][r] += weights[r] * x;
        }
    }
    for (int n = 0; n < count; n++) {
        for (int r = 0; r < kPanelRows; r++) parity[0][n][r] += parity[1][n][r];
        store_rows(parity[0][n], target, n);
    }
}

void tile(Format format, const uint8_t* panel, int cols, const Token* tokens, int count, const Target& target) {
    if (has_integers(format)) tile_integers(format, panel, cols, tokens, count, target);
    else tile_floats(format, panel, cols, tokens, count, target);
}

float abs_max(const float* x) {
    float largest = 0;
    for (int i = 0; i < kBlock; i++) largest = std::max(largest, std::fabs(x[i]));
    return largest;
}

// codes[i] = x[i] * inverse, rounded half to even. Returns their sum.
int round_block(const float* x, float inverse, int8_t* codes) {
    int sum = 0;
    for (int i = 0; i < kBlock; i++) {
        codes[i] = int8_t(std::nearbyint(x[i] * inverse));
        sum += codes[i];
    }
    return sum;
}

#endif

// Tokens whose activations fit the L2 cache; at least a tile. Between them all weights are read again: f32 ones, which are
// the largest, less often.
int block_tokens(const Matrix& w) {
    const int token_bytes = has_integers(w.format) ? w.cols + w.cols / 4 : w.cols * 4, tile = tile_tokens(w.format);
    const int bytes = w.format == Format::f32 ? 384 << 10 : 96 << 10;
    return std::max(tile, bytes / std::max(1, token_bytes) / tile * tile);
}

// Panels [p0, p1) × tokens [t0, t1), which fit a cache.
void multiply_block(const Matrix& w, const Activations& x, int t0, int t1, int p0, int p1, const Result& y) {
#if HEEDFUL_AVX2
    if (w.format == Format::f32) return multiply_floats(w, x, t0, t1, p0, p1, y);
#endif
#if HEEDFUL_VNNI
    if (has_integers(w.format) && t1 - t0 >= kLeastWideTokens) {
        const int wide = p0 + (p1 - p0) / 2 * 2;
        multiply_wide(w, x, t0, t1, p0, wide, y);
        p0 = wide;
    }
#endif
    const size_t bytes = panel_bytes(w);
    for (int p = p0; p < p1; p++) {
        for (int t = t0, count; t < t1; t += count) {
            count = even_share(t1 - t, tile_tokens(w.format));
            Token tokens[kTileTokens];
            for (int n = 0; n < count; n++) tokens[n] = token_of(w.format, x, t + n);
            tile(w.format, w.panels + p * bytes, w.cols, tokens, count, y.of(w, p, t));
        }
    }
}

}  // namespace

void quantize_activations(const float* x, const Activations& out, int t0, int t1) {
    const size_t blocks = size_t(out.cols / kBlock);
    for (size_t b = t0 * blocks; b < t1 * blocks; b++) {
        const float largest = abs_max(x + b * kBlock);
        const bool zero = largest < kSmallestAbsMax;
        const int sum = round_block(x + b * kBlock, zero ? 0.0f : 127 / largest, out.codes + b * kBlock);
        out.scales[b] = zero ? 0.0f : largest / 127;
        out.scaled_sums[b] = out.scales[b] * float(sum);
    }
}

void matmul(const Matrix& w, const Activations& x, int t0, int t1, int p0, int p1, float* y, int y_stride,
            const float* bias, bool add) {
    const int step = block_tokens(w);
    for (int t = t0; t < t1; t += step) multiply_block(w, x, t, std::min(t1, t + step), p0, p1, {y, y_stride, bias, add});
}

}  // namespace heedful::HEEDFUL_VARIANT
