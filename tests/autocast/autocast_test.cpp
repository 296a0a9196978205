#include "semitone/autocast/autocast.h"

#include "semitone/core/dtype.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/profiler_legacy.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <future>
#include <latch>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace semitone::amp::autocast_test {
namespace {

using test::error_of;
using test::expect_bitwise_equal;
using test::expect_close;
using test::expect_error;

constexpr auto kCpu = torch::kCPU;
constexpr auto kFp32 = torch::kFloat;
constexpr auto kFp16 = torch::kHalf;
constexpr auto kBf16 = torch::kBFloat16;

// The dtype of a matrix product of fp32 tensors in the current region.
c10::ScalarType product_dtype() {
  return at::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

std::string dtype_param_name(const testing::TestParamInfo<c10::ScalarType>& tested) {
  return dtype_name(tested.param);
}

// ---- regions -----------------------------------------------------------------------------------

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
    const Autocast off(kCpu, kBf16, /*enabled=*/false);
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

// ---- LibTorch's profiler, whose state is in the same chain as the regions ----------------------

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

// ---- which operator in which dtype, by preset --------------------------------------------------

// The presets in the order of OpCase::by_preset.
constexpr std::array<std::string_view, 5> kPresetColumns{"torch", "semitone", "apex", "paddle",
                                                         "paddle-o2"};

struct OpCase {
  const char* name;
  // What each preset of kPresetColumns does with the operator, one letter for each: l lowers to 16
  // bits, f casts to fp32, - casts nothing. "lllf-": torch, semitone and apex lower, paddle casts to
  // fp32, paddle-o2 leaves the dtypes. Preset none never casts.
  const char* by_preset;

  // The letter of a preset; nothing for one without a column.
  std::optional<char> in(std::string_view preset) const {
    if (preset == "none") return '-';
    const auto column = std::find(kPresetColumns.begin(), kPresetColumns.end(), preset);
    if (column == kPresetColumns.end()) return std::nullopt;
    return by_preset[column - kPresetColumns.begin()];
  }
  at::Tensor (*run)(const at::Tensor& x);  // x: 4x4, positive; all other arguments in its dtype
};

at::Tensor image(const at::Tensor& x) {
  return x.view({1, 1, 4, 4});
}

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> cases{
      {"mm", "lllll", [](const at::Tensor& x) { return at::mm(x, x); }},
      {"matmul", "lllll", [](const at::Tensor& x) { return at::matmul(x, x[0]); }},
      {"linear", "lllll", [](const at::Tensor& x) { return at::linear(x, x, x[0]); }},
      {"functional_linear", "lllll",
       [](const at::Tensor& x) { return torch::nn::functional::linear(x, x, x[0]); }},
      {"addmm", "lllll", [](const at::Tensor& x) { return at::addmm(x, x, x); }},
      {"bmm", "lllll", [](const at::Tensor& x) { return at::bmm(x.unsqueeze(0), x.unsqueeze(0)); }},
      {"baddbmm", "lll--",
       [](const at::Tensor& x) {
         return at::baddbmm(x.unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0));
       }},
      {"mv", "-llll", [](const at::Tensor& x) { return at::mv(x, x[0]); }},
      {"addmv", "-ll--", [](const at::Tensor& x) { return at::addmv(x[0], x, x[0]); }},
      {"conv1d", "lll--",
       [](const at::Tensor& x) { return at::conv1d(x.view({1, 2, 8}), x.view({4, 2, 2})); }},
      {"conv2d", "lllll", [](const at::Tensor& x) { return at::conv2d(image(x), image(x)); }},
      {"conv2d_padding", "lllll",
       [](const at::Tensor& x) { return at::conv2d(image(x), image(x), {}, 1, "same"); }},
      {"functional_conv2d", "lllll",
       [](const at::Tensor& x) { return torch::nn::functional::conv2d(image(x), image(x)); }},
      {"conv_transpose2d", "lll--",
       [](const at::Tensor& x) { return at::conv_transpose2d(image(x), image(x)); }},
      // Not in the lists of torch and apex, but composed of bmm, which is.
      {"einsum", "lllll", [](const at::Tensor& x) { return at::einsum("ij,jk->ik", {x, x}); }},
      {"scaled_dot_product_attention", "ll-ll",
       [](const at::Tensor& x) {
         const auto q = image(x);
         return at::scaled_dot_product_attention(q, q, q);
       }},
      {"prelu", "lll--", [](const at::Tensor& x) { return at::prelu(x, x[0]); }},
      {"softmax", "-fff-", [](const at::Tensor& x) { return at::softmax(x, 0); }},
      {"log_softmax", "-fff-", [](const at::Tensor& x) { return at::log_softmax(x, 0); }},
      {"exp", "-fff-", [](const at::Tensor& x) { return at::exp(x); }},
      {"log", "-fff-", [](const at::Tensor& x) { return at::log(x); }},
      {"pow", "-fff-", [](const at::Tensor& x) { return at::pow(x, 2); }},
      {"pow_method", "-fff-", [](const at::Tensor& x) { return x.pow(x); }},
      {"rsqrt", "-fff-", [](const at::Tensor& x) { return at::rsqrt(x); }},
      {"softplus", "-fff-", [](const at::Tensor& x) { return at::softplus(x); }},
      {"sum", "-fff-", [](const at::Tensor& x) { return at::sum(x); }},
      {"sum_dim", "-fff-", [](const at::Tensor& x) { return x.sum(0); }},
      {"prod", "ffff-", [](const at::Tensor& x) { return at::prod(x); }},
      {"cumsum", "-fff-", [](const at::Tensor& x) { return at::cumsum(x, 0); }},
      {"norm", "-fff-", [](const at::Tensor& x) { return at::norm(x); }},
      {"linalg_vector_norm", "-f-f-",
       [](const at::Tensor& x) { return at::linalg_vector_norm(x); }},
      {"dist", "-fff-", [](const at::Tensor& x) { return at::dist(x, x); }},
      {"mean", "---f-", [](const at::Tensor& x) { return at::mean(x); }},
      {"var", "--f--", [](const at::Tensor& x) { return at::var(x); }},
      {"gelu", "--f--", [](const at::Tensor& x) { return at::gelu(x); }},
      {"square", "-fff-", [](const at::Tensor& x) { return at::square(x); }},
      {"layer_norm", "--ff-",
       [](const at::Tensor& x) { return at::layer_norm(x, {4}, x[0], x[1]); }},
      {"group_norm", "--ff-", [](const at::Tensor& x) { return at::group_norm(x, 2, x[0], x[1]); }},
      {"mse_loss", "ffff-", [](const at::Tensor& x) { return at::mse_loss(x, x); }},
      {"l1_loss", "ffff-", [](const at::Tensor& x) { return at::l1_loss(x, x); }},
      {"cross_entropy_loss", "ffff-",
       [](const at::Tensor& x) { return at::cross_entropy_loss(x, torch::tensor({0, 1, 2, 3})); }},
      {"nll_loss", "ffff-",
       [](const at::Tensor& x) { return at::nll_loss(x, torch::tensor({0, 1, 2, 3})); }},
      {"bce_with_logits", "ffff-",
       [](const at::Tensor& x) { return at::binary_cross_entropy_with_logits(x, x); }},
      {"upsample_bilinear2d", "-ffff",
       [](const at::Tensor& x) { return at::upsample_bilinear2d(image(x), {8, 8}, false); }},
      {"embedding", "---ff",
       [](const at::Tensor& x) { return at::embedding(x, torch::tensor({0, 2})); }},
      {"max_pool2d", "---ll", [](const at::Tensor& x) { return at::max_pool2d(image(x), 2); }},
      {"relu", "-----", [](const at::Tensor& x) { return at::relu(x); }},
      {"tanh", "-----", [](const at::Tensor& x) { return at::tanh(x); }},
      {"add", "-----", [](const at::Tensor& x) { return x + x; }},
      {"mul", "-----", [](const at::Tensor& x) { return x * x; }},
      {"cat", "-----", [](const at::Tensor& x) { return at::cat({x, x}); }},
      {"batch_norm_training", "-----",
       [](const at::Tensor& x) {
         return at::batch_norm(x, x[0], x[1], {}, {}, true, 0.1, 1e-5, false);
       }},
      {"batch_norm_eval", "-----",
       [](const at::Tensor& x) {
         return at::batch_norm(x, x[0], x[1], x[2].clone(), x[3].clone(), false, 0.1, 1e-5, false);
       }},
  };
  return cases;
}

