#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace semitone::amp::detail {

/// A loss scale: a positive number that is finite and normal in fp32, also as a string, or
/// "dynamic". Error for anything else.
class LossScale {
 public:
  LossScale(double scale);              // NOLINT(google-explicit-constructor)
  LossScale(const std::string& scale);  // NOLINT(google-explicit-constructor)
  LossScale(const char* scale)          // NOLINT(google-explicit-constructor)
      : LossScale(std::string(scale)) {}

  bool is_dynamic() const { return dynamic_; }
  /// The number; 1 for a dynamic scale.
  double value() const { return value_; }
  std::string to_string() const;

 private:
  bool dynamic_ = false;
  double value_ = 1.0;
};

/// A boolean that also converts from "True", "true", "False" and "false", as programs receive them
/// on the command line. Error for any other string.
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
