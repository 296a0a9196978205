#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>

// How the values of a tensor are distributed over the powers of two.
namespace semitone::kernels {

struct ExponentCounts {
  // Of fp32: its smallest subnormal number is 2^-149, its largest number is below 2^128.
  static constexpr int kFirst = -149;
  static constexpr int kLast = 127;
  static constexpr std::size_t kCount = kLast - kFirst + 1;

  std::int64_t numel = 0;
  std::int64_t zeros = 0;  // of both signs
  std::int64_t nans = 0;
  std::int64_t infs = 0;  // of both signs
  double max_abs = 0;     // of the finite values; 0 without any
  // counts[i]: the finite values that are not 0 with floor(log2|x|) == kFirst + i. fp64 values
  // beyond this range count at its ends.
  std::array<std::int64_t, kCount> counts{};

  // The counts of two tensors together.
  ExponentCounts& operator+=(const ExponentCounts& other);
  bool operator==(const ExponentCounts&) const = default;
};

// Counts the values of a tensor of any real floating dtype, with any layout but a nested one, on
// any device. Subnormal numbers have the exponents of their values. Error for other dtypes, and for
// an undefined tensor. One pass on the CPU; elsewhere ATen operators in fp64, and one read from the
// device. The result does not depend on the number of threads.
ExponentCounts exponents_of(const at::Tensor& tensor);

namespace ref {
ExponentCounts exponents_of(const at::Tensor& tensor);
}  // namespace ref

}  // namespace semitone::kernels
