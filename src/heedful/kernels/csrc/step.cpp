// One decoder step over a thread pool: every thread walks all layers and meets the others at barriers.
//
// Per layer: norm and quantize | q, k, v | rotate and store | attention | out + residual | norm and quantize | gate, up and
// activation | down + residual. A lone token's norms and quantizations are done by every thread for itself: on 2 cores that
// is cheaper than a barrier. With more tokens they are split by token.
// An adapter's products go beside the base's: A x where the inputs are prepared, B (A x) added to the rows that a thread has
// just computed. That is a barrier more only where nothing else had to be prepared.
// While threads wait for each other the memory would idle: a lone token's next weights are fetched then, as far as half an
// L2 cache; and the lines that keys and values will be stored to, while q, k and v are multiplied.
// SmolLM2 at 64 to 260 tokens, 2 threads of a slow Zen 3 (22 GB/s), ms of a step of 6.2: products 4.5, attention 0.3, waits
// 0.5 before and 0.28 since, rotating and storing 0.15 before and 0.07 since, norms and rounding 0.15, Python 0.6.
// Where a span renews its choice of pages there are two barriers more: after the bounds of the candidates, after the
// choices.

#include "step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "pack.h"
#include "workspace.h"

namespace heedful {
namespace {

const std::vector<LowRank>* updates_of(const Product& product, const AdapterRun& run) {
    const size_t adapter = run.adapter;
    return adapter < product.updates.size() && !product.updates[adapter].empty() ? &product.updates[adapter] : nullptr;
}

bool has_updates(const Product& product, const std::vector<AdapterRun>& runs) {
    for (const AdapterRun& run : runs)
        if (updates_of(product, run)) return true;
    return false;
}

bool is_quantized(const Product& product) {
    for (const Matrix& part : product.parts)
        if (has_integers(part.format)) return true;
    return false;
}

int panels_of(const Product& product) {
    int sum = 0;
    for (const Matrix& part : product.parts) sum += part.panel_count();
    return sum;
}

}  // namespace

Decoder::Decoder(const DecoderConfig& config, const Ops& ops, int threads)
    : config(config), ops_(ops), pool_(threads), work_(std::make_unique<Workspace>()) {
    work_->own = std::vector<InputBuffers>(threads);
    work_->own_reduced = std::vector<Reduced>(threads);
    work_->own_parts = std::vector<Buffer<float>>(threads);
    work_->own_attended = std::vector<Buffer<float>>(threads);
    work_->scratch = std::vector<Buffer<uint8_t>>(threads);
    work_->selecting = std::vector<SelectionScratch>(threads);
}

Decoder::~Decoder() = default;

// One thread's walk through a step.
class Decoder::Worker {
public:
    Worker(Decoder& decoder, const Step& step, int thread)
        : d_(decoder), c_(decoder.config), ops_(decoder.ops_), w_(*decoder.work_), step_(step), thread_(thread),
          threads_(decoder.pool_.threads()), group_(c_.heads / c_.kv_heads) {}

    void run() {
        for (size_t i = 0; i < d_.layers.size(); i++) run_layer(d_.layers[i], static_cast<int>(i));
        run_head();
    }

private:
    void run_layer(const Layer& layer, int index) {
        const int C = c_.hidden, D = c_.head_dim, qkv_rows = (c_.heads + 2 * c_.kv_heads) * D;
        expect_rows(layer);
        multiply(layer.qkv, prepare(w_.x.get(), &layer.attn_norm, C, layer.qkv), w_.qkv.get(), qkv_rows, false, step_.adapted);
        expect(layer.out, layer.out.parts.size());
        barrier();
        rotate_and_store(layer, qkv_rows);
        barrier();
        renew_choices(layer, index, qkv_rows);
        bound_filled_pages(layer);
        attend(layer, index, qkv_rows);
        barrier();
        const float* attended = merge(work_of(layer, index));
        add_to_residual(layer.out, attended, c_.heads * D, layer.attn_post_norm, layer.up, 1);
        feed_forward(layer, index);
    }

