#include "src/report/small_gradients.h"

#include "src/report/number_formats.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace semitone::report {
namespace {

// Apex's largest loss scale, as a power of two.
constexpr int kLargestScale = 24;

// The exponent of the last loss scale that a sample had; 0 without one.
int last_scale_exponent(const RunData& run) {
  return run.samples.empty() ? 0 : run.samples.rbegin()->second.scale_exponent();
}

// The exponent of the largest gradient, of a parameter or of a layer's output.
std::optional<int> largest_gradient(const Summary& summary) {
  std::optional<int> largest;
  const auto see = [&](const std::optional<ValueCounts>& gradient) {
    if (gradient.has_value() && gradient->non_zero() > 0)
      largest = std::max(largest.value_or(gradient->last_exponent()), gradient->last_exponent());
  };
  for (const ParameterSummary& parameter : summary.parameters) see(parameter.gradient);
  for (const LayerSummary& layer : summary.layers) see(layer.output_gradient);
  return largest;
}

// The exponent of the largest scale at which the largest gradient stays a factor of 2 below the
// format's limit, and that is below all scales of skipped steps.
int largest_scale_exponent(const Evidence& evidence) {
  int possible = std::numeric_limits<int>::max();
  if (const auto largest = largest_gradient(evidence.summary); largest.has_value())
    possible = evidence.format->max_exponent - 1 - *largest;
  for (const auto& [step, skip] : evidence.run.skipped) {
    if (skip.loss_scale > 0) possible = std::min(possible, exponent_of_scale(skip.loss_scale) - 1);
  }
  return possible;
}

}  // namespace

std::string remedy_for_small_gradients(const Evidence& evidence) {
  if (evidence.format_index == kBFloat16)
    return "keep the layers that are named in float32: CastPolicy::keep_fp32_params";
  const int now = last_scale_exponent(evidence.run);
  const int largest = largest_scale_exponent(evidence);
  const int possible = std::min(largest, kLargestScale);
  if (possible > now) {
    return fmt::format(
        "raise the loss scale to {:.0f} (LossScaleOptions::init_scale, or a dynamic "
        "scale): the largest gradient then still fits",
        std::ldexp(1.0, possible));
  }
  return fmt::format("train in bfloat16, which has float32's range (--dtype bf16){}",
                     largest > now ? "" : ": a larger loss scale would overflow");
}

}  // namespace semitone::report
