#pragma once

#include <cmath>
#include <limits>

namespace semitone::train {

// A NaN's sign means nothing, and "-nan" is read as a number that is negative.
inline double without_sign_of_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

}  // namespace semitone::train