    void feed_forward(const Layer& layer, int index) {
        const int I = c_.intermediate;
        const Activations in = prepare(w_.x.get(), &layer.mlp_norm, c_.hidden, layer.up);
        const int panels = layer.up.parts[0].panel_count(), p0 = mine(panels, thread_), p1 = mine(panels, thread_ + 1);
        const int c0 = std::min(I, p0 * kPanelRows), c1 = std::min(I, p1 * kPanelRows);
        const float* bias = layer.up.bias;
        multiply_part(layer.up, 0, in, p0, p1, w_.gate.get(), I, bias, false, step_.adapted);
        if (c_.gated_mlp)
            multiply_part(layer.up, 1, in, p0, p1, w_.up.get(), I, bias ? bias + I : nullptr, false, step_.adapted);
        for (int t = 0; t < step_.tokens && c1 > c0; t++) {
            const size_t at = static_cast<size_t>(t) * I + c0;
            ops_.activate(c_.activation, w_.gate.get() + at, c_.gated_mlp ? w_.up.get() + at : nullptr, c1 - c0);
        }
        expect(layer.down, layer.down.parts.size());
        barrier();
        const bool is_last = index + 1 == static_cast<int>(d_.layers.size());
        const Product& next = is_last ? d_.head : d_.layers[index + 1].qkv;
        add_to_residual(layer.down, w_.gate.get(), I, layer.mlp_post_norm, next, next.parts.size());
    }

    // x += post_norm(W · source). `next`, `next_parts`: what is multiplied after it, as in `expect`.
    void add_to_residual(const Product& product, const float* source, int cols, const Norm& post_norm, const Product& next,
                         size_t next_parts) {
        const Activations in = prepare(source, nullptr, cols, product);
        if (!post_norm.weight) {
            multiply(product, in, w_.x.get(), c_.hidden, true, step_.adapted);
            expect(next, next_parts);
            barrier();
            return;
        }
        multiply(product, in, w_.y.get(), c_.hidden, false, step_.adapted);
        expect(next, next_parts);
        barrier();
        for (int t = mine(step_.tokens, thread_); t < mine(step_.tokens, thread_ + 1); t++) {
            float *x = w_.x.get() + static_cast<size_t>(t) * c_.hidden, *y = w_.y.get() + static_cast<size_t>(t) * c_.hidden;
            norm(post_norm, y, c_.hidden, y);
            for (int i = 0; i < c_.hidden; i++) x[i] += y[i];
        }
        barrier();
    }

    // The inputs of a product: normed when a norm is given, quantized when the product needs it, and reduced by the
    // adapters that update it.
    Activations prepare(const float* source, const Norm* before, int cols, const Product& product) {
        return prepare_tokens(source, before, cols, product, step_.tokens, step_.adapted);
    }

    Activations prepare_tokens(const float* source, const Norm* before, int cols, const Product& product, int tokens,
                               const std::vector<AdapterRun>& runs) {
        const bool alone = tokens == 1, quantized = is_quantized(product), reduces = has_updates(product, runs);
        InputBuffers& buffers = alone ? w_.own[thread_] : w_.shared;
        const int t0 = alone ? 0 : mine(tokens, thread_), t1 = alone ? 1 : mine(tokens, thread_ + 1);
        if (before) {
            for (int t = t0; t < t1; t++)
                norm(*before, source + static_cast<size_t>(t) * cols, cols, buffers.values.get() + static_cast<size_t>(t) * cols);
            source = buffers.values.get();
        }
        const Activations view = buffers.view(source, tokens, cols);
        if (quantized) ops_.quantize_activations(source, view, t0, t1);
        if (reduces) reduce(product, view, t0, t1, runs);
        if (!alone && (before || quantized || reduces)) barrier();
        return view;
    }

    const Reduced& reduced_of(int tokens) const { return tokens == 1 ? w_.own_reduced[thread_] : w_.reduced; }

