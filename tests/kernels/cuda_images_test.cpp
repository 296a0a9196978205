#include "src/kernels/cuda/images.h"

#include <gtest/gtest.h>

namespace semitone::kernels::cuda_images_test {
namespace {

TEST(CudaImages, MachineCodeRunsOnItsMajorVersionOnly) {
  constexpr int kImages[] = {800, 900};
  for (const int has : {800, 860, 890, 900}) EXPECT_TRUE(runs_on(has, kImages, 0)) << has;
  for (const int has : {700, 750, 1000, 1200}) EXPECT_FALSE(runs_on(has, kImages, 0)) << has;
  constexpr int kLater[] = {860};
  EXPECT_FALSE(runs_on(800, kLater, 0));
}

TEST(CudaImages, PtxRunsOnAllLaterDevices) {
  constexpr int kImages[] = {800, 900};
  for (const int has : {800, 890, 900, 1000, 1200}) EXPECT_TRUE(runs_on(has, kImages, 900)) << has;
  EXPECT_FALSE(runs_on(750, kImages, 900));
  EXPECT_FALSE(runs_on(750, kImages, 800));
}

}  // namespace
}  // namespace semitone::kernels::cuda_images_test
