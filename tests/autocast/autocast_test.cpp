// Regions: where they begin and end, what is cast in them and what is left alone.

#include "semitone/autocast/autocast.h"

#include "tests/autocast/autocast_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/profiler_legacy.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace semitone::amp::autocast_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;

TEST(Autocast, IsInForceUntilTheEndOfTheScope) {
  EXPECT_FALSE(autocast_enabled(kCpu));
  EXPECT_EQ(product_dtype(), kFp32);
  {
    const Autocast region(kCpu, kFp16);
    EXPECT_TRUE(autocast_enabled(kCpu));
    EXPECT_EQ(autocast_dtype(kCpu), kFp16);
    EXPECT_EQ(product_dtype(), kFp16);
  }
  EXPECT_FALSE(autocast_enabled(kCpu));
  EXPECT_EQ(autocast_dtype(kCpu), kBf16) << "the device's default";
  EXPECT_EQ(product_dtype(), kFp32);
}

TEST(Autocast, TakesTheDevicesDtypeUnlessTold) {
  const Autocast region(kCpu);
  EXPECT_EQ(autocast_dtype(kCpu), kBf16);
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(Autocast, NestsAndRestores) {
  const Autocast outer(CastPolicy::semitone({kCpu, kBf16}));
  {
    const Autocast other_dtype(kCpu, kFp16);
    EXPECT_EQ(product_dtype(), kFp16);
    {
      const Autocast other_policy(CastPolicy::semitone({kCpu, kBf16}).keep_fp32("mm"));
      EXPECT_EQ(product_dtype(), kFp32);
      EXPECT_EQ(autocast_dtype(kCpu), kBf16);
    }
    EXPECT_EQ(product_dtype(), kFp16);
  }
  EXPECT_EQ(product_dtype(), kBf16);
  EXPECT_EQ(autocast_dtype(kCpu), kBf16);
}

TEST(Autocast, CanBeOffInsideAndOnAgainInsideThat) {
  const Autocast outer(kCpu, kBf16);
  {
    const Autocast off(kCpu, torch::kFloat,
                       /*enabled=*/false);  // as programs with a dtype option do
    EXPECT_FALSE(autocast_enabled(kCpu));
    EXPECT_EQ(product_dtype(), kFp32);
    {
      const Autocast on(kCpu, kFp16);
      EXPECT_EQ(product_dtype(), kFp16);
    }
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(Autocast, RestoresWhenAnExceptionLeaves) {
  const Autocast outer(kCpu, kBf16);
  try {
    const Autocast off(kCpu, std::nullopt, false);
    const Autocast inner(kCpu, kFp16);
    const DisableCasts disabled;
    const auto carried = AutocastState::disabled().enter();
    throw std::runtime_error("for the test");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(autocast_enabled(kCpu));
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(Autocast, RestoresWhenAnOperatorRaises) {
  const Autocast region(kCpu, kBf16);
  EXPECT_THROW(at::mm(torch::ones({2, 3}), torch::ones({2, 3})), c10::Error);
  EXPECT_TRUE(autocast_enabled(kCpu));
  EXPECT_EQ(product_dtype(), kBf16);
}

// A program that holds regions by pointers may end them in any order.
TEST(Autocast, EndsInAnyOrder) {
  const bool optimizes_scripts = torch::jit::getGraphExecutorOptimize();
  const auto outside = at::autocast::get_autocast_dtype(kCpu);
  auto a = std::make_unique<Autocast>(kCpu, kBf16);
  auto b = std::make_unique<Autocast>(kCpu, kFp16);
  auto c = std::make_unique<Autocast>(torch::kCUDA, kBf16);
  a.reset();
  EXPECT_EQ(product_dtype(), kFp16) << "the inner region goes on";
  EXPECT_TRUE(autocast_enabled(torch::kCUDA));
  EXPECT_FALSE(torch::jit::getGraphExecutorOptimize());
  b.reset();
  EXPECT_EQ(product_dtype(), kFp32);
  EXPECT_FALSE(autocast_enabled(kCpu));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(kCpu));
  EXPECT_EQ(at::autocast::get_autocast_dtype(kCpu), outside);
  EXPECT_TRUE(autocast_enabled(torch::kCUDA));
  EXPECT_EQ(autocast_dtype(torch::kCUDA), kBf16);
  c.reset();
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCUDA));
  EXPECT_EQ(torch::jit::getGraphExecutorOptimize(), optimizes_scripts);
  EXPECT_EQ(product_dtype(), kFp32);

  a = std::make_unique<Autocast>(kCpu, kBf16);
  b = std::make_unique<Autocast>(kCpu, kFp16);
  c = std::make_unique<Autocast>(kCpu, kFp16, /*enabled=*/false);
  b.reset();
  EXPECT_EQ(product_dtype(), kFp32);
  c.reset();
  EXPECT_EQ(product_dtype(), kBf16);
  a.reset();
  EXPECT_EQ(product_dtype(), kFp32);
}

TEST(Autocast, ThatEndsOnAnotherThreadIsSaidAndDoesNoHarmThere) {
  std::thread([] {
    auto region = std::make_unique<Autocast>(kCpu, kBf16);
    std::thread([&region] {
      const Autocast own(kCpu, kFp16);
      region.reset();
      EXPECT_EQ(product_dtype(), kFp16);
    }).join();
    // The next region of this thread detects it.
    {
      const Autocast next(kCpu, kFp16);
    }
  }).join();
  EXPECT_EQ(product_dtype(), kFp32);
}

TEST(Autocast, ThatEndsOnAnotherThreadLastsNoLongerThanTheRegionAroundIt) {
  auto outer = std::make_unique<Autocast>(kCpu, kBf16);
  auto inner = std::make_unique<Autocast>(kCpu, kFp16);
  std::thread([&inner] { inner.reset(); }).join();
  EXPECT_EQ(product_dtype(), kFp16);
  outer.reset();
  EXPECT_EQ(product_dtype(), kFp32);
  EXPECT_FALSE(autocast_enabled(kCpu));
}

TEST(Autocast, WithoutAGpuSaysOnceThatACudaRegionCastsNothing) {
  if (at::hasCUDA()) return;
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, which said nothing yet
  const auto run = [] {
    {
      const Autocast cpu(kCpu, kBf16);
    }
    {
      const Autocast region(torch::kCUDA, kFp16);
    }
    std::exit(product_dtype() == kFp32 ? 0 : 1);
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(0), "expected a GPU.*default_device");
}

TEST(AutocastAndTheProfiler, StartAndStopInAnyOrder) {
  using namespace torch::autograd::profiler;
  const auto start = [] {
    enableProfilerLegacy(
        torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::CPU));
  };
  // The products that the profiler has recorded.
  const auto stop = [] {
    int products = 0;
    for (const auto& thread : disableProfilerLegacy()) {
      for (const auto& event : thread) {
        products += event.kind() == EventKind::PushRange && std::string(event.name()) == "aten::mm";
      }
    }
    return products;
  };
  {
    start();
    const Autocast region(kCpu, kBf16);
    EXPECT_EQ(product_dtype(), kBf16);
    EXPECT_EQ(stop(), 1) << "stopped inside";
    EXPECT_EQ(product_dtype(), kBf16);
  }
  EXPECT_EQ(product_dtype(), kFp32);
  {
    const Autocast region(kCpu, kBf16);
    start();
    EXPECT_EQ(product_dtype(), kBf16);
  }
  EXPECT_EQ(product_dtype(), kFp32);
  EXPECT_EQ(stop(), 2) << "stopped after it";
  start();
  {
    const Autocast region(kCpu, kBf16);
    const Autocast inner(kCpu, kFp16);
    EXPECT_EQ(product_dtype(), kFp16);
  }
  EXPECT_EQ(product_dtype(), kFp32);
  EXPECT_EQ(stop(), 2) << "around it";
}

TEST(Autocast, ConcernsItsDeviceOnly) {
  {
    const Autocast region(torch::kCUDA, kFp16);
    EXPECT_TRUE(autocast_enabled(torch::kCUDA));
    EXPECT_FALSE(autocast_enabled(kCpu));
    EXPECT_EQ(product_dtype(), kFp32);
    {
      const Autocast on_cpu(kCpu, kBf16);
      EXPECT_EQ(product_dtype(), kBf16);
      EXPECT_EQ(autocast_dtype(torch::kCUDA), kFp16);
    }
    EXPECT_TRUE(autocast_enabled(torch::kCUDA));
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_FALSE(autocast_enabled(torch::kCUDA));
  EXPECT_FALSE(autocast_enabled(torch::kMeta)) << "a device without autocast is never in a region";
}

TEST(Autocast, LeavesLibTorchsOwnStateAsItWas) {
  at::autocast::set_autocast_dtype(kCpu, kFp16);
  at::autocast::set_autocast_enabled(kCpu, true);
  {
    const Autocast region(kCpu, kBf16);
    EXPECT_EQ(product_dtype(), kBf16);
    const Autocast off(kCpu, std::nullopt, false);
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_TRUE(at::autocast::is_autocast_enabled(kCpu));
  EXPECT_EQ(at::autocast::get_autocast_dtype(kCpu), kFp16);
  EXPECT_EQ(product_dtype(), kFp16);
  at::autocast::set_autocast_enabled(kCpu, false);
  at::autocast::set_autocast_dtype(kCpu, kBf16);
  at::autocast::clear_cache();
}

TEST(Autocast, RefusesOtherDtypesAndDevices) {
  expect_error([] { const Autocast region(kCpu, torch::kDouble); },
               {"float16 or bfloat16", "float64"});
  expect_error([] { const Autocast region(torch::kMeta); }, {"device type", "meta"});
  EXPECT_FALSE(autocast_enabled(kCpu));
}

TEST(AutocastLeavesAlone, DoublesIntegersAndComplexNumbers) {
  const auto wide = torch::rand({4, 4}, torch::kDouble);
  const auto whole = torch::ones({4, 4}, torch::kLong);
  const auto complex = torch::rand({4, 4}, torch::kComplexFloat);
  for (const char* preset : {"semitone", "apex", "paddle"}) {
    SCOPED_TRACE(preset);
    const auto in_region = [&](auto&& run) {
      const Autocast region(CastPolicy::by_name(preset, {kCpu, kBf16}));
      return run();
    };
    expect_bitwise_equal(in_region([&] { return at::mm(wide, wide); }), at::mm(wide, wide));
    expect_bitwise_equal(in_region([&] { return at::softmax(wide, 0); }), at::softmax(wide, 0));
    expect_bitwise_equal(in_region([&] { return at::sum(whole); }), at::sum(whole));
    expect_bitwise_equal(in_region([&] { return at::cat({whole, whole}); }),
                         at::cat({whole, whole}));
    EXPECT_EQ(in_region([&] { return at::mm(complex, complex); }).scalar_type(),
              torch::kComplexFloat);
    EXPECT_EQ(in_region([&] { return at::exp(whole); }).scalar_type(), kFp32);
    EXPECT_THROW(in_region([&] { return at::mm(wide, wide.to(kFp32)); }), c10::Error);
  }
}

TEST(AutocastLeavesAlone, TensorsOfOtherDevices) {
  const Autocast region(kCpu, kBf16);
  const auto meta = torch::empty({4, 4}, torch::kMeta);
  EXPECT_EQ(at::mm(meta, meta).scalar_type(), kFp32);
}

TEST(AutocastLeavesAlone, UndefinedTensorsAndEmptyLists) {
  const Autocast region(kCpu, kBf16);
  const auto x = torch::rand({2, 4});
  EXPECT_EQ(at::linear(x, x, {}).scalar_type(), kBf16);
  EXPECT_EQ(at::layer_norm(x, {4}, {}, {}).scalar_type(), kFp32);
  EXPECT_THROW(at::cat(std::vector<at::Tensor>{}), c10::Error);
}

TEST(AutocastLeavesAlone, InPlaceOperatorsAndOutOverloads) {
  for (const char* preset : {"semitone", "torch", "paddle"}) {
    SCOPED_TRACE(preset);
    const auto x = torch::rand({4, 4});
    const Autocast region(CastPolicy::by_name(preset, {kCpu, kBf16}));
    auto out = torch::empty({4, 4});
    at::mm_out(out, x, x);
    EXPECT_EQ(out.scalar_type(), kFp32);
    auto sum = torch::zeros({4, 4});
    sum.addmm_(x, x);
    expect_bitwise_equal(sum, out);
    EXPECT_THROW(sum.addmm_(x.to(kBf16), x), c10::Error) << "mixed arguments raise as outside";
    auto low = x.to(kBf16);
    low.add_(x);
    EXPECT_EQ(low.scalar_type(), kBf16);
    low += 1;
    EXPECT_EQ(low.exp_().scalar_type(), kBf16);
  }
}

TEST(AutocastDtypeArgument, OfTheCallerIsRespected) {
  const auto low = torch::rand({4, 4}).to(kBf16);
  for (const char* preset : {"semitone", "apex", "paddle"}) {
    SCOPED_TRACE(preset);
    const Autocast region(CastPolicy::by_name(preset, {kCpu, kBf16}));
    EXPECT_EQ(at::softmax(low, 0).scalar_type(), kFp32);
    EXPECT_EQ(at::softmax(low, 0, kBf16).scalar_type(), kBf16);
    EXPECT_EQ(at::softmax(low, 0, torch::kDouble).scalar_type(), torch::kDouble);
    EXPECT_EQ(at::sum(low).scalar_type(), kFp32);
    EXPECT_EQ(at::sum(low, kBf16).scalar_type(), kBf16);
    EXPECT_EQ(at::cumsum(low, 0, torch::kDouble).scalar_type(), torch::kDouble);
    EXPECT_EQ(at::prod(low, 0, false, kBf16).scalar_type(), kBf16);
    EXPECT_EQ(at::norm(low, 2, torch::kDouble).scalar_type(), torch::kDouble);
  }
}

TEST(DisableCasts, TurnsEveryDeviceOffAndNestsBothWays) {
  const Autocast region(kCpu, kBf16);
  {
    const DisableCasts outer;
    EXPECT_EQ(product_dtype(), kFp32);
    EXPECT_FALSE(autocast_enabled(kCpu));
    {
      const DisableCasts inner;
      EXPECT_EQ(product_dtype(), kFp32);
    }
    EXPECT_EQ(product_dtype(), kFp32);
    {
      const Autocast again(kCpu, kFp16);
      EXPECT_EQ(product_dtype(), kFp16);
      const DisableCasts innermost;
      EXPECT_EQ(product_dtype(), kFp32);
    }
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(DisableCasts, MayOutliveItsRegionAndOneInsideIt) {
  for (const bool by_state : {false, true}) {
    std::optional<DisableCasts> off;
    std::optional<AutocastState::Scope> state;
    const auto turn_off = [&] {
      if (by_state) {
        state.emplace(AutocastState::disabled().enter());
      } else {
        off.emplace();
      }
    };
    const auto turn_on = [&] {
      off.reset();
      state.reset();
    };
    std::optional<Autocast> region;
    region.emplace(kCpu, kBf16);
    turn_off();
    region.reset();
    EXPECT_EQ(product_dtype(), kFp32);
    turn_on();
    EXPECT_EQ(product_dtype(), kFp32);
    EXPECT_FALSE(at::autocast::is_autocast_enabled(kCpu));

    const Autocast outer(kCpu, kBf16);
    turn_off();
    region.emplace(kCpu, kFp16);
    turn_on();
    EXPECT_EQ(product_dtype(), kFp16);
    region.reset();
    EXPECT_EQ(product_dtype(), kBf16);
  }
}

TEST(DisableCasts, OutsideOfARegionDoesNothing) {
  {
    const DisableCasts disabled;
  }
  EXPECT_EQ(product_dtype(), kFp32);
  const Autocast region(kCpu, kBf16);
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(DisableCasts, LiftsBansToo) {
  const Autocast region(CastPolicy::apex({kCpu, kFp16}));
  const DisableCasts disabled;
  EXPECT_NO_THROW(torch::ones({2}, kFp16).exp_());
}

}  // namespace
}  // namespace semitone::amp::autocast_test
