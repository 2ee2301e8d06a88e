// Python face of step.h: build a decoder piece by piece, then run steps. Arrays that are handed in and stay in use (panels,
// pages) are kept alive here; small ones (norms, biases) are copied.

#include "buffer.h"
#include "pack.h"
#include "step.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>
#include <tuple>

namespace nb = nanobind;

namespace heedful {
namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
using Choices = nb::ndarray<int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableFloats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

const Ops& variant_named(const std::string& name) {
    const Ops* tables = nullptr;
    for (int i = all_ops(&tables) - 1; i >= 0; i--)
        if (name == tables[i].name) return tables[i];
    throw std::invalid_argument("this processor has no kernel variant " + name);
}

void require(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
}

class PyDecoder {
public:
    PyDecoder(const DecoderConfig& config, const std::string& variant, int threads, int layers)
        : decoder_(config, variant.empty() ? ops() : variant_named(variant), threads) {
        decoder_.layers.resize(layers);
    }

    void add_rope(const Floats& inv_freq, float scaling) {
        decoder_.ropes.push_back({{inv_freq.data(), inv_freq.data() + inv_freq.size()}, scaling});
    }

    // stored: (vocab, bytes of a row) of a ggml type, read again for every token; positions: (positions, hidden), added to
    // a token's row where it stands, or empty.
    void set_embedding(int ggml_type, const Bytes& stored, float scale, const Floats& positions) {
        const int hidden = decoder_.config.hidden;
        require(can_pack(ggml_type) && hidden % stored_block_len(ggml_type) == 0, "rows of this type cannot be read");
        require(stored.ndim() == 2 && stored.shape(1) == stored_row_bytes(ggml_type, hidden), "stored is not (vocab, row)");
        require(positions.size() % hidden == 0, "positions is not (positions, hidden)");
        embedding_ = {ggml_type, stored, scale, positions.size() ? keep(positions) : nullptr, positions.size() / hidden};
    }

    void set_norm(int layer, const std::string& name, const Floats& weight, const Floats& bias) {
        norm_slot(layer, name) = {keep(weight), bias.size() ? keep(bias) : nullptr};
    }

    // parts: (format, rows, cols, panels); bias of all rows, or empty.
    void set_product(int layer, const std::string& name, const std::vector<std::tuple<int, int, int, Bytes>>& parts,
                     const Floats& bias) {
        Product product;
        for (const auto& [format, rows, cols, panels] : parts) {
            product.parts.push_back({static_cast<Format>(format), rows, cols, panels.data()});
            panels_.push_back(panels);
        }
        require(bias.size() == 0 || static_cast<int>(bias.size()) == product.rows(), "bias has another length than rows");
        if (bias.size()) product.bias = keep(bias);
        product_slot(layer, name) = product;
    }

    // What adapter number `adapter` adds to one part of a product that is set already. a: f32 panels of (rank, columns), b
    // of (rows, rank).
    void set_update(int adapter, int layer, const std::string& name, int part, int rank, const Bytes& a, const Bytes& b) {
        Product& product = product_slot(layer, name);
        require(adapter >= 0 && rank > 0, "an update has an adapter and a rank");
        require(part >= 0 && part < static_cast<int>(product.parts.size()), "the product has no such part");
        const Matrix& base = product.parts[part];
        require(a.size() == packed_bytes(Format::f32, rank, base.cols), "a is not (rank, columns) in f32 panels");
        require(b.size() == packed_bytes(Format::f32, base.rows, rank), "b is not (rows, rank) in f32 panels");
        if (static_cast<int>(product.updates.size()) <= adapter) product.updates.resize(adapter + 1);
        product.updates[adapter].resize(product.parts.size());
        product.updates[adapter][part] = {{Format::f32, rank, base.cols, a.data()}, {Format::f32, base.rows, rank, b.data()}};
        decoder_.most_rank = std::max(decoder_.most_rank, rank);
        adapters_ = std::max(adapters_, adapter + 1);
        panels_.push_back(a);
        panels_.push_back(b);
    }

