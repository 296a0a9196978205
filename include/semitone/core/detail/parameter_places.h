#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace semitone::detail {

/// The place of each parameter: its index in the list of an optimizer's parameters, group after
/// group, from 0. A parameter that appears twice keeps its first place, and the second appearance
/// is not counted.
using ParameterPlaces = std::unordered_map<const c10::TensorImpl*, std::uint32_t>;
/// Returns the places of all parameters in these groups.
ParameterPlaces places_of(const std::vector<torch::optim::OptimizerParamGroup>& groups);

/// An optimizer whose results depend on the places of its parameters. optim::FusedOptimizer is one:
/// the places seed the random bits with which it rounds bf16 state. A wrapper that gives an
/// optimizer only part of a parameter list (parallel::ZeroRedundancyOptimizer) sets the places in
/// the whole list, so that every rank computes what one optimizer of all parameters would.
class UsesParameterPlaces {
 public:
  UsesParameterPlaces() = default;
  UsesParameterPlaces(const UsesParameterPlaces&) = default;
  UsesParameterPlaces& operator=(const UsesParameterPlaces&) = default;
  virtual ~UsesParameterPlaces() = default;

  /// Sets the places of parameters in the whole parameter list. They replace the places in this
  /// optimizer's own groups until the next call.
  virtual void set_parameter_places(ParameterPlaces places) = 0;

  /// Whether the step of a parameter also depends on the gradients of others, as with a norm of all
  /// gradients. A wrapper refuses that.
  virtual bool combines_gradients() const { return false; }
};

}  // namespace semitone::detail
