// Page selection for tests: bounds in numpy arrays, every variant. Shapes as in ops.h.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace nb = nanobind;

namespace heedful {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bounds = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Pages = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Chosen = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
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

BoundsBuffer buffer_of(const Ops& ops, const Bytes& bounds, int kv_heads, int head_dim) {
    require(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim in [1, 256]");
    require(bounds.shape(1) == ops.bounds_bytes(kv_heads, head_dim), "bounds: (pages, bounds_bytes)");
    return {bounds.data(), bounds.shape(1)};
}

size_t bounds_bytes(int kv_heads, int head_dim, const std::string& variant) {
    return table_of(variant).bounds_bytes(kv_heads, head_dim);
}

void store_bounds(Bytes bounds, int kv_heads, int page, int kv_head, Keys keys, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const int dim = static_cast<int>(keys.shape(1));
    const BoundsBuffer buffer = buffer_of(ops, bounds, kv_heads, dim);
    require(keys.shape(0) == kPageLen, "keys: (64, D)");
    require(page >= 0 && page < static_cast<int>(bounds.shape(0)) && kv_head >= 0 && kv_head < kv_heads,
            "no such page or KV head");
    ops.store_bounds(keys.data(), dim, buffer, page, kv_head);
}

Out bound_pages(const std::vector<Bytes>& arenas, int kv_heads, Pages pages, Heads q, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const int heads = static_cast<int>(q.shape(0)), dim = static_cast<int>(q.shape(1)), group = heads / kv_heads;
    require(heads % kv_heads == 0, "heads a multiple of kv_heads");
    std::vector<BoundsBuffer> buffers;
    for (const Bytes& bounds : arenas) buffers.push_back(buffer_of(ops, bounds, kv_heads, dim));
    for (size_t i = 0; i < pages.size(); ++i) {
        require(pages(i) >= 0 && pages(i) / kArenaPages < static_cast<int>(arenas.size()), "no such arena");
        require(pages(i) % kArenaPages < static_cast<int>(arenas[pages(i) / kArenaPages].shape(0)), "no such page");
    }
    const size_t count = pages.size();
    auto* out = new float[heads * count + 1];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    std::vector<float> prepared(ops.bounds_query_bytes(group, dim) / sizeof(float));
    for (int head = 0; head < kv_heads; ++head) {
        ops.prepare_bounds_query(q.data() + head * group * dim, group, dim, prepared.data());
        ops.bound_pages(buffers.data(), pages.data(), static_cast<int>(count), head, group, dim, prepared.data(),
                        out + head * group * count, count);
    }
    return Out(out, {static_cast<size_t>(heads), count}, owner);
}

// By bounds of all candidates, as if each page had one key that scores so.
void choose_pages(Bounds bounds, float scale, int pages, int local_pages, Chosen chosen, const std::string& variant) {
    const Ops& ops = table_of(variant);
    const int num_pages = static_cast<int>(chosen.size()), candidates = pages - 2 - local_pages;
    require(local_pages >= 0 && num_pages >= 2 + local_pages && num_pages <= pages,
            "2 + local_pages <= chosen <= pages");
    require(bounds.shape(0) > 0, "bounds: a row a query head of the group");
    require(static_cast<int>(bounds.shape(1)) == candidates, "bounds: one a page from the second to the local ones");
    std::vector<float> maxima(bounds.data(), bounds.data() + bounds.size()), sums(bounds.size(), 1.0f);
    for (float& score : maxima) score *= scale * 1.44269504f;
    std::vector<int32_t> keys(candidates), listed(candidates);
    std::iota(listed.begin(), listed.end(), 1);
    ops.choose_pages(maxima.data(), sums.data(), static_cast<int>(bounds.shape(0)), keys.data(), listed.data(), candidates,
                     pages, local_pages, num_pages, chosen.data());
}

}  // namespace

void bind_selection(nb::module_& m) {
    m.def("bounds_bytes", &bounds_bytes, nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("variant"),
          "Bytes of the bounds of one page.");
    m.def("store_bounds", &store_bounds, nb::arg("bounds"), nb::arg("kv_heads"), nb::arg("page"), nb::arg("kv_head"),
          nb::arg("keys"), nb::arg("variant"), "Store the bounds of 64 keys (64, D) in bounds (pages, bounds_bytes).");
    m.def("bound_pages", &bound_pages, nb::arg("arenas"), nb::arg("kv_heads"), nb::arg("page_list"), nb::arg("q"),
          nb::arg("variant"),
          "(H, pages): what a key two standard deviations up in each page scores with q (H, D), unscaled.");
    m.def("choose_pages", &choose_pages, nb::arg("bounds"), nb::arg("scale"), nb::arg("pages"), nb::arg("local_pages"),
          nb::arg("chosen"), nb::arg("variant"),
          "Renew `chosen` (num_pages), in place, from bounds (group, candidates) of pages 1, 2, ... before the local ones.");
}

}  // namespace heedful
