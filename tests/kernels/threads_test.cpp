// Kernels run on LibTorch's threads, also if they are compiled without OpenMP: parallel_for_test.

#include "src/core/openmp.h"
#include "src/core/parallel_for.h"
#include "src/core/thread_count.h"

#include <ATen/Parallel.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace semitone::kernels::threads_test {
namespace {

TEST(Threads, ParallelForUsesAllOfThem) {
  const ThreadCount threads(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::set<int> numbers;
  parallel_for(0, 3, 1, [&](std::int64_t, std::int64_t) {
    const std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
    numbers.insert(at::get_thread_num());
  });
  EXPECT_EQ(seen.size(), 3U);
  EXPECT_EQ(numbers, (std::set<int>{0, 1, 2}));
}

// The chunks depend on the number of threads and on the grain, as LibTorch's.
TEST(Threads, ParallelForHandsOutEachNumberOnce) {
  const ThreadCount threads(3);
  for (const std::int64_t size : {0, 1, 2, 3, 7, 100}) {
    for (const std::int64_t grain : {0, 1, 5, 99, 100}) {
      std::mutex mutex;
      std::multiset<std::int64_t> ours;
      std::vector<int> seen(static_cast<std::size_t>(size));
      parallel_for(7, 7 + size, grain, [&](std::int64_t begin, std::int64_t end) {
        const std::lock_guard lock(mutex);
        ours.insert(end - begin);
        for (std::int64_t i = begin; i < end; ++i) ++seen.at(static_cast<std::size_t>(i - 7));
      });
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << size << " by " << grain;
      if (size > 0) {
        EXPECT_GE(*ours.begin(), size > grain ? 1 : size) << size << " by " << grain;
      }
    }
  }
}

TEST(Threads, AnInnerParallelForRunsInItsThread) {
  const ThreadCount threads(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  int calls = 0;
  parallel_for(0, 3, 1, [&](std::int64_t, std::int64_t) {
    EXPECT_TRUE(at::in_parallel_region());
    parallel_for(0, 100, 1, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_EQ(end - begin, 100);
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
      ++calls;
    });
  });
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(seen.size(), 3U);
  EXPECT_FALSE(at::in_parallel_region());
}

TEST(Threads, AnExceptionOfAThreadReachesTheCaller) {
  const ThreadCount threads(3);
  for (const std::int64_t size : {1, 3}) {
    EXPECT_THROW(parallel_for(0, size, 1,
                              [&](std::int64_t, std::int64_t end) {
                                if (end == size) throw std::out_of_range("planted");
                              }),
                 std::out_of_range);
  }
}

// A second runtime would not be affected by at::set_num_threads.
TEST(Threads, BelongToOneRuntime) {
  const ThreadCount threads(3);
  EXPECT_EQ(omp_get_max_threads(), 3);
}

}  // namespace
}  // namespace semitone::kernels::threads_test
