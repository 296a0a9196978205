#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace semitone::report {

// What an update did to a weight.
struct WeightChange {
  std::int64_t numel = 0;
  double ratio = 0;          // the norm of the update divided by that of the weight
  std::int64_t changed = 0;  // elements with another value than before
  // Those of them that would be as before if the weight were kept in this dtype, and the update
  // added to it in fp32 and rounded.
  std::int64_t lost_in_half = 0;
  std::int64_t lost_in_bfloat16 = 0;
};

// Compares an fp32 weight before and after an update. Both are on the same device. Error if they
// have different shapes.
WeightChange change_of(const at::Tensor& before, const at::Tensor& after);

}  // namespace semitone::report
