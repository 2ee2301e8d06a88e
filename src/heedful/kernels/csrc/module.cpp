// The Python face of the native kernels: heedful._native. Ops live in files of their own, one each; this one only
// binds them and says which variant this processor gets.

#include <nanobind/nanobind.h>

namespace {

// The variant is chosen once, at start, from what the processor says of itself.
const char *variant() {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "portable";
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("variant", &variant, "The kernel variant that this processor gets: 'avx2' or 'portable'.");
}
