// What the tiles of matmul.cpp are made of: where a panel's bytes are, a token's part of the activations, where results go.
#pragma once

#include <algorithm>

#include "ops.h"
#include "variant.h"

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

}  // namespace
}  // namespace heedful::HEEDFUL_VARIANT
