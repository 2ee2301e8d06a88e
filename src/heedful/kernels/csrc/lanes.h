// Eight float32 or int32 lanes and the few operations that attention.cpp needs of them: AVX2, or plain loops that say
// what they mean. Knows nothing of attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "variant.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

constexpr int kLanes = 8;

#if HEEDFUL_AVX2

using Floats = __m256;
using Ints = __m256i;
using Shorts = __m256i;  // 16 int16: eight pairs

inline Floats splat(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats mul_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
// The same; keeps the compiler from pulling products of a register tile apart, which spills sums.
inline Floats accumulate(Floats sums, Floats a, Floats b) {
    sums = _mm256_fmadd_ps(a, b, sums);
    asm volatile("" : "+x"(sums));
    return sums;
}
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats abs(Floats x) { return _mm256_andnot_ps(splat(-0.0f), x); }

// x where at >= bound, else 0.
inline Floats where_at_least(Floats at, float bound, Floats x) {
    return _mm256_and_ps(_mm256_cmp_ps(at, splat(bound), _CMP_GE_OQ), x);
}

// x in lanes [begin, end), else `other`.
inline Floats within(Floats x, int begin, int end, Floats other) {
    const Ints lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const Ints inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1)),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(inside));
}

// x * 2^n, where n is the integer that `shifted` = 1.5 * 2^23 + n holds.
inline Floats scale_by_power(Floats x, Floats shifted) {
    const Ints exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}

// One step of a Walsh-Hadamard transform inside a vector: a + b at lane i, a - b at lane i + Distance.
template <int Distance>
inline Floats butterfly(Floats x) {
    const Ints lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const Floats partner = _mm256_permutevar8x32_ps(x, _mm256_xor_si256(lane, _mm256_set1_epi32(Distance)));
    const Ints bit = _mm256_set1_epi32(Distance), upper = _mm256_cmpeq_epi32(_mm256_and_si256(lane, bit), bit);
    const Ints sign = _mm256_and_si256(upper, _mm256_castps_si256(splat(-0.0f)));
    return add(partner, _mm256_xor_ps(x, _mm256_castsi256_ps(sign)));
}

inline float largest(Floats x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline float total(Floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline int32_t total(Ints x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0b01001110));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0b10110001)));
}

