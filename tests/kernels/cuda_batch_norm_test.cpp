// Batch norm layers with the CUDA kernels, run on the CPU: how many launches they need, and their
// results beside those of the CPU's kernels.

#include "semitone/nn/fused_batch_norm.h"
#include "src/kernels/batch_norm.h"
#include "src/nn/batch_norm.h"
#include "tests/support/cuda_on_cpu/cuda_runtime.h"
#include "tests/support/cuda_on_cpu/emulated.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace semitone::nn::cuda_batch_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

// While it lives, notes LibTorch's operators on this thread that would launch work on a device: all
// but those that only make or view tensors. A conversion notes its copy.
class Operators {
 public:
  Operators() {
    noted().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function)
                                       -> std::unique_ptr<at::ObserverContext> {
          static const std::set<std::string> free{
              "aten::empty",  "aten::empty_like", "aten::empty_strided", "aten::narrow",
              "aten::slice",  "aten::select",     "aten::view",          "aten::alias",
              "aten::detach", "aten::to",         "aten::as_strided",    "aten::unsqueeze"};
          const std::string name = function.name();
          if (name.starts_with("aten::") && !free.contains(name)) noted().push_back(name);
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~Operators() { at::removeCallback(handle_); }
  Operators(const Operators&) = delete;
  Operators& operator=(const Operators&) = delete;

  static std::vector<std::string>& noted() {
    static thread_local std::vector<std::string> names;
    return names;
  }

 private:
  at::CallbackHandle handle_;
};

struct Variant {
  bool relu;
  bool residual;
};
constexpr Variant kVariants[] = {{false, false}, {true, false}, {false, true}, {true, true}};

constexpr std::int64_t kChannels = 24;

at::Tensor images(c10::ScalarType dtype, bool channels_last) {
  const at::Tensor values = torch::randn({6, kChannels, 7, 7}).mul(2).add(1).to(dtype);
  return (channels_last ? values.contiguous(at::MemoryFormat::ChannelsLast) : values)
      .requires_grad_();
}

void randomize(FusedBatchNorm& layer) {
  const torch::NoGradGuard no_grad;
  layer->weight.uniform_(0.5, 1.5);
  layer->bias.uniform_(-1, 1);
  layer->running_mean.normal_();
}

TEST(CudaBatchNorm, NeedsFourLaunchesForwardAndThreeBackward) {
  for (const Variant& variant : kVariants) {
    for (const bool channels_last : {false, true}) {
      SCOPED_TRACE(c10::str("relu ", variant.relu, ", residual ", variant.residual));
      torch::manual_seed(1);
      FusedBatchNorm layer(FusedBatchNormOptions(kChannels).relu(variant.relu));
      const at::Tensor input = images(torch::kBFloat16, channels_last);
      const at::Tensor residual =
          variant.residual ? images(torch::kBFloat16, channels_last) : at::Tensor();
      const at::Tensor grad = torch::randn_like(input);
      const Operators operators;
      std::size_t before = cuda_on_cpu::launches();
      const at::Tensor output = layer(input, residual);
      EXPECT_EQ(cuda_on_cpu::launches(), before + 3);
      // num_batches_tracked: one launch, as the operator for a number calls the one for a tensor.
      EXPECT_EQ(Operators::noted(), (std::vector<std::string>{"aten::add_", "aten::add_"}));
      Operators::noted().clear();
      before = cuda_on_cpu::launches();
      std::vector<at::Tensor> arguments{input, layer->weight, layer->bias};
      if (variant.residual) arguments.push_back(residual);
      const auto gradients = torch::autograd::grad({output}, arguments, {grad});
      EXPECT_EQ(cuda_on_cpu::launches(), before + 3);
      EXPECT_EQ(Operators::noted(), std::vector<std::string>{});
      EXPECT_EQ(gradients[1].scalar_type(), torch::kFloat);
    }
  }
}

struct Results {
  at::Tensor output;
  std::vector<at::Tensor> others;
};

Results run(const Variant& variant, c10::ScalarType dtype, c10::ScalarType parameters,
            bool channels_last) {
  torch::manual_seed(2);
  FusedBatchNorm layer(FusedBatchNormOptions(kChannels).relu(variant.relu).momentum(0.3));
  randomize(layer);
  layer->to(parameters);
  const at::Tensor input = images(dtype, channels_last);
  const at::Tensor residual = variant.residual ? images(dtype, channels_last) : at::Tensor();
  const at::Tensor output = layer(input, residual);
  output.backward(torch::randn_like(output));
  Results results{output.detach(),
                  {input.grad(), layer->weight.grad(), layer->bias.grad(), layer->running_mean,
                   layer->running_var}};
  if (variant.residual) results.others.push_back(residual.grad());
  return results;
}

TEST(CudaBatchNorm, EqualsTheCpusLayer) {
  for (const Variant& variant : kVariants) {
    for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
      for (const auto parameters : {torch::kFloat, torch::kBFloat16}) {
        for (const bool channels_last : {false, true}) {
          SCOPED_TRACE(c10::str("relu ", variant.relu, ", residual ", variant.residual, ", ", dtype,
                                " with ", parameters));
          const Results got = run(variant, dtype, parameters, channels_last);
          const test::WithoutEmulatedCuda cpu;
          const Results want = run(variant, dtype, parameters, channels_last);
          const double sums = test::reduction_tolerance(torch::kFloat, 6 * 49);
          const double tolerance =
              sums + test::rounding_tolerance(dtype, 2) + test::rounding_tolerance(parameters, 2);
          expect_close(got.output, want.output, tolerance);
          ASSERT_EQ(got.others.size(), want.others.size());
          for (std::size_t i = 0; i < want.others.size(); ++i) {
            SCOPED_TRACE(i);
            EXPECT_EQ(got.others[i].scalar_type(), want.others[i].scalar_type());
            EXPECT_EQ(got.others[i].strides(), want.others[i].strides());
            expect_close(got.others[i], want.others[i], tolerance);
          }
        }
      }
    }
  }
}

