#pragma once

#include "src/core/native_kernels.h"

#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

// The time of each kind of operator on this CPU in fp32, in a 16-bit dtype's own kernels, and
// emulated, with Semitone's choice.
namespace semitone::train {

struct OperatorSpeed {
  OperatorKind kind;
  bool training;  // forward and backward, or forward alone
  c10::ScalarType dtype;
  double gflop;  // of one call
  double fp32_ms;
  std::optional<double> native_ms;  // nothing: LibTorch raises
  double emulated_ms;
  bool is_native;  // what Semitone chooses

  // What an operator of this kind takes with Semitone.
  double chosen_ms() const { return is_native ? native_ms.value_or(emulated_ms) : emulated_ms; }
};

// The minimum of several calls, on as many threads as LibTorch uses. Takes some 10 seconds.
std::vector<OperatorSpeed> measure_operators();

}  // namespace semitone::train
