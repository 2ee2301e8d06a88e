// What the matrix products of some tokens read: floats, and their quantized form.
#pragma once

#include "buffer.h"
#include "ops.h"

namespace heedful {

struct InputBuffers {
    Buffer<float> values, scales, scaled_sums;
    Buffer<int8_t> codes;
    void reserve(int tokens, int cols) {
        const size_t count = static_cast<size_t>(tokens) * cols, blocks = count / kBlock + 1;
        values.reserve(count);
        codes.reserve(count);
        scales.reserve(blocks);
        scaled_sums.reserve(blocks);
    }
    Activations view(const float* source, int tokens, int cols) const {
        return {tokens, cols, source, codes.get(), scales.get(), scaled_sums.get()};
    }
};

}  // namespace heedful
