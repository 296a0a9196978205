#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone {

// While it lives, an optimizer's groups have each parameter once: a parameter that occurs again, as
// tied weights do, gives its place to an empty tensor. LibTorch's load() moves the state of a
// parameter to its first place, and then sets it to null at the next one.
class DistinctParameters {
 public:
  explicit DistinctParameters(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    std::unordered_set<const void*> seen;
    for (auto& group : optimizer_.param_groups()) {
      for (at::Tensor& parameter : group.params()) {
        if (seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        again_.push_back({&parameter, parameter});
        parameter = at::empty({0});
      }
    }
  }
  DistinctParameters(const DistinctParameters&) = delete;
  DistinctParameters& operator=(const DistinctParameters&) = delete;
  ~DistinctParameters() {
    for (auto& [place, parameter] : again_) {
      optimizer_.state().erase(place->unsafeGetTensorImpl());
      *place = std::move(parameter);
    }
  }

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::pair<at::Tensor*, at::Tensor>> again_;
};

}  // namespace semitone
