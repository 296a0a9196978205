#pragma once

#include <c10/core/ScalarType.h>

// The opt levels and dtypes that a test of every combination loops over.
namespace semitone::test {

inline constexpr const char* kLevels[] = {"O0", "O1", "O2", "O3"};
inline constexpr c10::ScalarType kDtypes[] = {c10::kBFloat16, c10::kHalf};

}  // namespace semitone::test
