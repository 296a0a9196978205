// What would hold for other formats, and what the record lacks.

#include "src/report/verdict_rules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace semitone::report {
namespace {

// So few values are no loss that training notices.
constexpr double kNegligible = 0.001;
// A scale for each tensor brings its largest value to the format's end. A hundredth of the values
// at zero is then the price of the range alone.
constexpr double kFloat8Loss = 0.01;
// Widths that are multiples of 8 let products of 16-bit numbers use whole tiles: NVIDIA's rule for
// tensor cores, and half of a row of AVX512's registers.
constexpr std::int64_t kTile = 8;
constexpr double kUnevenWeights = 0.01;
// Images have 1, 3 or 4 channels: their layer cannot be changed.
constexpr std::int64_t kChannelsOfImages = 4;

// All gradients of parameters, unscaled.
ValueCounts all_gradients(const Summary& summary) {
  ValueCounts all;
  for (const ParameterSummary& parameter : summary.parameters) {
    if (parameter.gradient.has_value()) all.add(*parameter.gradient);
  }
  return all;
}

// The exponents of the loss scales at which float16 loses no more than a negligible share at either
// end: the smallest and the largest.
std::optional<std::pair<int, int>> float16_scales(const ValueCounts& gradients) {
  const NumberFormat& format = kNumberFormats[kFloat16];
  const int largest = format.max_exponent - 1 - gradients.last_exponent();
  int smallest = largest;
  while (counts_in(format, gradients, smallest - 1).zero_share() <= kNegligible &&
         smallest > format.min_subnormal)
    --smallest;
  if (counts_in(format, gradients, largest).zero_share() > kNegligible) return std::nullopt;
  return std::pair{smallest, largest};
}

// What float16 needs to hold the gradients, and what to do.
struct Float16Advice {
  std::string title;
  std::string remedy;
};

Float16Advice advise_on_float16(const ValueCounts& gradients) {
  const auto scales = float16_scales(gradients);
  if (!scales.has_value())
    return {"float16 does not hold them at any loss scale: they span too many powers of two",
            "take bfloat16"};
  if (scales->first <= 0 && scales->second >= 0)
    return {"float16 holds them without a loss scale",
            "use a dynamic loss scale all the same: gradients become smaller later"};
  return {
      fmt::format("float16 needs a loss scale from 2^{} to 2^{}", scales->first, scales->second),
      "take bfloat16, or float16 with a dynamic loss scale"};
}

// The share of values that round to zero if the largest one of each tensor is the format's largest.
class ScaledToFit {
 public:
  explicit ScaledToFit(const NumberFormat& format) : format_(format) {}

  void add(const std::optional<ValueCounts>& values, const std::string& name) {
    if (!values.has_value() || values->non_zero() == 0) return;
    const FormatCounts counts =
        counts_in(format_, *values, format_.max_exponent - values->last_exponent());
    all_.add(counts);
    if (counts.zero_share() > kFloat8Loss) losing_.emplace_back(counts.zero_share(), name);
  }

  double share() const { return all_.zero_share(); }
  bool is_empty() const { return all_.total == 0; }
  const Ranked& losing() const { return losing_; }

 private:
  const NumberFormat& format_;
  FormatCounts all_;
  Ranked losing_;
};

// A parameter may lose both in its weight and in its gradient: it is named once.
Ranked worst_of_each(const Ranked& forward, const Ranked& backward) {
  std::map<std::string, double> worst;
  for (const Ranked* const losing : {&forward, &backward}) {
    for (const auto& [share, name] : *losing) worst[name] = std::max(worst[name], share);
  }
  Ranked ranked;
  ranked.reserve(worst.size());
  for (const auto& [name, share] : worst) ranked.emplace_back(share, name);
  return ranked;
}

bool has_products(const RunParameter& parameter) {
  const std::string& type = parameter.layer_type;
  if (type.empty()) return parameter.name.ends_with("weight");
  return type.find("Conv") != type.npos || type.find("Linear") != type.npos ||
         type.find("Dense") != type.npos;
}

// Whether the sizes of a weight's products, [out, in, …], are multiples of a tile.
bool is_even(const std::vector<std::int64_t>& shape) {
  const bool has_groups_or_images = shape.size() > 2 && shape[1] <= kChannelsOfImages;
  return shape[0] % kTile == 0 && (shape[1] % kTile == 0 || has_groups_or_images);
}

}  // namespace

