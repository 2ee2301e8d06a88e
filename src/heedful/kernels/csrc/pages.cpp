// Writing rows of keys and values into pages and reading them back. pages.h has the layouts.

#include "pages.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

// ---- q8 -----------------------------------------------------------------------------------------------------------

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

// Where the code of channel 0 lies, and how far from it channel c's.
size_t q8_key_at(int dim, int slot) {
    return static_cast<size_t>(slot / kLanes * kLanes) * padded(dim) + slot % kLanes * 2;
}
size_t q8_key_step(int c) { return static_cast<size_t>(c / 2 * 2 * kLanes + c % 2); }
size_t q8_value_at(int dim, int slot) { return static_cast<size_t>(slot / 2 * 2) * padded(dim) + slot % 2; }

uint8_t* q8_scale_at(uint8_t* side, int dim, int slot) {
    return side + element_bytes(KvNumber::q8, dim) + slot * sizeof(float);
}

void store_q8_key(uint8_t* side, int dim, int slot, const float* key) {
    uint8_t* codes = side + q8_key_at(dim, slot);
    const float scale = round_to_bytes(key, dim, [&](int c, uint8_t code) { codes[q8_key_step(c)] = code; });
    std::memcpy(q8_scale_at(side, dim, slot), &scale, sizeof scale);
}

void store_q8_value(uint8_t* side, int dim, int slot, const float* value) {
    uint8_t* codes = side + q8_value_at(dim, slot);
    const float scale = round_to_bytes(value, dim, [&](int c, uint8_t code) { codes[2 * c] = code; });
    std::memcpy(q8_scale_at(side, dim, slot), &scale, sizeof scale);
}

// ---- q4 -----------------------------------------------------------------------------------------------------------

// One block of a row: codes of 32 channels, 8 (which is 0) past `count`, and the scale as a half.
struct Nibbles {
    uint8_t codes[kBlock];
    uint16_t scale;
};

// The element of largest magnitude, the first of equals, with its sign.
float extreme(const float* x, int count) {
    const float magnitude = largest_magnitude(x, count);
    for (int i = 0; i < count; ++i)
        if (std::fabs(x[i]) == magnitude) return x[i];
    return 0.0f;
}

