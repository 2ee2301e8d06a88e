// A whole encoder in one call: tokens of several texts in, hidden states or scores out. Every token sees every token of its
// text. Built once from a layer table, which is data: BERT's layers, with each norm after the residual sum, and those of a
// head on it, with each norm before its part. Knows nothing of tokenizers or pooling.
#pragma once

#include "ops.h"
#include "pool.h"

#include <memory>
#include <mutex>
#include <vector>

namespace heedful {

struct Linear {
    Matrix matrix{Format::f32, 0, 0, nullptr};
    const float* bias = nullptr;
};

struct LayerNorm {
    const float* weight = nullptr;
    const float* bias = nullptr;
};

struct EncoderLayer {
    int heads = 1;
    bool norm_first = false;
    bool options_apart = false;    // tokens of different options do not see each other
    float norm_eps = 1e-12f;
    Activation activation = Activation::gelu;
    const float* added = nullptr;  // (kinds, C): before the layer each token gets the row of its text's kind; or null
    LayerNorm attn_norm, mlp_norm;
    Linear qkv, out, up, down;     // qkv: (3 C, C), q's rows first
};

// x = norm(tokens[id] + positions[position] + types[type])
struct Embedding {
    const float *tokens = nullptr, *positions = nullptr, *types = nullptr;  // rows of C
    LayerNorm norm;
    float norm_eps = 1e-12f;
};

// out(gelu(dense(norm(x)))): one number a row. No matrix: there is none.
struct RowScorer {
    LayerNorm norm;
    float norm_eps = 1e-5f;
    Linear dense, out;
};

// Texts of one call, one after another, without padding: T tokens.
struct TextBatch {
    int tokens = 0;
    const int32_t *ids = nullptr, *positions = nullptr, *types = nullptr;  // (T)
    const int32_t* options = nullptr;  // (T) option of each token, from 1, or 0: none; null: there are none
    int texts = 0;
    const int32_t* starts = nullptr;  // (texts + 1) first token of each text
    const int32_t* kinds = nullptr;   // (texts)
    int wanted = 0;
    const int32_t* wanted_tokens = nullptr;  // (wanted) ascending; null: all T
    float* out = nullptr;                    // (wanted, C), or (wanted) where there is a scorer
};

class Encoder {
public:
    Encoder(int hidden, const Ops& ops, int threads);
    ~Encoder();
    // Threads may share it: they take turns.
    void run(const TextBatch& batch);

    const int hidden;
    Embedding embedding;
    std::vector<EncoderLayer> layers;
    RowScorer scorer;

private:
    struct Workspace;
    class Worker;
    void reserve(const TextBatch& batch);
    const Ops& ops_;
    Pool pool_;
    std::mutex turn_;
    std::unique_ptr<Workspace> work_;
};

}  // namespace heedful
