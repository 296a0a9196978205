// Kernels run on LibTorch's threads: at::parallel_for depends on the flags of its caller's
// compilation.

#include "src/core/thread_count.h"

#include <ATen/Parallel.h>

#include <gtest/gtest.h>
#include <omp.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <thread>

namespace semitone::kernels::threads_test {
namespace {

TEST(Threads, ParallelForUsesAllOfThem) {
  const ThreadCount threads(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  at::parallel_for(0, 3, 1, [&](std::int64_t, std::int64_t) {
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen.size(), 3U);
}

// A second runtime would not be affected by at::set_num_threads.
TEST(Threads, BelongToOneRuntime) {
  const ThreadCount threads(3);
  EXPECT_EQ(omp_get_max_threads(), 3);
}

}  // namespace
}  // namespace semitone::kernels::threads_test
