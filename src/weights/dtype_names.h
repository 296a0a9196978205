#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <span>
#include <string_view>

namespace semitone::weights {

// What a format calls a dtype.
struct DtypeName {
  std::string_view name;
  c10::ScalarType dtype;
};

inline std::optional<c10::ScalarType> dtype_named(std::span<const DtypeName> names,
                                                  std::string_view name) {
  for (const DtypeName& known : names) {
    if (known.name == name) return known.dtype;
  }
  return std::nullopt;
}

inline std::optional<std::string_view> name_in(std::span<const DtypeName> names,
                                               c10::ScalarType dtype) {
  for (const DtypeName& known : names) {
    if (known.dtype == dtype) return known.name;
  }
  return std::nullopt;
}

}  // namespace semitone::weights
