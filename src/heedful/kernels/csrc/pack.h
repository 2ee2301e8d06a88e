// Weights from their file's format into the panels that matmul reads. Owns the layouts of ggml's blocks and of panels.
// Knows nothing of files, threads or processors; panels are the same for every variant of the kernels.
//
// Errors, against the weights that the file means (x: the largest magnitude of the row's 32 columns; tiny: 2^-24):
//   exact: F32 → f32, F16 → f16 and f32, BF16 → f32, every block type → f32 up to one float rounding of its own,
//          Q4_0 and Q4_1 → w4, Q8_0, Q5_0 and IQ4_NL → w8 (Q4_0's 8 · scale must be a finite half, as in real files)
//   Q4_K → w4: scale and min of each 32 columns rounded to half: 2^-11 of (15 · scale + |min|), or 8 tiny
//   all else → w8: x / 254 · (1 + 2^-9), or tiny
//   all → w6: (largest - smallest) / 126 of the 32 columns, plus 2^-10 x, or tiny
//   all else → w4: (largest - smallest) / 30 of the 32 columns, plus 2^-10 x, or tiny
//   all else → f16: 2^-11 of the weight, or tiny / 2
#pragma once

#include <string>

#include "ops.h"

namespace heedful {

const char* format_name(Format format);

// Throws std::invalid_argument.
Format format_named(const std::string& name);

// Bytes of a panelled matrix. `cols` is a multiple of 32 for the integer formats.
size_t packed_bytes(Format format, int rows, int cols);

// Whether this ggml type number can be packed.
bool can_pack(int ggml_type);

// Columns that are stored together, 1 for plain floats: cols is a multiple.
int stored_block_len(int ggml_type);

// Bytes of a stored row of `cols` columns.
size_t stored_row_bytes(int ggml_type, int cols);

// The panel format that keeps this type's precision: f32, f16 (F16), w4 (Q4_0, Q4_1, Q4_K) or w8.
Format packed_format(int ggml_type);

// Write panels [p0, p1) of a matrix of `rows` × `cols`, stored row after row at `stored` (any alignment), into `panels`
// (the start of panel 0). Threads may pack different ranges at once. Any type goes into any format; the integer
// ones need cols to be a multiple of 32.
void pack(int ggml_type, const uint8_t* stored, Format format, int rows, int cols, int p0, int p1, uint8_t* panels);

// One stored row of `cols` columns as floats.
void unpack_row(int ggml_type, const uint8_t* stored, int cols, float* out);

}  // namespace heedful
