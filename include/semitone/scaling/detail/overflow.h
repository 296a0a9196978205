#pragma once

#include <cstdint>
#include <string>

namespace semitone::amp::detail {

/// The result of a search for non-finite gradients.
struct Overflow {
  /// The parameter nearest the loss whose gradient is not finite: the last one in the model's
  /// order. Backward runs from the loss to the input and inf spreads with it, so this parameter
  /// overflowed first. Empty if no search was made, or if the overflow was on another rank.
  std::string parameter;
  std::int64_t parameters = 0;  ///< number of parameters with an inf or NaN in their gradients
};

}  // namespace semitone::amp::detail
