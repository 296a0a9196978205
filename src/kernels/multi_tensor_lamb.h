#pragma once

#include "src/kernels/multi_tensor_update.h"

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace semitone::kernels {

// The first pass of LAMB (updates.h); multi_tensor_update is the second. Returns the norms of each
// parameter and its update, with one host read for each device other than the CPU.
struct LambNorms {
  double param = 0;
  double update = 0;
};
std::vector<LambNorms> multi_tensor_lamb_moments(std::span<const Update> items,
                                                 std::span<const LambRule> rules);

namespace ref {
// LambNorms, in fp64.
at::Tensor lamb_moments(const Update& item, const LambRule& rule,
                        const ComputedNumbers& computed = {});
}  // namespace ref

}  // namespace semitone::kernels
