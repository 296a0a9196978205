#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace semitone::report {

// Counts of a tensor's values by their binary exponent, or of several tensors together.
struct ValueCounts {
  std::string dtype;                 // of the last tensor, Python's name: "float16"
  std::int64_t step = 0;             // of the last tensor
  std::optional<double> loss_scale;  // in force in that step
  std::int64_t samples = 0;          // number of tensors
  std::int64_t numel = 0;
  std::int64_t zeros = 0;
  std::int64_t nans = 0;
  std::int64_t infs = 0;
  double max_abs = 0;  // of the finite values
  int first_exponent = 0;
  std::vector<std::int64_t> counts;  // counts[i]: values with floor(log2|x|) == first_exponent + i

  // The finite values that are not zero.
  std::int64_t non_zero() const;
  // The exponent of the largest finite value; there must be one that is not zero.
  int last_exponent() const;
  // Adds the values of a later tensor.
  void add(const ValueCounts& later);
};

}  // namespace semitone::report
