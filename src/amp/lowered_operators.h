#pragma once

#include "semitone/autocast/cast_policy.h"
#include "semitone/autocast/model.h"

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace semitone::amp {

// An operator that computes in 16 bits under a policy.
struct LoweredOperator {
  // The layers whose parameters are its arguments, with patterns that match exactly these parameters
  // (CastPolicy::keep_fp32_params).
  using Layers = std::map<std::string, std::set<std::string>>;

  std::string name;  // "conv2d", "mul.Tensor"
  Layers layers{};
};

// Calls a function, and returns the operators that compute in 16 bits in its forward pass, in the
// order of their first calls. Only calls on this thread and inside of a region count. An operator is
// listed if the policy lowers it, or if an argument has 16 bits and the policy's row is not fp32 or
// ban; it may still compute in fp32 because of another argument. Operators that write to an argument,
// return views, or only copy or fill are left out.
std::vector<LoweredOperator> lowered_operators(const Model& model, const CastPolicy& policy,
                                               const std::function<void()>& function);

}  // namespace semitone::amp
