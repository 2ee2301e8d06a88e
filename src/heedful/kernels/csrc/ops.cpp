// The op tables, one a variant, and the choice between them: once, at start, from what the processor says of itself.

#include "ops.h"

#define HEEDFUL_DECLARE(variant)                                                                                       \
    namespace variant {                                                                                                \
    void norm(NormKind, const float*, const float*, const float*, float, int, float*);                                 \
    void rotate(float*, const float*, const float*, int);                                                              \
    void hadamard(float*, int, int);                                                                                   \
    void activate(Activation, float*, const float*, int);                                                              \
    void quantize_activations(const float*, const Activations&, int, int);                                             \
    void matmul(const Matrix&, const Activations&, int, int, int, int, float*, int, const float*, bool);               \
    size_t page_bytes(KvFormat, int, int);                                                                             \
    void store_row(const PageBuffer&, int, int, int, const float*, const float*);                                      \
    void expect_row(const PageBuffer&, int, int, int);                                                                 \
    void read_page(const PageBuffer&, int, int, float*, float*);                                                       \
    void attend(const PageBuffer*, const AttentionShape&, const KeyRun&, const QueryRows&, float*, void*);             \
    size_t attend_scratch_bytes(const AttentionShape&, int);                                                           \
    void merge_parts(const float*, size_t, int, int, float*);                                                          \
    void place_keys(const TextKeys&, int, int, const float*, const float*, int);                                       \
    void attend_text(const TextKeys&, int, const TextQueries&, float*, int, float*);                                   \
    size_t attend_text_scratch_floats(const TextKeys&);                                                                \
    size_t bounds_bytes(int, int);                                                                                     \
    void store_bounds(const float*, int, const BoundsBuffer&, int, int);                                               \
    void prepare_bounds_query(const float*, int, int, void*);                                                          \
    size_t bounds_query_bytes(int, int);                                                                               \
    void bound_pages(const BoundsBuffer*, const int32_t*, int, int, int, int, const void*, float*, size_t);            \
    void list_pages(float*, int, float, int32_t*, int, int, const int32_t*, int, int32_t*);                            \
    void weigh_pages(const PageBuffer*, const AttentionShape&, const int32_t*, int, const QueryRows&, float*, float*,  \
                     int, void*);                                                                                      \
    void choose_pages(float*, const float*, int, int32_t*, const int32_t*, int, int, int, int, int32_t*);              \
    }

#define HEEDFUL_TABLE(variant)                                                                                         \
    {                                                                                                                  \
        #variant, variant::norm, variant::rotate, variant::hadamard, variant::activate, variant::quantize_activations, \
            variant::matmul, variant::page_bytes, variant::store_row, variant::expect_row, variant::read_page, variant::attend,             \
            variant::attend_scratch_bytes, variant::merge_parts, variant::place_keys, variant::attend_text,            \
            variant::attend_text_scratch_floats,                                                                       \
            variant::bounds_bytes, variant::store_bounds, variant::prepare_bounds_query,                               \
            variant::bounds_query_bytes, variant::bound_pages, variant::list_pages, variant::weigh_pages,              \
            variant::choose_pages                                                                                      \
    }

namespace heedful {

HEEDFUL_DECLARE(portable)
#if HEEDFUL_HAS_X86
HEEDFUL_DECLARE(avx2)
HEEDFUL_DECLARE(vnni)
#endif

namespace {

const Ops kTables[] = {
    HEEDFUL_TABLE(portable),
#if HEEDFUL_HAS_X86
    HEEDFUL_TABLE(avx2),
    HEEDFUL_TABLE(vnni),
#endif
};

// How many tables, from the first on, this processor can run.
int runnable() {
#if HEEDFUL_HAS_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 1;
    const bool vnni = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vnni");
    return vnni ? 3 : 2;
#else
    return 1;
#endif
}

}  // namespace

int all_ops(const Ops** tables) {
    *tables = kTables;
    return runnable();
}

const Ops& ops() {
    static const Ops& chosen = kTables[runnable() - 1];
    return chosen;
}

}  // namespace heedful
