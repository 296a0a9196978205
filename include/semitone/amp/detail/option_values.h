#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace semitone::amp::detail {

/// A boolean that also converts from "True" and "False", as programs receive them on the command
/// line. Error for any other string.
class Flag {
 public:
  Flag(bool value) : value_(value) {}                  // NOLINT(google-explicit-constructor)
  Flag(const std::string& text);                       // NOLINT(google-explicit-constructor)
  Flag(const char* text) : Flag(std::string(text)) {}  // NOLINT(google-explicit-constructor)
  bool value() const { return value_; }

 private:
  bool value_;
};

/// See Options::cudnn_benchmark. A value that is not set leaves the setting unchanged.
struct CudnnSettings {
  std::optional<bool> benchmark;
  std::optional<int> benchmark_limit;
  std::optional<std::int64_t> workspace_limit;  ///< MiB
};

}  // namespace semitone::amp::detail
