#pragma once

#include "src/core/openmp.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace semitone {

#if SEMITONE_CALLS_OPENMP
// Calls work(thread, threads) in each of LibTorch's threads. The first exception is thrown when all
// have ended.
template <typename Work>
void for_all_threads(const Work& work) {
  struct Region {
    const Work& work;
    std::atomic_flag failed;
    std::exception_ptr failure;
  };
  Region region{work, {}, nullptr};
  GOMP_parallel(
      [](void* data) {
        auto& shared = *static_cast<Region*>(data);
        try {
          shared.work(omp_get_thread_num(), omp_get_num_threads());
        } catch (...) {
          if (!shared.failed.test_and_set()) shared.failure = std::current_exception();
        }
      },
      &region, /*threads=*/0, /*flags=*/0);
  if (region.failure) std::rethrow_exception(region.failure);
}
#endif

// at::parallel_for, on LibTorch's threads with any compiler.
template <typename Work>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, const Work& work) {
#if SEMITONE_CALLS_OPENMP
  const std::int64_t size = end - begin;
  if (size > std::max<std::int64_t>(1, grain) && !at::in_parallel_region() &&
      at::get_num_threads() > 1) {
    for_all_threads([&](std::int64_t thread, std::int64_t threads) {
      if (grain > 0) threads = std::min(threads, at::divup(size, grain));
      const std::int64_t chunk = at::divup(size, threads);
      const std::int64_t first = begin + thread * chunk;
      if (first >= end) return;
      const at::internal::ThreadIdGuard id(static_cast<int>(thread));
      const c10::ParallelGuard in_parallel(true);
      work(first, std::min(end, first + chunk));
    });
    return;
  }
#endif
  at::parallel_for(begin, end, grain, work);
}

}  // namespace semitone
