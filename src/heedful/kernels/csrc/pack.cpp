// Panels (ops.h) out of stored weights. Layouts of the stored blocks: ggml-common.h of llama.cpp, block_q4_0 and so on.
//
// A w4 panel block (8 rows, 32 columns, 160 bytes): half scale[8], half min[8], then vectors j = 0..3 of 32 bytes.
// Bytes 4r..4r+3 of a vector are row r; byte b of them has column 4j + b in its low nibble and column 16 + 4j + b in its
// high one. weight = scale * code + min, code 0..15.
// A w8 panel block (272 bytes): half scale[8], then vectors j = 0..7; bytes 4r..4r+3 are columns 4j..4j+3 of row r.
// weight = scale * code, code -128..127.
// A w6 panel block (288 bytes): half scale[8], half min[8], then vectors as w8's. weight = scale * code + min, code
// 0..63: two products of it with an int8 add up in an int16, which is why it is faster than w8 and no smaller.
#include "pack.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <stdexcept>

#include "half.h"

namespace heedful {
namespace {

// 32 columns of a row as their file has them: weight c = scale[c / 16] * code[c] + min[c / 16].
struct StoredBlock {
    float scale[2];
    float min[2];
    int8_t code[kBlock];
};

// 32 columns of a row as a panel has them. Codes of w4 lie in pairs: column c in a low nibble, 16 + c in the high one.
struct PanelBlock {
    uint16_t scale, min;
    int8_t code[kBlock];
};

using ReadBlock = void (*)(const uint8_t* row, int k, StoredBlock& out);  // columns [32 k, 32 (k + 1))
using TakeBlock = void (*)(const uint8_t* row, int k, PanelBlock& out);   // the same, into the default format
using ReadFloat = float (*)(const uint8_t* row, int c);

struct StoredType {
    int ggml_type, block_len, block_bytes;
    Format format;   // the default
    TakeBlock take;  // null: the default format does not take the codes as they are
    ReadBlock read;  // one of read and read_float is null
    ReadFloat read_float;
};

void set_scale(StoredBlock& out, float scale, float min) {
    out.scale[0] = out.scale[1] = scale;
    out.min[0] = out.min[1] = min;
}

// 16 bytes: columns 0..15 in the low nibbles, 16..31 in the high.
void split_nibbles(const uint8_t* packed, int8_t* code) {
    for (int i = 0; i < 16; i++) {
        code[i] = int8_t(packed[i] & 15);
        code[16 + i] = int8_t(packed[i] >> 4);
    }
}

void add_fifth_bits(const uint8_t* packed, int8_t* code) {
    for (int i = 0; i < kBlock; i++) code[i] = int8_t(code[i] | (packed[i / 8] >> i % 8 & 1) << 4);
}

void read_q4_0(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k) * 18;
    const float scale = load_half(block);
    set_scale(out, scale, -8 * scale);
    split_nibbles(block + 2, out.code);
}

void read_q4_1(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k) * 20;
    set_scale(out, load_half(block), load_half(block + 2));
    split_nibbles(block + 4, out.code);
}

void read_q5_0(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k) * 22;
    set_scale(out, load_half(block), 0);
    split_nibbles(block + 6, out.code);
    add_fifth_bits(block + 2, out.code);
    for (int8_t& code : out.code) code = int8_t(code - 16);
}

void read_q5_1(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k) * 24;
    set_scale(out, load_half(block), load_half(block + 2));
    split_nibbles(block + 8, out.code);
    add_fifth_bits(block + 4, out.code);
}

void read_q8_0(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k) * 34;
    set_scale(out, load_half(block), 0);
    std::memcpy(out.code, block + 2, kBlock);
}

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

void read_iq4_nl(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k) * 18;
    set_scale(out, load_half(block), 0);
    split_nibbles(block + 2, out.code);
    for (int8_t& code : out.code) code = kIq4Values[code];
}

// The K types: super-blocks of 256 columns; k % 8 is the 32 columns' place in theirs.

// 2 bits a column: each 32 bytes hold four runs of 32 columns, the first in the lowest bits.
void split_pairs(const uint8_t* packed, int at, int8_t* code) {
    const uint8_t* run = packed + at / 4 * 32;
    for (int i = 0; i < kBlock; i++) code[i] = int8_t(run[i] >> at % 4 * 2 & 3);
}

// 4 bits a column: each 32 bytes hold two runs of 32 columns, the first in the low nibbles.
void split_k_nibbles(const uint8_t* packed, int at, int8_t* code) {
    const uint8_t* run = packed + at / 2 * 32;
    for (int i = 0; i < kBlock; i++) code[i] = int8_t(run[i] >> at % 2 * 4 & 15);
}

