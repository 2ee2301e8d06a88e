// Attention inside a whole text, every query seeing every key but those that are hidden from it. Keys and values of a text
// and head are f32 panels (ops.h, TextKeys), so that scores and weighted sums are products of matmul.cpp; between them
// stands the softmax of each row. Float sums run along channels, or along the text's tokens in their order, so a text's
// result does not depend on what is computed beside it.
//
// 240 tokens, 12 heads of 32 channels, one thread of a Xeon with AVX-512: see encoder.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "lanes.h"
#include "ops.h"

namespace heedful::HEEDFUL_VARIANT {

void matmul(const Matrix& w, const Activations& x, int t0, int t1, int p0, int p1, float* y, int y_stride,
            const float* bias, bool add);

namespace {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr size_t kScoreBytes = 128 << 10;  // of a block of queries, so that they stay in a cache
constexpr int kLeastQueries = 12;

int queries_at_once(const TextKeys& text) {
    return std::max<int>(kLeastQueries, kScoreBytes / sizeof(float) / text.padded());
}

// y (count, w.rows) = x (count, w.cols) times a matrix of f32 panels.
void multiply(const float* panels, int rows, int cols, const float* x, int count, float* y, int stride) {
    const Matrix w{Format::f32, rows, cols, reinterpret_cast<const uint8_t*>(panels)};
    matmul(w, {count, cols, x, nullptr, nullptr, nullptr}, 0, count, 0, w.panel_count(), y, stride, nullptr, false);
}

// Weights in place of a row of `padded` scores in powers of two, `tokens` of them real; returns the sum.
float softmax(float* row, int tokens, int padded) {
    const int last = padded - kLanes;
    store(row + last, within(load(row + last), 0, tokens - last, splat(kNothing)));
    Floats maxima[4] = {splat(kNothing), splat(kNothing), splat(kNothing), splat(kNothing)};
    int i = 0;
    for (; i + 4 * kLanes <= padded; i += 4 * kLanes)
        for (int j = 0; j < 4; ++j) maxima[j] = max(maxima[j], load(row + i + j * kLanes));
    for (; i < padded; i += kLanes) maxima[0] = max(maxima[0], load(row + i));
    const Floats most = splat(largest(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]))));
    Floats sums[2] = {splat(0.0f), splat(0.0f)};
    for (i = 0; i < padded; i += kLanes) {
        const Floats weights = exp2_of(sub(load(row + i), most));
        store(row + i, weights);
        sums[i / kLanes % 2] = add(sums[i / kLanes % 2], weights);
    }
    return total(add(sums[0], sums[1]));
}

// Tokens of other options than `own` are not seen by a token of an option.
void hide_options(float* row, const int32_t* options, int begin, int end, int32_t own) {
    for (int i = begin; i < end; ++i) row[i] = options[i] != 0 && options[i] != own ? kNothing : row[i];
}

void attend_block(const TextKeys& text, int head, const TextQueries& queries, int q0, int q1, float* out, int out_stride,
                  float* scratch) {
    const int D = text.head_dim, padded = text.padded(), count = q1 - q0;
    float *scores = scratch, *rows = scratch + static_cast<size_t>(queries_at_once(text)) * padded;
    for (int q = q0; q < q1; ++q) {
        const float* from = queries.rows + static_cast<size_t>(q) * queries.stride + head * D;
        for (int c = 0; c < D; ++c) rows[(q - q0) * D + c] = from[c] * (queries.scale * kLog2E);
    }
    multiply(text.keys + head * text.head_keys(), text.tokens, D, rows, count, scores, padded);
    int begin = 0, end = queries.options ? text.tokens : 0;  // of the options
    while (begin < end && queries.options[begin] == 0) ++begin;
    while (begin < end && queries.options[end - 1] == 0) --end;
    float* sums = rows;  // the queries are not needed any more
    for (int q = q0; q < q1; ++q) {
        float* row = scores + static_cast<size_t>(q - q0) * padded;
        const int32_t own = queries.options ? queries.options[queries.tokens ? queries.tokens[q] : queries.first + q] : 0;
        if (own != 0) hide_options(row, queries.options, begin, end, own);
        sums[q - q0] = softmax(row, text.tokens, padded);
    }
    float* to = out + static_cast<size_t>(q0) * out_stride + head * D;
    multiply(text.values + head * text.head_values(), D, padded, scores, count, to, out_stride);
    for (int q = 0; q < count; ++q) {
        const float inverse = 1.0f / sums[q];
        for (int c = 0; c < D; ++c) to[static_cast<size_t>(q) * out_stride + c] *= inverse;
    }
}

}  // namespace

void place_keys(const TextKeys& text, int t0, int t1, const float* keys, const float* values, int stride) {
    const int D = text.head_dim, padded = text.padded(), even = D + D % 2;
    const bool ends = t1 == text.tokens;  // who places the last token makes what pads the text zero
    for (int t = t0; t < (ends ? padded : t1); ++t) {
        const float *key = keys + static_cast<size_t>(t - t0) * stride, *value = values + static_cast<size_t>(t - t0) * stride;
        for (int h = 0; h < text.heads; ++h) {
            float* k = text.keys + h * text.head_keys() + static_cast<size_t>(t / kPanelRows) * kPanelRows * even;
            float* v = text.values + h * text.head_values();
            for (int c = 0; t < text.tokens && c < even; ++c)
                k[c / 2 * 2 * kPanelRows + t % kPanelRows * 2 + c % 2] = c < D ? key[h * D + c] : 0.0f;
            for (int c = 0; c < D; ++c)
                v[static_cast<size_t>(c / kPanelRows) * kPanelRows * padded + t / 2 * 2 * kPanelRows + c % kPanelRows * 2 + t % 2] =
                    t < text.tokens ? value[h * D + c] : 0.0f;
        }
    }
}

void attend_text(const TextKeys& text, int head, const TextQueries& queries, float* out, int out_stride, float* scratch) {
    const int step = queries_at_once(text);
    for (int q = 0; q < queries.count; q += step)
        attend_block(text, head, queries, q, std::min(queries.count, q + step), out, out_stride, scratch);
}

size_t attend_text_scratch_floats(const TextKeys& text) {
    return static_cast<size_t>(queries_at_once(text)) * (text.padded() + text.head_dim) + kLanes;
}

}  // namespace heedful::HEEDFUL_VARIANT
