#pragma once

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <ostream>
#include <string>
#include <vector>

// A model whose training is exact in every dtype, and the levels and scales to train it at.
namespace semitone::amp::scaled_loss_test {

using c10::ScalarType;
using test::kDtypes;
using test::kLevels;

inline constexpr float kInf = std::numeric_limits<float>::infinity();

// y = (x * a) * b with a kept in fp32 and b in the level's dtype. Small powers of two, so that
// 16-bit arithmetic is exact and levels can be compared bit for bit.
struct ToyImpl : torch::nn::Module {
  explicit ToyImpl(float unique = 0) {
    a = register_parameter("a", torch::tensor({unique + 1, unique + 2}));
    b = register_parameter("b", torch::tensor({2.0F, 0.5F}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return ((x.to(torch::kFloat) * a.to(torch::kFloat)) * b.to(torch::kFloat)).sum();
  }
  at::Tensor a;
  at::Tensor b;
};
TORCH_MODULE(Toy);

inline Options options(const std::string& level, ScalarType dtype = torch::kHalf) {
  Options made(level);
  made.dtype(dtype).verbosity(0);
  if (level != "O0") made.policy(CastPolicy::semitone().keep_fp32_params("a"));
  return made;
}

// A dynamic scale, starting from a value with which none of these gradients overflows fp16.
inline constexpr double kFirstScale = 1024;

inline Options dynamic_scale(const Options& given, const LossScaleOptions& rule = {}) {
  return Options(given).loss_scale("dynamic").loss_scale_options(
      LossScaleOptions(rule).init_scale(kFirstScale));
}

inline at::Tensor ones() {
  return torch::ones({2});
}

// One model and one optimizer at a level.
struct Trained {
  explicit Trained(const Options& opts, double lr = 0.125)
      : optimizer(model->parameters(), torch::optim::SGDOptions(lr).momentum(0.5)),
        mixed(initialize(model, optimizer, opts)) {}

  at::Tensor loss() { return mixed.forward(model, ones()); }
  void backward(ScaleLossOptions how = {}) { mixed.scale_loss(loss(), optimizer, how).backward(); }
  // A backward whose gradient of a parameter is inf.
  void overflow(const at::Tensor& parameter, ScaleLossOptions how = {}) {
    auto scaled = mixed.scale_loss(loss(), optimizer, how);
    scaled.value().backward();
    parameter.mutable_grad()[0] = kInf;
    scaled.finish();
  }
  // The gradients that the optimizer will step with.
  std::vector<at::Tensor> grads() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& p : mixed.master_params(optimizer)) {
      all.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
    }
    return all;
  }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all = test::copies(mixed.master_params(optimizer));
    for (const at::Tensor& p : model->parameters()) all.push_back(p.detach().clone());
    return all;
  }

  Toy model;
  torch::optim::SGD optimizer;
  MixedPrecision mixed;
};

// Levels, dtypes and scales: nothing of this may change the gradients.
struct Case {
  std::string name;
  Options options;
};

inline std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      const Options given = options(level, dtype);
      const std::string name = level + "_" + dtype_name(dtype);
      for (const double scale : {1, 128}) {
        all.push_back({name + "_" + std::to_string(static_cast<int>(scale)),
                       Options(given).loss_scale(scale)});
      }
      all.push_back({name + "_dynamic", dynamic_scale(given)});
    }
  }
  return all;
}

inline void PrintTo(const Case& one, std::ostream* stream) {
  *stream << one.name;
}

class ScaledLossAtEveryLevel : public testing::TestWithParam<Case> {
 protected:
  const Options& opts() const { return GetParam().options; }
  ScalarType dtype() const { return Properties::resolve(opts(), c10::DeviceType::CPU).dtype; }
  // Nothing is unscaled: a scale of 1 and no masters.
  bool is_plain() const {
    const auto properties = Properties::resolve(opts(), c10::DeviceType::CPU);
    return properties.loss_scale.to_string() == "1" && !properties.master_weights;
  }
  Trained plain{options("O0")};
};

}  // namespace semitone::amp::scaled_loss_test