    // `group`: the layer group whose spans it reads.
    void set_layer(int layer, int group, int rope) {
        require(rope < static_cast<int>(decoder_.ropes.size()), "no such rope table");
        require(2 * decoder_.ropes[rope].inv_freq.size() <= static_cast<size_t>(decoder_.config.head_dim),
                "rope turns more than a head");
        decoder_.layers.at(layer).group = group;
        decoder_.layers.at(layer).rope = rope;
    }

    // keys, values: indices of KvNumber. bounds: (num_pages, bounds_bytes), (num_pages, 0) where nothing is selected.
    void set_pages(int layer, int arena, int keys, int values, const MutableBytes& pages, const MutableBytes& bounds) {
        require(pages.ndim() == 2, "pages are (num_pages, page_bytes)");
        require(bounds.ndim() == 2 && bounds.shape(0) == pages.shape(0), "bounds are (num_pages, bounds_bytes)");
        std::vector<PageBuffer>& arenas = decoder_.layers.at(layer).arenas;
        if (static_cast<int>(arenas.size()) <= arena) arenas.resize(arena + 1);
        decoder_.layers[layer].bounds.resize(arenas.size());
        if (bounds.shape(1) > 0) decoder_.layers[layer].bounds[arena] = {bounds.data(), bounds.shape(1)};
        pages_.push_back(bounds);
        const KvFormat format{static_cast<KvNumber>(keys), static_cast<KvNumber>(values)};
        arenas[arena] = {format, decoder_.config.kv_heads, decoder_.config.head_dim, pages.data(), pages.shape(1)};
        pages_.push_back(pages);
    }

    // moves: (n, 3) group, source, target; to be done before a step that reads or writes these pages.
    void move_pages(const Ints& moves) {
        std::vector<PageMove> list;
        for (size_t i = 0; i + 2 < moves.size(); i += 3)
            list.push_back({moves.data()[i], moves.data()[i + 1], moves.data()[i + 2]});
        nb::gil_scoped_release released;
        decoder_.move_pages(list.data(), static_cast<int>(list.size()));
    }

    // span_table: (chunks, groups, 16) start, end, window, first_page, offset of its pages in `pages`, sinks, offset of
    // the sink pages, sink_distance, rotated, as in Span; num_pages, local_pages, dense_layers, renew, as in Selection,
    // and which of `chosen`, (layers, K, num_pages) each, is read and written; listed_pages, and which of `chosen`, (layers,
    // K, listed_pages), takes the listed ones, -1 where all candidates are. adapted, adapted_wanted: (n, 3) adapter,
    // begin, end, of tokens and of places in `wanted`, ascending.
    void run(const Ints& ids, const Ints& positions, const Ints& chunk_starts, const Ints& span_table,
             const Ints& pages, const std::vector<Choices>& chosen, const Ints& wanted, const MutableFloats& logits,
             const Ints& adapted, const Ints& adapted_wanted) {
        Step step;
        step.tokens = static_cast<int>(positions.size());
        step.chunks = static_cast<int>(span_table.shape(0));
        step.groups = static_cast<int>(span_table.shape(1));
        step.wanted = static_cast<int>(wanted.size());
        require(span_table.ndim() == 3 && span_table.shape(2) == kColumns, "span_table is not (chunks, groups, 16)");
        require(ids.size() == positions.size(), "ids and positions differ in length");
        require(static_cast<int>(chunk_starts.size()) == step.chunks + 1, "chunk_starts is not (chunks + 1)");
        require(logits.size() == static_cast<size_t>(step.wanted) * decoder_.config.vocab, "logits is not (wanted, vocab)");
        spans_.clear();
        for (int i = 0; i < step.chunks * step.groups; i++) {
            const int32_t* row = span_table.data() + kColumns * i;
            spans_.push_back({row[0], row[1], row[2], row[3], pages.data() + row[4], row[5], pages.data() + row[6], row[7],
                              row[8] != 0});
            if (row[9] > 0) select(spans_.back(), i % step.groups, row + 9, chosen);
        }
        step.embedded = embed(ids, positions);
        step.positions = positions.data();
        step.chunk_starts = chunk_starts.data();
        step.spans = spans_.data();
        step.wanted_tokens = wanted.data();
        step.logits = logits.data();
        step.adapted = runs_of(adapted, step.tokens);
        step.adapted_wanted = runs_of(adapted_wanted, step.wanted);
        nb::gil_scoped_release released;
        decoder_.run(step);
    }

private:
    static constexpr int kColumns = 16;