class PresetOps : public testing::TestWithParam<std::tuple<std::size_t, c10::ScalarType>> {};

TEST_P(PresetOps, RunInTheDtypeOfTheirRow) {
  const OpCase& one = op_cases()[std::get<0>(GetParam())];
  const auto lower = std::get<1>(GetParam());
  torch::manual_seed(3);
  const auto x = torch::rand({4, 4}) + 0.5;
  for (const std::string& preset : CastPolicy::preset_names()) {
    SCOPED_TRACE(preset);
    const auto row = one.in(preset);
    if (!row.has_value()) continue;
    const auto policy = CastPolicy::by_name(preset, {kCpu, lower});
    for (const auto dtype : {kFp32, lower}) {
      SCOPED_TRACE(dtype_name(dtype) + " input");
      const auto input = x.to(dtype);
      // No cast is missing or superfluous: the numbers are those of explicit casts, up to the
      // rounding of the result (where fp16 is emulated, the sums inside are more exact).
      const auto run_in = row == 'l' ? lower : row == 'f' ? kFp32 : dtype;
      const at::Tensor by_hand = one.run(input.to(run_in));
      at::Tensor got;
      {
        const Autocast region(policy);
        got = one.run(input);
      }
      EXPECT_EQ(got.scalar_type(), run_in);
      expect_close(got, by_hand, test::reduction_tolerance(run_in, 16));
      EXPECT_EQ(input.scalar_type(), dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Autocast, PresetOps,
                         testing::Combine(testing::Range(std::size_t{0}, op_cases().size()),
                                          testing::Values(kBf16, kFp16)),
                         [](const auto& tested) {
                           return std::string(op_cases()[std::get<0>(tested.param)].name) + "_" +
                                  dtype_name(std::get<1>(tested.param));
                         });

// Operators without a 16-bit kernel on a CPU.
TEST(AutocastPolicies, RunInFp32WhatLibTorchHasNo16BitKernelFor) {
  const auto x = torch::rand({4, 4});
  for (const char* preset : {"torch", "semitone"}) {
    SCOPED_TRACE(preset);
    const Autocast region(CastPolicy::by_name(preset, {kCpu, kBf16}));
    const auto low = x.to(kBf16);
    EXPECT_EQ(at::cdist(low, low).scalar_type(), kFp32);
    EXPECT_EQ(at::avg_pool3d(low.view({1, 1, 1, 4, 4}), 1).scalar_type(), kFp32);
    EXPECT_EQ(at::inverse(low + torch::eye(4)).scalar_type(), kFp32);
    EXPECT_EQ(std::get<0>(at::linalg_qr(low)).scalar_type(), kFp32);
    EXPECT_EQ(at::fft_rfft(low).scalar_type(), torch::kComplexFloat);
  }
}

// A policy's own edits override the preset's rows.
TEST(AutocastPolicies, ObeyEdits) {
  const auto x = torch::rand({4, 4});
  const auto policy = CastPolicy::semitone({kCpu, kBf16})
                          .keep_fp32("mm")
                          .lower("tanh")
                          .leave("softmax")
                          .keep_fp32("relu");
  const Autocast region(policy);
  EXPECT_EQ(at::mm(x.to(kBf16), x).scalar_type(), kFp32);
  EXPECT_EQ(at::tanh(x).scalar_type(), kBf16);
  EXPECT_EQ(at::softmax(x.to(kBf16), 0).scalar_type(), kBf16);
  EXPECT_EQ(at::relu(x.to(kBf16)).scalar_type(), kFp32);
  EXPECT_EQ(at::matmul(x, x).scalar_type(), kBf16) << "a row of its own";
}

TEST(AutocastPolicies, KeptParametersKeepTheirOperatorsInFp32) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  const auto policy = CastPolicy::semitone({kCpu, kBf16}).keep_fp32_params("1.*").bind(net);
  for (const auto& x : {torch::rand({2, 4}), torch::rand({2, 3, 4})}) {
    at::Tensor first;
    at::Tensor second;
    {
      const Autocast region(policy);
      first = net[0]->as<torch::nn::Linear>()->forward(x);
      second = net[1]->as<torch::nn::Linear>()->forward(first);
    }
    EXPECT_EQ(first.scalar_type(), kBf16);
    EXPECT_EQ(second.scalar_type(), kFp32);
    expect_close(second, net[1]->as<torch::nn::Linear>()->forward(first.to(kFp32)),
                 test::reduction_tolerance(kFp32, 4));
  }
}

// An operator that writes to an argument cannot be cast: it would write to the copy.
TEST(AutocastPolicies, KeptParametersLeaveOperatorsAloneThatWriteToAnArgument) {
  torch::nn::Linear linear(2, 2);
  {
    const torch::NoGradGuard no_grad;
    linear->bias.fill_(3);
  }
  const auto low = [](double value) { return torch::full({2}, value, kFp16); };
  const auto apex = CastPolicy::apex({kCpu, kFp16}).keep_fp32_params("bias");
  const torch::NoGradGuard no_grad;
  {
    const Autocast region(CastPolicy(apex).leave("pow_").bind(linear));
    auto x = low(2);
    x.pow_(linear->bias);
    expect_bitwise_equal(x, low(8));
    auto y = low(2);
    y.add_(linear->bias);
    expect_bitwise_equal(y, low(5));
    auto out = low(0);
    at::mul_out(out, low(2), linear->bias);
    expect_bitwise_equal(out, low(6));
  }
  const Autocast region(apex.bind(linear));
  auto x = low(2);
  expect_error([&] { x.pow_(linear->bias); }, {"'pow_.Tensor'", "'apex'"});
  expect_bitwise_equal(x, low(2));
}

struct KeptCase {
  const char* name;
  at::Tensor (*run)(const at::Tensor& weight, const at::Tensor& x);  // x: 16 bits, 4x4 as weight
};

const std::vector<KeptCase>& kept_cases() {
  static const std::vector<KeptCase> cases{
      {"mm", [](const at::Tensor& w, const at::Tensor& x) { return at::mm(w, x); }},
      {"mv", [](const at::Tensor& w, const at::Tensor& x) { return at::mv(w, x[0]); }},
      {"matmul", [](const at::Tensor& w, const at::Tensor& x) { return at::matmul(x, w.t()); }},
      {"linear", [](const at::Tensor& w, const at::Tensor& x) { return at::linear(x, w); }},
      {"addr", [](const at::Tensor& w, const at::Tensor& x) { return at::addr(w, x[0], x[1]); }},
      {"dot", [](const at::Tensor& w, const at::Tensor& x) { return at::dot(w[0], x[0]); }},
      {"einsum",
       [](const at::Tensor& w, const at::Tensor& x) { return at::einsum("ij,jk->ik", {x, w}); }},
      {"prelu", [](const at::Tensor& w, const at::Tensor& x) { return at::prelu(x, w[0]); }},
      {"cat", [](const at::Tensor& w, const at::Tensor& x) { return at::cat({x, w}); }},
      {"layer_norm",
       [](const at::Tensor& w, const at::Tensor& x) { return at::layer_norm(x, {4}, w[0]); }},
      {"relu", [](const at::Tensor& w, const at::Tensor&) { return at::relu(w); }},
      {"mul", [](const at::Tensor& w, const at::Tensor& x) { return w * x; }}};
  return cases;
}

class KeptParameters : public testing::TestWithParam<std::string> {};

// Also if the policy's own table does not list the operator, and for any policies that this process
// has used: in the test amp_test.first_use.presets each preset is the first of a process.
TEST_P(KeptParameters, KeepEveryCastOperatorInFp32) {
  torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
  const auto x = torch::rand({4, 4}).to(kBf16);
  const auto policy = CastPolicy::by_name(GetParam(), {kCpu, kBf16}).keep_fp32_params("weight");
  const torch::NoGradGuard no_grad;
  const Autocast region(policy.bind(linear));
  for (const KeptCase& one : kept_cases()) {
    SCOPED_TRACE(one.name);
    const at::Tensor got = one.run(linear->weight, x);
    EXPECT_EQ(got.scalar_type(), kFp32);
    const DisableCasts no_casts;
    expect_close(got, one.run(linear->weight, x.to(kFp32)), test::reduction_tolerance(kFp32, 4));
  }
}

INSTANTIATE_TEST_SUITE_P(AutocastPolicies, KeptParameters,
                         testing::ValuesIn(CastPolicy::preset_names()), [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// An operator that neither the policy nor preset semitone lists is not cast, even if another policy
// has installed a kernel for it.
TEST(AutocastPolicies, KeptParametersDoNotCastWhatNoListNames) {
  torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
  const auto x = torch::rand({4, 4}).to(kBf16);
  const auto policy = CastPolicy::none({kCpu, kBf16}).keep_fp32_params("weight").bind(linear);
  const torch::NoGradGuard no_grad;
  const auto raises = [&] {
    const Autocast region(policy);
    EXPECT_THROW(at::lerp(linear->weight, x, 0.5), c10::Error);
  };
  raises();
  {
    const Autocast installs(CastPolicy::none({kCpu, kBf16}).keep_fp32("lerp"));
    EXPECT_EQ(at::lerp(linear->weight, x, 0.5).scalar_type(), kFp32);
  }
  raises();
  const Autocast region(
      CastPolicy::none({kCpu, kBf16}).leave("lerp").keep_fp32_params("weight").bind(linear));
  EXPECT_EQ(at::lerp(linear->weight, x, 0.5).scalar_type(), kFp32) << "a row of its own";
}

TEST(AutocastPolicies, KeptParametersWithoutAModelAreAnError) {
  const auto policy = CastPolicy::semitone({kCpu, kBf16}).keep_fp32_params("nosuch*");
  expect_error([&] { const Autocast region(policy); },
               {"[amp.autocast]", "'nosuch*'", "policy.bind(model)"});
  EXPECT_FALSE(autocast_enabled(kCpu));
}

TEST(AutocastPolicies, ParametersMayBeKeptAfterBind) {
  torch::nn::Linear linear(4, 4);
  auto policy = CastPolicy::semitone({kCpu, kBf16}).bind(linear);
  policy.keep_fp32_params("weight");
  const Autocast region(policy);
  EXPECT_EQ(linear(torch::rand({2, 4})).scalar_type(), kFp32);
}

// ---- promotion ---------------------------------------------------------------------------------

struct Promotion {
  c10::ScalarType a;
  c10::ScalarType b;
  c10::ScalarType promote;  // in a bf16 region
  c10::ScalarType widest;
};

const std::vector<Promotion> kPromotions{
    {kFp32, kFp32, kFp32, kFp32},
    {kFp32, kBf16, kFp32, kFp32},
    {kFp32, kFp16, kFp32, kFp32},
    {kBf16, kBf16, kBf16, kBf16},
    {kBf16, kFp16, kFp32, kFp32},
    // fp16 alone meets the region's bf16 in promote, and nothing else in widest.
    {kFp16, kFp16, kFp32, kFp16}};

TEST(AutocastPromotion, GoesToTheWidestDtype) {
  const auto x = torch::rand({4}) + 0.5;
  const auto base = CastPolicy::none({kCpu, kBf16});
  const auto promote =
      CastPolicy(base).promote("atan2").promote("cat").promote("dot").promote("addcmul");
  const auto widest =
      CastPolicy(base).widest("atan2").widest("cat").widest("dot").widest("addcmul");
  for (const Promotion& one : kPromotions) {
    for (const auto& [first, second] : {std::pair{one.a, one.b}, std::pair{one.b, one.a}}) {
      SCOPED_TRACE(dtype_name(first) + " with " + dtype_name(second));
      const auto a = x.to(first);
      const auto b = x.to(second);
      for (const auto& [policy, want] :
           {std::pair{&promote, one.promote}, std::pair{&widest, one.widest}}) {
        const Autocast region(*policy);
        EXPECT_EQ(at::atan2(a, b).scalar_type(), want);
        EXPECT_EQ(at::cat({a, b, a}).scalar_type(), want);
        EXPECT_EQ(at::dot(a, b).scalar_type(), want);
        EXPECT_EQ(at::addcmul(a, b, b).scalar_type(), want);
      }
    }
  }
}

TEST(AutocastPromotion, CopiesTheListOfACaller) {
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}));
  const std::vector<at::Tensor> tensors{torch::ones({2}), torch::ones({2}, kBf16)};
  EXPECT_EQ(at::cat(tensors).scalar_type(), kFp32);
  EXPECT_EQ(at::stack(tensors).scalar_type(), kFp32);
  EXPECT_EQ(tensors[1].scalar_type(), kBf16);
}

TEST(AutocastPromotion, MixedArgumentsThatLibTorchsCpuListRefusesWorkInPresetSemitone) {
  const auto x = torch::rand({4, 4});
  const auto low = x.to(kBf16);
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}));
  EXPECT_EQ(at::mv(low, x[0]).scalar_type(), kBf16);
  EXPECT_EQ(at::dot(low[0], x[0]).scalar_type(), kFp32);
  EXPECT_EQ(at::index_put(low, {torch::tensor({0})}, x[0]).scalar_type(), kFp32);
  EXPECT_EQ(at::scatter_add(low, 0, torch::zeros({4, 4}, torch::kLong), x).scalar_type(), kFp32);
  EXPECT_EQ(at::bilinear(low, x, x.view({1, 4, 4})).scalar_type(), kFp32);
}

