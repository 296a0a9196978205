#include "src/report/scaled_counts.h"

#include <c10/core/ScalarType.h>
#include <torch/types.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace semitone::report {

using kernels::ExponentCounts;

bool is_power_of_two(double number) {
  int exponent = 0;
  return number > 0 && std::isfinite(number) && std::frexp(number, &exponent) == 0.5;
}

ExponentCounts divided(const ExponentCounts& counts, double power_of_two) {
  const int shift = std::ilogb(power_of_two);
  ExponentCounts result = counts;
  result.counts.fill(0);
  for (std::size_t i = 0; i < counts.counts.size(); ++i) {
    const int place = static_cast<int>(i) - shift;
    if (place < 0) {
      result.zeros += counts.counts[i];
    } else {
      result.counts[std::min(static_cast<std::size_t>(place), result.counts.size() - 1)] +=
          counts.counts[i];
    }
  }
  result.max_abs = counts.max_abs / power_of_two;
  if (result.max_abs < std::ldexp(1, ExponentCounts::kFirst)) result.max_abs = 0;
  return result;
}

ExponentCounts divided_counts(const at::Tensor& tensor, double scale) {
  if (!(scale > 0) || !std::isfinite(scale)) scale = 1;
  if (is_power_of_two(scale)) return divided(kernels::exponents_of(tensor), scale);
  const bool is_fp64 = tensor.scalar_type() == at::kDouble;
  return kernels::exponents_of((is_fp64 ? tensor : tensor.to(at::kFloat)) / scale);
}

nlohmann::ordered_json describe_counts(std::string_view what, const std::string& name,
                                       at::ScalarType dtype, const ExponentCounts& counts) {
  const auto is_used = [](std::int64_t count) { return count > 0; };
  const auto& all = counts.counts;
  const auto first = std::find_if(all.begin(), all.end(), is_used);
  const auto last = std::find_if(all.rbegin(), std::make_reverse_iterator(first), is_used).base();
  const auto place = static_cast<int>(first - all.begin());
  return {{"what", what},
          {"name", name},
          {"dtype", c10::toString(dtype)},
          {"numel", counts.numel},
          {"zeros", counts.zeros},
          {"nans", counts.nans},
          {"infs", counts.infs},
          {"max_abs", counts.max_abs},
          {"first_exponent", first == all.end() ? 0 : ExponentCounts::kFirst + place},
          {"counts", std::vector<std::int64_t>(first, last)}};
}

}  // namespace semitone::report
