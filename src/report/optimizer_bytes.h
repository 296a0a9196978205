#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace semitone::report {

// The memory of an optimizer's state, as far as the optimizer saves it.
class OptimizerBytes {
 public:
  explicit OptimizerBytes(const torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  // Measured again if the number of parameters with state has changed, and always for LBFGS.
  std::int64_t bytes();

 private:
  const torch::optim::Optimizer& optimizer_;
  std::optional<std::size_t> parameters_;
  std::int64_t bytes_ = 0;
};

}  // namespace semitone::report
