// float16 and bfloat16 in plain C++, for code that is not compiled for F16C. All functions are static: a shared inline
// could be linked from a file compiled with other flags, and then run on a processor without them.
#pragma once

#include <cstdint>
#include <cstring>

namespace heedful {

static inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_half(uint16_t half) {
    // The half's exponent and mantissa at float's places are 2^112 too small; this also makes subnormals right.
    const float magnitude = float_of_bits(uint32_t(half & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = bits_of_float(magnitude) | uint32_t(half & 0x8000) << 16;
    if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;  // infinity and NaN
    return float_of_bits(bits);
}

// Rounds to nearest, ties to even; too large becomes infinity.
static inline uint16_t half_of_float(float value) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);   // NaN
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above
    if (magnitude < 0x38800000) {                                 // subnormal: the float adder rounds at the right bit
        return uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return uint16_t(sign | (rounded - 0x38000000) >> 13);
}

static inline float float_of_bfloat(uint16_t half) { return float_of_bits(uint32_t(half) << 16); }

static inline uint16_t load_u16(const uint8_t* at) {
    uint16_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

static inline float load_half(const uint8_t* at) { return float_of_half(load_u16(at)); }

}  // namespace heedful
