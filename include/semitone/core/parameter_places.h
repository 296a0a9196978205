#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace semitone {

/// The place of each parameter in the groups of an optimizer: 0, 1, 2 … group after group. A
/// parameter that stands there twice has its first place, and the next one follows on.
using ParameterPlaces = std::unordered_map<const c10::TensorImpl*, std::uint32_t>;
ParameterPlaces places_of(const std::vector<torch::optim::OptimizerParamGroup>& groups);

/// An optimizer whose numbers depend on the places of its parameters, as the random bits do with
/// which optim::FusedOptimizer rounds bf16 state. A wrapper that gives it only some parameters of
/// its own list (parallel::ZeroRedundancyOptimizer) tells it their places there, and every rank
/// computes what the optimizer of all of them would.
class UsesParameterPlaces {
 public:
  UsesParameterPlaces() = default;
  UsesParameterPlaces(const UsesParameterPlaces&) = default;
  UsesParameterPlaces& operator=(const UsesParameterPlaces&) = default;
  virtual ~UsesParameterPlaces() = default;

  /// Takes the places of another list than the optimizer's own. They hold for the parameters that
  /// are in them until the next call.
  virtual void set_parameter_places(ParameterPlaces places) = 0;
};

}  // namespace semitone
