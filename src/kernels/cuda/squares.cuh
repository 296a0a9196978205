#pragma once

#include "src/kernels/cuda/elements.cuh"

#include <cstdint>

namespace semitone::kernels {

// A thread's own sum of squares, in fp32 without loss of digits and for numbers of all sizes: few
// devices add fp64 as fast as memory delivers.
//
// Numbers are multiplied by a power of two, such that the largest one so far is below 4. The sum
// begins at 16: it is never below a square, so that what it loses by rounding is known exactly
// (T. J. Dekker: "A floating-point technique for extending the available precision", 1971), and a
// second number has the sum of that. For n numbers the sum is off by at most n^2 2^-44 of its size.
class SquareSum {
 public:
  // kRounds: whether a square of these numbers may have more digits than fp32.
  template <bool kRounds, unsigned N>
  __device__ void add(const float (&values)[N]) {
    float largest = fabsf(values[0]);
#pragma unroll
    for (unsigned k = 1; k < N; ++k) largest = fmaxf(largest, fabsf(values[k]));
    if (largest > limit_) make_room(largest);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      const float value = values[k] * scale_;
      const float square = value * value;
      const float sum = sum_ + square;
      rest_ += square - (sum - sum_);
      if constexpr (kRounds) rest_ += fmaf(value, value, -square);
      sum_ = sum;
    }
  }
  // Infinite or NaN if a number is.
  __device__ double total() const {
    const double sum = static_cast<double>(sum_ - kBegin);
    if (sum_ - sum_ != 0) return sum;
    const double unit = 1 / static_cast<double>(scale_);
    return (sum + static_cast<double>(rest_)) * unit * unit;
  }

 private:
  static constexpr float kBegin = 16;
  static constexpr std::uint32_t kMantissaBits = 23;

  // Numbers of 2^126 and more are below 4 after the same multiplication.
  __device__ void make_room(float largest) {
    constexpr std::uint32_t kMost = 253;
    const std::uint32_t bits = bits_of(largest) >> kMantissaBits;
    const std::uint32_t exponent = bits < 1 ? 1 : bits < kMost ? bits : kMost;
    const float scale = number_of((254 - exponent) << kMantissaBits);
    // scale / scale_, or 0 if that is less than 2^-126.
    const auto quotient = static_cast<std::int32_t>(bits_of(scale) - bits_of(scale_) + bits_of(1));
    const float less = number_of(quotient < 0 ? 0 : static_cast<std::uint32_t>(quotient));
    limit_ = number_of((exponent + 2) << kMantissaBits);
    scale_ = scale;
    rest_ = rest_ * less * less;
    const float sum = (sum_ - kBegin) * less * less;
    sum_ = kBegin + sum;
    // Either may be the larger one.
    const float added = sum_ - kBegin;
    rest_ += (kBegin - (sum_ - added)) + (sum - added);
  }

  float sum_ = kBegin;
  float rest_ = 0;
  float scale_ = 0x1p126F;
  float limit_ = 0;
};

}  // namespace semitone::kernels
