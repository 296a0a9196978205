#pragma once

#include "src/report/number_formats.h"
#include "src/report/run_data.h"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace semitone::report {

inline constexpr auto kPhases = std::to_array<const char*>(
    {"data", "forward", "backward", "communication", "unscale", "optimizer", "other"});
inline constexpr auto kMemoryParts = std::to_array<const char*>(
    {"parameters", "masters", "gradients", "optimizer_state", "activations"});

// What all samples say of a parameter.
struct ParameterSummary {
  RunParameter info;
  std::optional<ValueCounts> weight;
  std::optional<ValueCounts> gradient;  // unscaled
  AllFormatCounts scaled_gradient;      // of the gradient times the loss scale of its step
  std::optional<double> update_ratio;   // mean over the samples in which it is finite
  std::int64_t updates = 0;             // samples that compared the weight
  std::int64_t changed = 0;             // elements that updates changed
  std::int64_t lost_float16 = 0;
  std::int64_t lost_bfloat16 = 0;
  // Of the samples in which the weight had no master: their number, the elements that updates changed,
  // and in those whose step updated weights, the elements whose gradient is not zero, and that moved.
  std::int64_t updates_alone = 0;
  std::int64_t changed_alone = 0;
  std::int64_t with_gradient = 0;
  std::int64_t moved = 0;
};

struct LayerSummary {
  std::string name;
  std::string layer_type;
  std::optional<ValueCounts> output;
  std::optional<ValueCounts> output_gradient;  // unscaled
  AllFormatCounts scaled_gradient;
};

// Operators, seconds and phases leave out the first sample of each start, in which LibTorch sets up
// its kernels, unless there is no other sample.
struct Summary {
  std::vector<ParameterSummary> parameters;  // in the model's order
  std::vector<LayerSummary> layers;          // in the order of the first sample that has them
  std::vector<RunOperator> operators;        // sums over the samples, slowest first
  double operator_seconds = 0;               // of all operators
  std::optional<double> step_seconds;        // mean
  Amounts phases;                            // means
  Amounts memory;                            // maxima
};

Summary summarize(const RunData& run);

}  // namespace semitone::report
