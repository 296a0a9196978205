#pragma once

#include "src/autocast/compiled_policy.h"

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <string_view>

namespace semitone::amp {

// Kernels of operators that are called too often for boxing, and that have work in every region.
// CastKernel applies the policies.
inline constexpr std::array<std::string_view, 4> kWatched{"view", "add_.Tensor", "sub_.Tensor",
                                                          "set_.source_Tensor"};

// The kernel of an operator in this list.
c10::KernelFunction make_watching_kernel(const c10::OperatorHandle& op, OpId id,
                                         c10::DeviceType device, c10::DispatchKey key);

}  // namespace semitone::amp
