// Python face of encoder.h: build an encoder piece by piece, then run batches of texts. Panels and the embedding of tokens
// stay where they are and are kept alive here; small arrays (norms, biases, other embeddings) are copied. All that would
// make the kernels read beside what is there is refused.

#include "encoder.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <deque>
#include <stdexcept>
#include <string>

#include "pack.h"

namespace nb = nanobind;

namespace heedful {
namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
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

class PyEncoder {
public:
    PyEncoder(int hidden, int layers, const std::string& variant, int threads)
        : encoder_(hidden, variant.empty() ? ops() : variant_named(variant), threads) {
        require(hidden > 0 && layers > 0, "an encoder has channels and layers");
        encoder_.layers.resize(layers);
        kinds_.resize(layers);
    }

    // Tables (rows, hidden). `tokens` stays in use.
    void set_embedding(const Floats& tokens, const Floats& positions, const Floats& types, float norm_eps) {
        Embedding& embedding = encoder_.embedding;
        vocab_ = rows_of(tokens), positions_ = rows_of(positions), types_ = rows_of(types);
        embedding.tokens = tokens.data();
        tables_.push_back(tokens);
        embedding.positions = keep(positions);
        embedding.types = keep(types);
        embedding.norm_eps = norm_eps;
    }

    // activation: index of Activation. added (kinds, hidden), or empty: see EncoderLayer.
    void set_layer(int layer, int heads, bool norm_first, bool options_apart, float norm_eps, int activation,
                   const Floats& added) {
        require(heads > 0 && encoder_.hidden % heads == 0, "channels do not part into heads");
        require(activation >= 0 && activation <= static_cast<int>(Activation::relu), "no such activation");
        EncoderLayer& l = encoder_.layers.at(layer);
        l.heads = heads;
        l.norm_first = norm_first;
        l.options_apart = options_apart;
        l.norm_eps = norm_eps;
        l.activation = static_cast<Activation>(activation);
        kinds_[layer] = rows_of(added);
        if (kinds_[layer]) l.added = keep(added);
    }

    // layer -1: of what comes before and after the layers.
    void set_norm(int layer, const std::string& name, const Floats& weight, const Floats& bias) {
        require(weight.size() == static_cast<size_t>(encoder_.hidden), "a norm's weight is not (hidden)");
        require(bias.size() == 0 || bias.size() == weight.size(), "a norm's bias is not (hidden)");
        norm_slot(layer, name) = {keep(weight), bias.size() ? keep(bias) : nullptr};
    }

    void set_linear(int layer, const std::string& name, int format, int rows, int cols, const Bytes& panels,
                    const Floats& bias) {
        require(format >= 0 && format <= static_cast<int>(Format::w6) && rows > 0 && cols > 0, "no such matrix");
        const Matrix matrix{static_cast<Format>(format), rows, cols, panels.data()};
        require(!has_integers(matrix.format) || cols % kBlock == 0, "columns are not whole blocks");
        require(panels.size() == packed_bytes(matrix.format, rows, cols), "panels have another number of bytes");
        require(bias.size() == 0 || bias.size() == static_cast<size_t>(rows), "bias has another length than rows");
        linear_slot(layer, name) = {matrix, bias.size() ? keep(bias) : nullptr};
        panels_.push_back(panels);
    }

    void set_scorer_eps(float norm_eps) { encoder_.scorer.norm_eps = norm_eps; }

    // ids, positions, types (T); options (T) or empty; starts (texts + 1); kinds (texts); wanted ascending tokens, empty:
    // all; out (wanted, hidden), or (wanted) where there is a scorer.
    void run(const Ints& ids, const Ints& positions, const Ints& types, const Ints& options, const Ints& starts,
             const Ints& kinds, const Ints& wanted, const MutableFloats& out) {
        require_whole();
        const int tokens = static_cast<int>(ids.size()), texts = static_cast<int>(starts.size()) - 1;
        require(tokens > 0 && positions.size() == ids.size() && types.size() == ids.size(), "a token lacks its number");
        require(options.size() == 0 || options.size() == ids.size(), "options are not (tokens)");
        require(within(ids, vocab_) && within(positions, positions_) && within(types, types_), "no such row of a table");
        require(texts > 0 && starts.data()[0] == 0 && starts.data()[texts] == tokens && ascends(starts),
                "starts do not part the tokens");
        require(kinds.size() == static_cast<size_t>(texts), "kinds are not (texts)");
        for (int count : kinds_) require(count == 0 || within(kinds, count), "no such kind of text");
        require(wanted.size() == 0 || (within(wanted, tokens) && ascends(wanted)), "wanted are no tokens, ascending");
        const size_t rows = wanted.size() ? wanted.size() : ids.size();
        const size_t width = encoder_.scorer.out.matrix.panels ? 1 : encoder_.hidden;
        require(out.size() == rows * width, "out has another size");
        TextBatch batch{tokens, ids.data(), positions.data(), types.data(), options.size() ? options.data() : nullptr,
                        texts, starts.data(), kinds.data(), static_cast<int>(wanted.size()),
                        wanted.size() ? wanted.data() : nullptr, out.data()};
        nb::gil_scoped_release released;
        encoder_.run(batch);
    }

private:
    int rows_of(const Floats& table) const {
        require(table.size() % encoder_.hidden == 0, "a table is not (rows, hidden)");
        return static_cast<int>(table.size() / encoder_.hidden);
    }

    static bool within(const Ints& values, int end) {
        for (size_t i = 0; i < values.size(); i++)
            if (values.data()[i] < 0 || values.data()[i] >= end) return false;
        return true;
    }

    static bool ascends(const Ints& values) {
        for (size_t i = 1; i < values.size(); i++)
            if (values.data()[i] <= values.data()[i - 1]) return false;
        return true;
    }

    void require_shape(const Linear& linear, int rows, int cols) const {
        require(linear.matrix.panels && linear.matrix.rows == rows && linear.matrix.cols == cols, "a matrix is missing or misshapen");
    }

    void require_whole() {
        if (whole_) return;
        const int hidden = encoder_.hidden;
        require(encoder_.embedding.tokens && encoder_.embedding.norm.weight, "there is no embedding");
        for (const EncoderLayer& layer : encoder_.layers) {
            require(layer.attn_norm.weight && layer.mlp_norm.weight, "a norm is missing");
            require_shape(layer.qkv, 3 * hidden, hidden);
            require_shape(layer.out, hidden, hidden);
            require_shape(layer.up, layer.up.matrix.rows, hidden);
            require_shape(layer.down, hidden, layer.up.matrix.rows);
        }
        if (encoder_.scorer.out.matrix.panels) {
            require(encoder_.scorer.norm.weight, "a norm is missing");
            require_shape(encoder_.scorer.dense, hidden, hidden);
            require_shape(encoder_.scorer.out, 1, hidden);
        }
        whole_ = true;
    }

    const float* keep(const Floats& values) {
        kept_.emplace_back(values.data(), values.data() + values.size());
        return kept_.back().data();
    }

    LayerNorm& norm_slot(int layer, const std::string& name) {
        if (layer < 0 && name == "embed_norm") return encoder_.embedding.norm;
        if (layer < 0 && name == "scorer.norm") return encoder_.scorer.norm;
        if (layer >= 0 && name == "attn_norm") return encoder_.layers.at(layer).attn_norm;
        if (layer >= 0 && name == "mlp_norm") return encoder_.layers.at(layer).mlp_norm;
        throw std::invalid_argument("no norm is called " + name);
    }

    Linear& linear_slot(int layer, const std::string& name) {
        if (layer < 0 && name == "scorer.dense") return encoder_.scorer.dense;
        if (layer < 0 && name == "scorer.out") return encoder_.scorer.out;
        if (layer >= 0 && name == "attn.qkv") return encoder_.layers.at(layer).qkv;
        if (layer >= 0 && name == "attn.out") return encoder_.layers.at(layer).out;
        if (layer >= 0 && name == "mlp.up") return encoder_.layers.at(layer).up;
        if (layer >= 0 && name == "mlp.down") return encoder_.layers.at(layer).down;
        throw std::invalid_argument("no matrix is called " + name);
    }

    Encoder encoder_;
    int vocab_ = 0, positions_ = 0, types_ = 0;
    std::vector<int> kinds_;  // by layer, rows of its added table; 0: it has none
    bool whole_ = false;
    std::deque<std::vector<float>> kept_;
    std::vector<Floats> tables_;
    std::vector<Bytes> panels_;
};

}  // namespace

void bind_encoder(nb::module_& m) {
    nb::class_<PyEncoder>(m, "Encoder", "A whole encoder in one call a batch of texts; see encoder.h.")
        .def(nb::init<int, int, const std::string&, int>(), nb::arg("hidden"), nb::arg("layers"), nb::arg("variant"),
             nb::arg("threads"))
        .def("set_embedding", &PyEncoder::set_embedding, nb::arg("tokens"), nb::arg("positions"), nb::arg("types"),
             nb::arg("norm_eps"))
        .def("set_layer", &PyEncoder::set_layer, nb::arg("layer"), nb::arg("heads"), nb::arg("norm_first"),
             nb::arg("options_apart"), nb::arg("norm_eps"), nb::arg("activation"), nb::arg("added"))
        .def("set_norm", &PyEncoder::set_norm, nb::arg("layer"), nb::arg("name"), nb::arg("weight"), nb::arg("bias"))
        .def("set_linear", &PyEncoder::set_linear, nb::arg("layer"), nb::arg("name"), nb::arg("format"), nb::arg("rows"),
             nb::arg("cols"), nb::arg("panels"), nb::arg("bias"))
        .def("set_scorer_eps", &PyEncoder::set_scorer_eps, nb::arg("norm_eps"))
        .def("run", &PyEncoder::run, nb::arg("ids"), nb::arg("positions"), nb::arg("types"), nb::arg("options"),
             nb::arg("starts"), nb::arg("kinds"), nb::arg("wanted"), nb::arg("out"));
}

}  // namespace heedful
