#pragma once

#include <ATen/Config.h>

// The functions of LibTorch's OpenMP runtime, with any compiler. clang compiles OpenMP for a
// runtime of its own only, whose threads would compete with LibTorch's.
#ifdef _OPENMP
#include <omp.h>
#elif AT_PARALLEL_OPENMP
extern "C" {
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
void omp_set_num_threads(int threads);
}
#endif

// Whether at::parallel_for, a template, would run on a single thread, or on threads of another
// runtime, as with clang and -fopenmp.
#if AT_PARALLEL_OPENMP && (!defined(_OPENMP) || defined(__clang__))
#define SEMITONE_CALLS_OPENMP 1
// The function that GCC calls for a parallel region. With 0 threads, omp_set_num_threads decides.
// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" void GOMP_parallel(void (*region)(void*), void* data, unsigned threads, unsigned flags);
#else
#define SEMITONE_CALLS_OPENMP 0
#endif