// The kernels compute relu's input again, and must come to the same zeros as the result that was
// rounded to 16 bits: also where that is subnormal, or was rounded to 0.
TEST(CudaBatchNorm, GradientsPassWhereTheResultIsPositive) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    for (const bool with_residual : {false, true}) {
      for (const bool channels_last : {false, true}) {
        torch::manual_seed(3);
        FusedBatchNorm layer(FusedBatchNormOptions(kChannels).relu(true));
        {
          const torch::NoGradGuard no_grad;
          layer->weight.fill_(dtype == torch::kHalf ? 0x1p-25 : 1);
        }
        const at::Tensor input = images(dtype, channels_last);
        const at::Tensor residual = with_residual ? images(dtype, channels_last) : at::Tensor();
        const at::Tensor output = layer(input, residual);
        const at::Tensor grad = torch::ones_like(output);
        output.backward(grad);
        const at::Tensor passed = output.detach().gt(0).to(torch::kFloat).sum({0, 2, 3});
        EXPECT_GT(passed.sum().item<float>(), 0);
        expect_bitwise_equal(layer->bias.grad(), passed);
        if (with_residual) {
          expect_bitwise_equal(residual.grad(), output.detach().gt(0).to(dtype));
        }
      }
    }
  }
}

TEST(CudaBatchNorm, RefusesASingleValueWithoutWaitingForTheDevice) {
  FusedBatchNorm layer(FusedBatchNormOptions(3));
  test::expect_error([&] { layer(torch::ones({1, 3})); }, {"more than 1 value a channel"});
  expect_bitwise_equal(layer->running_mean, torch::zeros({3}));
}

// Another process, whose part of the batch is known.
class OtherProcess final : public BatchNormPeers {
 public:
  explicit OtherProcess(at::Tensor input) : input_(std::move(input)) {}

  at::Tensor all_gather(const at::Tensor& own) const override {
    const auto moments = kernels::moments(input_);
    const at::Tensor count = torch::full({1}, input_.numel() / input_.size(1), torch::kDouble);
    return at::stack({own, at::cat({moments.mean, moments.m2, count})});
  }
  void all_reduce(at::Tensor& sums) const override { sums.add_(other_sums); }

  at::Tensor other_sums;

 private:
  at::Tensor input_;
};

TEST(CudaBatchNorm, OfSeveralProcessesIsThatOfTheWholeBatch) {
  for (const std::int64_t of_other : {0, 2, 5}) {
    SCOPED_TRACE(of_other);
    torch::manual_seed(4);
    FusedBatchNorm layer(FusedBatchNormOptions(kChannels).relu(true));
    randomize(layer);
    const at::Tensor all = images(torch::kFloat, /*channels_last=*/true);
    const at::Tensor grad = torch::randn_like(all);
    const at::Tensor mean_before = layer->running_mean.clone();
    const at::Tensor want = layer(all);
    want.backward(grad);
    const at::Tensor want_mean = layer->running_mean.clone();
    layer->running_mean.copy_(mean_before);
    const at::Tensor want_var = layer->running_var.clone();
    layer->running_var.fill_(1);

    const at::Tensor theirs = all.detach().slice(0, 6 - of_other);
    const at::Tensor ours = all.detach().slice(0, 0, 6 - of_other).requires_grad_();
    const auto peers = std::make_shared<OtherProcess>(theirs);
    const at::Tensor their_grad =
        grad.slice(0, 6 - of_other) * want.detach().slice(0, 6 - of_other).gt(0);
    const auto sums =
        kernels::gradient_sums(their_grad, theirs, kernels::moments(all.detach()).mean);
    peers->other_sums = at::stack({sums.grad, sums.grad_times_centred});
    const at::Tensor got = batch_norm(ours, {.component = "test",
                                             .weight = layer->weight,
                                             .bias = layer->bias,
                                             .running_mean = layer->running_mean,
                                             .running_var = layer->running_var,
                                             .momentum = 0.1,
                                             .eps = 1e-5,
                                             .peers = peers,
                                             .relu = true});
    got.backward(grad.slice(0, 0, 6 - of_other));
    const double tolerance = test::reduction_tolerance(torch::kFloat, 6 * 49);
    expect_close(got.detach(), want.detach().slice(0, 0, 6 - of_other), tolerance);
    expect_close(ours.grad(), all.grad().slice(0, 0, 6 - of_other), tolerance);
    expect_close(layer->running_mean, want_mean, tolerance);
    expect_close(layer->running_var, want_var, tolerance);
  }
}

}  // namespace
}  // namespace semitone::nn::cuda_batch_norm_test
