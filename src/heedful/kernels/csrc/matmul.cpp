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

#include "ops.h"
#include "variant.h"

#if HEEDFUL_AVX2
#include "avx2_tiles.h"
#else
#include "plain_tiles.h"
#endif

namespace heedful::HEEDFUL_VARIANT {
namespace {

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
