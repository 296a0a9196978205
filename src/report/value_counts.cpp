#include "src/report/value_counts.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace semitone::report {

std::int64_t ValueCounts::non_zero() const {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

int ValueCounts::last_exponent() const {
  std::size_t size = counts.size();
  while (size > 0 && counts[size - 1] == 0) --size;
  return first_exponent + static_cast<int>(size) - 1;
}

void ValueCounts::add(const ValueCounts& later) {
  dtype = later.dtype;
  step = later.step;
  loss_scale = later.loss_scale;
  samples += later.samples;
  numel += later.numel;
  zeros += later.zeros;
  nans += later.nans;
  infs += later.infs;
  max_abs = std::max(max_abs, later.max_abs);
  if (later.counts.empty()) return;
  if (counts.empty()) first_exponent = later.first_exponent;
  if (later.first_exponent < first_exponent) {
    counts.insert(counts.begin(), static_cast<std::size_t>(first_exponent - later.first_exponent),
                  0);
    first_exponent = later.first_exponent;
  }
  const auto offset = static_cast<std::size_t>(later.first_exponent - first_exponent);
  counts.resize(std::max(counts.size(), offset + later.counts.size()));
  for (std::size_t i = 0; i < later.counts.size(); ++i) counts[offset + i] += later.counts[i];
}

}  // namespace semitone::report