// Preset torch behaves as LibTorch, also where LibTorch raises, for any other policies that this
// process has used.
TEST(AutocastPromotion, PresetTorchRaisesWhereLibTorchRaises) {
  const auto half = torch::ones({2}, kFp16);
  {
    const Autocast installs(CastPolicy::apex(kCpu));
  }
  const Autocast region(CastPolicy::torch({kCpu, kBf16}));
  EXPECT_THROW(at::cat({half, half}), c10::Error);
  EXPECT_EQ(at::cat({half.to(kBf16), torch::ones({2})}).scalar_type(), kFp32);
}

// ---- bans --------------------------------------------------------------------------------------

TEST(AutocastBan, RefusesA16BitArgumentAndSaysWhatToDo) {
  const auto p = torch::full({3}, 0.5);
  {
    const Autocast region(CastPolicy::apex({kCpu, kFp16}));
    expect_error([&] { (void)at::binary_cross_entropy(p.to(kFp16), p); },
                 {"[amp.autocast]", "'binary_cross_entropy'", "'apex'", "float16",
                  "policy.keep_fp32(\"binary_cross_entropy\")"});
    EXPECT_EQ(at::binary_cross_entropy(p, p).scalar_type(), kFp32) << "fp32 arguments pass";
  }
  // Apex's allow_banned.
  const Autocast region(CastPolicy::apex({kCpu, kFp16}).keep_fp32("binary_cross_entropy"));
  EXPECT_EQ(at::binary_cross_entropy(p.to(kFp16), p).scalar_type(), kFp32);
}