float saturated(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

Nibbles round_to_nibbles(const float* x, int count) {
    constexpr float kLeast = 1e-37f;  // below it the reciprocal overflows; the half that is stored is 0 long before
    const float scale = extreme(x, count) / -8.0f;
    const float inverse = std::fabs(scale) > kLeast ? 1.0f / scale : 0.0f;
    Nibbles block;
    for (int c = 0; c < kBlock; ++c) {
        const float shifted = (c < count ? x[c] : 0.0f) * inverse + 8.5f;
        block.codes[c] = static_cast<uint8_t>(shifted < 15.0f ? shifted : 15.0f);
    }
    block.scale = to_half(saturated(scale));
    return block;
}

// Block b of the row: what lies there is counted from channel 32 b.
Nibbles block_of(const float* row, int dim, int b) {
    const int left = dim - b * kBlock;
    return round_to_nibbles(row + b * kBlock, left < kBlock ? left : kBlock);
}

uint8_t* q4_key_block(uint8_t* side, int dim, int slot, int b) {
    return side + (static_cast<size_t>(slot / kLanes) * blocks_of(dim) + b) * kQ4KeyBytes;
}

// The byte of channel c of a block; channels from 16 on have the high nibble.
uint8_t* q4_key_byte(uint8_t* block, int slot, int c) {
    return block + 2 * kLanes + c % 16 / 4 * 32 + slot % kLanes * 4 + c % 4;
}

void store_q4_key(uint8_t* side, int dim, int slot, const float* key) {
    for (int b = 0; b < blocks_of(dim); ++b) {
        const Nibbles row = block_of(key, dim, b);
        uint8_t* block = q4_key_block(side, dim, slot, b);
        std::memcpy(block + slot % kLanes * 2, &row.scale, sizeof row.scale);
        for (int c = 0; c < 16; ++c)
            *q4_key_byte(block, slot, c) = static_cast<uint8_t>(row.codes[c] | row.codes[c + 16] << 4);
    }
}

uint8_t* q4_value_word(uint8_t* side, int dim, int slot, int c) {
    return side + (static_cast<size_t>(slot / kLanes) * padded(dim) + c) * sizeof(uint32_t);
}
int q4_value_shift(int slot) { return slot % 2 * 16 + slot % kLanes / 2 * 4; }

uint8_t* q4_value_scale(uint8_t* side, int dim, int slot, int b) {
    return side + element_bytes(KvNumber::q4, dim) + (static_cast<size_t>(b) * kPageLen + slot) * sizeof(uint16_t);
}

void store_q4_value(uint8_t* side, int dim, int slot, const float* value) {
    const int shift = q4_value_shift(slot);
    for (int b = 0; b < blocks_of(dim); ++b) {
        const Nibbles row = block_of(value, dim, b);
        std::memcpy(q4_value_scale(side, dim, slot, b), &row.scale, sizeof row.scale);
        for (int c = b * kBlock; c < (b + 1) * kBlock && c < padded(dim); ++c) {
            uint8_t* at = q4_value_word(side, dim, slot, c);
            uint32_t word;
            std::memcpy(&word, at, sizeof word);
            word = (word & ~(15u << shift)) | static_cast<uint32_t>(row.codes[c % kBlock]) << shift;
            std::memcpy(at, &word, sizeof word);
        }
    }
}

// ---- f32, f16 -----------------------------------------------------------------------------------------------------

// Within the range of half floats: a key beyond it must not become infinite, and the softmax NaN.
void put(float x, float* at) { *at = x; }
void put(float x, uint16_t* at) { *at = to_half(saturated(x)); }

template <class Element>
Element* float_key(uint8_t* side, int dim, int slot) {
    return reinterpret_cast<Element*>(side) + static_cast<size_t>(slot / kLanes * kLanes) * padded(dim) + slot % kLanes;
}
template <class Element>
Element* float_value(uint8_t* side, int dim, int slot) {
    return reinterpret_cast<Element*>(side) + static_cast<size_t>(slot) * padded(dim);
}

// `step`: elements from one channel to the next.
template <class Element>
void store_floats(const float* x, int dim, Element* at, int step) {
    for (int c = 0; c < padded(dim); ++c) put(c < dim ? x[c] : 0.0f, at + static_cast<size_t>(c) * step);
}

// ---- by format ----------------------------------------------------------------------------------------------------

void store_key(KvNumber number, uint8_t* side, int dim, int slot, const float* key) {
    switch (number) {
        case KvNumber::f32: return store_floats(key, dim, float_key<float>(side, dim, slot), kLanes);
        case KvNumber::f16: return store_floats(key, dim, float_key<uint16_t>(side, dim, slot), kLanes);
        case KvNumber::q8: return store_q8_key(side, dim, slot, key);
        case KvNumber::q4: return store_q4_key(side, dim, slot, key);
    }
}

void store_value(KvNumber number, uint8_t* side, int dim, int slot, const float* value) {
    switch (number) {
        case KvNumber::f32: return store_floats(value, dim, float_value<float>(side, dim, slot), 1);
        case KvNumber::f16: return store_floats(value, dim, float_value<uint16_t>(side, dim, slot), 1);
        case KvNumber::q8: return store_q8_value(side, dim, slot, value);
        case KvNumber::q4: return store_q4_value(side, dim, slot, value);
    }
}

float half_at(const void* at) {
    uint16_t half;
    std::memcpy(&half, at, sizeof half);
    return float_of_half(half);
}
float float_at(const void* at) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
float signed_code(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }

void read_key(KvNumber number, uint8_t* side, int dim, int slot, float* key) {
    const float scale = number == KvNumber::q8 ? float_at(q8_scale_at(side, dim, slot)) : 0.0f;
    for (int c = 0; c < dim; ++c) {
        const size_t step = static_cast<size_t>(c) * kLanes;
        switch (number) {
            case KvNumber::f32: key[c] = float_key<float>(side, dim, slot)[step]; break;
            case KvNumber::f16: key[c] = float_of_half(float_key<uint16_t>(side, dim, slot)[step]); break;
            case KvNumber::q8: key[c] = signed_code(side[q8_key_at(dim, slot) + q8_key_step(c)]) * scale; break;
            case KvNumber::q4: {
                uint8_t* block = q4_key_block(side, dim, slot, c / kBlock);
                const int code = *q4_key_byte(block, slot, c % kBlock) >> (c % kBlock < 16 ? 0 : 4) & 15;
                key[c] = static_cast<float>(code - 8) * half_at(block + slot % kLanes * 2);
            }
        }
    }
}

void read_value(KvNumber number, uint8_t* side, int dim, int slot, float* value) {
    const float scale = number == KvNumber::q8 ? float_at(q8_scale_at(side, dim, slot)) : 0.0f;
    for (int c = 0; c < dim; ++c) {
        switch (number) {
            case KvNumber::f32: value[c] = float_value<float>(side, dim, slot)[c]; break;
            case KvNumber::f16: value[c] = float_of_half(float_value<uint16_t>(side, dim, slot)[c]); break;
            case KvNumber::q8: value[c] = signed_code(side[q8_value_at(dim, slot) + 2 * c]) * scale; break;
            case KvNumber::q4: {
                uint32_t word;
                std::memcpy(&word, q4_value_word(side, dim, slot, c), sizeof word);
                const int code = static_cast<int>(word >> q4_value_shift(slot) & 15);
                value[c] = static_cast<float>(code - 8) * half_at(q4_value_scale(side, dim, slot, c / kBlock));
            }
        }
    }
}

}  // namespace

