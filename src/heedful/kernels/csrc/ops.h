// Every op of the native kernels, with its shapes. T tokens, C channels in, R rows out, H query heads, K KV heads, D
// channels a head. Plain pointers: the caller owns all memory and says which part of the work is this thread's.
//
// One rule for all: what is computed for a token never depends, to the bit, on which other tokens are in the call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heedful {

constexpr int kPanelRows = 8;    // rows that lie interleaved, one vector lane each
constexpr int kBlock = 32;       // columns that share a scale
constexpr int kPageLen = 64;     // token slots of a page
constexpr int kArenaPages = 1 << 20;  // a page is arena * kArenaPages + its row in the arena's buffer
constexpr int kMaxHeadDim = 256;

// ---- matmul.cpp ------------------------------------------------------------------------------------------------

enum class Format : int {
    f32 = 0,  // panel: [C / 2][8 rows][2 columns] float, with a zero column at the end where C is odd
    f16 = 1,  // panel: [C][8 rows] half
    w4 = 2,   // panel: per 32 columns 160 bytes: half scale[8], half min[8], 4 vectors of 32 bytes (see matmul.cpp)
    w8 = 3,   // panel: per 32 columns 272 bytes: half scale[8], 8 vectors of 32 bytes
    w6 = 4,   // panel: per 32 columns 288 bytes: half scale[8], half min[8], 8 vectors of 32 bytes, codes 0..63
};

inline bool has_integers(Format format) {
    return format == Format::w4 || format == Format::w6 || format == Format::w8;
}

// R rows in panels of 8; the last panel is padded with zero rows. C is a multiple of 32 for the integer formats.
struct Matrix {
    Format format;
    int rows, cols;
    const uint8_t* panels;
    int panel_count() const { return (rows + kPanelRows - 1) / kPanelRows; }
};

// T tokens' inputs to matrix products. quantized is filled for the integer formats, f32 is what f32 and f16 read.
struct Activations {
    int tokens, cols;
    const float* f32;    // (T, C)
    int8_t* codes;       // (T, C)
    float* scales;       // (T, C / 32): value = code * scale
    float* scaled_sums;  // (T, C / 32): scale * sum of the block's codes
};

// ---- pages.cpp, attention.cpp ----------------------------------------------------------------------------------

enum class KvNumber : int {
    f32 = 0,
    f16 = 1,  // saturated at the largest half
    q8 = 2,   // int8 rows, one float32 scale a row: scale = max abs / 127, code = round half to even(x / scale)
    q4 = 3,   // ggml's Q4_0: blocks of 32 channels with a half scale d, 4 bits a channel: (code - 8) * d
};

struct KvFormat {
    KvNumber keys, values;
};

// One layer's pages of one format. Row r starts at base + r * page_bytes and holds, KV head after KV head, 64 keys then
// 64 values.
struct PageBuffer {
    KvFormat format;
    int kv_heads, head_dim;
    uint8_t* base;
    size_t page_bytes;
};

struct AttentionShape {
    int heads, kv_heads, head_dim;  // head h reads KV head h / (heads / kv_heads)
    float scale;                    // multiplies q·k
    float softcap;                  // 0: none; else scores become cap * tanh(score / cap)
};

// The keys of one sequence that one softmax runs over, in pages that follow one another.
struct KeyRun {
    const int32_t* pages;
    int count;       // of pages
    int first_page;  // index in the sequence of pages[0]
    int begin, end;  // positions that count
    int window;      // 0: none; else a query sees itself and the window - 1 positions before it
    int32_t next;    // the page that is read after the last one; it is prefetched, nothing else
};

// Queries at positions [q0, q1), for one KV head.
struct QueryRows {
    const float* rows;  // the one at position `start` first, H·D floats each, `stride` floats apart
    int stride, start;
    int kv_head, q0, q1;
};

// ---- selection.cpp ---------------------------------------------------------------------------------------------

// The bounds of one layer's pages of one format: of the page in row r at base + r * page_bytes. They lie apart from the
// pages, so that choosing reads nothing else.
struct BoundsBuffer {
    uint8_t* base;
    size_t page_bytes;
};