TEST(AutocastBan, OfAnInPlaceOperatorProposesAnEditThatIsPossible) {
  const Autocast region(CastPolicy::apex({kCpu, kFp16}));
  auto low = torch::ones({3}, kFp16);
  expect_error([&] { low.exp_(); }, {"'exp_'", "policy.leave(\"exp_\")"});
  EXPECT_EQ(low[0].item<float>(), 1) << "nothing was written";
  auto wide = torch::zeros({3});
  EXPECT_EQ(wide.exp_()[0].item<float>(), 1);
  const Autocast relaxed(CastPolicy::apex({kCpu, kFp16}).leave("exp_"));
  EXPECT_EQ(low.exp_().scalar_type(), kFp16);
}

// ---- what is left alone ------------------------------------------------------------------------

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

// ---- gradients ---------------------------------------------------------------------------------

class AutocastGradients : public testing::TestWithParam<c10::ScalarType> {
 protected:
  void SetUp() override { torch::manual_seed(4); }
  CastPolicy semitone() const { return CastPolicy::semitone({kCpu, GetParam()}); }
};

TEST_P(AutocastGradients, HaveTheDtypeOfTheirLeafAndOfTheirInput) {
  for (const auto input_dtype : {kFp32, GetParam()}) {
    for (const char* preset : {"semitone", "apex", "paddle", "torch"}) {
      SCOPED_TRACE(std::string(preset) + ", " + dtype_name(input_dtype));
      torch::nn::Linear linear(4, 4);
      torch::nn::Conv2d conv(torch::nn::Conv2dOptions(1, 2, 3));
      const auto x = torch::rand({4, 4}).to(input_dtype).requires_grad_();
      const auto picture = torch::rand({1, 1, 5, 5}).to(input_dtype).requires_grad_();
      at::Tensor loss;
      {
        const Autocast region(CastPolicy::by_name(preset, {kCpu, GetParam()}));
        const auto y = at::softmax(at::relu(linear(x)), 1);
        loss = at::mse_loss(y, torch::zeros_like(y)) + conv(picture).sum();
      }
      loss.backward();
      EXPECT_EQ(x.grad().scalar_type(), input_dtype);
      EXPECT_EQ(picture.grad().scalar_type(), input_dtype);
      for (const auto& parameter : linear->parameters())
        EXPECT_EQ(parameter.grad().scalar_type(), kFp32);
      for (const auto& parameter : conv->parameters())
        EXPECT_EQ(parameter.grad().scalar_type(), kFp32);
    }
  }
}

