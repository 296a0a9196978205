#pragma once

#include "semitone/scaling/grad_scaler.h"
#include "tests/support/optimizers.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

// Optimizers and trainings for the tests of GradScaler.
namespace semitone::amp::grad_scaler_test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Powers of two, so that scaling is exact and results can be compared bit for bit.
inline const LossScaleOptions kRule = LossScaleOptions().init_scale(128).growth_interval(1);

inline at::Tensor parameter(std::initializer_list<float> values,
                            c10::ScalarType dtype = torch::kFloat) {
  return torch::tensor(c10::ArrayRef<float>(values)).to(dtype).requires_grad_(true);
}

// An optimizer over one parameter, whose gradient is set by hand.
struct One {
  explicit One(float grad = 1.0F) : weight(parameter({1, 2})), optimizer({weight}, /*lr=*/1.0) {
    set_grad(grad);
  }
  void set_grad(float value) { weight.mutable_grad() = torch::full({2}, value); }
  at::Tensor weight;
  torch::optim::SGD optimizer;
};

inline GradScaler used_once(const LossScaleOptions& options = kRule) {
  GradScaler scaler(options);
  scaler.scale(torch::ones({}));
  return scaler;
}

struct Training {
  explicit Training(const test::OptimizerKind& kind) {
    torch::manual_seed(3);
    net = test::ToyNet(test::ToyNetOptions{.inputs = 4});
    optimizer = kind.make(net->parameters());
    for (int i = 0; i < 4; ++i) batches.push_back(torch::randn({5, 4}));
    target = torch::randn({5, 3});
  }
  at::Tensor loss(std::size_t batch) {
    return torch::mse_loss(net->forward(batches[batch]), target);
  }

  test::ToyNet net{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<at::Tensor> batches;
  at::Tensor target;
};

inline std::string state_of(torch::optim::Optimizer& optimizer) {
  // Keys are addresses, so it is the state of each parameter in turn that is compared.
  std::stringstream text;
  text << std::hexfloat;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& p : group.params()) {
      const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      torch::serialize::OutputArchive archive;
      found->second->serialize(archive);
      std::stringstream stream;
      archive.save_to(stream);
      text << stream.str().size() << ' ';
      torch::serialize::InputArchive in;
      in.load_from(stream);
      for (const std::string& key : in.keys()) {
        c10::IValue value;
        in.read(key, value);
        text << key << '=';
        if (value.isTensor()) {
          const at::Tensor flat = value.toTensor().to(torch::kDouble).flatten();
          for (std::int64_t i = 0; i < flat.numel(); ++i) text << flat[i].item<double>() << ',';
        } else {
          text << value;
        }
        text << ';';
      }
    }
  }
  return text.str();
}

}  // namespace semitone::amp::grad_scaler_test