    // A x of the runs' tokens among [t0, t1), of every part that they update.
    void reduce(const Product& product, const Activations& in, int t0, int t1, const std::vector<AdapterRun>& runs) {
        const Reduced& reduced = reduced_of(in.tokens);
        for (const AdapterRun& run : runs) {
            const std::vector<LowRank>* updates = updates_of(product, run);
            const int first = std::max(t0, run.begin), last = std::min(t1, run.end);
            if (!updates || first >= last) continue;
            for (size_t part = 0; part < updates->size(); part++) {
                const Matrix& a = (*updates)[part].a;
                if (a.rows == 0) continue;
                float* rows = reduced.rows(run, static_cast<int>(part), a.rows, d_.most_rank);
                ops_.matmul(a, in, first, last, 0, a.panel_count(), rows, a.rows, nullptr, false);
            }
        }
    }

    // This thread's share of y (+)= W · in + bias, updates included.
    void multiply(const Product& product, const Activations& in, float* y, int y_stride, bool add,
                  const std::vector<AdapterRun>& runs) {
        const int all = panels_of(product), lo = mine(all, thread_), hi = mine(all, thread_ + 1);
        int first_panel = 0, first_row = 0;
        for (size_t i = 0; i < product.parts.size(); i++) {
            const Matrix& part = product.parts[i];
            const int p0 = std::max(lo - first_panel, 0), p1 = std::min(hi - first_panel, part.panel_count());
            const float* bias = product.bias ? product.bias + first_row : nullptr;
            if (p0 < p1) multiply_part(product, static_cast<int>(i), in, p0, p1, y + first_row, y_stride, bias, add, runs);
            first_panel += part.panel_count();
            first_row += part.rows;
        }
    }

    // Panels [p0, p1) of one part, for all tokens.
    void multiply_part(const Product& product, int part, const Activations& in, int p0, int p1, float* y, int y_stride,
                       const float* bias, bool add, const std::vector<AdapterRun>& runs) {
        ops_.matmul(product.parts[part], in, 0, in.tokens, p0, p1, y, y_stride, bias, add);
        for (const AdapterRun& run : runs) {
            const std::vector<LowRank>* updates = updates_of(product, run);
            if (!updates || (*updates)[part].b.rows == 0) continue;
            const Matrix& b = (*updates)[part].b;
            const float* rows = reduced_of(in.tokens).rows(run, part, b.cols, d_.most_rank);
            const Activations low{in.tokens, b.cols, rows, nullptr, nullptr, nullptr};
            ops_.matmul(b, low, run.begin, run.end, p0, p1, y, y_stride, nullptr, true);
        }
    }

    // Where this thread begins to read the weights of the product that comes next, of which the first `parts` parts are
    // shared out together. A lone token's products wait for the memory, which idles while threads wait for each other.
    void expect(const Product& product, size_t parts) {
        if (step_.tokens > 1) return;
        int all = 0, first_panel = 0;
        for (size_t i = 0; i < parts; i++) all += product.parts[i].panel_count();
        const int lo = mine(all, thread_), hi = mine(all, thread_ + 1);
        for (size_t i = 0; i < parts; i++) {
            const Matrix& part = product.parts[i];
            const int p0 = lo - first_panel, p1 = std::min(hi - first_panel, part.panel_count());
            if (p0 < p1) {
                const size_t bytes = packed_bytes(part.format, kPanelRows, part.cols);
                const char* start = reinterpret_cast<const char*>(part.panels) + p0 * bytes;
                ahead_ = {start, start + std::min(kAheadBytes, (p1 - p0) * bytes)};
                for (size_t line = 0; line < kFirstBytes; line += 64) ahead_.fetch_line();
                return;
            }
            first_panel += part.panel_count();
        }
    }

    // This thread's share of the heads of all slot groups, KV heads first: each(slot group, head).
    template <typename Each>
    void each_head(Each&& each) const {
        const int stores = kStoreWeight * c_.kv_heads, weight = stores + c_.heads;
        const int all = static_cast<int>(w_.slots.size()) * weight, lo = mine(all, thread_), hi = mine(all, thread_ + 1);
        for (int group = lo / weight; group * weight < hi; group++)
            for (int head = 0; head < c_.kv_heads + c_.heads; head++) {
                const int at = group * weight + (head < c_.kv_heads ? kStoreWeight * head : stores + head - c_.kv_heads);
                if (at >= lo && at < hi) each(w_.slots[group], head);
            }
    }