void read_q2_k(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k / 8) * 84;
    const int at = k % 8;
    for (int h = 0; h < 2; h++) {
        const uint8_t scale_and_min = block[2 * at + h];
        out.scale[h] = load_half(block + 80) * float(scale_and_min & 15);
        out.min[h] = -(load_half(block + 82) * float(scale_and_min >> 4));
    }
    split_pairs(block + 16, at, out.code);
}

// Scale i of 16: four low bits in bytes 0..7 (the first eight, then the others in the high nibbles), two high bits in
// bytes 8..11.
int q3_k_scale(const uint8_t* packed, int i) {
    const int low = packed[i % 8] >> i / 8 * 4 & 15, high = packed[8 + i % 4] >> i / 4 * 2 & 3;
    return (low | high << 4) - 32;
}

void read_q3_k(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k / 8) * 110;
    const int at = k % 8;
    for (int h = 0; h < 2; h++) {
        out.scale[h] = load_half(block + 108) * float(q3_k_scale(block + 96, 2 * at + h));
        out.min[h] = 0;
    }
    split_pairs(block + 32, at, out.code);
    for (int i = 0; i < kBlock; i++) out.code[i] = int8_t((out.code[i] | (block[i] >> at & 1) << 2) - 4);
}

// Scale and min i of 8, 6 bits each: the first four in the low bits of bytes 0..3 and 4..7, the others as a nibble each
// of bytes 8..11 and the two high bits that bytes 0..7 have left.
void set_q4_k_scale(const uint8_t* block, int i, StoredBlock& out) {
    const uint8_t* packed = block + 4;
    int scale, min;
    if (i < 4) {
        scale = packed[i] & 63;
        min = packed[4 + i] & 63;
    } else {
        scale = (packed[4 + i] & 15) | (packed[i - 4] >> 6) << 4;
        min = packed[4 + i] >> 4 | (packed[i] >> 6) << 4;
    }
    set_scale(out, load_half(block) * float(scale), -(load_half(block + 2) * float(min)));
}

void read_q4_k(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k / 8) * 144;
    set_q4_k_scale(block, k % 8, out);
    split_k_nibbles(block + 16, k % 8, out.code);
}

void read_q5_k(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k / 8) * 176;
    const int at = k % 8;
    set_q4_k_scale(block, at, out);
    split_k_nibbles(block + 48, at, out.code);
    for (int i = 0; i < kBlock; i++) out.code[i] = int8_t(out.code[i] | (block[16 + i] >> at & 1) << 4);
}

// 6 bits a column: nibbles in runs of 64 bytes (two times 32 columns low, then high), pairs as split_pairs.
void read_q6_k(const uint8_t* row, int k, StoredBlock& out) {
    const uint8_t* block = row + size_t(k / 8) * 210;
    const int at = k % 8;
    for (int h = 0; h < 2; h++) {
        out.scale[h] = load_half(block + 208) * float(int8_t(block[192 + 2 * at + h]));
        out.min[h] = 0;
    }
    split_pairs(block + 128, at, out.code);
    const uint8_t* low = block + at / 4 * 64 + at % 2 * 32;
    for (int i = 0; i < kBlock; i++) {
        out.code[i] = int8_t((out.code[i] << 4 | (low[i] >> at % 4 / 2 * 4 & 15)) - 32);
    }
}

float read_f32(const uint8_t* row, int c) {
    float value;
    std::memcpy(&value, row + size_t(c) * 4, sizeof value);
    return value;
}

float read_f16(const uint8_t* row, int c) { return load_half(row + size_t(c) * 2); }

float read_bf16(const uint8_t* row, int c) { return float_of_bfloat(load_u16(row + size_t(c) * 2)); }

// Blocks that a panel takes as they are.

void take_q4_0(const uint8_t* row, int k, PanelBlock& out) {
    const uint8_t* block = row + size_t(k) * 18;
    out.scale = load_u16(block);
    out.min = half_of_float(-8 * float_of_half(out.scale));
    std::memcpy(out.code, block + 2, kBlock / 2);
}

void take_q4_1(const uint8_t* row, int k, PanelBlock& out) {
    const uint8_t* block = row + size_t(k) * 20;
    out.scale = load_u16(block);
    out.min = load_u16(block + 2);
    std::memcpy(out.code, block + 4, kBlock / 2);
}

void take_q8_0(const uint8_t* row, int k, PanelBlock& out) {
    const uint8_t* block = row + size_t(k) * 34;
    out.scale = load_u16(block);
    std::memcpy(out.code, block + 2, kBlock);
}

// Blocks whose codes a panel takes, with one scale and min.

template <ReadBlock read>
void take_w8(const uint8_t* row, int k, PanelBlock& out) {
    StoredBlock stored;
    read(row, k, stored);
    out.scale = half_of_float(stored.scale[0]);
    std::memcpy(out.code, stored.code, kBlock);
}

