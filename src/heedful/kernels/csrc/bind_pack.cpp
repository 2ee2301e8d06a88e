// Python faces of packing. Shapes are checked here, once; pack.h trusts them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer.h"
#include "pack.h"
#include "packer.h"

namespace nb = nanobind;

namespace heedful {
namespace {

using Stored = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Numpy = nb::ndarray<nb::numpy, T>;

void check(bool holds, const std::string& what) {
    if (!holds) throw nb::value_error(what.c_str());
}

const char* packed_format_name(int ggml_type) {
    return can_pack(ggml_type) ? format_name(packed_format(ggml_type)) : nullptr;
}

class PyPacker {
  public:
    explicit PyPacker(int threads) : packer_(threads) {}

    Numpy<uint8_t> start(int ggml_type, Stored stored, int cols, const std::optional<std::string>& format) {
        check(can_pack(ggml_type), "ggml type " + std::to_string(ggml_type) + " cannot be packed");
        const Format target = format ? format_named(*format) : packed_format(ggml_type);
        const int block_len = std::max(has_integers(target) ? kBlock : 1, stored_block_len(ggml_type));
        check(cols > 0 && cols % block_len == 0, "cols is not whole blocks");
        check(stored.shape(1) == stored_row_bytes(ggml_type, cols), "stored has another number of bytes a row");
        const int rows = int(stored.shape(0));
        auto panels = packer_.start(ggml_type, stored.data(), target, rows, cols);
        kept_.push_back(stored);
        uint8_t* const data = panels.get();
        nb::capsule owner(new std::shared_ptr<uint8_t>(std::move(panels)), [](void* piece) noexcept {
            delete static_cast<std::shared_ptr<uint8_t>*>(piece);
        });
        return Numpy<uint8_t>(data, {packed_bytes(target, rows, cols)}, owner);
    }

    void finish() {
        {
            nb::gil_scoped_release release;
            packer_.finish();
        }
        kept_.clear();
    }

    Numpy<uint8_t> pack(int ggml_type, Stored stored, int cols, const std::optional<std::string>& format) {
        Numpy<uint8_t> panels = start(ggml_type, stored, cols, format);
        finish();
        return panels;
    }

  private:
    std::vector<Stored> kept_;  // outlives the threads, which read it
    Packer packer_;
};

Numpy<float> unpack_array(int ggml_type, Stored stored, int cols) {
    check(can_pack(ggml_type), "ggml type " + std::to_string(ggml_type) + " cannot be unpacked");
    check(cols > 0 && cols % stored_block_len(ggml_type) == 0, "cols is not whole blocks");
    check(stored.shape(1) == stored_row_bytes(ggml_type, cols), "stored has another number of bytes a row");
    const size_t rows = stored.shape(0), columns = cols;
    float* out = static_cast<float*>(allocate(rows * columns * sizeof(float)));
    nb::capsule owner(out, [](void* floats) noexcept { std::free(floats); });
    for (size_t r = 0; r < rows; r++)
        unpack_row(ggml_type, stored.data() + r * stored.shape(1), cols, out + r * columns);
    return Numpy<float>(out, {rows, columns}, owner);
}

}  // namespace

void bind_pack(nb::module_& m) {
    m.def("packed_format", &packed_format_name, nb::arg("ggml_type"),
          "The panel format that this ggml type is packed into by default; None: cannot be packed.");
    m.def("unpack", &unpack_array, nb::arg("ggml_type"), nb::arg("stored"), nb::arg("cols"),
          "Stored rows, uint8 (rows, row_bytes), as floats (rows, cols).");
    nb::class_<PyPacker>(m, "Packer", "Packs matrices into memory that they share, on threads of its own.")
        .def(nb::init<int>(), nb::arg("threads") = 1)
        .def("start", &PyPacker::start, nb::arg("ggml_type"), nb::arg("stored"), nb::arg("cols"),
             nb::arg("format") = nb::none(), "Room for panels (bytes), which are there after finish().")
        .def("finish", &PyPacker::finish, "Waits for all that was started.")
        .def("pack", &PyPacker::pack, nb::arg("ggml_type"), nb::arg("stored"), nb::arg("cols"),
             nb::arg("format") = nb::none(), "Stored rows, uint8 (rows, row_bytes), as panels (bytes).");
}

}  // namespace heedful
