#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/autocast/cast_policy.h"

#include <optional>
#include <vector>

// What amp::initialize chooses for the models: the policy, its region and the memory format.
namespace semitone::amp {

// The policy of the region for the models, bound to them; nothing if there is nothing to cast.
std::optional<CastPolicy> policy_for(const std::vector<Model>& models,
                                     const Properties& properties);

// Whether forward must run in that region. forward itself casts the arguments. On devices with
// correct 16-bit operators, the region has work only for parameters that stay fp32, for products in
// fp8, for attention with padded keys, which LibTorch computes in fp32 only, and for views of
// channels-last tensors.
bool runs_in_region(const Properties& properties, const std::optional<CastPolicy>& policy,
                    const std::vector<Model>& models);

// The format for a device that prefers channels last in 16 bits. Only the weights of convolutions
// are converted: the layers' results follow their format.
c10::MemoryFormat choose_memory_format(const std::vector<at::Tensor>& weights,
                                       const OptimizerRefs& optimizers, OptLevel opt_level,
                                       const std::optional<CastPolicy>& policy);

}  // namespace semitone::amp
