#include "src/comm/gpu.h"

#include "tests/support/errors.h"

#include <gtest/gtest.h>

namespace semitone::comm {
namespace {

using test::expect_error;

TEST(Gpu, IsTheOneOfTheLocalRank) {
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(gpu_index(rank, 4, 4), rank);
  EXPECT_EQ(gpu_index(1, 2, 8), 1);
}

TEST(Gpu, IsTheOnlyOneThatTheProcessSees) {
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(gpu_index(rank, 4, 1), 0);
}

TEST(Gpu, OfEachRankIsAnother) {
  expect_error([] { gpu_index(0, 4, 2); }, {"[comm.init]", "each of the 4 ranks", "got 2", "gloo"});
  expect_error([] { gpu_index(0, 1, 0); }, {"each of the 1 ranks", "got 0"});
}

// A single GPU may be the one that the launcher shows to each process, or the machine's only one.
TEST(Gpu, IsNotAnotherRanksToo) {
  require_distinct_gpus({"GPU-a", "GPU-b", "GPU-c"});
  expect_error([] { require_distinct_gpus({"GPU-a", "GPU-b", "GPU-a"}); },
               {"[comm.init]", "GPU-a", "ranks 0 and 2", "LOCAL_RANK", "gloo"});
}

TEST(Gpu, IsThereForALocalRankThatIsNotBelowTheirNumber) {
  // The launcher sets LOCAL_RANK and LOCAL_WORLD_SIZE.
  EXPECT_EQ(gpu_index(5, 2, 2), 1);
}

}  // namespace
}  // namespace semitone::comm
