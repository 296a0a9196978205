#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace semitone::bench {

/// The tolerance of a result: this many half units in the last place of its dtype at the exact
/// value (1: rounded once), and a share of the tensor's largest value, for intermediate rounding in
/// fp32.
struct Tolerance {
  double share_of_largest;
  double roundings = 1;
};

/// Error, with the result's name and the worst element, unless each element of `got` is within
/// the tolerance of `want`, in fp64 and of the same shape. NaN is never within.
void require_within(const at::Tensor& got, const at::Tensor& want, const Tolerance& tolerance,
                    const std::string& name);

/// Error, with the name, unless the condition holds.
void require(bool holds, const std::string& name);

}  // namespace semitone::bench