    const Span& span_of(const Layer& layer, const SlotGroup& slots) const {
        return step_.spans[slots.chunk * step_.groups + layer.group];
    }
    int position_of(const Span& span, const SlotGroup& slots, int token) const {
        return span.start + token - step_.chunk_starts[slots.chunk];
    }

    // Brings near what this thread will store, while the weights of q, k and v are read.
    void expect_rows(const Layer& layer) {
        if (step_.tokens > kExpectedTokens) return;
        each_head([&](const SlotGroup& slots, int head) {
            const Span& span = span_of(layer, slots);
            for (int token = slots.begin; token < slots.end && head < c_.kv_heads; token++) {
                const int position = position_of(span, slots, token);
                const int32_t page = span.pages[position / kPageLen - span.first_page];
                ops_.expect_row(layer.arenas[page / kArenaPages], page % kArenaPages, head, position % kPageLen);
            }
        });
    }

    // Positions into queries and keys; keys and values into their pages.
    void rotate_and_store(const Layer& layer, int qkv_rows) {
        each_head([&](const SlotGroup& slots, int head) {
            const Span& span = span_of(layer, slots);
            for (int token = slots.begin; token < slots.end; token++) {
                float* row = w_.qkv.get() + static_cast<size_t>(token) * qkv_rows;
                if (head < c_.kv_heads)
                    store(layer, span, row, token, position_of(span, slots, token), head);
                else
                    place_query(layer, span, row + (head - c_.kv_heads) * c_.head_dim, token, head - c_.kv_heads);
            }
        });
    }

    void place_query(const Layer& layer, const Span& span, float* q, int token, int head) {
        const int rope = layer.rope;
        if (layer.q_norm.weight) norm(layer.q_norm, q, c_.head_dim, q);
        if (span.sink_distance >= 0) {
            const int table = rope * step_.groups + layer.group;
            float* copy = w_.sink_queries.get() + (static_cast<size_t>(token) * c_.heads + head) * c_.head_dim;
            std::memcpy(copy, q, c_.head_dim * sizeof(float));
            turn(rope, copy, w_.sink_cos[table], w_.sink_sin[table], token);
            if (span.rotated) rotate(copy);
        }
        turn(rope, q, w_.cos[rope], w_.sin[rope], token);
        if (span.rotated) rotate(q);
    }

    void store(const Layer& layer, const Span& span, float* row, int token, int position, int kv_head) {
        float *key = row + (c_.heads + kv_head) * c_.head_dim, *value = key + c_.kv_heads * c_.head_dim;
        if (layer.k_norm.weight) norm(layer.k_norm, key, c_.head_dim, key);
        turn(layer.rope, key, w_.cos[layer.rope], w_.sin[layer.rope], token);
        if (span.rotated) rotate(key), rotate(value);
        const int32_t page = span.pages[position / kPageLen - span.first_page];
        const PageBuffer& arena = layer.arenas[page / kArenaPages];
        ops_.store_row(arena, page % kArenaPages, kv_head, position % kPageLen, key, value);
    }

    void turn(int rope, float* head, const Buffer<float>& cos, const Buffer<float>& sin, int token) {
        const int half = static_cast<int>(d_.ropes[rope].inv_freq.size());
        const size_t at = static_cast<size_t>(token) * half;
        if (half) ops_.rotate(head, cos.get() + at, sin.get() + at, half);
    }

    void rotate(float* head) { ops_.hadamard(head, c_.head_dim, c_.rotation_block); }

    // Which pages each KV head reads from now on: bounds list some, the keys of these are weighed. Candidates and listed
    // pages are shared out by page, choices by head.
    void renew_choices(const Layer& layer, int index, int qkv_rows) {
        const GroupSelection& selection = w_.selections[layer.group];
        if (!selection.covers(index) || selection.renewals.empty()) return;
        const std::vector<Renewal>& renewals = selection.renewals;
        const auto each_choice = [&](auto&& each) {
            const int units = static_cast<int>(renewals.size()) * c_.kv_heads;
            for (int unit = mine(units, thread_); unit < mine(units, thread_ + 1); unit++)
                each(renewals[unit / c_.kv_heads], unit % c_.kv_heads);
            barrier();
        };
        if (std::any_of(renewals.begin(), renewals.end(), [](const Renewal& renewal) { return renewal.lists(); })) {
            for (const Renewal& renewal : renewals)
                if (renewal.lists()) bound_candidates(layer, renewal, qkv_rows);
            barrier();
            each_choice([&](const Renewal& renewal, int head) {
                if (renewal.lists()) list(renewal, index, head);
            });
        }
        for (const Renewal& renewal : renewals) weigh_listed(layer, renewal, index, qkv_rows);
        barrier();
        each_choice([&](const Renewal& renewal, int head) { choose(layer, renewal, index, head); });
    }

