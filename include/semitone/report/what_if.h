#pragma once

#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace semitone::report {

/// Options of WhatIf.
struct WhatIfOptions {
  /// fp16, bf16, fp8 e4m3fn or fp8 e5m2. Error for others. Default: all four.
  TORCH_ARG(std::vector<c10::ScalarType>, formats) = {
    c10::ScalarType::Half,
    c10::ScalarType::BFloat16,
    c10::ScalarType::Float8_e4m3fn,
    c10::ScalarType::Float8_e5m2
  };
  /// Operators to examine, by their ATen names without overload. Default: matrix products,
  /// convolutions and attention, forward and
  /// backward, but not recurrent layers. A backward operator needs its own name
  /// (threshold_backward). Operators that write to an argument are never examined.
  TORCH_ARG(std::vector<std::string>, operators);
  /// Number of past steps whose largest absolute values decide the scale of fp8. At least 1. Default
  /// 16.
  TORCH_ARG(std::int64_t, amax_history) = 16;
};

/// What a format would do to an operator.
struct FormatEffect {
  c10::ScalarType format = c10::ScalarType::Float;
  /// Relative error of the results: the 2-norm of their changes divided by that of the results, over
  /// all calls. Elements that would be inf or NaN are not counted here.
  double error = 0;
  /// The share of the arguments' elements other than 0 that would be 0.
  double underflow = 0;
  /// The share of the arguments' elements that would exceed the format's largest value.
  double overflow = 0;
  /// The number of finite results that would be inf or NaN.
  std::int64_t non_finite = 0;
};

/// An operator at one place of the model.
struct WhatIfRow {
  std::string op;         ///< "addmm", "convolution_backward"
  std::string layer;      ///< "layer1.conv"; empty: not known
  bool backward = false;  ///< in the backward pass
  std::int64_t calls = 0;
  std::vector<FormatEffect> effects;  ///< in the order of WhatIfOptions::formats
};

/// Shows what reduced precision would do to each operator, while training goes on in fp32:
///
///     report::WhatIf what_if(*model);
///     for (int step = 0; step < 10; ++step) {
///       train_step(model, batches[step]);  // in fp32, as always
///       what_if.next_step();
///     }
///     std::cout << what_if.to_string();
///
/// From its construction to its destruction, each call of the operators by this thread, and by the
/// threads that work for it (autograd's), is computed again with rounded arguments, once for each
/// format, and compared with the result in fp32. Results of the training do not change.
///
/// fp16 and bf16: all fp32 arguments are rounded, products are summed in fp32, and the results are
/// rounded, as in an autocast region. fp8: arguments of two or more dimensions are multiplied by a
/// scale, rounded and divided by it again; sums and results are fp32. The scale is that of delayed
/// scaling: the format's largest value divided by the largest absolute value of this argument in the
/// last amax_history steps (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 4.1,
/// and NVIDIA's Transformer Engine); in the first step, of its present values. What exceeds the
/// format after scaling is clamped, and counted as overflow.
///
/// Gradients have the loss scale that the training gives them: multiply the loss by 65536, say, to
/// see what fp16 does to scaled gradients.
///
/// Operators that an examined one calls are not examined themselves. Arguments that are not fp32 are
/// not rounded, so a 16-bit region shows little. An examined call costs about one more call for each
/// format. Operators that draw random numbers (dropout, attention with dropout) draw the same ones
/// each time. An object belongs to the thread that constructs it.
class WhatIf {
 public:
  /// Begins to examine. The names of the model's parameters give the rows their layers. Error for options out of range, and for unknown operators.
  explicit WhatIf(const torch::nn::Module& model, const WhatIfOptions& options = {});
  ~WhatIf();
  WhatIf(const WhatIf&) = delete;
  WhatIf& operator=(const WhatIf&) = delete;

  /// Ends a step: call it after each, for the scales of fp8 and the names of layers.
  void next_step();

  /// The rows so far, in the order of the operators' first calls. Error if a call could not be
  /// computed again.
  std::vector<WhatIfRow> rows() const;
  /// A table, one line for each row and format.
  std::string to_string() const;
  /// The same as JSON: {"rows": [{"op", "layer", "backward", "calls", "effects": [{"format",
  /// "error", "underflow", "overflow", "non_finite"}]}]}.
  std::string to_json() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::report