TEST_P(AutocastGradients, AreTheSameWhetherBackwardRunsInTheRegionOrAfter) {
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 3));
  const auto x = torch::rand({5, 8});
  std::vector<std::vector<at::Tensor>> gradients;
  for (const bool inside : {false, true}) {
    net->zero_grad();
    {
      std::optional<Autocast> region(semitone());
      const auto loss = at::cross_entropy_loss(net->forward(x), torch::tensor({0, 1, 2, 0, 1}));
      if (!inside) region.reset();
      loss.backward();
    }
    auto& found = gradients.emplace_back();
    for (const auto& parameter : net->parameters()) found.push_back(parameter.grad().clone());
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    expect_bitwise_equal(gradients[0][i], gradients[1][i]);
}

TEST_P(AutocastGradients, OfAGradientWork) {
  const auto w = torch::rand({4, 4}).requires_grad_();
  const auto x = torch::rand({4, 4}).requires_grad_();
  at::Tensor penalty;
  {
    const Autocast region(semitone());
    const auto y = at::mm(x, w).sum();
    const auto grad = torch::autograd::grad({y}, {x}, {}, true, true)[0];
    EXPECT_EQ(grad.scalar_type(), kFp32);
    penalty = grad.pow(2).sum();
  }
  penalty.backward();
  // d/dw of sum((rowsum w)^2) * 4 rows = 8 * rowsum.
  const auto want = (8 * w.detach().sum(1)).unsqueeze(1).expand({4, 4});
  expect_close(w.grad(), want, 4 * test::pointwise_tolerance(GetParam()));
}

// ---- composite operators and modules -----------------------------------------------------------

// fp32 values that the dtype represents, so casting does not change them.
at::Tensor held(const at::Tensor& values, c10::ScalarType dtype) {
  return values.to(dtype).to(kFp32);
}
void hold(torch::nn::Module& module, c10::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module.parameters()) parameter.copy_(held(parameter, dtype));
}

// The tolerance for this number of successive roundings, each by up to half a unit in any
// direction. Their sum has a standard deviation of 0.58 sqrt(count) half units, and one of some
// hundred elements is 3.5 times that away. Sums are in fp32 and add nothing.
double roundings(c10::ScalarType dtype, int count) {
  return test::rounding_tolerance(dtype) * 2 * std::sqrt(count);
}

// Compares a module on x in fp32 and in a region, with the gradients of both; the 16-bit dtype
// represents weights and x exactly. The two differ only by the roundings of intermediate results.
template <typename Run>
void expect_only_roundings(torch::nn::Module& module, at::Tensor x, const CastPolicy& policy,
                           const Run& run, double results_apart, double gradients_apart,
                           std::optional<c10::ScalarType> result_dtype = std::nullopt) {
  hold(module, policy.dtype());
  x = held(x, policy.dtype()).requires_grad_();
  std::vector<at::Tensor> leaves{x};
  std::vector<std::string> names{"x"};
  for (const auto& item : module.named_parameters()) {
    leaves.push_back(item.value());
    names.push_back(item.key());
  }
  // Each element of a result counts differently: sums of equal gradients can cancel.
  const auto gradients = [&](const std::vector<at::Tensor>& results) {
    std::vector<at::Tensor> grad_outputs;
    for (const at::Tensor& result : results) {
      grad_outputs.push_back(
          held(torch::linspace(0.5, 1.5, result.numel()).view(result.sizes()), policy.dtype())
              .to(result.scalar_type()));
    }
    return torch::autograd::grad(results, leaves, grad_outputs);
  };
  const std::vector<at::Tensor> want = run(x);
  const std::vector<at::Tensor> want_gradients = gradients(want);
  std::vector<at::Tensor> got;
  {
    const Autocast region(policy);
    got = run(x);
  }
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE("result " + std::to_string(i));
    if (result_dtype.has_value()) {
      EXPECT_EQ(got[i].scalar_type(), *result_dtype);
    }
    expect_close(got[i].to(kFp32), want[i], results_apart);
  }
  const std::vector<at::Tensor> got_gradients = gradients(got);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    SCOPED_TRACE("gradient of " + names[i]);
    expect_close(got_gradients[i], want_gradients[i], gradients_apart);
  }
}

