// Python faces of elementwise.cpp, for tests: arrays in, new arrays out, one row after the other.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "ops.h"

namespace nb = nanobind;

namespace heedful {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

const Ops& ops_named(const std::string& variant) {
    const Ops* tables = nullptr;
    const int count = all_ops(&tables);
    for (int i = 0; i < count; i++)
        if (variant == tables[i].name) return tables[i];
    throw nb::value_error(("this processor has no variant " + variant).c_str());
}

// A copy of x, each row changed by change(row, n).
template <class Change>
Result changed(const Rows& x, Change&& change) {
    float* out = new float[x.size() + 1];
    std::memcpy(out, x.data(), x.size() * sizeof(float));
    for (size_t i = 0; i < x.shape(0); i++) change(out + i * x.shape(1), i, static_cast<int>(x.shape(1)));
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return Result(out, {x.shape(0), x.shape(1)}, owner);
}

Result norm(bool layer, const Rows& x, const Row& weight, const Row& bias, float eps, const std::string& variant) {
    const Ops& ops = ops_named(variant);
    const NormKind kind = layer ? NormKind::layer : NormKind::rms;
    return changed(x, [&](float* row, size_t, int n) {
        ops.norm(kind, row, weight.data(), bias.size() ? bias.data() : nullptr, eps, n, row);
    });
}

Result rotate(const Rows& x, const Rows& cos, const Rows& sin, const std::string& variant) {
    const Ops& ops = ops_named(variant);
    const size_t half = cos.shape(1);
    return changed(x, [&](float* row, size_t i, int) {
        ops.rotate(row, cos.data() + i * half, sin.data() + i * half, static_cast<int>(half));
    });
}

Result hadamard(const Rows& x, int block, const std::string& variant) {
    const Ops& ops = ops_named(variant);
    if (block < 8 || (block & (block - 1)) || x.shape(1) % block) 
        throw nb::value_error("block: a power of two from 8 on that divides a row");
    return changed(x, [&](float* row, size_t, int n) { ops.hadamard(row, n, block); });
}

Result activate(int kind, const Rows& x, const Rows& up, const std::string& variant) {
    const Ops& ops = ops_named(variant);
    return changed(x, [&](float* row, size_t i, int n) {
        ops.activate(static_cast<Activation>(kind), row, up.size() ? up.data() + i * up.shape(1) : nullptr, n);
    });
}

}  // namespace

void bind_elementwise(nb::module_& m) {
    m.def("norm", &norm, nb::arg("layer"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("eps"),
          nb::arg("variant"), "RMS norm or LayerNorm of each row of x (T, n); bias may be empty.");
    m.def("rotate", &rotate, nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("variant"),
          "Rows of x (T, D) turned by the angles of cos and sin (T, half).");
    m.def("hadamard", &hadamard, nb::arg("x"), nb::arg("block"), nb::arg("variant"),
          "Rows of x (T, n) times the normalised Walsh-Hadamard matrix, in blocks of channels.");
    m.def("activate", &activate, nb::arg("kind"), nb::arg("x"), nb::arg("up"), nb::arg("variant"),
          "act(x) * up, or act(x) where `up` is empty; kind: 0 silu, 1 gelu_tanh, 2 gelu, 3 relu.");
}

}  // namespace heedful