    struct Embedding {
        int ggml_type;
        Bytes stored;
        float scale;
        const float* positions;  // or null
        size_t most_positions;
    };

    // (T, hidden), until the next call.
    const float* embed(const Ints& ids, const Ints& positions) {
        const size_t hidden = decoder_.config.hidden;
        float* const embedded = embedded_.reserve(ids.size() * hidden);
        for (size_t i = 0; i < ids.size(); i++) {
            const int32_t id = ids.data()[i], position = positions.data()[i];
            require(id >= 0 && id < static_cast<int64_t>(embedding_.stored.shape(0)), "no such token");
            float* const row = embedded + i * hidden;
            unpack_row(embedding_.ggml_type, embedding_.stored.data() + id * embedding_.stored.shape(1), int(hidden), row);
            for (size_t c = 0; c < hidden && embedding_.scale != 1.0f; c++) row[c] *= embedding_.scale;
            if (!embedding_.positions) continue;
            require(position >= 0 && position < static_cast<int64_t>(embedding_.most_positions), "no such position");
            for (size_t c = 0; c < hidden; c++) row[c] += embedding_.positions[position * hidden + c];
        }
        return embedded;
    }

    // Rows of a table (n, 3), refused where they would reach beyond what is there or a token would have two adapters.
    std::vector<AdapterRun> runs_of(const Ints& table, int count) const {
        require(table.size() % 3 == 0, "a table of adapters is not (n, 3)");
        std::vector<AdapterRun> runs;
        for (size_t i = 0; i < table.size(); i += 3) {
            const AdapterRun run{table.data()[i], table.data()[i + 1], table.data()[i + 2]};
            require(run.adapter >= 0 && run.adapter < adapters_, "no such adapter");
            require(run.begin >= (runs.empty() ? 0 : runs.back().end) && run.end > run.begin && run.end <= count,
                    "an adapter's tokens are not ascending, or not there");
            runs.push_back(run);
        }
        return runs;
    }

    // columns: num_pages and on. Whatever would make the kernels read beside what is there is refused.
    void select(Span& span, int group, const int32_t* columns, const std::vector<Choices>& chosen) const {
        const Choices& choices = chosen.at(columns[4]);
        const int pages = span.start / kPageLen + 1;
        const size_t kv_heads = decoder_.config.kv_heads, num_pages = columns[0];
        require(choices.shape(0) == decoder_.layers.size() && choices.shape(1) == kv_heads && choices.shape(2) == num_pages,
                "chosen is not (layers, kv_heads, num_pages)");
        require(columns[1] >= 0 && columns[0] >= 2 + columns[1] && columns[0] <= pages,
                "num_pages is not in [2 + local_pages, pages]");
        require(span.end == span.start + 1 && span.window == 0 && span.sinks == 0 && span.first_page == 0,
                "pages are selected for one query without window and sinks");
        span.selection = {columns[0], columns[1], columns[2], columns[3] != 0, choices.data()};
        if (span.selection.renew) list(span, columns[5], columns[6], chosen);
        for (const Span& other : spans_)
            require(other.selection.num_pages == 0 || other.selection.dense_layers == columns[2],
                    "dense_layers differ");
        for (size_t i = 0; i < choices.size() && !span.selection.renew; i++)
            require(choices.data()[i] >= 0 && choices.data()[i] < pages, "a chosen page is none of the sequence's");
        for (const Layer& layer : decoder_.layers)
            for (size_t arena = 0; arena < layer.arenas.size() && layer.group == group; arena++)
                require(!layer.arenas[arena].base || layer.bounds[arena].base,
                        "pages without bounds cannot be selected");
    }