    void bound_candidates(const Layer& layer, const Renewal& renewal, int qkv_rows) {
        const int count = candidates_of(*renewal.span), first = mine(count, thread_), last = mine(count, thread_ + 1);
        float* prepared = w_.selecting[thread_].prepared.get();
        for (int head = 0; head < c_.kv_heads && first < last; head++) {
            const float* q = w_.qkv.get() + static_cast<size_t>(renewal.token) * qkv_rows + head * group_ * c_.head_dim;
            ops_.prepare_bounds_query(q, group_, c_.head_dim, prepared);
            ops_.bound_pages(layer.bounds.data(), renewal.span->pages + 1 + first, last - first, head, group_,
                             c_.head_dim, prepared, bounds_of(renewal, head) + first, count);
        }
    }

    // Of one KV head: (group, candidates).
    float* bounds_of(const Renewal& renewal, int kv_head) const {
        return renewal.bounds + static_cast<size_t>(kv_head) * group_ * candidates_of(*renewal.span);
    }

    size_t choice_of(int index, int kv_head) const { return static_cast<size_t>(index) * c_.kv_heads + kv_head; }

    void list(const Renewal& renewal, int index, int kv_head) {
        const Selection& selection = renewal.span->selection;
        const size_t choice = choice_of(index, kv_head);
        ops_.list_pages(bounds_of(renewal, kv_head), group_, c_.query_scale, w_.selecting[thread_].keys.get(),
                        candidates_of(*renewal.span), selection.listed_pages, selection.chosen + choice * selection.num_pages,
                        selection.num_pages, selection.listed + choice * selection.listed_pages);
    }

    // (listed_pages) by index in the sequence.
    const int32_t* listed_of(const Layer& layer, const Renewal& renewal, int index, int kv_head) const {
        const Selection& selection = renewal.span->selection;
        if (!renewal.lists()) return w_.selections[layer.group].candidates.data();
        return selection.listed + choice_of(index, kv_head) * selection.listed_pages;
    }

    // This thread's share of the listed pages of all KV heads.
    void weigh_listed(const Layer& layer, const Renewal& renewal, int index, int qkv_rows) {
        const Span& span = *renewal.span;
        const int count = span.selection.listed_pages, all = count * c_.kv_heads;
        const int lo = mine(all, thread_), hi = mine(all, thread_ + 1);
        const AttentionShape shape{c_.heads, c_.kv_heads, c_.head_dim, c_.query_scale, c_.attention_softcap};
        const float* rows = w_.qkv.get() + static_cast<size_t>(renewal.token) * qkv_rows;
        int32_t* pages = w_.selecting[thread_].pages.get();
        for (int head = 0; head < c_.kv_heads; head++) {
            const int first = std::max(lo - head * count, 0), last = std::min(hi - head * count, count);
            if (first >= last) continue;
            const int32_t* listed = listed_of(layer, renewal, index, head);
            for (int i = first; i < last; i++) pages[i - first] = span.pages[listed[i]];
            const size_t at = static_cast<size_t>(head) * group_ * count + first;
            ops_.weigh_pages(layer.arenas.data(), shape, pages, last - first,
                             {rows, qkv_rows, span.start, head, span.start, span.end}, renewal.maxima + at,
                             renewal.sums + at, count, w_.scratch[thread_].get());
        }
    }

    void choose(const Layer& layer, const Renewal& renewal, int index, int kv_head) {
        const Selection& selection = renewal.span->selection;
        const size_t at = static_cast<size_t>(kv_head) * group_ * selection.listed_pages;
        ops_.choose_pages(renewal.maxima + at, renewal.sums + at, group_, w_.selecting[thread_].keys.get(),
                          listed_of(layer, renewal, index, kv_head), selection.listed_pages,
                          renewal.span->start / kPageLen + 1, selection.local_pages, selection.num_pages,
                          selection.chosen + choice_of(index, kv_head) * selection.num_pages);
    }