void pair_up(const int8_t* code, int8_t* pairs) {
    for (int i = 0; i < kBlock / 2; i++) pairs[i] = int8_t(code[i] | code[kBlock / 2 + i] << 4);
}

template <ReadBlock read>
void take_w4(const uint8_t* row, int k, PanelBlock& out) {
    StoredBlock stored;
    read(row, k, stored);
    out.scale = half_of_float(stored.scale[0]);
    out.min = half_of_float(stored.min[0]);
    pair_up(stored.code, out.code);
}

constexpr StoredType kTypes[] = {
    {0, 1, 4, Format::f32, nullptr, nullptr, read_f32},
    {1, 1, 2, Format::f16, nullptr, nullptr, read_f16},
    {2, 32, 18, Format::w4, take_q4_0, read_q4_0, nullptr},
    {3, 32, 20, Format::w4, take_q4_1, read_q4_1, nullptr},
    {6, 32, 22, Format::w8, take_w8<read_q5_0>, read_q5_0, nullptr},
    {7, 32, 24, Format::w8, nullptr, read_q5_1, nullptr},
    {8, 32, 34, Format::w8, take_q8_0, read_q8_0, nullptr},
    {10, 256, 84, Format::w8, nullptr, read_q2_k, nullptr},
    {11, 256, 110, Format::w8, nullptr, read_q3_k, nullptr},
    {12, 256, 144, Format::w4, take_w4<read_q4_k>, read_q4_k, nullptr},
    {13, 256, 176, Format::w8, nullptr, read_q5_k, nullptr},
    {14, 256, 210, Format::w8, nullptr, read_q6_k, nullptr},
    {20, 32, 18, Format::w8, take_w8<read_iq4_nl>, read_iq4_nl, nullptr},
    {30, 1, 2, Format::f32, nullptr, nullptr, read_bf16},
};

const StoredType* find_type(int ggml_type) {
    for (const StoredType& type : kTypes) {
        if (type.ggml_type == ggml_type) return &type;
    }
    return nullptr;
}

const StoredType& type_of(int ggml_type) {
    const StoredType* type = find_type(ggml_type);
    assert(type != nullptr);
    return *type;
}

// `count` (at most 32) weights of a row from column 32 k on.
void read_floats(const StoredType& type, const uint8_t* row, int k, int count, float* out) {
    if (type.read_float != nullptr) {
        for (int i = 0; i < count; i++) out[i] = type.read_float(row, k * kBlock + i);
        return;
    }
    StoredBlock block;
    type.read(row, k, block);
    for (int i = 0; i < count; i++) out[i] = block.scale[i / 16] * float(block.code[i]) + block.min[i / 16];
}

// NaN becomes the smallest code: a conversion of it would be undefined.
int8_t clamped_code(float value, float smallest, float largest) {
    const float whole = std::nearbyint(value);
    return int8_t(whole > smallest ? std::min(whole, largest) : smallest);
}

// The smallest half that is at least `value`.
uint16_t half_not_below(float value) {
    const uint16_t half = half_of_float(value);
    if (float_of_half(half) >= value) return half;
    return uint16_t(half & 0x8000 ? half - 1 : half + 1);
}

// Codes are rounded for scale and min as the half has them, and these are rounded outwards: no code leaves its range by
// more than a rounding error, and no error exceeds half a scale.
PanelBlock quantize_w8(const float* weights) {
    float largest = 0;
    for (int i = 0; i < kBlock; i++) largest = std::max(largest, std::fabs(weights[i]));
    PanelBlock out = {half_not_below(largest / 127), 0, {}};
    const float scale = float_of_half(out.scale), inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < kBlock; i++) out.code[i] = clamped_code(weights[i] * inverse, -127, 127);
    return out;
}

// w4 and w6: codes from 0 to `most`.
PanelBlock quantize_with_min(const float* weights, int most) {
    const auto [smallest, largest] = std::minmax_element(weights, weights + kBlock);
    PanelBlock out = {0, uint16_t(half_not_below(-*smallest) ^ 0x8000), {}};
    const float min = float_of_half(out.min);
    out.scale = half_not_below((*largest - min) / float(most));
    const float scale = float_of_half(out.scale), inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < kBlock; i++) out.code[i] = clamped_code((weights[i] - min) * inverse, 0, float(most));
    return out;
}

PanelBlock panel_block(const StoredType& type, Format format, const uint8_t* row, int k) {
    if (type.take != nullptr && format == type.format) {
        PanelBlock out;
        type.take(row, k, out);
        return out;
    }
    float weights[kBlock];
    read_floats(type, row, k, kBlock, weights);
    if (format == Format::w8) return quantize_w8(weights);
    if (format == Format::w6) return quantize_with_min(weights, 63);
    PanelBlock out = quantize_with_min(weights, 15);
    pair_up(out.code, out.code);
    return out;
}