// ---- text_attention.cpp ----------------------------------------------------------------------------------------

// Keys and values of one text of n tokens, as f32 panels by head: keys (n, D), and values turned (D, n), with zeros up to
// the next multiple of 8 tokens.
struct TextKeys {
    int tokens, heads, head_dim;
    float *keys, *values;
    int padded() const { return (tokens + kPanelRows - 1) / kPanelRows * kPanelRows; }
    // Floats of one head.
    size_t head_keys() const { return static_cast<size_t>(padded()) * (head_dim + head_dim % 2); }
    size_t head_values() const {
        return static_cast<size_t>(padded()) * ((head_dim + kPanelRows - 1) / kPanelRows * kPanelRows);
    }
};

// Queries of tokens of a text: rows of all heads, `stride` floats apart.
struct TextQueries {
    const float* rows;
    int stride, count;
    const int32_t* tokens;   // (count) of each query, its place in the text; null: from `first` on
    int first;
    float scale;             // multiplies q·k
    const int32_t* options;  // (n) option of each token of the text, from 1, or 0: none; null: all see all
};

// ---- elementwise.cpp -------------------------------------------------------------------------------------------

enum class NormKind : int { rms = 0, layer = 1 };
enum class Activation : int { silu = 0, gelu_tanh = 1, gelu = 2, relu = 3 };

// ---- the table -------------------------------------------------------------------------------------------------

struct Ops {
    const char* name;

    // out = norm(x) over n channels: x / sqrt(mean(x²) + eps) · weight, or LayerNorm with bias. out may be x.
    void (*norm)(NormKind kind, const float* x, const float* weight, const float* bias, float eps, int n, float* out);

    // Turn channel pairs (i, i + half) of one head in place: cos and sin (half).
    void (*rotate)(float* head, const float* cos, const float* sin, int half);

    // x (n) times the normalised Walsh-Hadamard matrix in Sylvester's order, in blocks of `block` channels: a power of
    // two, at least 8, that divides n.
    void (*hadamard)(float* x, int n, int block);

    // x = act(x) · gate_partner for n channels, or act(x) alone when `up` is null. act(gate)·up: x holds gate.
    void (*activate)(Activation kind, float* x, const float* up, int n);

    // Quantize tokens [t0, t1) of `x` (T, C) into `out` in blocks of 32: scale = max abs / 127.
    void (*quantize_activations)(const float* x, const Activations& out, int t0, int t1);

    // y[t][row] (+)= sum_c W[row][c] * x[t][c] (+ bias[row]) for tokens [t0, t1) and panels [p0, p1).
    // `y_stride`: floats from one token's row 0 to the next one's. `bias` may be null. Rows past W.rows are not written.
    void (*matmul)(const Matrix& w, const Activations& x, int t0, int t1, int p0, int p1, float* y, int y_stride,
                   const float* bias, bool add);

    // Bytes of a page of this shape.
    size_t (*page_bytes)(KvFormat format, int kv_heads, int head_dim);

    // Write one token's key and value of one KV head, each (D) floats, into slot [0, 64) of a page, by its row. Tokens
    // of the same eight slots share bytes: one thread stores them.
    void (*store_row)(const PageBuffer& pages, int row, int kv_head, int slot, const float* key, const float* value);

    // Brings near what store_row will write: it lies cold in memory, and a store waits for the lines that it shares.
    void (*expect_row)(const PageBuffer& pages, int row, int kv_head, int slot);

    // What one KV head's keys and values of a page stand for, (64, D) floats each; either may be null.
    void (*read_page)(const PageBuffer& pages, int row, int kv_head, float* keys, float* values);

    // Partial attention of the queries' H / K heads each, over the keys of the run as far as each query sees them.
    // `arenas`: the layer's buffers by arena. Writes for query i, head g: max, sum of exp, and unnormalised sum (D) to
    // part + ((i - q0) * group + g) * (D + 2), as [max, sum, values...]; a query that sees no key: max = -inf, sum = 0.
    void (*attend)(const PageBuffer* arenas, const AttentionShape& shape, const KeyRun& keys, const QueryRows& queries,
                   float* part, void* scratch);

