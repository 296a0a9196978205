#pragma once

#include <ATen/core/Tensor.h>

// Comparing tensors so that a NaN, a wrong dtype or a wrong shape always fails.
namespace semitone::test {

// The same dtype, shape and bits: -0 is not 0. NaNs are equal to each other whatever their payload.
void expect_bitwise_equal(const at::Tensor& got, const at::Tensor& want);

// The same dtype and shape, and |got - want| <= relative * max(|want|, mean |want|) for each
// element: the mean is there because a sum that cancels is as exact as its terms. Infinities and
// NaNs must be in the same places. `relative` comes from tests/support/tolerance.h.
void expect_close(const at::Tensor& got, const at::Tensor& want, double relative);

}  // namespace semitone::test
