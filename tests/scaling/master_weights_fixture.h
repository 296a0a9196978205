#pragma once

#include "semitone/scaling/master_weights.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>

// 16-bit parameters and their masters.
namespace semitone::amp::master_weights_test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline at::Tensor parameter(c10::IntArrayRef shape, c10::ScalarType dtype = torch::kBFloat16) {
  return torch::randn(shape).to(dtype).requires_grad_(true);
}

inline const at::Tensor& in_group(torch::optim::Optimizer& optimizer, std::size_t group,
                                  std::size_t index) {
  return optimizer.param_groups().at(group).params().at(index);
}

inline at::Tensor rounded(const at::Tensor& master, const at::Tensor& like) {
  return master.detach().to(like.scalar_type());
}

struct Pair {
  at::Tensor weight = parameter({4});
  torch::optim::SGD optimizer{{weight}, 0.1};
  MasterWeights masters{optimizer};
  at::Tensor master = masters.master_of(weight);
};

}  // namespace semitone::amp::master_weights_test