inline Ints no_ints() { return _mm256_setzero_si256(); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats to_floats(Floats x) { return x; }

inline Shorts load_pairs(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Shorts load_pairs(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_pairs(int16_t* p, Shorts x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline Shorts splat_pair(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return _mm256_set1_epi32(pair);
}
// sums + a.first * b.first + a.second * b.second, pair by pair.
inline Ints add_pair_products(Ints sums, Shorts a, Shorts b) {
#if HEEDFUL_VNNI
    sums = _mm256_dpwssd_epi32(sums, a, b);
#else
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
    asm volatile("" : "+x"(sums));  // as in accumulate
    return sums;
}

inline Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Shorts splat_short(int16_t x) { return _mm256_set1_epi16(x); }
inline Ints load_ints(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Nibbles I and I + 4 of each lane, as a pair.
template <int I>
inline Shorts nibble_pairs(Ints x) {
    return _mm256_and_si256(_mm256_srli_epi32(x, 4 * I), _mm256_set1_epi32(0x000F000F));
}

// Four channels of 8 lanes: byte 4 t + j is channel j of lane t.
using Quads = __m256i;
// Nibbles of 32 bytes: the low ones, the high ones.
struct NibbleQuads {
    Quads low, high;
};
inline NibbleQuads load_nibbles(const uint8_t* p) {
    const Ints both = load_ints(p), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
inline Quads splat_quad(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, sizeof quad);
    return _mm256_set1_epi32(quad);
}

// Sums of up to 32 products a lane, of nibbles and codes in [-127, 127]. Without VNNI they are pairs of int16, each of
// 16 products, at most 16 * 15 * 127 = 30480.
using NibbleSums = __m256i;
inline NibbleSums no_nibble_sums() { return _mm256_setzero_si256(); }
inline NibbleSums add_quad_products(NibbleSums sums, Quads nibbles, Quads codes) {
#if HEEDFUL_VNNI
    sums = _mm256_dpbusd_epi32(sums, nibbles, codes);
#else
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, codes));
#endif
    asm volatile("" : "+x"(sums));  // as in accumulate
    return sums;
}
inline Ints finish_nibble_sums(NibbleSums sums, int32_t start) {
#if !HEEDFUL_VNNI
    sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
    return _mm256_add_epi32(sums, _mm256_set1_epi32(start));
}

// 16 floats rounded half to even to int16, saturated.
inline Shorts round_to_shorts(Floats low, Floats high) {
    const Ints packed = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
    return _mm256_permute4x64_epi64(packed, 0b11011000);
}

inline Floats load_halves(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

// Into the second cache level: the few buffers in which the first one waits for memory stay free for what is read now.
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#else

struct Floats {
    float v[kLanes];
};
struct Ints {
    int32_t v[kLanes];
};
struct Shorts {
    int16_t v[2 * kLanes];
};

template <class F>
inline Floats each(F&& f) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = f(i);
    return out;
}

inline Floats splat(float x) {
    return each([&](int) { return x; });
}
inline Floats load(const float* p) {
    return each([&](int i) { return p[i]; });
}
inline void store(float* p, Floats x) { std::memcpy(p, x.v, sizeof x.v); }
inline Floats add(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats sub(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Floats mul(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats div(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Floats mul_add(Floats a, Floats b, Floats c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Floats accumulate(Floats sums, Floats a, Floats b) { return mul_add(a, b, sums); }
inline Floats max(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats min(Floats a, Floats b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Floats abs(Floats x) {
    return each([&](int i) { return x.v[i] < 0 ? -x.v[i] : x.v[i]; });
}
inline Floats where_at_least(Floats at, float bound, Floats x) {
    return each([&](int i) { return at.v[i] >= bound ? x.v[i] : 0.0f; });
}
inline Floats within(Floats x, int begin, int end, Floats other) {
    return each([&](int i) { return i >= begin && i < end ? x.v[i] : other.v[i]; });
}
inline Floats scale_by_power(Floats x, Floats shifted) {
    return each([&](int i) {
        uint32_t bits, power;
        std::memcpy(&bits, &x.v[i], sizeof bits);
        std::memcpy(&power, &shifted.v[i], sizeof power);
        bits += power << 23;
        float scaled;
        std::memcpy(&scaled, &bits, sizeof scaled);
        return scaled;
    });
}
template <int Distance>
inline Floats butterfly(Floats x) {
    return each([&](int i) { return i & Distance ? x.v[i - Distance] - x.v[i] : x.v[i] + x.v[i + Distance]; });
}
inline float largest(Floats x) {
    float best = x.v[0];
    for (int i = 1; i < kLanes; ++i) best = x.v[i] > best ? x.v[i] : best;
    return best;
}
inline float total(Floats x) {
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += x.v[i];
    return sum;
}

inline int32_t total(Ints x) {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += x.v[i];
    return sum;
}

inline Ints no_ints() { return Ints{}; }
inline Floats to_floats(Ints x) {
    return each([&](int i) { return static_cast<float>(x.v[i]); });
}
inline Floats to_floats(Floats x) { return x; }

template <class T>
inline Shorts load_pairs(const T* p) {
    Shorts out;
    for (int i = 0; i < 2 * kLanes; ++i) out.v[i] = p[i];
    return out;
}
inline void store_pairs(int16_t* p, Shorts x) { std::memcpy(p, x.v, sizeof x.v); }
inline Shorts splat_pair(const int16_t* p) {
    Shorts out;
    for (int i = 0; i < 2 * kLanes; ++i) out.v[i] = p[i % 2];
    return out;
}
inline Ints add_pair_products(Ints sums, Shorts a, Shorts b) {
    for (int i = 0; i < kLanes; ++i) sums.v[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
    return sums;
}

inline Shorts splat_short(int16_t x) {
    Shorts out;
    for (int i = 0; i < 2 * kLanes; ++i) out.v[i] = x;
    return out;
}
inline Ints splat_int(int32_t x) {
    Ints out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = x;
    return out;
}
inline Ints load_ints(const uint8_t* p) {
    Ints out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
template <int I>
inline Shorts nibble_pairs(Ints x) {
    Shorts out;
    for (int i = 0; i < 2 * kLanes; ++i)
        out.v[i] = static_cast<int16_t>(static_cast<uint32_t>(x.v[i / 2]) >> (4 * I + i % 2 * 16) & 15);
    return out;
}

struct Quads {
    int8_t v[4 * kLanes];
};
struct NibbleQuads {
    Quads low, high;
};
inline NibbleQuads load_nibbles(const uint8_t* p) {
    NibbleQuads quads;
    for (int i = 0; i < 4 * kLanes; ++i) {
        quads.low.v[i] = p[i] & 15;
        quads.high.v[i] = p[i] >> 4;
    }
    return quads;
}
inline Quads splat_quad(const int8_t* p) {
    Quads quads;
    for (int i = 0; i < 4 * kLanes; ++i) quads.v[i] = p[i % 4];
    return quads;
}
using NibbleSums = Ints;
inline NibbleSums no_nibble_sums() { return Ints{}; }
inline NibbleSums add_quad_products(NibbleSums sums, const Quads& nibbles, const Quads& codes) {
    for (int i = 0; i < 4 * kLanes; ++i) sums.v[i / 4] += nibbles.v[i] * codes.v[i];
    return sums;
}
inline Ints finish_nibble_sums(NibbleSums sums, int32_t start) {
    for (int i = 0; i < kLanes; ++i) sums.v[i] += start;
    return sums;
}

// Half to even: adding 1.5 * 2^23 leaves no room for a fraction.
inline float rounded(float x) {
    constexpr float kNoFraction = 12582912.0f;
    return (x + kNoFraction) - kNoFraction;
}
inline Shorts round_to_shorts(Floats low, Floats high) {
    Shorts out;
    for (int i = 0; i < 2 * kLanes; ++i) {
        const float x = i < kLanes ? low.v[i] : high.v[i - kLanes];
        const float bounded = x > -32768.0f ? (x < 32767.0f ? x : 32767.0f) : -32768.0f;
        out.v[i] = static_cast<int16_t>(rounded(bounded));
    }
    return out;
}

inline uint16_t to_half(float x) { return half_of_float(x); }
inline Floats load_halves(const uint16_t* p) {
    return each([&](int i) { return float_of_half(p[i]); });
}

inline void prefetch(const void*) {}

#endif

constexpr float kExp2[] = {0.6931470036506653f, 0.24022242426872253f, 0.05550733581185341f, 0.009671512991189957f,
                           0.001326472731307149f};

// 2^y for y <= 1, in float32: relative error below 1.8e-7 (1.5 units in the last place) down to y = -126; exactly 1 at
// 0, exactly 0 from -127 down and for NaN. Degree 5 minimax over [-1/2, 1/2] with its constant held at 1.
inline Floats exp2_of(Floats y) {
    const Floats no_fraction = splat(12582912.0f);
    y = max(y, splat(-127.0f));  // between -127 and -126.5 the bits are those of a subnormal, never negative
    const Floats shifted = add(y, no_fraction);
    const Floats r = sub(y, sub(shifted, no_fraction));
    Floats p = splat(kExp2[4]);
    for (int i = 3; i >= 0; --i) p = mul_add(p, r, splat(kExp2[i]));
    p = mul_add(p, r, splat(1.0f));
    return scale_by_power(p, shifted);
}

inline float exp2_of(float y) {
    float lanes[kLanes];
    store(lanes, exp2_of(splat(y)));
    return lanes[0];
}

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT
