// A pass of an encoder over a thread pool. Tokens are cut into blocks; who takes a block computes everything of it that
// needs no other block: attention of its queries, output, residual, norms, MLP, and then the next layer's q, k and v. So a
// layer has one barrier; keys and values lie twice, for the layer that is read and the one that is written. Blocks are
// taken as they come: a thread that is kept off its processor loses no more than the block it is at.
//
// The last layer computes the wanted rows alone: all of its keys and values, but queries, output and MLP only of those.

#include "encoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "inputs.h"

namespace heedful {
namespace {

// Of a block at most: its MLP's activations (MiniLM: 590 KB in float32) stay in the second cache, and every weight is read
// from the third one once for so many tokens.
constexpr int kBlockTokens = 96;

size_t padded(size_t count) { return (count + kPanelRows - 1) / kPanelRows * kPanelRows; }

// Rows cut into blocks of nearly equal size, as many for each thread.
struct Blocks {
    int rows = 0, count = 0;
    Blocks() = default;
    Blocks(int rows, int threads)
        : rows(rows), count(std::min(rows, (rows + threads * kBlockTokens - 1) / (threads * kBlockTokens) * threads)) {}
    int begin(int block) const { return static_cast<int>(static_cast<int64_t>(rows) * block / count); }
    int most() const { return count ? (rows + count - 1) / count : 0; }
};

// A thread's own memory, for a block.
struct Scratch {
    InputBuffers inputs;
    Buffer<float> normed, qkv, attended, wide, rows, queries, attention;
    std::vector<int32_t> tokens;
};

}  // namespace

struct Encoder::Workspace {
    Buffer<float> x, queries;            // (T, C)
    Buffer<float> keys[2], values[2];    // of all texts, by the layer's parity
    std::vector<size_t> padded_starts;   // (texts + 1) sum of the padded lengths before each text
    std::vector<Scratch> scratch;        // by thread
    Blocks blocks, wanted;
    std::unique_ptr<std::atomic<int>[]> next;  // by layer, and one for what comes before the first
};

Encoder::Encoder(int hidden, const Ops& ops, int threads)
    : hidden(hidden), ops_(ops), pool_(threads), work_(std::make_unique<Workspace>()) {
    work_->scratch = std::vector<Scratch>(threads);
}

Encoder::~Encoder() = default;

// One thread's walk through a pass.
class Encoder::Worker {
public:
    Worker(Encoder& encoder, const TextBatch& batch, int thread)
        : e_(encoder), ops_(encoder.ops_), w_(*encoder.work_), b_(batch), s_(w_.scratch[thread]), C_(encoder.hidden) {}

    void run() {
        const int layers = static_cast<int>(e_.layers.size());
        take(0, w_.blocks, [&](int t0, int t1) {
            embed(t0, t1);
            project(0, t0, t1);
        });
        for (int l = 0; l < layers; l++) {
            e_.pool_.barrier();
            if (l + 1 < layers)
                take(l + 1, w_.blocks, [&](int t0, int t1) {
                    run_layer(l, t0, t1, row_of(w_.x, t0), row_of(w_.queries, t0), nullptr);
                    project(l + 1, t0, t1);
                });
            else
                take(l + 1, w_.wanted, [&](int r0, int r1) { run_last(l, r0, r1); });
        }
    }

private:
    float* row_of(const Buffer<float>& rows, int row) const { return rows.get() + static_cast<size_t>(row) * C_; }

    template <typename Body>
    void take(int phase, const Blocks& blocks, Body&& body) {
        for (int block; (block = w_.next[phase]++) < blocks.count;) body(blocks.begin(block), blocks.begin(block + 1));
    }

    void embed(int t0, int t1) {
        const Embedding& e = e_.embedding;
        for (int t = t0; t < t1; t++) {
            const float* token = e.tokens + static_cast<size_t>(b_.ids[t]) * C_;
            const float* position = e.positions + static_cast<size_t>(b_.positions[t]) * C_;
            const float* type = e.types + static_cast<size_t>(b_.types[t]) * C_;
            float* x = row_of(w_.x, t);
            for (int c = 0; c < C_; c++) x[c] = token[c] + position[c] + type[c];
        }
        norm(e.norm, e.norm_eps, row_of(w_.x, t0), t1 - t0, row_of(w_.x, t0));
    }

    bool asks_for_rows(int l) const { return l + 1 == static_cast<int>(e_.layers.size()) && b_.wanted_tokens; }

    // Queries, keys and values of a layer; of the last one the keys and values alone where some rows are wanted.
    void project(int l, int t0, int t1) {
        const EncoderLayer& layer = e_.layers[l];
        const int count = t1 - t0;
        if (layer.added)
            for (int t = t0; t < t1; t++) {
                const float* row = layer.added + static_cast<size_t>(b_.kinds[text_of(t)]) * C_;
                float* x = row_of(w_.x, t);
                for (int c = 0; c < C_; c++) x[c] += row[c];
            }
        float* qkv = s_.qkv.get();
        const int first = asks_for_rows(l) ? C_ / kPanelRows : 0;  // panel
        multiply(layer.qkv, first_input(layer, row_of(w_.x, t0), count), count, qkv, false, first);
        for (int t = t0; t < t1 && !asks_for_rows(l); t++)
            std::memcpy(row_of(w_.queries, t), qkv + static_cast<size_t>(t - t0) * 3 * C_, C_ * sizeof(float));
        for (int t = t0; t < t1;) {
            const int text = text_of(t), start = b_.starts[text], end = std::min(t1, b_.starts[text + 1]);
            const float* keys = qkv + static_cast<size_t>(t - t0) * 3 * C_ + C_;
            ops_.place_keys(keys_of(l, text), t - start, end - start, keys, keys + C_, 3 * C_);
            t = end;
        }
    }

    const float* first_input(const EncoderLayer& layer, const float* x, int count) {
        if (!layer.norm_first) return x;
        norm(layer.attn_norm, layer.norm_eps, x, count, s_.normed.get());
        return s_.normed.get();
    }

    // Rows r0 to r1 of x, in place; `q` are their queries, `tokens` what they are of, null: r0 and on.
    void run_layer(int l, int r0, int r1, float* x, const float* q, const int32_t* tokens) {
        const EncoderLayer& layer = e_.layers[l];
        const int count = r1 - r0;
        attend(l, r0, r1, q, tokens);
        multiply(layer.out, s_.attended.get(), count, x, true);
        if (!layer.norm_first) norm(layer.attn_norm, layer.norm_eps, x, count, x);
        const float* in = x;
        if (layer.norm_first) {
            norm(layer.mlp_norm, layer.norm_eps, x, count, s_.normed.get());
            in = s_.normed.get();
        }
        multiply(layer.up, in, count, s_.wide.get(), false);
        ops_.activate(layer.activation, s_.wide.get(), nullptr, count * layer.up.matrix.rows);
        multiply(layer.down, s_.wide.get(), count, x, true);
        if (!layer.norm_first) norm(layer.mlp_norm, layer.norm_eps, x, count, x);
    }

    void run_last(int l, int r0, int r1) {
        const int count = r1 - r0;
        float* x = row_of(w_.x, r0);
        if (!b_.wanted_tokens) {
            run_layer(l, r0, r1, x, row_of(w_.queries, r0), nullptr);
        } else {
            x = s_.rows.get();
            for (int r = r0; r < r1; r++)
                std::memcpy(x + static_cast<size_t>(r - r0) * C_, row_of(w_.x, b_.wanted_tokens[r]), C_ * sizeof(float));
            const EncoderLayer& layer = e_.layers[l];
            const int panels = (C_ + kPanelRows - 1) / kPanelRows;  // of q, and where C is odd of a bit of k
            multiply(layer.qkv, first_input(layer, x, count), count, s_.qkv.get(), false, 0, panels);
            for (int r = 0; r < count; r++)
                std::memcpy(s_.queries.get() + static_cast<size_t>(r) * C_, s_.qkv.get() + static_cast<size_t>(r) * 3 * C_,
                            C_ * sizeof(float));
            run_layer(l, r0, r1, x, s_.queries.get(), b_.wanted_tokens + r0);
        }
        if (e_.scorer.out.matrix.panels) return score(x, r0, r1);
        std::memcpy(b_.out + static_cast<size_t>(r0) * C_, x, static_cast<size_t>(count) * C_ * sizeof(float));
    }

    void score(const float* x, int r0, int r1) {
        const RowScorer& scorer = e_.scorer;
        const int count = r1 - r0;
        norm(scorer.norm, scorer.norm_eps, x, count, s_.normed.get());
        multiply(scorer.dense, s_.normed.get(), count, s_.attended.get(), false);
        ops_.activate(Activation::gelu, s_.attended.get(), nullptr, count * C_);
        multiply(scorer.out, s_.attended.get(), count, b_.out + r0, false);
    }

    void attend(int l, int r0, int r1, const float* q, const int32_t* tokens) {
        const EncoderLayer& layer = e_.layers[l];
        const float scale = 1.0f / std::sqrt(static_cast<float>(C_ / layer.heads));
        for (int r = r0; r < r1;) {
            const int text = text_of(tokens ? tokens[r - r0] : r), start = b_.starts[text], end = b_.starts[text + 1];
            int last = r;
            s_.tokens.clear();
            for (; last < r1 && (tokens ? tokens[last - r0] : last) < end; last++)
                if (tokens) s_.tokens.push_back(tokens[last - r0] - start);
            const int32_t* options = layer.options_apart && b_.options ? b_.options + start : nullptr;
            const size_t at = static_cast<size_t>(r - r0) * C_;
            const TextQueries queries{q + at, C_, last - r, tokens ? s_.tokens.data() : nullptr, r - start, scale, options};
            for (int head = 0; head < layer.heads; head++)
                ops_.attend_text(keys_of(l, text), head, queries, s_.attended.get() + at, C_, s_.attention.get());
            r = last;
        }
    }

