#pragma once

#include <cmath>
#include <limits>

namespace semitone::train {

// Removes a NaN's sign: it has no meaning, and "-nan" looks like a negative number.
inline double without_sign_of_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

}  // namespace semitone::train
