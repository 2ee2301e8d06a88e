// Tiles of 8 rows × up to 8 tokens in plain C++, which compilers turn into what vectors there are; and the rounding of
// activations. They judge the AVX2 ones.
#pragma once

#include <algorithm>
#include <cmath>

#include "half.h"
#include "tiles.h"

namespace heedful::HEEDFUL_VARIANT {
namespace {

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

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT
