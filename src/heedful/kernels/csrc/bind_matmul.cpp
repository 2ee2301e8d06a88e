// Python faces of matrix products and the thread pool, for tests and benches: arrays in, arrays out. The step
// calls the ops directly. Shapes are checked here, once; the ops trust them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "ops.h"
#include "pack.h"
#include "pool.h"

namespace nb = nanobind;

namespace heedful {
namespace {

using Bytes1 = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Numpy = nb::ndarray<nb::numpy, T>;

void check(bool holds, const std::string& what) {
    if (!holds) throw nb::value_error(what.c_str());
}

const Ops& ops_named(const std::string& variant) {
    const Ops* tables = nullptr;
    const int count = all_ops(&tables);
    for (int i = 0; i < count; i++) {
        if (variant == tables[i].name) return tables[i];
    }
    throw nb::value_error(("this processor has no variant " + variant).c_str());
}

std::vector<std::string> variant_names() {
    const Ops* tables = nullptr;
    const int count = all_ops(&tables);
    std::vector<std::string> names;
    for (int i = 0; i < count; i++) names.push_back(tables[i].name);
    return names;
}

struct Scratch {
    uint8_t* at;
    explicit Scratch(size_t bytes) : at(static_cast<uint8_t*>(allocate(bytes))) {}
    ~Scratch() { std::free(at); }
    Scratch(const Scratch&) = delete;
    template <class T>
    T* as() { return reinterpret_cast<T*>(at); }
};

template <class T>
Numpy<T> numpy_of(T* data, std::initializer_list<size_t> shape) {
    nb::capsule owner(data, [](void* memory) noexcept { std::free(memory); });
    return Numpy<T>(data, shape, owner);
}

template <class T>
T* allocate_array(size_t count) { return static_cast<T*>(allocate(count * sizeof(T))); }

// Thread `thread`'s part [first, last) of `count` things.
struct Part {
    int first, last;
    Part(int count, int thread, int threads)
        : first(int(int64_t(count) * thread / threads)), last(int(int64_t(count) * (thread + 1) / threads)) {}
};

Matrix matrix_of(const Bytes1& packed, const std::string& format, int rows, int cols) {
    const Format parsed = format_named(format);
    check(rows >= 0 && cols > 0, "rows and cols must be positive");
    check(packed.shape(0) == packed_bytes(parsed, rows, cols), "packed has another number of bytes");
    return {parsed, rows, cols, packed.data()};
}

// Quantized activations and their memory.
struct QuantizedTokens {
    Scratch codes, scales, sums;
    Activations activations;

    QuantizedTokens(const float* x, int tokens, int cols)
        : codes(size_t(tokens) * cols),
          scales(size_t(tokens) * (cols / kBlock) * sizeof(float)),
          sums(size_t(tokens) * (cols / kBlock) * sizeof(float)),
          activations{tokens, cols, x, codes.as<int8_t>(), scales.as<float>(), sums.as<float>()} {
    }
};

Numpy<float> matmul_array(Bytes1 packed, const std::string& format, int rows, int cols, Floats2 x, int threads,
                          const std::string& variant, std::optional<Floats1> bias, std::optional<Floats2> add_to,
                          Pool* pool) {
    const Ops& ops = ops_named(variant);
    const Matrix w = matrix_of(packed, format, rows, cols);
    check(int(x.shape(1)) == cols, "x has another number of columns");
    check(!bias || int(bias->shape(0)) == rows, "bias has another number of rows");
    const int tokens = int(x.shape(0));
    check(!add_to || (int(add_to->shape(0)) == tokens && int(add_to->shape(1)) == rows), "add_to has another shape");
    float* y = allocate_array<float>(size_t(tokens) * rows);
    if (add_to) std::copy(add_to->data(), add_to->data() + add_to->size(), y);
    {
        nb::gil_scoped_release release;
        const QuantizedTokens inputs(x.data(), tokens, cols);
        std::optional<Pool> own;
        if (pool == nullptr) pool = &own.emplace(threads);
        pool->run([&](int thread) {
            if (has_integers(w.format)) {
                const Part share(tokens, thread, pool->threads());
                ops.quantize_activations(x.data(), inputs.activations, share.first, share.last);
                pool->barrier();
            }
            const Part part(w.panel_count(), thread, pool->threads());
            ops.matmul(w, inputs.activations, 0, tokens, part.first, part.last, y, rows, bias ? bias->data() : nullptr,
                       add_to.has_value());
        });
    }
    return numpy_of(y, {size_t(tokens), size_t(rows)});
}

nb::tuple quantize_array(Floats2 x, const std::string& variant) {
    const Ops& ops = ops_named(variant);
    check(x.shape(1) % kBlock == 0, "columns must be a multiple of 32");
    const size_t tokens = x.shape(0), cols = x.shape(1), blocks = cols / kBlock;
    const Activations out = {int(tokens), int(cols), x.data(), allocate_array<int8_t>(tokens * cols),
                             allocate_array<float>(tokens * blocks), allocate_array<float>(tokens * blocks)};
    ops.quantize_activations(x.data(), out, 0, out.tokens);
    return nb::make_tuple(numpy_of(out.codes, {tokens, cols}), numpy_of(out.scales, {tokens, blocks}),
                          numpy_of(out.scaled_sums, {tokens, blocks}));
}

using MatrixArgs = std::tuple<Bytes1, std::string, int, int>;

double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Matrices side by side in memory of their own, as a step has them; and what their products read and write.
struct Timed {
    std::vector<Matrix> matrices;
    std::vector<Activations> inputs;  // one a matrix, the same memory for all: (tokens, its cols)
    Scratch panels, codes, scales, sums, y;
    int max_rows;

    static size_t total_bytes(const std::vector<Matrix>& matrices) {
        size_t bytes = 0;
        for (const Matrix& w : matrices) bytes += (packed_bytes(w.format, w.rows, w.cols) + 63) / 64 * 64;
        return bytes;
    }

    static int most(const std::vector<Matrix>& matrices, int Matrix::*field) {
        int value = 1;
        for (const Matrix& w : matrices) value = std::max(value, w.*field);
        return value;
    }

    Timed(const Ops& ops, const std::vector<Matrix>& given, const float* x, int tokens, int cols)
        : matrices(given), panels(total_bytes(given)), codes(size_t(tokens) * cols), scales(size_t(tokens) * cols / 8),
          sums(size_t(tokens) * cols / 8), y(size_t(tokens) * most(given, &Matrix::rows) * 4),
          max_rows(most(given, &Matrix::rows)) {
        uint8_t* at = panels.at;
        for (Matrix& w : matrices) {
            const size_t bytes = packed_bytes(w.format, w.rows, w.cols);
            std::copy(w.panels, w.panels + bytes, at);
            w.panels = at;
            at += (bytes + 63) / 64 * 64;
            inputs.push_back({tokens, w.cols, x, codes.as<int8_t>(), scales.as<float>(), sums.as<float>()});
        }
        const Activations widest = {tokens, cols, x, codes.as<int8_t>(), scales.as<float>(), sums.as<float>()};
        ops.quantize_activations(x, widest, 0, tokens);
    }

