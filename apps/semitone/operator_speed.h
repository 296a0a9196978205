#pragma once

#include "semitone/core/device.h"
#include "src/core/native_kernels.h"

#include <nlohmann/json_fwd.hpp>

#include <iosfwd>
#include <optional>
#include <vector>

// `semitone ops --speed`: the time of each kind of operator on this CPU in fp32, in a 16-bit
// dtype's own kernels, and emulated, with Semitone's choice.
namespace semitone::cli {

struct OperatorSpeed {
  OperatorKind kind;
  bool training;  // forward and backward, or forward alone
  c10::ScalarType dtype;
  double gflop;  // of one call
  double fp32_ms;
  std::optional<double> native_ms;  // nothing: LibTorch raises
  double emulated_ms;
  bool is_native;  // what Semitone chooses
};

// The minimum of several calls, on as many threads as LibTorch uses. Takes some 10 seconds.
std::vector<OperatorSpeed> measure_operators();

void print(std::ostream& out, const std::vector<OperatorSpeed>& speeds);
nlohmann::ordered_json to_json(const std::vector<OperatorSpeed>& speeds);

}  // namespace semitone::cli