    // Of the pages that this step has filled: a later one chooses by them.
    void bound_filled_pages(const Layer& layer) {
        const std::vector<int32_t>& filled = w_.selections[layer.group].filled;
        const int units = static_cast<int>(filled.size()) * c_.kv_heads;
        for (int unit = mine(units, thread_); unit < mine(units, thread_ + 1); unit++)
            bound_page(ops_, layer.arenas, layer.bounds, filled[unit / c_.kv_heads], unit % c_.kv_heads,
                       w_.selecting[thread_].rows.get());
    }

    const GroupWork& work_of(const Layer& layer, int index) const {
        const GroupSelection& selection = w_.selections[layer.group];
        return selection.covers(index) ? selection.work : w_.groups[layer.group];
    }

    // Where parts are shared out, each thread begins with a run of its own, since a part's last page fetches the page
    // behind it; who has done its run helps the others. Whole items come longest first, from one run.
    void attend(const Layer& layer, int index, int qkv_rows) {
        const GroupWork& work = work_of(layer, index);
        const int count = static_cast<int>(work.items.size());
        NextItem* next = w_.next_items.get() + static_cast<size_t>(index) * threads_;
        const int runs = work.merges.empty() ? 1 : threads_;
        for (int helped = 0; helped < runs; helped++) {
            const int run = (thread_ + helped) % runs, first = count * run / runs, end = count * (run + 1) / runs;
            for (;;) {
                const int i = first + next[run].taken.fetch_add(1, std::memory_order_relaxed);
                if (i >= end) break;
                attend_item(layer, index, work.items[i], qkv_rows);
            }
        }
    }

    void attend_item(const Layer& layer, int index, const Item& item, int qkv_rows) {
        const size_t stride = static_cast<size_t>(item.q1 - item.q0) * group_ * (c_.head_dim + 2);
        float* result = item.result ? item.result : w_.own_parts[thread_].get();
        for (int p = item.p0; p < item.p1; p++)
            attend_part(layer, index, item, p, qkv_rows, result + (p - item.p0) * stride);
        if (!item.result) merge_item(item, result, stride);
    }

    void attend_part(const Layer& layer, int index, const Item& item, int part, int qkv_rows, float* result) {
        const AttentionShape shape{c_.heads, c_.kv_heads, c_.head_dim, c_.query_scale, c_.attention_softcap};
        Span span = *item.span;
        if (span.selection.covers(index)) {
            int32_t* pages = w_.selecting[thread_].pages.get();
            chosen_pages(span, index, c_.kv_heads, item.kv_head, pages);
            span.pages = pages;
        }
        const bool apart = item.parts.is_sinks(part) && span.sink_distance >= 0;
        const float* rows = apart ? w_.sink_queries.get() : w_.qkv.get();
        const int stride = apart ? c_.heads * c_.head_dim : qkv_rows;
        const QueryRows queries{rows + static_cast<size_t>(item.first_token) * stride, stride, span.start,
                                item.kv_head, item.q0, item.q1};
        ops_.attend(layer.arenas.data(), shape, keys_of(span, item.parts, part), queries, result,
                    w_.scratch[thread_].get());
    }

    void merge_item(const Item& item, const float* result, size_t stride) {
        for (int q = item.q0; q < item.q1; q++)
            for (int g = 0; g < group_; g++) {
                const float* first = result + (static_cast<size_t>(q - item.q0) * group_ + g) * (c_.head_dim + 2);
                merge_row({first, stride, item.p1 - item.p0, item.first_token + q - item.span->start,
                           item.kv_head * group_ + g, item.span->rotated}, w_.attended.get());
            }
    }

    void merge_row(const MergeJob& job, float* out) {
        float* row = out + (static_cast<size_t>(job.token) * c_.heads + job.head) * c_.head_dim;
        ops_.merge_parts(job.parts, job.stride, job.count, c_.head_dim, row);
        if (job.rotated) rotate(row);
    }

