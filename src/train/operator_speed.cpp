#include "src/train/operator_speed.h"

#include "semitone/autocast/autocast.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>

namespace semitone::train {
namespace {

using Tensors = std::vector<at::Tensor>;

// An operator of each kind, of a size for which fp32 takes about a millisecond.
struct Example {
  OperatorKind kind;
  std::vector<std::vector<std::int64_t>> shapes;
  std::function<at::Tensor(const Tensors&)> run;
  double gflop;  // forward; a gradient by data takes as many, one by weights too
};

std::vector<Example> examples() {
  using enum OperatorKind;
  return {
      {product,
       {{384, 384}, {384, 384}},
       [](const Tensors& t) { return at::mm(t[0], t[1]); },
       2.0 * 384 * 384 * 384 / 1e9},
      {convolution,
       {{8, 32, 28, 28}, {32, 32, 3, 3}},
       [](const Tensors& t) { return at::conv2d(t[0], t[1], {}, 1, 1); },
       2.0 * 8 * 28 * 28 * 32 * 32 * 9 / 1e9},
      {grouped_convolution,
       {{8, 64, 28, 28}, {64, 1, 3, 3}},
       [](const Tensors& t) { return at::conv2d(t[0], t[1], {}, 1, 1, 1, 64); },
       2.0 * 8 * 28 * 28 * 64 * 9 / 1e9},
      {transposed_convolution,
       {{8, 32, 14, 14}, {32, 32, 4, 4}},
       [](const Tensors& t) { return at::conv_transpose2d(t[0], t[1], {}, 2, 1); },
       2.0 * 8 * 14 * 14 * 32 * 32 * 16 / 1e9},
      {recurrent,
       {{16, 16, 128}, {512, 128}, {512, 128}, {512}, {512}, {1, 16, 128}, {1, 16, 128}},
       [](const Tensors& t) {
         return std::get<0>(at::lstm(t[0], {t[5], t[6]}, {t[1], t[2], t[3], t[4]}, true, 1, 0.0,
                                     true, false, false));
       },
       2.0 * 16 * 16 * 512 * (128 + 128) / 1e9},
      {attention,
       {{4, 4, 128, 64}, {4, 4, 128, 64}, {4, 4, 128, 64}},
       [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2]); },
       4.0 * 4 * 4 * 128 * 128 * 64 / 1e9},
  };
}

// The minimum time of several calls, in ms; nothing if the first call raises.
std::optional<double> least_ms(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kEnough{60};
  constexpr int kLeastCalls = 3;
  constexpr int kCalls = 30;
  try {
    call();  // oneDNN makes its kernels at the first
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  double least = std::numeric_limits<double>::infinity();
  const auto start = Clock::now();
  for (int i = 0; i < kCalls && (i < kLeastCalls || Clock::now() - start < kEnough); ++i) {
    const auto before = Clock::now();
    call();
    least =
        std::min(least, std::chrono::duration<double, std::milli>(Clock::now() - before).count());
  }
  return least;
}

std::optional<double> measure(const Example& example, bool training, c10::ScalarType dtype,
                              amp::Emulation emulation) {
  Tensors inputs;
  for (const auto& shape : example.shapes)
    inputs.push_back((torch::randn(shape) * 0.1).to(dtype).requires_grad_(training));
  const at::Tensor gradient = training ? torch::randn_like(example.run([&] {
                                           Tensors wide;
                                           for (const at::Tensor& input : inputs)
                                             wide.push_back(input.detach().to(at::kFloat));
                                           return wide;
                                         }()))
                                             .to(dtype)
                                       : at::Tensor();
  const at::AutoGradMode mode(training);
  std::optional<amp::CastPolicy> policy;
  if (dtype != at::kFloat) {
    policy = amp::CastPolicy::semitone({c10::DeviceType::CPU, dtype})
                 .fast_kernels(false)
                 .emulation(emulation);
  }
  return least_ms([&] {
    at::Tensor result;
    {
      std::optional<amp::Autocast> region;
      if (policy.has_value()) region.emplace(*policy);
      result = example.run(inputs);
    }
    if (training) (void)torch::autograd::grad({result}, inputs, {gradient});
  });
}

bool chooses_native(const Example& example, bool training, c10::ScalarType dtype) {
  return training ? trains_natively(c10::DeviceType::CPU, dtype, example.kind)
                  : has_native_kernel(c10::DeviceType::CPU, dtype, example.kind);
}

}  // namespace

std::vector<OperatorSpeed> measure_operators() {
  torch::manual_seed(0);
  std::vector<OperatorSpeed> speeds;
  for (const Example& example : examples()) {
    for (const bool training : {false, true}) {
      const double fp32 = measure(example, training, at::kFloat, amp::Emulation::never).value_or(0);
      for (const auto dtype : {at::kBFloat16, at::kHalf}) {
        speeds.push_back({example.kind, training, dtype, example.gflop * (training ? 3 : 1), fp32,
                          measure(example, training, dtype, amp::Emulation::never),
                          measure(example, training, dtype, amp::Emulation::always).value_or(0),
                          chooses_native(example, training, dtype)});
      }
    }
  }
  return speeds;
}

}  // namespace semitone::train
