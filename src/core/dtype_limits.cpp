#include "src/core/dtype_limits.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <limits>

namespace semitone {

using c10::ScalarType;

DtypeLimits dtype_limits(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return {std::numeric_limits<double>::max(), 0x1p-1022, 0x1p-1074, 0x1p-52, 52};
    case ScalarType::Float:
      return {0x1.fffffep127, 0x1p-126, 0x1p-149, 0x1p-23, 23};
    case ScalarType::Half:
      return {65504.0, 0x1p-14, 0x1p-24, 0x1p-10, 10};
    case ScalarType::BFloat16:
      return {0x1.fep127, 0x1p-126, 0x1p-133, 0x1p-7, 7};
    case ScalarType::Float8_e4m3fn:
      return {448.0, 0x1p-6, 0x1p-9, 0x1p-3, 3};
    case ScalarType::Float8_e5m2:
      return {57344.0, 0x1p-14, 0x1p-16, 0x1p-2, 2};
    default:
      throw Error("core.dtype", "a floating-point dtype", dtype_name(dtype));
  }
}

}  // namespace semitone
