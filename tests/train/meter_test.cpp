#include "src/train/meter.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

namespace semitone::train {
namespace {

constexpr std::int64_t kMega = 1 << 20;

at::Tensor megabytes(std::int64_t count) {
  return torch::empty({count * kMega}, torch::kByte);
}

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

TEST(TensorMemoryMeter, CountsWhatIsThereAndTheMostThatWas) {
  const TensorMemoryMeter meter;
  EXPECT_TRUE(meter.is_active());
  EXPECT_EQ(meter.peak_bytes(), 0);
  {
    const at::Tensor four = megabytes(4);
    EXPECT_EQ(meter.current_bytes(), 4 * kMega);
    {
      const at::Tensor eight = megabytes(8);
    }
    EXPECT_EQ(meter.current_bytes(), 4 * kMega);
  }
  EXPECT_EQ(meter.current_bytes(), 0);
  EXPECT_EQ(meter.peak_bytes(), 12 * kMega);
}

TEST(TensorMemoryMeter, CountsGradientsOfBackward) {
  at::Tensor weight = torch::ones({kMega}, torch::requires_grad());
  const TensorMemoryMeter meter;
  (weight * 2).sum().backward();
  EXPECT_GE(meter.peak_bytes(), 8 * kMega);  // the product, then the gradient beside another
  EXPECT_EQ(meter.current_bytes(), 4 * kMega);
  weight.mutable_grad().reset();
  EXPECT_EQ(meter.current_bytes(), 0);
}

TEST(TensorMemoryMeter, IgnoresWhatWasThereBefore) {
  at::Tensor before = megabytes(4);
  const TensorMemoryMeter meter;
  before.reset();
  EXPECT_EQ(meter.current_bytes(), 0);
  EXPECT_EQ(meter.peak_bytes(), 0);
}

TEST(TensorMemoryMeter, HearsThreadsThatWorkForThisOneAndNoOthers) {
  const TensorMemoryMeter meter;
  std::vector<at::Tensor> kept(2);
  std::thread([&] { kept[0] = megabytes(1); }).join();
  EXPECT_EQ(meter.current_bytes(), 0);
  std::thread([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    kept[1] = megabytes(2);
  }).join();
  EXPECT_EQ(meter.current_bytes(), 2 * kMega);
}

TEST(TensorMemoryMeter, MetersNest) {
  const TensorMemoryMeter outer;
  const at::Tensor one = megabytes(1);
  {
    const TensorMemoryMeter inner;
    EXPECT_TRUE(inner.is_active());
    const at::Tensor two = megabytes(2);
    EXPECT_EQ(inner.current_bytes(), 2 * kMega);
    EXPECT_EQ(outer.current_bytes(), 3 * kMega);
  }
  EXPECT_EQ(outer.current_bytes(), 1 * kMega);
  const at::Tensor four = megabytes(4);
  EXPECT_EQ(outer.current_bytes(), 5 * kMega);
}

struct OtherListener : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t, std::size_t, std::size_t, c10::Device) override {
    ++reports;
  }
  bool memoryProfilingEnabled() const override { return true; }
  int reports = 0;
};

TEST(TensorMemoryMeter, LeavesLibTorchsProfilerItsPlace) {
  const auto profiler = std::make_shared<OtherListener>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, profiler);
  const TensorMemoryMeter meter;
  EXPECT_FALSE(meter.is_active());
  const at::Tensor one = megabytes(1);
  EXPECT_EQ(meter.peak_bytes(), 0);
  EXPECT_EQ(profiler->reports, 1);
}

}  // namespace
}  // namespace semitone::train
