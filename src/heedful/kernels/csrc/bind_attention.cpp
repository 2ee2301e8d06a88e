// Attention for tests: pages in numpy arrays, one thread, every variant. Loops over query tiles, KV heads and parts of
// the keys as a step does. Shapes as in ops.h. Arenas are (number of keys, number of values, bytes); a page is arena *
// 2^20 + row.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "paging.h"

namespace nb = nanobind;

namespace heedful {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Pages = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::numpy, float>;
using Arenas = std::vector<std::tuple<std::string, std::string, Bytes>>;

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

KvNumber number_named(const std::string& name) {
    constexpr const char* kNames[] = {"f32", "f16", "q8", "q4"};  // in KvNumber's order
    for (int i = 0; i < 4; ++i)
        if (name == kNames[i]) return static_cast<KvNumber>(i);
    throw std::invalid_argument("KV numbers: f32, f16, q8 or q4, not " + name);
}

std::vector<PageBuffer> buffers_of(const Ops& ops, const Arenas& arenas, int kv_heads, int head_dim) {
    require(kv_heads > 0 && head_dim > 0 && head_dim <= 256, "kv_heads >= 1, head_dim in [1, 256]");
    std::vector<PageBuffer> buffers;
    for (const auto& [keys, values, bytes] : arenas) {
        const KvFormat format{number_named(keys), number_named(values)};
        buffers.push_back({format, kv_heads, head_dim, bytes.data(), ops.page_bytes(format, kv_heads, head_dim)});
    }
    return buffers;
}

void require_page(const Arenas& arenas, const std::vector<PageBuffer>& buffers, int page) {
    require(page >= 0 && page / kArenaPages < static_cast<int>(arenas.size()), "a page of no arena");
    const size_t bytes = std::get<2>(arenas[page / kArenaPages]).size();
    require((page % kArenaPages + 1) * buffers[page / kArenaPages].page_bytes <= bytes, "a page lies outside the buffer");
}

void require_pages(const Arenas& arenas, const std::vector<PageBuffer>& buffers, const Pages& list) {
    for (size_t i = 0; i < list.size(); ++i) require_page(arenas, buffers, list(i));
}

size_t page_bytes(const std::string& keys, const std::string& values, int kv_heads, int head_dim,
                  const std::string& variant) {
    return table_of(variant).page_bytes({number_named(keys), number_named(values)}, kv_heads, head_dim);
}

void store(const Arenas& arenas, Pages list, int start, Rows k, Rows v, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const int tokens = static_cast<int>(k.shape(0)), heads = static_cast<int>(k.shape(1));
    const int dim = static_cast<int>(k.shape(2));
    require(v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2), "k and v: one shape");
    const std::vector<PageBuffer> buffers = buffers_of(ops, arenas, heads, dim);
    require_pages(arenas, buffers, list);
    require(start >= 0 && start + tokens <= static_cast<int>(list.size()) * kPageLen, "more tokens than slots");
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) {
            const int page = list((start + t) / kPageLen);
            ops.store_row(buffers[page / kArenaPages], page % kArenaPages, h, (start + t) % kPageLen, &k(t, h, 0),
                          &v(t, h, 0));
        }
}

Out owned(std::vector<float>&& values, std::initializer_list<size_t> shape) {
    auto* data = new std::vector<float>(std::move(values));
    nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    return Out(data->data(), shape, owner);
}

nb::tuple read_page(const Arenas& arenas, int page, int kv_heads, int head_dim, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const std::vector<PageBuffer> buffers = buffers_of(ops, arenas, kv_heads, head_dim);
    require_page(arenas, buffers, page);
    const size_t heads = kv_heads, dim = head_dim, side = kPageLen * dim;
    std::vector<float> keys(heads * side), values(heads * side);
    for (size_t h = 0; h < heads; ++h)
        ops.read_page(buffers[page / kArenaPages], page % kArenaPages, static_cast<int>(h), keys.data() + h * side,
                      values.data() + h * side);
    const size_t slots = kPageLen;
    return nb::make_tuple(owned(std::move(keys), {heads, slots, dim}), owned(std::move(values), {heads, slots, dim}));
}

void move(const Arenas& arenas, int source, int target, int kv_heads, int head_dim, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const std::vector<PageBuffer> buffers = buffers_of(ops, arenas, kv_heads, head_dim);
    require_page(arenas, buffers, source);
    require_page(arenas, buffers, target);
    std::vector<float> rows(2 * static_cast<size_t>(kPageLen) * head_dim);
    for (int h = 0; h < kv_heads; ++h)
        move_page(ops, buffers[source / kArenaPages], source % kArenaPages, buffers[target / kArenaPages],
                  target % kArenaPages, h, rows.data());
}

