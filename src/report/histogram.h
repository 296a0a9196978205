#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace semitone::report {

// The distribution of the finite values of a tensor: TensorFlow's HistogramProto, and the number of
// other values.
struct Histogram {
  double min = 0;
  double max = 0;
  double num = 0;
  double sum = 0;
  double sum_squares = 0;
  // Each bucket's values are below its limit, and not below the limit before. From the first bucket
  // that has values to the last one.
  std::vector<double> limits;
  std::vector<double> counts;
  std::int64_t non_finite = 0;
};

// Error for a tensor that is undefined, empty, complex or quantised.
Histogram histogram_of(const at::Tensor& values);

}  // namespace semitone::report
