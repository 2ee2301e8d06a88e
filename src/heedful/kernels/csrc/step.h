// One step of a decoder: embedded tokens in, logits out. Built once from a layer table; the table is data, so one code
// path serves every family. Knows nothing of tokenizers, page tables or sampling.
#pragma once

#include "paging.h"
#include "pool.h"

#include <memory>
#include <vector>

namespace heedful {

// What an adapter adds to one part of a product: B (A x), its scale in B. Both in f32 panels: A (rank, columns of the part),
// B (rows of the part, rank). No rows: it leaves that part as it is.
struct LowRank {
    Matrix a{Format::f32, 0, 0, nullptr}, b{Format::f32, 0, 0, nullptr};
};

// A matrix in parts that stand one below the other (q, k and v; gate and up) and its bias, or null.
struct Product {
    std::vector<Matrix> parts;
    const float* bias = nullptr;
    std::vector<std::vector<LowRank>> updates;  // by adapter, then by part; an adapter that changes no part has none
    int rows() const {
        int sum = 0;
        for (const Matrix& part : parts) sum += part.rows;
        return sum;
    }
};

struct Norm {
    const float* weight = nullptr;  // null: no such norm
    const float* bias = nullptr;
};

// inv_freq (half) radians a position; empty: no rotation. cos and sin are multiplied by `scaling`.
struct RopeTable {
    std::vector<float> inv_freq;
    float scaling = 1.0f;
};

struct Layer {
    Norm attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
    Product qkv, out, up, down;  // up: gate and up where the MLP is gated
    std::vector<PageBuffer> arenas;    // by index; those of other groups are empty
    std::vector<BoundsBuffer> bounds;  // likewise, and empty where nothing is ever selected
    int group = 0;                   // index of its layer group: which span it reads
    int rope = 0;                    // index into Decoder::ropes
};

struct DecoderConfig {
    int hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0, vocab = 0;
    NormKind norm_kind = NormKind::rms;
    float norm_eps = 1e-5f;
    Activation activation = Activation::silu;
    bool gated_mlp = true;
    int rotation_block = 1;  // channels that one Hadamard matrix turns, in sequences that are rotated; 1: none
    float query_scale = 1.0f, attention_softcap = 0.0f, logit_softcap = 0.0f;
};

// Tokens, or wanted tokens, [begin, end) that an adapter is for; those of no run are the base's alone.
struct AdapterRun {
    int adapter, begin, end;
};

// What one step computes. Tokens of the chunks lie one after another.
struct Step {
    int tokens = 0;
    const float* embedded = nullptr;  // (T, hidden)
    const int32_t* positions = nullptr;  // (T)
    int chunks = 0, groups = 0;
    const int32_t* chunk_starts = nullptr;  // (chunks + 1) first token of each chunk
    const Span* spans = nullptr;            // (chunks, groups)
    int wanted = 0;
    const int32_t* wanted_tokens = nullptr;  // (wanted) tokens whose logits are wanted
    float* logits = nullptr;                 // (wanted, vocab)
    std::vector<AdapterRun> adapted;         // of tokens, without overlaps
    std::vector<AdapterRun> adapted_wanted;  // of places in wanted_tokens, likewise
};

// A page of one format to be rewritten as one of another, in all layers of a group. Pages as in KeyRun.
struct PageMove {
    int group;
    int32_t source, target;
};

class Decoder {
public:
    Decoder(const DecoderConfig& config, const Ops& ops, int threads);
    ~Decoder();
    void run(const Step& step);
    void move_pages(const PageMove* moves, int count);

    DecoderConfig config;
    std::vector<Layer> layers;
    std::vector<RopeTable> ropes;
    Norm final_norm;
    Product head;
    int most_rank = 0;  // of all updates

private:
    struct Workspace;
    class Worker;
    void reserve(const Step& step);
    void place(const Step& step);
    void plan(const Step& step);
    const Ops& ops_;
    Pool pool_;
    std::unique_ptr<Workspace> work_;
};

}  // namespace heedful