    void multiply(const Ops& ops, Pool& pool) {
        pool.run([&](int thread) {
            for (size_t i = 0; i < matrices.size(); i++) {
                const Matrix& w = matrices[i];
                const Part part(w.panel_count(), thread, pool.threads());
                ops.matmul(w, inputs[i], 0, inputs[i].tokens, part.first, part.last, y.as<float>(), max_rows, nullptr,
                           false);
                pool.barrier();
            }
        });
    }
};

// Seconds of each repetition of all products one after the other, a barrier after each, in one region.
std::vector<double> time_matmuls(const std::vector<MatrixArgs>& given, Floats2 x, int threads,
                                 const std::string& variant, int repeat) {
    const Ops& ops = ops_named(variant);
    std::vector<Matrix> matrices;
    for (const auto& [packed, format, rows, cols] : given) matrices.push_back(matrix_of(packed, format, rows, cols));
    const int cols = int(x.shape(1));
    check(Timed::most(matrices, &Matrix::cols) <= cols && cols % kBlock == 0, "x has fewer columns than a matrix");
    nb::gil_scoped_release release;
    Timed timed(ops, matrices, x.data(), int(x.shape(0)), cols);
    Pool pool(threads);
    std::vector<double> seconds;
    for (int i = 0; i < repeat; i++) {
        const auto began = std::chrono::steady_clock::now();
        timed.multiply(ops, pool);
        seconds.push_back(seconds_since(began));
    }
    return seconds;
}

// In each region every thread counts up its own cell, meets the others, and looks whether all have counted as far.
// Returns how often one had not, or a thread was missing.
int count_in_step(Pool& pool, int regions, int barriers) {
    nb::gil_scoped_release release;
    std::vector<int> counts(size_t(pool.threads()) * 16, 0);  // plain ints: the barrier must order them
    std::atomic<int> faults{0};
    for (int region = 0; region < regions; region++) {
        pool.run([&](int thread) {
            const char* const all = reinterpret_cast<const char*>(counts.data());
            Ahead ahead{all, all + counts.size() * sizeof(int)};
            for (int i = 0; i < barriers; i++) {
                counts[size_t(thread) * 16]++;
                pool.barrier(&ahead);
                if (ahead.next > ahead.end) faults++;
                for (int other = 0; other < pool.threads(); other++) {
                    if (counts[size_t(other) * 16] != region * barriers + i + 1) faults++;
                }
                pool.barrier();
            }
        });
        for (int thread = 0; thread < pool.threads(); thread++) {
            if (counts[size_t(thread) * 16] != (region + 1) * barriers) faults++;
        }
    }
    return faults;
}

// Microseconds of one empty region, or of one barrier: each of `repeat` measurements over `count` of them.
std::vector<double> time_pool(Pool& pool, bool barriers, int count, int repeat) {
    nb::gil_scoped_release release;
    std::vector<double> microseconds;
    for (int i = 0; i < repeat; i++) {
        const auto began = std::chrono::steady_clock::now();
        if (barriers) {
            pool.run([&](int) {
                for (int j = 0; j < count; j++) pool.barrier();
            });
        } else {
            for (int j = 0; j < count; j++) pool.run([](int) {});
        }
        microseconds.push_back(seconds_since(began) * 1e6 / count);
    }
    return microseconds;
}

}  // namespace

void bind_matmul(nb::module_& m) {
    m.def("variants", &variant_names, "The variants that this processor can run.");
    m.def("quantize_activations", &quantize_array, nb::arg("x"), nb::arg("variant"),
          "x (T, C) as codes int8 (T, C), scales (T, C / 32), scale * sum of codes (T, C / 32).");
    m.def("matmul", &matmul_array, nb::arg("packed"), nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("x"),
          nb::arg("threads"), nb::arg("variant"), nb::arg("bias") = nb::none(), nb::arg("add_to") = nb::none(),
          nb::arg("pool").none() = nb::none(),
          "(T, rows): [add_to +] x (T, cols) times the packed matrix [+ bias]. With a pool, on all its threads.");
    m.def("time_matmuls", &time_matmuls, nb::arg("matrices"), nb::arg("x"), nb::arg("threads"), nb::arg("variant"),
          nb::arg("repeat"), "Seconds of each repetition of the products of all (packed, format, rows, cols) with x.");

    nb::class_<Pool>(m, "Pool", "A pool of threads.")
        .def(nb::init<int, bool>(), nb::arg("threads"), nb::arg("pinned") = false)
        .def("count_in_step", &count_in_step, nb::arg("regions"), nb::arg("barriers"), "Number of faults seen: 0.")
        .def("time", &time_pool, nb::arg("barriers"), nb::arg("count"), nb::arg("repeat"),
             "Microseconds of a region, or of a barrier.")
        .def("nest", [](Pool& pool) { pool.run([&](int) { pool.run([](int) {}); }); }, "Misuse: ends the process.")
        .def("stray_barrier", [](Pool& pool) { pool.barrier(); }, "Misuse: ends the process.");
}

}  // namespace heedful
