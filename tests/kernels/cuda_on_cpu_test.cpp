// The CUDA kernels, run on the CPU: compared with the CPU's own, in both orders of threads, and
// with numbers in a device's memory. The tests of the tensor-level functions are part of this
// program too, and use the CUDA kernels here.

#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/recompute/linear_cross_entropy.h"
#include "src/kernels/cross_entropy.h"
#include "src/kernels/cuda/cuda_kernels.h"
#include "tests/support/all_rules.h"
#include "tests/support/cuda_cases.h"
#include "tests/support/cuda_on_cpu/cuda_runtime.h"
#include "tests/support/cuda_on_cpu/emulated.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <vector>

namespace semitone::kernels::cuda_on_cpu_test {
namespace {

using cuda_on_cpu::Order;

// Sets the order of threads while it lives.
class InOrder {
 public:
  explicit InOrder(Order order) { cuda_on_cpu::set_order(order); }
  ~InOrder() { cuda_on_cpu::set_order(Order::forwards); }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;
};

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                 double relative) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(c10::str("result ", i));
    if (relative == 0) {
      EXPECT_TRUE(test::same_bits(got[i], want[i]));
    } else {
      test::expect_close(got[i], want[i], relative);
    }
  }
}

// The host does not wait for a device to check the targets.
TEST(CudaCrossEntropy, RowsWhoseTargetIsNoClassAreNan) {
  torch::manual_seed(1);
  const at::Tensor logits = torch::randn({4, 7}).requires_grad_();
  const at::Tensor target = torch::tensor({2, 9, -100, -1});
  const std::size_t before = cuda_on_cpu::launches();
  const at::Tensor losses = nn::fused_cross_entropy(
      logits, target, nn::FusedCrossEntropyOptions().reduction(torch::kNone));
  losses.sum().backward();
  EXPECT_EQ(cuda_on_cpu::launches(), before + 2);
  for (const at::Tensor& rows : {losses.view({4, 1}), logits.grad()}) {
    EXPECT_TRUE(rows[0].isfinite().all().item<bool>());
    EXPECT_TRUE(rows[1].isnan().all().item<bool>());
    EXPECT_TRUE(rows[2].eq(0).all().item<bool>());
    EXPECT_TRUE(rows[3].isnan().all().item<bool>());
  }
}

TEST(CudaCrossEntropy, RowsWhoseTargetIsNoClassAreNanInChunksToo) {
  torch::manual_seed(1);
  const at::Tensor input = torch::randn({4, 5}).requires_grad_();
  const at::Tensor weight = torch::randn({7, 5});
  const at::Tensor target = torch::tensor({2, 9, -100, -1});
  const auto loss = [&](const at::Tensor& rows, const at::Tensor& classes) {
    return nn::linear_cross_entropy(
        rows, weight, classes,
        nn::LinearCrossEntropyOptions().reduction(torch::kNone).chunk_size(3));
  };
  const std::size_t before = cuda_on_cpu::launches();
  const at::Tensor losses = loss(input, target);
  losses.sum().backward();
  EXPECT_EQ(cuda_on_cpu::launches(), before + 6);
  for (const at::Tensor& rows : {losses.view({4, 1}), input.grad()}) {
    EXPECT_TRUE(rows[1].isnan().all().item<bool>());
    EXPECT_TRUE(rows[2].eq(0).all().item<bool>());
    EXPECT_TRUE(rows[3].isnan().all().item<bool>());
  }
  const test::WithoutEmulatedCuda cpu;
  const at::Tensor row = input.detach().slice(0, 0, 1).clone().requires_grad_();
  const at::Tensor want = loss(row, target.slice(0, 0, 1));
  want.sum().backward();
  expect_same({losses[0], input.grad()[0]}, {want[0], row.grad()[0]}, 1e-6);
}

class CudaOnCpu : public testing::TestWithParam<test::CudaCase> {};