    TextKeys keys_of(int l, int text) const {
        const int heads = e_.layers[l].heads, tokens = b_.starts[text + 1] - b_.starts[text];
        TextKeys keys{tokens, heads, C_ / heads, nullptr, nullptr};
        keys.keys = w_.keys[l % 2].get() + w_.padded_starts[text] * (keys.head_keys() / keys.padded()) * heads;
        keys.values = w_.values[l % 2].get() + w_.padded_starts[text] * (keys.head_values() / keys.padded()) * heads;
        return keys;
    }

    int text_of(int token) const {
        return static_cast<int>(std::upper_bound(b_.starts, b_.starts + b_.texts + 1, token) - b_.starts) - 1;
    }

    // y (count, R) (+)= W · x + bias, of panels [p0, p1) alone; p1 < 0: all.
    void multiply(const Linear& linear, const float* x, int count, float* y, bool add, int p0 = 0, int p1 = -1) {
        const Matrix& matrix = linear.matrix;
        const Activations in = s_.inputs.view(x, count, matrix.cols);
        if (has_integers(matrix.format)) ops_.quantize_activations(x, in, 0, count);
        ops_.matmul(matrix, in, 0, count, p0, p1 < 0 ? matrix.panel_count() : p1, y, matrix.rows, linear.bias, add);
    }

    void norm(const LayerNorm& norm, float eps, const float* x, int count, float* out) {
        for (size_t i = 0; i < static_cast<size_t>(count) * C_; i += C_)
            ops_.norm(NormKind::layer, x + i, norm.weight, norm.bias, eps, C_, out + i);
    }

    Encoder& e_;
    const Ops& ops_;
    Workspace& w_;
    const TextBatch& b_;
    Scratch& s_;
    const int C_;
};

void Encoder::reserve(const TextBatch& batch) {
    Workspace& w = *work_;
    const int threads = pool_.threads(), rows = batch.wanted_tokens ? batch.wanted : batch.tokens;
    w.blocks = Blocks(batch.tokens, threads);
    w.wanted = Blocks(rows, threads);
    w.padded_starts.assign(1, 0);
    int longest = 0;
    for (int i = 0; i < batch.texts; i++) {
        const int tokens = batch.starts[i + 1] - batch.starts[i];
        longest = std::max(longest, tokens);
        w.padded_starts.push_back(w.padded_starts.back() + padded(tokens));
    }
    const size_t T = batch.tokens, C = hidden, all = w.padded_starts.back(), B = std::max(w.blocks.most(), w.wanted.most());
    w.x.reserve(T * C);
    w.queries.reserve(T * C);
    size_t widest = C, attention = 0, keys = 0, values = 0;
    for (const EncoderLayer& layer : layers) {
        const TextKeys text{longest, layer.heads, hidden / layer.heads, nullptr, nullptr};
        keys = std::max(keys, all * (text.head_keys() / text.padded()) * layer.heads);
        values = std::max(values, all * (text.head_values() / text.padded()) * layer.heads);
        widest = std::max(widest, static_cast<size_t>(layer.up.matrix.rows));
        for (int i = 0; i < batch.texts; i++) {
            const TextKeys one{batch.starts[i + 1] - batch.starts[i], layer.heads, hidden / layer.heads, nullptr, nullptr};
            attention = std::max(attention, ops_.attend_text_scratch_floats(one));
        }
    }
    for (int parity = 0; parity < 2; parity++) {
        w.keys[parity].reserve(keys);
        w.values[parity].reserve(values);
    }
    for (Scratch& s : w.scratch) {
        s.inputs.reserve(static_cast<int>(B), static_cast<int>(widest));
        s.normed.reserve(B * C);
        s.qkv.reserve(B * 3 * C);
        s.attended.reserve(B * C);
        s.rows.reserve(B * C);
        s.queries.reserve(B * C);
        s.wide.reserve(B * widest);
        s.attention.reserve(attention);
        s.tokens.reserve(B);
    }
    w.next = std::make_unique<std::atomic<int>[]>(layers.size() + 1);
    for (size_t i = 0; i <= layers.size(); i++) w.next[i] = 0;
}

void Encoder::run(const TextBatch& batch) {
    std::lock_guard<std::mutex> lock(turn_);
    reserve(batch);
    pool_.run([&](int thread) { Worker(*this, batch, thread).run(); });
}

}  // namespace heedful
