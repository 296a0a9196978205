// What the tests of fp8 share.
#pragma once

#include "semitone/autocast/autocast.h"
#include "src/core/dtype_limits.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace semitone::amp::fp8_test {

inline constexpr auto kE4m3 = torch::kFloat8_e4m3fn;
inline constexpr auto kE5m2 = torch::kFloat8_e5m2;

inline CastPolicy fp8_policy(torch::nn::Module& model, const Fp8Options& options = {},
                             c10::ScalarType dtype = torch::kBFloat16) {
  return CastPolicy::semitone({torch::kCPU, dtype}).fp8(options).bind(model);
}

inline double amax_of(const at::Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

inline float scale_of(double amax, c10::ScalarType format) {
  return static_cast<float>(dtype_limits(format).max / amax);
}

struct Net : torch::nn::Module {
  Net()
      : conv(register_module("conv", torch::nn::Conv2d(1, 4, 3))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        body(register_module("body", torch::nn::Linear(16, 16))),
        head(register_module("head", torch::nn::Linear(16, 8))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::relu(norm(conv(x))).flatten(2).mean(1);
    return head(torch::relu(body(y)));
  }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear body;
  torch::nn::Linear head;
};

class Fp8 : public testing::Test {
 protected:
  Fp8() { torch::manual_seed(3); }
};

}  // namespace semitone::amp::fp8_test