TEST_P(AutocastGradients, FlowThroughAttention) {
  torch::manual_seed(4);
  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(8, 2));
  // Projection, scaling, scores, probabilities, their product, projection.
  expect_only_roundings(
      *attention, torch::randn({5, 3, 8}), semitone(),
      [&](const at::Tensor& x) { return std::vector<at::Tensor>{std::get<0>(attention(x, x, x))}; },
      roundings(GetParam(), 6), roundings(GetParam(), 12), GetParam());
}

TEST_P(AutocastGradients, FlowThroughATransformerLayer) {
  torch::manual_seed(4);
  // Smooth: where ReLU's argument is near 0, a rounding switches a gradient on or off.
  torch::nn::TransformerEncoderLayer layer(
      torch::nn::TransformerEncoderLayerOptions(8, 2).dropout(0).dim_feedforward(16).activation(
          torch::kGELU));
  // Attention, two linear layers, two sums and two layer norms.
  expect_only_roundings(
      *layer, torch::randn({5, 3, 8}), semitone(),
      [&](const at::Tensor& x) { return std::vector<at::Tensor>{layer(x)}; },
      roundings(GetParam(), 12), roundings(GetParam(), 24));
}

TEST_P(AutocastGradients, FlowThroughEinsumAndItsRelatives) {
  const auto a = torch::rand({3, 4}).requires_grad_();
  const auto b = torch::rand({4, 5}).requires_grad_();
  const auto c = torch::rand({5, 2}).requires_grad_();
  at::Tensor loss;
  {
    const Autocast region(semitone());
    const auto einsum = at::einsum("ij,jk,kl->il", {a, b, c});
    const auto chain = at::linalg_multi_dot({a, b, c});
    const auto dots = at::tensordot(a, b, {1}, {0});
    EXPECT_EQ(einsum.scalar_type(), GetParam());
    EXPECT_EQ(chain.scalar_type(), GetParam());
    EXPECT_EQ(dots.scalar_type(), kFp32) << "promote: its arguments are fp32";
    loss = einsum.sum() + chain.sum() + dots.sum();
  }
  loss.backward();
  for (const auto& leaf : {a, b, c}) EXPECT_EQ(leaf.grad().scalar_type(), kFp32);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, AutocastGradients, testing::Values(kBf16, kFp16),
                         dtype_param_name);

struct Recurrent {
  const char* kind;
  int layers;
  bool bidirectional;
  bool packed;
  const char* preset;
  c10::ScalarType dtype;
};

class RecurrentNetworks : public testing::TestWithParam<Recurrent> {
 protected:
  void SetUp() override { torch::manual_seed(5); }

  // The output and the last hidden state of a network on padded or packed sequences.
  template <typename Net>
  static std::vector<at::Tensor> run(Net& net, const at::Tensor& x) {
    namespace rnn = torch::nn::utils::rnn;
    std::vector<at::Tensor> results;
    if (GetParam().packed) {
      const auto packed = rnn::pack_padded_sequence(x, torch::tensor({5, 3, 2}));
      const auto [output, hidden] = net->forward_with_packed_input(packed);
      results.push_back(output.data());
      append(results, hidden);
    } else {
      const auto [output, hidden] = net->forward(x);
      results.push_back(output);
      append(results, hidden);
    }
    return results;
  }

  static void append(std::vector<at::Tensor>& results, const at::Tensor& hidden) {
    results.push_back(hidden);
  }
  static void append(std::vector<at::Tensor>& results,
                     const std::tuple<at::Tensor, at::Tensor>& hidden) {
    results.push_back(std::get<0>(hidden));
    results.push_back(std::get<1>(hidden));
  }

  // At each of 5 steps some 4 numbers are rounded on the way from one state to the next.
  template <typename Net>
  static void check(Net net) {
    const int count = 5 * 4 * GetParam().layers;
    const bool torch = std::string(GetParam().preset) == "torch";  // returns some of them in fp32
    at::Tensor x = torch::randn({5, 3, 4});
    if (std::string(GetParam().kind) == "rnn_relu") {
      // Away from where ReLU's gradient jumps.
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& parameter : net->parameters()) parameter.abs_();
      x.abs_();
    }
    expect_only_roundings(
        *net, x, CastPolicy::by_name(GetParam().preset, {kCpu, GetParam().dtype}),
        [&](const at::Tensor& in) { return run(net, in); }, roundings(GetParam().dtype, count),
        roundings(GetParam().dtype, 2 * count),
        torch ? std::nullopt : std::optional(GetParam().dtype));
  }
};

TEST_P(RecurrentNetworks, Give16BitResultsAndFp32Gradients) {
  const auto [kind, layers, bidirectional, packed, preset, dtype] = GetParam();
  const std::string name = kind;
  if (name == "lstm")
    check(torch::nn::LSTM(
        torch::nn::LSTMOptions(4, 6).num_layers(layers).bidirectional(bidirectional)));
  if (name == "gru")
    check(torch::nn::GRU(
        torch::nn::GRUOptions(4, 6).num_layers(layers).bidirectional(bidirectional)));
  if (name == "rnn_tanh" || name == "rnn_relu") {
    auto options = torch::nn::RNNOptions(4, 6).num_layers(layers).bidirectional(bidirectional);
    if (name == "rnn_relu") options.nonlinearity(torch::kReLU);
    check(torch::nn::RNN(options));
  }
}

