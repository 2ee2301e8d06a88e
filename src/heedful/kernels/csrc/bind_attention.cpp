// Attention for tests: pages in numpy arrays, one thread, every variant. Loops over query tiles, KV heads and segments
// as a step does. Shapes as in ops.h.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace nb = nanobind;

namespace heedful {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Pages = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::numpy, float>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

const Ops& table_of(const std::string& variant) {
    const Ops* tables = nullptr;
    const int count = all_ops(&tables);
    for (int i = 0; i < count; ++i)
        if (variant == tables[i].name) return tables[i];
    throw std::invalid_argument("no such variant on this processor: " + variant);
}

KvFormat format_of(const std::string& name) {
    require(name == "f16" || name == "q8", "KV format: f16 or q8");
    return name == "q8" ? KvFormat::q8 : KvFormat::f16;
}

PageBuffer buffer_of(const Ops& ops, Bytes& pages, const std::string& format, int kv_heads, int head_dim) {
    require(kv_heads > 0 && head_dim > 0 && head_dim <= 256, "kv_heads >= 1, head_dim in [1, 256]");
    const KvFormat kv_format = format_of(format);
    return {kv_format, kv_heads, head_dim, pages.data(), ops.page_bytes(kv_format, kv_heads, head_dim)};
}

void require_pages(const PageBuffer& buffer, const Bytes& pages, const Pages& list) {
    for (size_t i = 0; i < list.size(); ++i)
        require(list(i) >= 0 && (list(i) + 1) * buffer.page_bytes <= pages.size(), "a page lies outside the buffer");
}

size_t page_bytes(const std::string& format, int kv_heads, int head_dim, const std::string& variant) {
    return table_of(variant).page_bytes(format_of(format), kv_heads, head_dim);
}

void store(Bytes pages, const std::string& format, Pages list, int start, Rows k, Rows v, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const int tokens = static_cast<int>(k.shape(0)), heads = static_cast<int>(k.shape(1));
    const int dim = static_cast<int>(k.shape(2));
    require(v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2), "k and v: one shape");
    const PageBuffer buffer = buffer_of(ops, pages, format, heads, dim);
    require_pages(buffer, pages, list);
    require(start >= 0 && start + tokens <= static_cast<int>(list.size()) * kPageLen, "more tokens than slots");
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h)
            ops.store_row(buffer, list((start + t) / kPageLen), h, (start + t) % kPageLen, &k(t, h, 0), &v(t, h, 0));
}

Out owned(std::vector<float>&& values, std::initializer_list<size_t> shape) {
    auto* data = new std::vector<float>(std::move(values));
    nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    return Out(data->data(), shape, owner);
}

// max + log(sum of exp) of a row over its segments.
float log_sum_exp(const float* parts, size_t stride, int segments) {
    double maximum = -INFINITY, sum = 0;
    for (int s = 0; s < segments; ++s) maximum = std::fmax(maximum, parts[s * stride]);
    for (int s = 0; s < segments; ++s) sum += std::exp(parts[s * stride] - maximum) * parts[s * stride + 1];
    return static_cast<float>(maximum + std::log(sum));
}

nb::tuple attend(Bytes pages, const std::string& format, int kv_heads, Pages list, int start, int end, int window,
                 Rows q, float scale, float softcap, int first_page, int query_tile, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const int heads = static_cast<int>(q.shape(1)), dim = static_cast<int>(q.shape(2));
    const PageBuffer buffer = buffer_of(ops, pages, format, kv_heads, dim);
    require_pages(buffer, pages, list);
    require(start >= 0 && end - start == static_cast<int>(q.shape(0)), "q: (end - start, H, D)");
    require(heads % kv_heads == 0 && query_tile > 0, "heads a multiple of kv_heads, query_tile >= 1");
    require(end <= (first_page + static_cast<int>(list.size())) * kPageLen, "fewer pages than positions");
    const AttentionShape shape{heads, scale, softcap};
    const Span span{start, end, window, first_page, list.data()};
    const int group = heads / kv_heads, first_segment = first_page * kPageLen / kSegment;
    const int segments = (end + kSegment - 1) / kSegment - first_segment;
    const size_t row = dim + 2, stride = row * query_tile * group;
    std::vector<float> parts(stride * (segments > 0 ? segments : 0)), out(q.size()), lse(q.shape(0) * heads);
    std::vector<uint8_t> scratch(ops.attend_scratch_bytes(buffer, shape, query_tile));
    for (int q0 = start; q0 < end; q0 += query_tile)
        for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
            const int q1 = q0 + query_tile < end ? q0 + query_tile : end;
            for (int s = 0; s < segments; ++s)
                ops.attend_segment(buffer, shape, span, q.data(), heads * dim, kv_head, q0, q1, first_segment + s,
                                   parts.data() + s * stride, scratch.data());
            for (int r = 0; r < (q1 - q0) * group; ++r) {
                const size_t to = static_cast<size_t>(q0 - start + r / group) * heads + kv_head * group + r % group;
                ops.merge_segments(parts.data() + r * row, stride, segments, dim, out.data() + to * dim);
                lse[to] = log_sum_exp(parts.data() + r * row, stride, segments);
            }
        }
    const size_t tokens = q.shape(0), columns = heads, channels = dim;
    return nb::make_tuple(owned(std::move(out), {tokens, columns, channels}), owned(std::move(lse), {tokens, columns}));
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("page_bytes", &page_bytes, nb::arg("format"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("variant"),
          "Bytes of one page of 64 tokens.");
    m.def("store", &store, nb::arg("pages"), nb::arg("format"), nb::arg("page_list"), nb::arg("start"), nb::arg("k"),
          nb::arg("v"), nb::arg("variant"), "Store k and v, (N, K, D) each, at positions start, start + 1, ...");
    m.def("attend", &attend, nb::arg("pages"), nb::arg("format"), nb::arg("kv_heads"), nb::arg("page_list"),
          nb::arg("start"), nb::arg("end"), nb::arg("window"), nb::arg("q"), nb::arg("scale"), nb::arg("softcap"),
          nb::arg("first_page"), nb::arg("query_tile"), nb::arg("variant"),
          "Attention of q (T, H, D) at positions [start, end): out (T, H, D), log-sum-exp (T, H). 0: no window, cap.");
}

}  // namespace heedful
