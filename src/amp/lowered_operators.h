#pragma once

#include "semitone/autocast/cast_policy.h"
#include "semitone/autocast/model.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace semitone::amp {

// An operator that computes in 16 bits under a policy.
struct LoweredOperator {
  std::string name;                 // "conv2d", "mul.Tensor"
  std::vector<std::string> layers;  // globs of the layers whose parameters are its arguments
};

// Calls a function, and returns the operators that it calls on this thread in a region, in the
// forward pass, and that then compute in 16 bits: because the policy casts to them, or because an
// argument has 16 bits and the policy does not cast it to fp32. In the order of their first calls,
// without those that CastPolicy::keep_fp32 does not take or that only view memory.
std::vector<LoweredOperator> lowered_operators(const Model& model, const CastPolicy& policy,
                                               const std::function<void()>& function);

}  // namespace semitone::amp