void place_w4(const PanelBlock& block, int r, uint8_t* out) {
    std::memcpy(out + 2 * r, &block.scale, 2);
    std::memcpy(out + 16 + 2 * r, &block.min, 2);
    for (int j = 0; j < 4; j++) std::memcpy(out + 32 + 32 * j + 4 * r, block.code + 4 * j, 4);
}

void place_bytes(const PanelBlock& block, bool has_min, int r, uint8_t* out) {
    std::memcpy(out + 2 * r, &block.scale, 2);
    if (has_min) std::memcpy(out + 16 + 2 * r, &block.min, 2);
    out += has_min ? 16 : 0;
    for (int j = 0; j < 8; j++) std::memcpy(out + 16 + 32 * j + 4 * r, block.code + 4 * j, 4);
}

void pack_integers(const StoredType& type, const uint8_t* row, Format format, int cols, int r, uint8_t* panel) {
    const size_t block_bytes = packed_bytes(format, kPanelRows, kBlock);
    for (int k = 0; k < cols / kBlock; k++) {
        const PanelBlock block = panel_block(type, format, row, k);
        uint8_t* out = panel + k * block_bytes;
        if (format == Format::w4) place_w4(block, r, out);
        else place_bytes(block, format == Format::w6, r, out);
    }
}

void pack_floats(const StoredType& type, const uint8_t* row, Format format, int cols, int r, uint8_t* panel) {
    float weights[kBlock];
    for (int c = 0; c < cols; c += kBlock) {
        const int count = std::min(kBlock, cols - c);
        read_floats(type, row, c / kBlock, count, weights);
        for (int i = 0; i < count; i++) {
            const int column = c + i;
            if (format == Format::f32) {
                std::memcpy(panel + (size_t(column / 2) * kPanelRows * 2 + r * 2 + column % 2) * 4, &weights[i], 4);
                continue;
            }
            const uint16_t half = half_of_float(weights[i]);
            std::memcpy(panel + (size_t(column) * kPanelRows + r) * 2, &half, 2);
        }
    }
}

constexpr const char* kFormatNames[] = {"f32", "f16", "w4", "w8", "w6"};  // in the order of Format

}  // namespace

const char* format_name(Format format) { return kFormatNames[int(format)]; }

Format format_named(const std::string& name) {
    for (int i = 0; i < 5; i++) {
        if (name == kFormatNames[i]) return Format(i);
    }
    throw std::invalid_argument("no panel format is called " + name);
}

size_t packed_bytes(Format format, int rows, int cols) {
    const size_t panels = size_t(rows + kPanelRows - 1) / kPanelRows, columns = size_t(cols);
    switch (format) {
        case Format::f32: return panels * (columns + columns % 2) * kPanelRows * 4;
        case Format::f16: return panels * columns * kPanelRows * 2;
        case Format::w4: return panels * (columns / kBlock) * 160;
        case Format::w8: return panels * (columns / kBlock) * 272;
        case Format::w6: return panels * (columns / kBlock) * 288;
    }
    return 0;
}

bool can_pack(int ggml_type) { return find_type(ggml_type) != nullptr; }

int stored_block_len(int ggml_type) { return type_of(ggml_type).block_len; }

size_t stored_row_bytes(int ggml_type, int cols) {
    const StoredType& type = type_of(ggml_type);
    return size_t(cols / type.block_len) * size_t(type.block_bytes);
}

Format packed_format(int ggml_type) { return type_of(ggml_type).format; }

void pack(int ggml_type, const uint8_t* stored, Format format, int rows, int cols, int p0, int p1, uint8_t* panels) {
    const StoredType& type = type_of(ggml_type);
    const bool integers = has_integers(format);
    assert(cols % type.block_len == 0 && (!integers || cols % kBlock == 0));
    const size_t panel_bytes = packed_bytes(format, kPanelRows, cols), row_bytes = stored_row_bytes(ggml_type, cols);
    for (int p = p0; p < p1; p++) {
        uint8_t* panel = panels + p * panel_bytes;
        const int panel_rows = std::min(kPanelRows, rows - p * kPanelRows);
        if (panel_rows < kPanelRows || cols % 2 != 0) std::memset(panel, 0, panel_bytes);
        for (int r = 0; r < panel_rows; r++) {
            const uint8_t* row = stored + size_t(p * kPanelRows + r) * row_bytes;
            if (integers) pack_integers(type, row, format, cols, r, panel);
            else pack_floats(type, row, format, cols, r, panel);
        }
    }
}

void unpack_row(int ggml_type, const uint8_t* stored, int cols, float* out) {
    const StoredType& type = type_of(ggml_type);
    for (int c = 0; c < cols; c += kBlock) read_floats(type, stored, c / kBlock, std::min(kBlock, cols - c), out + c);
}

}  // namespace heedful