    // Which pages' keys are read to renew a choice.
    void list(Span& span, int listed_pages, int at, const std::vector<Choices>& chosen) const {
        const int candidates = candidates_of(span), wanted = span.selection.num_pages - 2 - span.selection.local_pages;
        require(listed_pages >= wanted && listed_pages <= candidates, "listed_pages is not in [chosen ones, candidates]");
        require(at >= 0 || listed_pages == candidates, "some candidates are listed, and there is no room for which");
        span.selection.listed_pages = listed_pages;
        if (at < 0) return;
        const Choices& listed = chosen.at(at);
        require(listed.shape(0) == decoder_.layers.size() && static_cast<int>(listed.shape(1)) == decoder_.config.kv_heads &&
                    static_cast<int>(listed.shape(2)) == listed_pages,
                "listed is not (layers, kv_heads, listed_pages)");
        span.selection.listed = listed.data();
    }

    const float* keep(const Floats& values) {
        kept_.emplace_back(values.data(), values.data() + values.size());
        return kept_.back().data();
    }

    Norm& norm_slot(int layer, const std::string& name) {
        if (name == "norm") return decoder_.final_norm;
        Layer& l = decoder_.layers.at(layer);
        if (name == "attn_norm") return l.attn_norm;
        if (name == "attn_post_norm") return l.attn_post_norm;
        if (name == "mlp_norm") return l.mlp_norm;
        if (name == "mlp_post_norm") return l.mlp_post_norm;
        if (name == "q_norm") return l.q_norm;
        if (name == "k_norm") return l.k_norm;
        throw std::invalid_argument("no norm is called " + name);
    }

    Product& product_slot(int layer, const std::string& name) {
        if (name == "head") return decoder_.head;
        Layer& l = decoder_.layers.at(layer);
        if (name == "qkv") return l.qkv;
        if (name == "out") return l.out;
        if (name == "up") return l.up;
        if (name == "down") return l.down;
        throw std::invalid_argument("no product is called " + name);
    }

    Decoder decoder_;
    Embedding embedding_{};
    Buffer<float> embedded_;
    std::deque<std::vector<float>> kept_;
    std::vector<Bytes> panels_;
    int adapters_ = 0;
    std::vector<MutableBytes> pages_;
    std::vector<Span> spans_;
};

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<PyDecoder>(m, "Decoder")
        .def(
            "__init__",
            [](PyDecoder* self, int layers, int hidden, int heads, int kv_heads, int head_dim, int intermediate, int vocab,
               bool layer_norm, float norm_eps, int activation, bool gated_mlp, int rotation_block, float query_scale,
               float attention_softcap, float logit_softcap, int threads, const std::string& variant) {
                require(head_dim <= kMaxHeadDim, "heads have up to 256 channels");
                DecoderConfig c;
                c.hidden = hidden, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = head_dim;
                c.intermediate = intermediate, c.vocab = vocab;
                c.norm_kind = layer_norm ? NormKind::layer : NormKind::rms;
                c.norm_eps = norm_eps;
                c.activation = static_cast<Activation>(activation);
                c.gated_mlp = gated_mlp;
                c.rotation_block = rotation_block;
                c.query_scale = query_scale, c.attention_softcap = attention_softcap, c.logit_softcap = logit_softcap;
                new (self) PyDecoder(c, variant, threads, layers);
            },
            nb::kw_only(), nb::arg("layers"), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
            nb::arg("intermediate"), nb::arg("vocab"), nb::arg("layer_norm"), nb::arg("norm_eps"), nb::arg("activation"),
            nb::arg("gated_mlp"), nb::arg("rotation_block"), nb::arg("query_scale"),
            nb::arg("attention_softcap"), nb::arg("logit_softcap"), nb::arg("threads"), nb::arg("variant"))
        .def("add_rope", &PyDecoder::add_rope)
        .def("set_embedding", &PyDecoder::set_embedding)
        .def("set_norm", &PyDecoder::set_norm)
        .def("set_product", &PyDecoder::set_product)
        .def("set_update", &PyDecoder::set_update)
        .def("set_layer", &PyDecoder::set_layer)
        .def("set_pages", &PyDecoder::set_pages)
        .def("move_pages", &PyDecoder::move_pages)
        .def("run", &PyDecoder::run);
}

}  // namespace heedful
