// Each op file is compiled once per variant, with that variant's compiler flags and HEEDFUL_VARIANT set to its name; the
// code is the same source in another namespace. ops.cpp picks a table of function pointers once, at start.
#pragma once

#ifndef HEEDFUL_VARIANT
#error "compile with -DHEEDFUL_VARIANT=portable, =avx2 or =vnni"
#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HEEDFUL_AVX2 1
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12 warns of the undefined vectors that its own header starts from
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#else
#define HEEDFUL_AVX2 0
#endif

// AVX2 code with the one-instruction integer dot products of AVX-512 VNNI, still in 256-bit vectors.
#if HEEDFUL_AVX2 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HEEDFUL_VNNI 1
#else
#define HEEDFUL_VNNI 0
#endif