// max + log(sum of exp) of a row over its parts.
float log_sum_exp(const float* parts, size_t stride, int count) {
    double maximum = -INFINITY, sum = 0;
    for (int s = 0; s < count; ++s) maximum = std::fmax(maximum, parts[s * stride]);
    for (int s = 0; s < count; ++s) sum += std::exp(parts[s * stride] - maximum) * parts[s * stride + 1];
    return static_cast<float>(maximum + std::log(sum));
}

nb::tuple attend(const Arenas& arenas, int kv_heads, Pages list, int start, int end, int window, int sinks,
                 Pages sink_list, Rows q, Rows sink_q, float scale, float softcap, int first_page, int query_tile,
                 const std::string& variant) {
    const Ops& ops = table_of(variant);
    const int heads = static_cast<int>(q.shape(1)), dim = static_cast<int>(q.shape(2));
    const std::vector<PageBuffer> buffers = buffers_of(ops, arenas, kv_heads, dim);
    require_pages(arenas, buffers, list);
    require_pages(arenas, buffers, sink_list);
    require(start >= 0 && end - start == static_cast<int>(q.shape(0)), "q: (end - start, H, D)");
    require(sink_q.size() == q.size(), "sink_q: the shape of q");
    require(heads % kv_heads == 0 && query_tile > 0, "heads a multiple of kv_heads, query_tile >= 1");
    require(end <= (first_page + static_cast<int>(list.size())) * kPageLen, "fewer pages than positions");
    require(std::min(sinks, end) <= static_cast<int>(sink_list.size()) * kPageLen, "fewer sink pages than sinks");
    const AttentionShape shape{heads, kv_heads, dim, scale, softcap};
    const Span span{start, end, window, first_page, list.data(), sinks, sink_list.data(), -1, false};
    const int group = heads / kv_heads;
    const size_t row = dim + 2, stride = row * query_tile * group;
    std::vector<float> results(stride * parts_of(span, start, end).count()), out(q.size()), lse(q.shape(0) * heads);
    std::vector<uint8_t> scratch(ops.attend_scratch_bytes(shape, query_tile));
    for (int q0 = start; q0 < end; q0 += query_tile)
        for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
            const int q1 = std::min(q0 + query_tile, end);
            const Parts parts = parts_of(span, q0, q1);
            for (int p = 0; p < parts.count(); ++p) {
                const float* rows = parts.is_sinks(p) ? sink_q.data() : q.data();
                ops.attend(buffers.data(), shape, keys_of(span, parts, p), {rows, heads * dim, start, kv_head, q0, q1},
                           results.data() + p * stride, scratch.data());
            }
            for (int r = 0; r < (q1 - q0) * group; ++r) {
                const size_t to = static_cast<size_t>(q0 - start + r / group) * heads + kv_head * group + r % group;
                ops.merge_parts(results.data() + r * row, stride, parts.count(), dim, out.data() + to * dim);
                lse[to] = log_sum_exp(results.data() + r * row, stride, parts.count());
            }
        }
    const size_t tokens = q.shape(0), columns = heads, channels = dim;
    return nb::make_tuple(owned(std::move(out), {tokens, columns, channels}), owned(std::move(lse), {tokens, columns}));
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("page_bytes", &page_bytes, nb::arg("keys"), nb::arg("values"), nb::arg("kv_heads"), nb::arg("head_dim"),
          nb::arg("variant"), "Bytes of one page of 64 tokens.");
    m.def("store", &store, nb::arg("arenas"), nb::arg("page_list"), nb::arg("start"), nb::arg("k"), nb::arg("v"),
          nb::arg("variant"), "Store k and v, (N, K, D) each, at positions start, start + 1, ...");
    m.def("read_page", &read_page, nb::arg("arenas"), nb::arg("page"), nb::arg("kv_heads"), nb::arg("head_dim"),
          nb::arg("variant"), "What a page's keys and values stand for, (K, 64, D) each.");
    m.def("move", &move, nb::arg("arenas"), nb::arg("source"), nb::arg("target"), nb::arg("kv_heads"),
          nb::arg("head_dim"), nb::arg("variant"), "Rewrite a page as one of another format.");
    m.def("attend", &attend, nb::arg("arenas"), nb::arg("kv_heads"), nb::arg("page_list"), nb::arg("start"),
          nb::arg("end"), nb::arg("window"), nb::arg("sinks"), nb::arg("sink_list"), nb::arg("q"), nb::arg("sink_q"),
          nb::arg("scale"), nb::arg("softcap"), nb::arg("first_page"), nb::arg("query_tile"), nb::arg("variant"),
          "Attention of q (T, H, D) at positions [start, end), sink_q where they meet the first `sinks` keys: out "
          "(T, H, D), log-sum-exp (T, H). 0: no window, cap, sinks.");
}

}  // namespace heedful
