#include "src/core/cuda_driver.h"

#include <gtest/gtest.h>

namespace semitone {
namespace {

TEST(CudaDriver, Float16IsFastWhereThereAreUnitsForIt) {
  for (const ComputeCapability none : {ComputeCapability{3, 5}, {5, 0}, {5, 2}, {6, 1}})
    EXPECT_FALSE(computes_fp16_fast(none)) << none.major << '.' << none.minor;
  for (const ComputeCapability fast :
       {ComputeCapability{5, 3}, {6, 0}, {6, 2}, {7, 0}, {7, 5}, {8, 0}, {9, 0}, {12, 0}})
    EXPECT_TRUE(computes_fp16_fast(fast)) << fast.major << '.' << fast.minor;
}

TEST(CudaDriver, Bfloat16IsFastFromAmpereOn) {
  EXPECT_FALSE(computes_bf16_fast({7, 5}));
  EXPECT_TRUE(computes_bf16_fast({8, 0}));
  EXPECT_TRUE(computes_bf16_fast({8, 9}));
}

TEST(CudaDriver, SaysWhereSixteenBitsAreSlow) {
  EXPECT_EQ(describe_speed({7, 0}, true), "native");
  EXPECT_EQ(describe_speed({6, 1}, false),
            "slower than float32 on this GPU (compute capability 6.1)");
}

TEST(CudaDriver, WhatIsNoGpuHasNoCapability) {
  EXPECT_FALSE(compute_capability(-1).has_value());
  EXPECT_FALSE(compute_capability(gpu_count()).has_value());
  for (int gpu = 0; gpu < gpu_count(); ++gpu) EXPECT_TRUE(compute_capability(gpu).has_value());
}

}  // namespace
}  // namespace semitone
