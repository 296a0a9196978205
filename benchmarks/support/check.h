#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace semitone::bench {

/// How far a result may be from the exact one: so many half units of its dtype's last place at the
/// exact value's size (1: rounded once), and a share of the largest value of the tensor, for what was
/// rounded in fp32 on the way.
struct Tolerance {
  double share_of_largest;
  double roundings = 1;
};

/// Error, with the result's name and the worst element, unless each element of `got` is within
/// the tolerance of `want`, in fp64 and of the same shape. NaN is never within.
void require_within(const at::Tensor& got, const at::Tensor& want, const Tolerance& tolerance,
                    const std::string& name);

/// Error, with the name, unless it holds.
void require(bool holds, const std::string& name);

}  // namespace semitone::bench
