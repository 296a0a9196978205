#pragma once

#include "semitone/core/error.h"

#include <torch/serialize/archive.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace semitone {

// Reads one value from an archive: bool, int64, double, string or tensor. Returns nothing if the
// key is missing; FileError if the value has another type.
template <typename T>
std::optional<T> find_value(torch::serialize::InputArchive& archive, const std::string& key,
                            std::string_view component) {
  c10::IValue value;
  try {
    if (!archive.try_read(key, value)) return std::nullopt;
  } catch (const c10::Error& error) {
    throw FileError(component, "'" + key + "' in the archive", error.what_without_backtrace());
  }
  const auto must_be = [&](bool right, const char* type) {
    if (!right)
      throw FileError(component, std::string(type) + " for '" + key + "'", value.tagKind());
  };
  if constexpr (std::is_same_v<T, bool>) must_be(value.isBool(), "a bool");
  if constexpr (std::is_same_v<T, std::int64_t>) must_be(value.isInt(), "an integer");
  if constexpr (std::is_same_v<T, double>) must_be(value.isDouble(), "a real");
  if constexpr (std::is_same_v<T, std::string>) must_be(value.isString(), "a string");
  if constexpr (std::is_same_v<T, at::Tensor>) must_be(value.isTensor(), "a tensor");
  return value.to<T>();
}

// The same; FileError if the key is missing.
template <typename T>
T read_value(torch::serialize::InputArchive& archive, const std::string& key,
             std::string_view component) {
  if (auto value = find_value<T>(archive, key, component)) return *std::move(value);
  throw FileError(component, "'" + key + "' in the archive", "none",
                  "was it saved by this kind of object?");
}

// An archive inside an archive, or nothing if the key is missing.
inline std::optional<torch::serialize::InputArchive> find_archive(
    torch::serialize::InputArchive& archive, const std::string& key, std::string_view component) {
  torch::serialize::InputArchive inner;
  try {
    if (!archive.try_read(key, inner)) return std::nullopt;
  } catch (const c10::Error& error) {
    throw FileError(component, "an archive '" + key + "'", error.what_without_backtrace());
  }
  return inner;
}

inline torch::serialize::InputArchive read_archive(torch::serialize::InputArchive& archive,
                                                   const std::string& key,
                                                   std::string_view component) {
  if (auto inner = find_archive(archive, key, component)) return *std::move(inner);
  throw FileError(component, "'" + key + "' in the archive", "none",
                  "was it saved by this kind of object?");
}

// What was written to an archive, to be read.
inline torch::serialize::InputArchive reread(torch::serialize::OutputArchive& written) {
  std::stringstream stream;
  written.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  return archive;
}

}  // namespace semitone