INSTANTIATE_TEST_SUITE_P(Autocast, RecurrentNetworks, testing::ValuesIn([] {
                           std::vector<Recurrent> cases;
                           for (const char* kind : {"lstm", "gru", "rnn_tanh", "rnn_relu"}) {
                             for (const char* preset : {"semitone", "apex", "torch"}) {
                               for (const auto dtype : {kBf16, kFp16}) {
                                 cases.push_back({kind, 1, false, false, preset, dtype});
                                 cases.push_back({kind, 2, true, false, preset, dtype});
                                 cases.push_back({kind, 2, false, true, preset, dtype});
                               }
                             }
                           }
                           return cases;
                         }()),
                         [](const auto& tested) {
                           const Recurrent& one = tested.param;
                           return std::string(one.kind) + "_" + std::to_string(one.layers) +
                                  (one.bidirectional ? "_bidirectional" : "") +
                                  (one.packed ? "_packed_" : "_") + one.preset + "_" +
                                  dtype_name(one.dtype);
                         });

class RecurrentCells : public testing::TestWithParam<c10::ScalarType> {
 protected:
  template <typename Cell, typename First>
  static void check(Cell cell, First first) {
    for (const char* preset : {"semitone", "apex"}) {
      SCOPED_TRACE(preset);
      expect_only_roundings(
          *cell, torch::randn({3, 4}), CastPolicy::by_name(preset, {kCpu, GetParam()}),
          [&](const at::Tensor& x) { return std::vector<at::Tensor>{first(cell(x))}; },
          roundings(GetParam(), 6), roundings(GetParam(), 12), GetParam());
    }
  }
};

TEST_P(RecurrentCells, Give16BitResultsAndFp32Gradients) {
  torch::manual_seed(6);
  check(torch::nn::LSTMCell(4, 6), [](const auto& state) { return std::get<0>(state); });
  check(torch::nn::GRUCell(4, 6), [](const at::Tensor& state) { return state; });
  check(torch::nn::RNNCell(4, 6), [](const at::Tensor& state) { return state; });
  torch::nn::RNNCell relu(torch::nn::RNNCellOptions(4, 6).nonlinearity(torch::kReLU));
  {
    const torch::NoGradGuard no_grad;
    relu->bias_ih.fill_(4);  // away from where ReLU's gradient jumps
  }
  check(relu, [](const at::Tensor& state) { return state; });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, RecurrentCells, testing::Values(kBf16, kFp16), dtype_param_name);

// ---- DisableCasts ------------------------------------------------------------------------------

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

// ---- other threads -----------------------------------------------------------------------------

c10::ScalarType on_launched_task() {
  std::promise<c10::ScalarType> promise;
  at::launch([&promise] { promise.set_value(product_dtype()); });
  return promise.get_future().get();
}

c10::ScalarType on_new_thread() {
  c10::ScalarType dtype = kFp32;
  std::thread([&dtype] { dtype = product_dtype(); }).join();
  return dtype;
}

TEST(AutocastThreads, LibTorchsHelpersAreInTheRegion) {
  const Autocast region(CastPolicy::semitone({kCpu, kFp16}).keep_fp32("mm"));
  EXPECT_EQ(on_launched_task(), kFp32) << "the policy comes along, not only the dtype";
  const Autocast inner(kCpu, kFp16);
  EXPECT_EQ(on_launched_task(), kFp16);
}

TEST(AutocastThreads, BackwardSeesTheRegionThatBackwardIsCalledIn) {
  struct Spy : torch::autograd::Function<Spy> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x * 2;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list& grads) {
      EXPECT_EQ(product_dtype(), kFp16);
      return {grads[0] * 2};
    }
  };
  const auto x = torch::ones({2}).requires_grad_();
  const Autocast region(kCpu, kFp16);
  Spy::apply(x).sum().backward();
}

TEST(AutocastThreads, AThreadOfOnesOwnIsInNoRegion) {
  const Autocast region(kCpu, kFp16);
  EXPECT_EQ(on_new_thread(), kFp32);
}

TEST(AutocastState, TakesTheRegionsToAnotherThread) {
  const Autocast region(CastPolicy::semitone({kCpu, kFp16}));
  const auto state = AutocastState::current();
  std::thread([&state] {
    {
      const auto scope = state.enter();
      EXPECT_TRUE(autocast_enabled(kCpu));
      EXPECT_EQ(autocast_dtype(kCpu), kFp16);
      EXPECT_EQ(product_dtype(), kFp16);
    }
    EXPECT_FALSE(autocast_enabled(kCpu));
    EXPECT_EQ(product_dtype(), kFp32);
  }).join();
}

TEST(AutocastState, WorksInParallelForOnEveryWorker) {
  const Autocast region(kCpu, kFp16);
  std::atomic<int> wrong = 0;
  at::parallel_for(
      0, 64, 1, [state = AutocastState::current(), &wrong](std::int64_t begin, std::int64_t end) {
        const auto scope = state.enter();
        for (std::int64_t i = begin; i < end; ++i) wrong += product_dtype() == kFp16 ? 0 : 1;
      });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(product_dtype(), kFp16);
}

TEST(AutocastState, OutlivesTheRegion) {
  const auto state = [] {
    const Autocast region(kCpu, kFp16);
    return AutocastState::current();
  }();
  EXPECT_EQ(product_dtype(), kFp32);
  const AutocastState copy = state;
  const auto scope = copy.enter();
  EXPECT_EQ(product_dtype(), kFp16);
}

TEST(AutocastState, ReplacesTheRegionsOfTheThreadThatEnters) {
  const auto state = [] {
    const Autocast region(torch::kCUDA, kFp16);
    return AutocastState::current();
  }();
  const Autocast own(kCpu, kBf16);
  {
    const auto scope = state.enter();
    EXPECT_EQ(product_dtype(), kFp32) << "the state has no region of the CPU";
    EXPECT_TRUE(autocast_enabled(torch::kCUDA));
    const auto back = AutocastState::current();
    EXPECT_FALSE(autocast_enabled(kCpu));
  }
  EXPECT_EQ(product_dtype(), kBf16);
  EXPECT_FALSE(autocast_enabled(torch::kCUDA));
}