TEST_P(CudaOnCpu, EqualsTheCpusKernels) {
  const std::size_t before = cuda_on_cpu::launches();
  const auto got = GetParam().run(at::kCPU);
  EXPECT_GT(cuda_on_cpu::launches(), before) << "no CUDA kernel was run";
  const test::WithoutEmulatedCuda cpu;
  const std::size_t after = cuda_on_cpu::launches();
  const auto want = GetParam().run(at::kCPU);
  EXPECT_EQ(cuda_on_cpu::launches(), after);
  expect_same(got, want, GetParam().relative);
}

TEST_P(CudaOnCpu, DoesNotDependOnTheOrderOfThreads) {
  const auto want = GetParam().run(at::kCPU);
  const InOrder backwards(Order::backwards);
  expect_same(GetParam().run(at::kCPU), want, 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaOnCpu, testing::ValuesIn(test::cuda_cases()),
                         [](const auto& which) {
                           std::string name = which.param.name;
                           for (char& c : name)
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           return name;
                         });

// ---- numbers in a device's memory ---------------------------------------------------------------

struct Parameter {
  at::Tensor value = torch::randn({8200});
  at::Tensor grad = torch::randn({8200});
  at::Tensor m = torch::randn({8200});
  at::Tensor v = torch::rand({8200});

  UpdateSpan span() const {
    UpdateSpan span;
    span.grad = grad.const_data_ptr();
    span.param = value.mutable_data_ptr();
    span.state[0] = m.mutable_data_ptr();
    span.state[1] = v.mutable_data_ptr();
    span.size = 8200;
    return span;
  }
  std::vector<at::Tensor> results() const { return {value.clone(), m.clone(), v.clone()}; }
};

template <typename Rule>
void expect_as_from_arguments(void (*kernel)(const CudaStep<Rule>&, CudaStream)) {
  // More than a table has.
  std::vector<Rule> rules(65);
  for (std::size_t i = 0; i < rules.size(); ++i)
    rules[i].grad_scale = 0.5 + static_cast<double>(i) / 64;
  const auto run = [&](bool on_device, const float* found_inf) {
    torch::manual_seed(1);
    std::vector<Parameter> parameters(rules.size());
    std::vector<UpdateSpan> spans;
    for (const Parameter& parameter : parameters) spans.push_back(parameter.span());
    CudaStep<Rule> step{.spans = spans, .rules = rules, .found_inf = found_inf};
    if (on_device) step.rules_on_device = std::exchange(step.rules, {}).data();
    kernel(step, {});
    std::vector<at::Tensor> results;
    for (const Parameter& parameter : parameters) {
      for (const at::Tensor& result : parameter.results()) results.push_back(result);
    }
    return results;
  };
  const auto want = run(false, nullptr);
  expect_same(run(true, nullptr), want, 0);
  float found_inf = 0;
  expect_same(run(true, &found_inf), want, 0);
  found_inf = 1;
  torch::manual_seed(1);
  std::vector<at::Tensor> untouched;
  for (const Parameter& parameter : std::vector<Parameter>(rules.size())) {
    for (const at::Tensor& result : parameter.results()) untouched.push_back(result);
  }
  expect_same(run(true, &found_inf), untouched, 0);
  expect_same(run(false, &found_inf), untouched, 0);
}

TEST(CudaSteps, TakeRulesAndFoundInfFromTheDevice) {
  test::for_all_rules([]<typename Rule>(const Rule&) {
    SCOPED_TRACE(Rule::kName);
    expect_as_from_arguments<Rule>(
        [](const CudaStep<Rule>& step, CudaStream stream) { update_cuda(step, stream); });
  });
  expect_as_from_arguments<LambRule>([](const CudaStep<LambRule>& step, CudaStream stream) {
    std::vector<double> parts(2 * 2 * step.spans.size());
    std::vector<double> squares(2 * step.spans.size(), 7);
    lamb_moments_cuda(step, parts.data(), squares.data(), stream);
    const bool skipped = step.found_inf != nullptr && *step.found_inf != 0;
    for (const double square : squares) EXPECT_EQ(square == 0, skipped);
  });
}

TEST(CudaUnscale, TakesTheScaleFromTheDevice) {
  const at::Tensor grad = torch::randn({300});
  at::Tensor out = torch::empty({300});
  const UnscaleSpan span{grad.const_data_ptr(),  Format::fp32, nullptr,
                         out.mutable_data_ptr(), Format::fp32, 300};
  const float inv_scale = 0.25F;
  float found_inf = 0;
  unscale_cuda({&span, 1}, 3, &inv_scale, &found_inf, {});
  test::expect_bitwise_equal(out, grad * 0.25F);
  EXPECT_EQ(found_inf, 0);
}

TEST(CudaCrossEntropy, MakesNanOfTargetsThatAreNoClass) {
  const at::Tensor logits = torch::randn({4, 5});
  const ClassTargets targets{torch::tensor({1, 5, -1, 4}, torch::kLong), -100, 0};
  const RowLosses losses = cross_entropy(logits, targets);
  const at::Tensor grad =
      cross_entropy_gradient(logits, targets, losses, torch::ones({4}), /*in_place=*/false);
  const at::Tensor bad = torch::tensor({false, true, true, false});
  EXPECT_TRUE(losses.loss.isnan().equal(bad));
  EXPECT_TRUE(grad.isnan().all(1).equal(bad));
  EXPECT_TRUE(grad.isnan().any(1).equal(bad));
}

// ---- the emulation itself -----------------------------------------------------------------------

std::vector<unsigned> visits;

void visit_and_wait(unsigned times) {
  for (unsigned i = 0; i < times; ++i) {
    visits.push_back(threadIdx.x);
    __syncthreads();
  }
}

void wait_by_half() {
  if (threadIdx.x < blockDim.x / 2) __syncthreads();
}

void exchange_by_half() {
  if (threadIdx.x < 16) __shfl_xor_sync(0xFFFFFFFFU, 1, 1);
}

void rotate_in_warp(unsigned* results) {
  unsigned value = threadIdx.x;
  for (int away = 1; away < 32; away *= 2)
    value = value * 3 + __shfl_xor_sync(0xFFFFFFFFU, value, away);
  results[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

template <typename... Arguments>
cudaError_t launch_on_cpu(dim3 grid, dim3 block, void (*kernel)(Arguments...),
                          Arguments... arguments) {
  cudaLaunchConfig_t config;
  config.gridDim = grid;
  config.blockDim = block;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

TEST(CudaOnCpuItself, LetsAllThreadsReachABarrierBeforeAnyLeavesIt) {
  visits.clear();
  ASSERT_EQ(launch_on_cpu(1, 100, visit_and_wait, 3U), cudaSuccess);
  ASSERT_EQ(visits.size(), 300U);
  for (unsigned i = 0; i < 300; ++i) EXPECT_EQ(visits[i], i % 100);
}

TEST(CudaOnCpuItself, FindsBarriersThatSomeThreadsMiss) {
  EXPECT_THROW(launch_on_cpu(1, 64, wait_by_half), std::logic_error);
  EXPECT_THROW(launch_on_cpu(1, 32, exchange_by_half), std::logic_error);
}

TEST(CudaOnCpuItself, ExchangesValuesOfOneMoment) {
  std::vector<unsigned> results(3 * 64);
  ASSERT_EQ(launch_on_cpu(3, 64, rotate_in_warp, results.data()), cudaSuccess);
  std::vector<unsigned> want(32);
  for (unsigned i = 0; i < results.size(); i += 32) {
    for (unsigned lane = 0; lane < 32; ++lane) want[lane] = i % 64 + lane;
    for (unsigned away = 1; away < 32; away *= 2) {
      const std::vector<unsigned> before = want;
      for (unsigned lane = 0; lane < 32; ++lane)
        want[lane] = before[lane] * 3 + before[lane ^ away];
    }
    EXPECT_EQ(std::vector<unsigned>(results.begin() + i, results.begin() + i + 32), want);
  }
}

TEST(CudaOnCpuItself, RefusesWhatNoDeviceTakes) {
  EXPECT_NE(launch_on_cpu(0, 32, visit_and_wait, 1U), cudaSuccess);
  EXPECT_NE(launch_on_cpu(1, 1025, visit_and_wait, 1U), cudaSuccess);
  EXPECT_NE(launch_on_cpu(dim3(1, 65536), 32, visit_and_wait, 1U), cudaSuccess);
}

}  // namespace
}  // namespace semitone::kernels::cuda_on_cpu_test
