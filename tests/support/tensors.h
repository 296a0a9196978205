#pragma once

#include <ATen/core/Tensor.h>

#include <gtest/gtest.h>

#include <vector>

// Compares tensors so that a NaN or a wrong shape always fails. Sparse tensors are compared as
// dense ones; two undefined tensors are equal.
namespace semitone::test {

// The same dtype, shape and bits: -0 is not 0. NaNs are equal to each other whatever their payload.
testing::AssertionResult same_bits(const at::Tensor& got, const at::Tensor& want);
// Lists of tensors, element by element.
testing::AssertionResult same_bits(const std::vector<at::Tensor>& got,
                                   const std::vector<at::Tensor>& want);

// With a larger one, near() fails whatever is compared: it could not tell a gradient from a part of
// it.
inline constexpr double kLargestTolerance = 0.1;

// The same shape, and |got - want| <= relative * max(|want|, mean |want|) for each element: the
// mean is there because a sum that cancels is as exact as its terms. Infinities and NaNs must be in
// the same places. Dtypes may differ. `relative` comes from tests/support/tolerance.h.
testing::AssertionResult near(const at::Tensor& got, const at::Tensor& want, double relative);

testing::AssertionResult near(const std::vector<at::Tensor>& got,
                              const std::vector<at::Tensor>& want, double relative);

// That same_bits holds.
void expect_bitwise_equal(const at::Tensor& got, const at::Tensor& want);
void expect_bitwise_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want);

// That near holds, and the dtypes are the same.
void expect_close(const at::Tensor& got, const at::Tensor& want, double relative);

// Detached clones. Undefined tensors stay undefined.
std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors);

// The gradients of parameters; undefined for parameters that have none.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

}  // namespace semitone::test
