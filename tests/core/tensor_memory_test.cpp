#include "src/core/tensor_memory.h"

#include "semitone/core/events.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace semitone {
namespace {

constexpr std::int64_t kMega = 1 << 20;

at::Tensor megabytes(std::int64_t count) {
  return torch::empty({count * kMega}, torch::kByte);
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

TEST(TensorMemoryMeter, MeasuresThePeakOfEachPart) {
  TensorMemoryMeter meter;
  const at::Tensor four = megabytes(4);
  megabytes(8);
  meter.reset_peak();
  EXPECT_EQ(meter.peak_bytes(), 4 * kMega);
  megabytes(2);
  EXPECT_EQ(meter.peak_bytes(), 6 * kMega);
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

TEST(TensorMemoryMeter, LeavesAProfilerThatStartedLaterItsPlace) {
  auto meter = std::make_optional<TensorMemoryMeter>();
  const auto profiler = std::make_shared<OtherListener>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, profiler);
    meter.reset();
    const at::Tensor one = megabytes(1);
    EXPECT_EQ(profiler->reports, 1);
  }
  EXPECT_FALSE(c10::memoryProfilingEnabled());
}

TEST(TensorMemoryMeter, MetersEndInAnyOrder) {
  auto outer = std::make_optional<TensorMemoryMeter>();
  auto inner = std::make_optional<TensorMemoryMeter>();
  outer.reset();
  const at::Tensor one = megabytes(1);
  EXPECT_EQ(inner->current_bytes(), kMega);
  inner.reset();
  EXPECT_FALSE(c10::memoryProfilingEnabled());
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

struct Counter : events::Listener {
  using Listener::on;
  void on(const events::StepSkipped&) override { ++count; }
  int count = 0;
};

TEST(TensorMemoryMeter, LaterListenersOutliveIt) {
  const auto counter = std::make_shared<Counter>();
  auto meter = std::make_optional<TensorMemoryMeter>();
  {
    const events::Listen listen(counter);
    meter.reset();
    EXPECT_FALSE(c10::memoryProfilingEnabled());
    events::emit(events::StepSkipped{});
  }
  events::emit(events::StepSkipped{});
  EXPECT_EQ(counter->count, 1);
}

TEST(TensorMemoryMeter, ListenersThatEndBetweenTwoMetersStayEnded) {
  const auto counter = std::make_shared<Counter>();
  const TensorMemoryMeter outer;
  auto listen = std::make_optional<events::Listen>(counter);
  {
    const TensorMemoryMeter inner;
    listen.reset();
    const at::Tensor one = megabytes(1);
    EXPECT_EQ(inner.current_bytes(), kMega);
    EXPECT_EQ(outer.current_bytes(), kMega);
  }
  EXPECT_FALSE(events::listening());
}

}  // namespace
}  // namespace semitone
