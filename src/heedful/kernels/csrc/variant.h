// Each op file is compiled once per variant, with that variant's compiler flags and HEEDFUL_VARIANT set to its name; the
// code is the same source in another namespace. ops.cpp picks a table of function pointers once, at start.
#pragma once

#ifndef HEEDFUL_VARIANT
#error "compile with -DHEEDFUL_VARIANT=avx2 or =portable"
#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HEEDFUL_AVX2 1
#include <immintrin.h>
#else
#define HEEDFUL_AVX2 0
#endif