std::optional<Verdict> judge_sizes(const Evidence& evidence) {
  if (evidence.format == nullptr) return std::nullopt;
  double uneven = 0;
  double all = 0;
  Ranked weights;
  Ranked shapes;
  for (const RunParameter& parameter : evidence.run.parameters) {
    if (parameter.shape.size() < 2 || !has_products(parameter)) continue;
    const auto numel = static_cast<double>(parameter.numel());
    all += numel;
    if (is_even(parameter.shape)) continue;
    uneven += numel;
    weights.emplace_back(numel, parameter.name);
    shapes.emplace_back(
        numel, fmt::format("{} [{}, {}]", parameter.name, parameter.shape[0], parameter.shape[1]));
  }
  const double share = all > 0 ? uneven / all : 0;
  if (share <= kUnevenWeights) return std::nullopt;
  std::optional<Verdict> verdict = share_verdict(Severity::advice, "sizes", share);
  verdict->where = worst_first(weights);
  verdict->title = fmt::format("{} of the products' weights have sizes that are no multiples of {}",
                               percent(share), kTile);
  verdict->detail = fmt::format(
      "16-bit products work on tiles of 8 and more numbers, and fill up the last one: {}.",
      fmt::join(worst_first(shapes), ", "));
  verdict->remedy = "round the layers' widths up to multiples of 8 (64 for large layers)";
  return verdict;
}

std::optional<Verdict> judge_formats(const Evidence& evidence) {
  const ValueCounts gradients = all_gradients(evidence.summary);
  if (gradients.non_zero() == 0) return std::nullopt;
  const double lost = counts_in(kNumberFormats[kFloat16], gradients, 0).zero_share();
  const bool needs_no_scale = lost <= kNegligible;
  const bool is_scaled = evidence.run.samples.rbegin()->second.loss_scale.value_or(1) != 1;
  // Of a 16-bit run that needs its scale, the other verdicts say all.
  if (evidence.format != nullptr && !(is_scaled && needs_no_scale)) return std::nullopt;
  std::optional<Verdict> verdict = share_verdict(Severity::advice, "formats", lost);
  const Float16Advice advice = advise_on_float16(gradients);
  verdict->title = fmt::format("Gradients lie between 2^{} and 2^{}: {}", gradients.first_exponent,
                               gradients.last_exponent() + 1, advice.title);
  verdict->detail = fmt::format(
      "Without a loss scale, {} of the gradients' values would round to zero in float16, and {} in "
      "bfloat16.",
      percent(lost), percent(counts_in(kNumberFormats[kBFloat16], gradients, 0).zero_share()));
  verdict->remedy = advice.remedy;
  return verdict;
}

std::optional<Verdict> judge_float8(const Evidence& evidence) {
  const auto& operators = evidence.summary.operators;
  const bool is_in_use = std::any_of(operators.begin(), operators.end(), [](const RunOperator& op) {
    return op.dtype.starts_with("float8");
  });
  if (is_in_use) return std::nullopt;
  ScaledToFit forward(kNumberFormats[kFloat8E4m3fn]);
  ScaledToFit backward(kNumberFormats[kFloat8E5m2]);
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    forward.add(parameter.weight, parameter.info.name);
    backward.add(parameter.gradient, parameter.info.name);
  }
  for (const LayerSummary& layer : evidence.summary.layers) {
    forward.add(layer.output, layer.name);
    backward.add(layer.output_gradient, layer.name);
  }
  if (forward.is_empty() || backward.is_empty()) return std::nullopt;
  const bool fits = forward.share() <= kFloat8Loss && backward.share() <= kFloat8Loss;
  std::optional<Verdict> verdict =
      share_verdict(Severity::advice, "float8", std::max(forward.share(), backward.share()));
  verdict->where = worst_first(worst_of_each(forward.losing(), backward.losing()));
  verdict->title = fmt::format(
      "The values {} float8's range: with a scale for each tensor, {} of weights and outputs "
      "(e4m3fn) and {} of gradients (e5m2) round to zero",
      fits ? "fit" : "do not fit", percent(forward.share()), percent(backward.share()));
  verdict->detail =
      "Only the range is judged. float8 keeps 3 bits (e4m3fn) or 2 bits (e5m2) of the significand.";
  verdict->remedy = fits ? "train in it to see whether the loss tolerates that (CastPolicy::fp8, "
                           "semitone train --fp8)"
                         : "stay with 16 bits";
  return verdict;
}

std::optional<Verdict> judge_samples(const Evidence& evidence) {
  if (!evidence.run.samples.empty()) return std::nullopt;
  std::optional<Verdict> verdict = number_verdict(Severity::advice, "no_samples", 0, "samples");
  verdict->title = "The record has no samples: values, operators and times are unknown";
  verdict->detail = "Only losses, loss scales and skipped steps could be checked.";
  verdict->remedy =
      "construct report::Recorder(log, *model) after the RunLog in the next run; semitone train "
      "--log-dir DIR samples by itself (--record-every N, default 100)";
  return verdict;
}

}  // namespace semitone::report
