#include "src/train/meter.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>

namespace semitone::train {
namespace {

constexpr std::int64_t kMega = 1 << 20;

TEST(StepMeter, WithoutStepsIsZero) {
  const StepMeter meter;
  EXPECT_EQ(meter.steps(), 0);
  EXPECT_EQ(meter.mean_ms(), 0);
  EXPECT_EQ(meter.median_ms(), 0);
  EXPECT_EQ(meter.items_per_second(), 0);
}

TEST(StepMeter, KnowsMeanMedianAndThroughput) {
  StepMeter meter;
  meter.add(0.9, 10);
  EXPECT_DOUBLE_EQ(meter.median_ms(), 900);
  meter.add(0.1, 10);
  EXPECT_DOUBLE_EQ(meter.median_ms(), 500);
  meter.add(0.2, 40);
  EXPECT_DOUBLE_EQ(meter.median_ms(), 200);
  EXPECT_DOUBLE_EQ(meter.mean_ms(), 400);
  EXPECT_DOUBLE_EQ(meter.items_per_second(), 50);
  EXPECT_EQ(meter.steps(), 3);
}

TEST(PeakRss, GrowsWithTheMemoryInUse) {
  const std::int64_t before = peak_rss_bytes();
  EXPECT_GT(before, kMega);
  const at::Tensor touched = torch::ones({before + 16 * kMega}, torch::kByte);
  EXPECT_GT(peak_rss_bytes(), before + 8 * kMega);
}

}  // namespace
}  // namespace semitone::train
