// heedful._native: binds the parts. Ops live in files of their own; ops.cpp chooses their variant.

#include <nanobind/nanobind.h>

#include "ops.h"

namespace heedful {
void bind_pack(nanobind::module_& m);
void bind_matmul(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_elementwise(nanobind::module_& m);
void bind_selection(nanobind::module_& m);
void bind_step(nanobind::module_& m);
void bind_encoder(nanobind::module_& m);
void bind_texts(nanobind::module_& m);
}  // namespace heedful

NB_MODULE(_native, m) {
    m.attr("API") = 6;  // of the calls and their arguments; kernels/native.py has the same number
    m.def("variant", [] { return heedful::ops().name; }, "The kernel variant that this processor gets.");
    heedful::bind_pack(m);
    heedful::bind_matmul(m);
    heedful::bind_attention(m);
    heedful::bind_elementwise(m);
    heedful::bind_selection(m);
    heedful::bind_step(m);
    heedful::bind_encoder(m);
    heedful::bind_texts(m);
}