    // Bytes of scratch that attend needs for up to `queries` queries at once.
    size_t (*attend_scratch_bytes)(const AttentionShape& shape, int queries);

    // Merge partial results of one query and head, `part_stride` floats apart, in this order into out (D).
    void (*merge_parts)(const float* parts, size_t part_stride, int count, int head_dim, float* out);

    // Write the keys and values of tokens [t0, t1) of a text to their places; each row (H·D), `stride` floats apart.
    void (*place_keys)(const TextKeys& text, int t0, int t1, const float* keys, const float* values, int stride);

    // Attention of one head's queries over the keys of their text; tokens of two different options do not see each other.
    // Writes for query i (D) to out + i * out_stride + head * D. scratch: attend_text_scratch_floats floats.
    void (*attend_text)(const TextKeys& text, int head, const TextQueries& queries, float* out, int out_stride,
                        float* scratch);
    size_t (*attend_text_scratch_floats)(const TextKeys& text);

    // Bytes of the bounds of one page.
    size_t (*bounds_bytes)(int kv_heads, int head_dim);

    // Write the bounds of a full page of one KV head: mean and variance of its keys (64, D), channel by channel, as int8,
    // the largest magnitude of either as 127.
    void (*store_bounds)(const float* keys, int head_dim, const BoundsBuffer& bounds, int row, int kv_head);

    // The group's queries (group, D) as integers, into `prepared` of bounds_query_bytes, which is aligned as floats are.
    void (*prepare_bounds_query)(const float* q, int group, int head_dim, void* prepared);
    size_t (*bounds_query_bytes)(int group, int head_dim);

    // out[g * stride + i] = what a key two standard deviations up in pages[i] scores with query g of the group, unscaled.
    // `arenas`: the layer's bounds by arena.
    void (*bound_pages)(const BoundsBuffer* arenas, const int32_t* pages, int count, int kv_head, int group, int head_dim,
                        const void* prepared, float* out, size_t stride);

    // The `wanted` of `count` candidates whose bounds promise the group most, as page indices in `listed`, ascending; of
    // equal ones the first. bounds (group, count): of page 1 + i at i. A page's promise: its shares of the softmax of each
    // query's bounds · scale, summed; a quarter more for those that `chosen` (num_chosen, ascending) holds. Overwrites
    // bounds; `keys` is scratch for the candidates.
    void (*list_pages)(float* bounds, int group, float scale, int32_t* keys, int count, int wanted, const int32_t* chosen,
                       int num_chosen, int32_t* listed);

    // What the keys of whole pages weigh for a group's one query: of pages[i] and head g, at [g * stride + i], the largest
    // score in powers of two and the sum of 2^(score - that).
    void (*weigh_pages)(const PageBuffer* arenas, const AttentionShape& shape, const int32_t* pages, int count,
                        const QueryRows& query, float* maxima, float* sums, int stride, void* scratch);

    // Renew which `num_pages` of a sequence's `pages` pages one KV head reads, by index, ascending: the first, the last
    // and the `local_pages` before it, and those of the `count` listed ones that weigh most: shares of each head's weights
    // (maxima and sums, (group, count)), summed; a quarter more for those that `chosen` holds, from last time; the first of
    // equal ones. Overwrites maxima; `keys` is scratch for the listed pages. 2 + local_pages <= num_pages <= pages.
    void (*choose_pages)(float* maxima, const float* sums, int group, int32_t* keys, const int32_t* listed, int count,
                         int pages, int local_pages, int num_pages, int32_t* chosen);
};

// The table for this processor, chosen once: "vnni" (AVX-512 VNNI), else "avx2" (with FMA and F16C), else "portable".
const Ops& ops();
// Every table that this processor can run, for tests: tables[0] is "portable". Returns how many there are.
int all_ops(const Ops** tables);

}  // namespace heedful
