#pragma once

#include "semitone/core/error.h"

#include <torch/serialize/archive.h>

#include <string>
#include <string_view>

namespace semitone::amp {

// Reads one value from an archive; FileError with the key where it is missing or of another type.
template <typename T>
T read_value(torch::serialize::InputArchive& archive, const std::string& key,
             std::string_view where) {
  c10::IValue value;
  bool found = false;
  try {
    found = archive.try_read(key, value);
  } catch (const c10::Error& error) {
    throw FileError(where, "'" + key + "' in the archive", error.what_without_backtrace());
  }
  if (!found)
    throw FileError(where, "'" + key + "' in the archive", "none",
                    "was it saved by this kind of object?");
  const bool right_type = [&] {
    if constexpr (std::is_same_v<T, bool>) return value.isBool();
    if constexpr (std::is_same_v<T, std::int64_t>) return value.isInt();
    if constexpr (std::is_same_v<T, double>) return value.isDouble();
    if constexpr (std::is_same_v<T, std::string>) return value.isString();
    if constexpr (std::is_same_v<T, at::Tensor>) return value.isTensor();
  }();
  if (!right_type) throw FileError(where, "another type for '" + key + "'", value.tagKind());
  return value.to<T>();
}

}  // namespace semitone::amp
