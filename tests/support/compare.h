#pragma once

#include <ATen/core/Tensor.h>

#include <gtest/gtest.h>

namespace semitone::test {

// Every element of got within relative * max|want| of want. NaN is near NaN only, inf near the same
// inf only. Shapes must be equal; dtypes need not.
testing::AssertionResult near(const at::Tensor& got, const at::Tensor& want, double relative);

// The same dtype, shape and bits (so NaN equals the same NaN, and -0 is not 0).
testing::AssertionResult same_bits(const at::Tensor& got, const at::Tensor& want);

}  // namespace semitone::test