    // Attention results as inputs of the out matrix; a lone token's are merged by every thread for itself.
    const float* merge(const GroupWork& work) {
        const std::vector<MergeJob>& jobs = work.merges;
        if (jobs.empty()) return w_.attended.get();
        const bool alone = step_.tokens == 1;
        float* out = alone ? w_.own_attended[thread_].get() : w_.attended.get();
        const int count = static_cast<int>(jobs.size());
        const int first = alone ? 0 : mine(count, thread_), last = alone ? count : mine(count, thread_ + 1);
        for (int i = first; i < last; i++) merge_row(jobs[i], out);
        if (!alone) barrier();
        return out;
    }

    void run_head() {
        const int C = c_.hidden, V = c_.vocab, wanted = step_.wanted;
        if (wanted == 0) return;
        for (int i = mine(wanted, thread_); i < mine(wanted, thread_ + 1); i++)
            std::memcpy(w_.y.get() + static_cast<size_t>(i) * C, w_.x.get() + static_cast<size_t>(step_.wanted_tokens[i]) * C,
                        C * sizeof(float));
        barrier();
        const std::vector<AdapterRun>& runs = step_.adapted_wanted;
        const Activations in = prepare_tokens(w_.y.get(), &d_.final_norm, C, d_.head, wanted, runs);
        const int panels = panels_of(d_.head), r0 = mine(panels, thread_) * kPanelRows;
        multiply(d_.head, in, step_.logits, V, false, runs);
        if (c_.logit_softcap == 0) return;
        const int r1 = std::min(V, mine(panels, thread_ + 1) * kPanelRows);
        for (int i = 0; i < wanted; i++)
            for (int r = r0; r < r1; r++) {
                float& logit = step_.logits[static_cast<size_t>(i) * V + r];
                logit = c_.logit_softcap * std::tanh(logit / c_.logit_softcap);
            }
    }

    void norm(const Norm& n, const float* x, int count, float* out) const {
        ops_.norm(c_.norm_kind, x, n.weight, n.bias, c_.norm_eps, count, out);
    }

    // First unit of `thread` when `count` units are shared out evenly.
    int mine(int count, int thread) const { return static_cast<int>(static_cast<int64_t>(count) * thread / threads_); }
    void barrier() { d_.pool_.barrier(&ahead_); }

    static constexpr size_t kAheadBytes = 192 << 10;  // half of a small second cache level
    static constexpr size_t kFirstBytes = 1536;       // products fetch nearly as far ahead themselves
    static constexpr int kStoreWeight = 3;            // a key and a value take as long as three queries
    static constexpr int kExpectedTokens = 16;

    Ahead ahead_;
    Decoder& d_;
    const DecoderConfig& c_;
    const Ops& ops_;
    Workspace& w_;
    const Step& step_;
    const int thread_, threads_, group_;
};

void Decoder::run(const Step& step) {
    Workspace& w = *work_;
    reserve(step);
    place(step);
    plan(step);
    w.next_items = std::make_unique<NextItem[]>(layers.size() * pool_.threads());
    pool_.run([&](int thread) { Worker(*this, step, thread).run(); });
}

void Decoder::move_pages(const PageMove* moves, int count) {
    const int threads = pool_.threads(), K = config.kv_heads, units = count * static_cast<int>(layers.size()) * K;
    pool_.run([&](int thread) {
        std::vector<float> rows(2 * static_cast<size_t>(kPageLen) * config.head_dim);
        const auto first = [&](int t) { return static_cast<int>(static_cast<int64_t>(units) * t / threads); };
        for (int unit = first(thread); unit < first(thread + 1); unit++) {
            const Layer& layer = layers[unit / K % layers.size()];
            const PageMove& move = moves[unit / K / layers.size()];
            if (layer.group != move.group) continue;
            move_page(ops_, layer.arenas[move.source / kArenaPages], move.source % kArenaPages,
                      layer.arenas[move.target / kArenaPages], move.target % kArenaPages, unit % K, rows.data());
            bound_page(ops_, layer.arenas, layer.bounds, move.target, unit % K, rows.data());
        }
    });
}

}  // namespace heedful
