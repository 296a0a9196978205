#pragma once

#include "semitone/core/error.h"

#include <torch/serialize/archive.h>

#include <string>
#include <string_view>
#include <type_traits>

namespace semitone::amp {

// Reads one value from an archive: bool, int64, double, string or tensor. FileError with the key
// where it is missing or of another type.
template <typename T>
T read_value(torch::serialize::InputArchive& archive, const std::string& key,
             std::string_view where) {
  c10::IValue value;
  if (!archive.try_read(key, value)) {
    throw FileError(where, "'" + key + "' in the archive", "none",
                    "was it saved by this kind of object?");
  }
  const auto must_be = [&](bool right, const char* type) {
    if (!right) throw FileError(where, std::string(type) + " for '" + key + "'", value.tagKind());
  };
  if constexpr (std::is_same_v<T, bool>) must_be(value.isBool(), "a bool");
  if constexpr (std::is_same_v<T, std::int64_t>) must_be(value.isInt(), "an integer");
  if constexpr (std::is_same_v<T, double>) must_be(value.isDouble(), "a real");
  if constexpr (std::is_same_v<T, std::string>) must_be(value.isString(), "a string");
  if constexpr (std::is_same_v<T, at::Tensor>) must_be(value.isTensor(), "a tensor");
  return value.to<T>();
}

}  // namespace semitone::amp
