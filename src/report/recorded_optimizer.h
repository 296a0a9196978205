#pragma once

#include <torch/optim/optimizer.h>

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace semitone::report {

// What a Recorder says of an optimizer.
class RecordedOptimizer {
 public:
  explicit RecordedOptimizer(const torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  // The memory of its state, as far as it is saved. Measured again if the number of parameters with
  // state has changed, and always for LBFGS.
  std::int64_t bytes();

  // Its groups, for the line "model".
  nlohmann::ordered_json describe() const;

 private:
  const torch::optim::Optimizer& optimizer_;
  std::optional<std::size_t> parameters_;
  std::int64_t bytes_ = 0;
};

}  // namespace semitone::report