TEST(AutocastState, DisabledIsNoRegionAtAll) {
  const Autocast region(kCpu, kBf16);
  {
    const auto scope = AutocastState::disabled().enter();
    EXPECT_EQ(product_dtype(), kFp32);
    EXPECT_FALSE(autocast_enabled(kCpu));
    const Autocast inside(kCpu, kFp16);
    EXPECT_EQ(product_dtype(), kFp16);
  }
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(AutocastState, RemembersWhatIsTurnedOff) {
  const Autocast region(kCpu, kBf16);
  const auto disabled_casts = [] {
    const DisableCasts disabled;
    return AutocastState::current();
  }();
  const auto disabled_region = [] {
    const Autocast off(kCpu, std::nullopt, false);
    return AutocastState::current();
  }();
  for (const auto& state : {disabled_casts, disabled_region}) {
    const auto scope = state.enter();
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(AutocastState, EntersAlsoUnderDisableCastsAndUnderLibTorchsOwnRegion) {
  const auto state = [] {
    const Autocast region(kCpu, kFp16);
    return AutocastState::current();
  }();
  {
    const DisableCasts disabled;
    const auto scope = state.enter();
    EXPECT_EQ(product_dtype(), kFp16);
  }
  at::autocast::set_autocast_enabled(kCpu, true);
  {
    const auto scope = AutocastState::disabled().enter();
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_EQ(product_dtype(), kBf16);
  at::autocast::set_autocast_enabled(kCpu, false);
  at::autocast::clear_cache();
  EXPECT_EQ(product_dtype(), kFp32);
}

// ---- many threads at once
// ------------------------------------------------------------------------

// The work of one thread in the following tests: its own policy, checked repeatedly.
struct Worker {
  CastPolicy policy;
  c10::ScalarType product;
  c10::ScalarType softmax;  // of a 16-bit tensor
  c10::ScalarType relu;     // of an fp32 tensor
};

std::vector<Worker> workers() {
  std::vector<Worker> all;
  all.push_back({CastPolicy::torch({kCpu, kBf16}), kBf16, kBf16, kFp32});
  all.push_back({CastPolicy::semitone({kCpu, kFp16}), kFp16, kFp32, kFp32});
  all.push_back({CastPolicy::apex({kCpu, kBf16}).lower("relu"), kBf16, kFp32, kBf16});
  all.push_back({CastPolicy::paddle({kCpu, kFp16}).keep_fp32("mm"), kFp32, kFp32, kFp32});
  all.push_back({CastPolicy::none({kCpu, kBf16}).lower("softmax"), kFp32, kBf16, kFp32});
  return all;
}

void work(const Worker& worker, int iterations, std::atomic<int>& wrong) {
  const auto x = torch::ones({4, 4});
  const auto low = x.to(worker.policy.dtype());
  const auto weight = torch::ones({4, 4}).requires_grad_();
  for (int i = 0; i < iterations; ++i) {
    const Autocast region(worker.policy);
    const auto y = at::mm(x, weight);
    wrong += y.scalar_type() == worker.product ? 0 : 1;
    wrong += y[0][0].item<float>() == 4 ? 0 : 1;
    wrong += at::softmax(low, 0).scalar_type() == worker.softmax ? 0 : 1;
    wrong += at::relu(x).scalar_type() == worker.relu ? 0 : 1;
  }
}

// In its own process, which is the test amp_test.first_use.threads, this is also the first use of
// every policy: kernels are installed while other threads run operators.
TEST(AutocastConcurrency, ThreadsHaveTheirOwnPoliciesFromTheFirstUseOn) {
  const std::vector<Worker> all = workers();
  std::atomic<int> wrong = 0;
  std::latch start(static_cast<std::ptrdiff_t>(all.size()));
  std::vector<std::thread> threads;
  for (const Worker& worker : all) {
    threads.emplace_back([&worker, &start, &wrong] {
      start.arrive_and_wait();
      work(worker, 300, wrong);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(AutocastConcurrency, LibTorchsOwnRegionsRunBesideOurs) {
  std::atomic<int> wrong = 0;
  std::atomic<bool> done = false;
  std::latch start(2);
  std::thread stock([&] {
    at::set_num_threads(1);
    const auto x = torch::ones({4, 4});
    start.arrive_and_wait();
    while (!done) {
      at::autocast::set_autocast_dtype(kCpu, kFp16);
      at::autocast::set_autocast_enabled(kCpu, true);
      wrong += at::mm(x, x).scalar_type() == kFp16 ? 0 : 1;
      wrong += at::softmax(x.to(kFp16), 0).scalar_type() == kFp16 ? 0 : 1;
      wrong += at::mse_loss(x.to(kFp16), x).scalar_type() == kFp32 ? 0 : 1;
      at::autocast::set_autocast_enabled(kCpu, false);
      at::autocast::clear_cache();
      wrong += at::mm(x, x).scalar_type() == kFp32 ? 0 : 1;
    }
  });
  start.arrive_and_wait();
  for (const Worker& worker : workers()) work(worker, 100, wrong);
  done = true;
  stock.join();
  EXPECT_EQ(wrong, 0);
}

TEST(AutocastConcurrency, OneRegionServesManyCarriedThreads) {
  torch::nn::Linear linear(8, 8);
  const auto x = torch::rand({4, 8});
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}).bind(linear));
  const at::Tensor want = linear(x).detach();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, state = AutocastState::current(), i] {
      const auto scope = state.enter();
      for (int repeat = 0; repeat < 200; ++repeat) {
        const torch::AutoGradMode grad((repeat + i) % 2 == 0);
        if (repeat % 50 == 49) clear_cast_cache();
        const auto y = linear(x);
        wrong += y.requires_grad() == ((repeat + i) % 2 == 0) ? 0 : 1;
        wrong += at::equal(y, want) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace semitone::amp::autocast_test