size_t page_bytes(KvFormat format, int kv_heads, int head_dim) {
    return kv_heads * (key_side_bytes(format.keys, head_dim) + value_side_bytes(format.values, head_dim));
}

void store_row(const PageBuffer& pages, int row, int kv_head, int slot, const float* key, const float* value) {
    store_key(pages.format.keys, key_side(pages, row, kv_head), pages.head_dim, slot, key);
    store_value(pages.format.values, value_side(pages, row, kv_head), pages.head_dim, slot, value);
}

void expect_row(const PageBuffer& pages, int row, int kv_head, int slot) {
    const int dim = pages.head_dim;
    const uint8_t *keys = key_side(pages, row, kv_head), *values = value_side(pages, row, kv_head);
    const size_t key_elements = element_bytes(pages.format.keys, dim), value_elements = element_bytes(pages.format.values, dim);
    const bool q4_keys = pages.format.keys == KvNumber::q4;
    const size_t eight = (q4_keys ? key_side_bytes(KvNumber::q4, dim) : key_elements) / kPageGroups;
    for (size_t at = 0; at < eight; at += 64) prefetch(keys + slot / kLanes * eight + at);
    if (pages.format.keys == KvNumber::q8) prefetch(q8_scale_at(const_cast<uint8_t*>(keys), dim, slot));
    const int together = pages.format.values == KvNumber::q4 ? kLanes : pages.format.values == KvNumber::q8 ? 2 : 1;
    const size_t tokens = value_elements / kPageLen * together;
    for (size_t at = 0; at < tokens; at += 64) prefetch(values + slot / together * tokens + at);
    if (pages.format.values == KvNumber::q8) prefetch(q8_scale_at(const_cast<uint8_t*>(values), dim, slot));
}

void read_page(const PageBuffer& pages, int row, int kv_head, float* keys, float* values) {
    const int dim = pages.head_dim;
    for (int slot = 0; slot < kPageLen; ++slot) {
        const size_t at = static_cast<size_t>(slot) * dim;
        if (keys) read_key(pages.format.keys, key_side(pages, row, kv_head), dim, slot, keys + at);
        if (values) read_value(pages.format.values, value_side(pages, row, kv_head), dim, slot, values + at);
    }
}

}  // namespace heedful::HEEDFUL_VARIANT
