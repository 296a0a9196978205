// What the training's 16-bit format leaves of the gradients, at the loss scale in force.

#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace semitone::report {
namespace {

// Losing the gradients in [2^-27, 2^-24) was enough to make a detector diverge (Micikevicius et al.,
// Mixed Precision Training, 2018): a twentieth of all values is more than noise.
constexpr double kUnderflowOverall = 0.05;
// A parameter that loses half of its gradient is hardly trained, however small it is.
constexpr double kUnderflowParameter = 0.5;
// Below the last normal number a value loses a bit with each binade. A tenth of such values shows
// that the distribution lies at the format's edge: its zeros are then values that vanished.
constexpr double kAtTheEdge = 0.1;
// A fifth of the values with fewer bits than the format has is worth a larger scale.
constexpr double kSubnormal = 0.2;

// Values of gradients that are lost, out of all that are not zero by themselves.
struct LostValues {
  double lost = 0;
  double all = 0;

  double share() const { return all > 0 ? lost / all : 0; }
};

LostValues lost_values(const ParameterSummary& parameter, std::size_t format) {
  const FormatCounts& counts = parameter.scaled_gradient[format];
  LostValues found{static_cast<double>(counts.zero), static_cast<double>(counts.total)};
  // A gradient that went through the format has lost these values already.
  if (counts.total > 0 && counts.zero_share() + counts.subnormal_share() >= kAtTheEdge) {
    const auto zeros = static_cast<double>(parameter.gradient->zeros);
    found.lost += zeros;
    found.all += zeros;
  }
  return found;
}

struct LostGradients {
  LostValues overall;
  Ranked parameters;  // that lose more than kUnderflowOverall
  double worst = 0;
};

LostGradients lost_gradients(const Evidence& evidence) {
  LostGradients found;
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    if (!parameter.gradient.has_value()) continue;
    const LostValues lost = lost_values(parameter, evidence.format_index);
    found.overall.lost += lost.lost;
    found.overall.all += lost.all;
    found.worst = std::max(found.worst, lost.share());
    if (lost.share() > kUnderflowOverall)
      found.parameters.emplace_back(lost.share(), parameter.info.name);
  }
  return found;
}

bool underflows(const LostGradients& gradients) {
  return gradients.overall.share() > kUnderflowOverall || gradients.worst >= kUnderflowParameter;
}

// The exponent of the last loss scale that a sample had; 0 without one.
int last_scale_exponent(const RunData& run) {
  return run.samples.empty() ? 0 : run.samples.rbegin()->second.scale_exponent();
}

// The exponent of the largest scale at which the largest gradient stays a factor of 2 below the
// format's limit.
int largest_scale_exponent(const Evidence& evidence) {
  int largest = std::numeric_limits<int>::min();
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    if (parameter.gradient.has_value() && parameter.gradient->non_zero() > 0)
      largest = std::max(largest, parameter.gradient->last_exponent());
  }
  return evidence.format->max_exponent - 1 - largest;
}

std::string remedy_for_small_gradients(const Evidence& evidence) {
  if (evidence.format_index == kBFloat16)
    return "keep the layers that are named in float32: CastPolicy::keep_fp32_params";
  const int now = last_scale_exponent(evidence.run);
  const int possible = std::min(largest_scale_exponent(evidence), 24);  // Apex's largest
  if (possible > now) {
    return fmt::format(
        "raise the loss scale to {:.0f} (LossScaleOptions::init_scale, or a dynamic "
        "scale): the largest gradient then still fits",
        std::ldexp(1.0, possible));
  }
  return "train in bfloat16, which has float32's range (--dtype bf16): a larger loss scale would "
         "overflow";
}

std::string scale_words(const Evidence& evidence) {
  const auto& samples = evidence.run.samples;
  const auto scale =
      samples.empty() ? std::optional<double>() : samples.rbegin()->second.loss_scale;
  return scale.has_value() ? fmt::format("at the loss scale of their step, last {:g}", *scale)
                           : "without a loss scale";
}

}  // namespace

std::optional<Verdict> judge_underflow(const Evidence& evidence) {
  if (evidence.format == nullptr) return std::nullopt;
  const LostGradients gradients = lost_gradients(evidence);
  if (gradients.overall.all == 0) return std::nullopt;
  const double share = gradients.overall.share();
  const auto name = evidence.format->name;
  if (!underflows(gradients)) {
    std::optional<Verdict> good = share_verdict(Severity::good, "underflow", share);
    good->title = fmt::format("Gradients keep clear of {}'s lower end: {} round to zero", name,
                              percent(share));
    good->detail = fmt::format("Counted {}.", scale_words(evidence));
    return good;
  }
  std::optional<Verdict> verdict = share_verdict(Severity::problem, "underflow", share);
  verdict->where = worst_first(gradients.parameters);
  verdict->title =
      fmt::format("{} of the gradients' values round to zero in {}: {}", percent(share), name,
                  first_and_others(verdict->where, gradients.parameters.size()));
  verdict->detail = fmt::format(
      "{}, values below 2^{} vanish. '{}' loses {}. Weights with such gradients are not trained.",
      evidence.run.samples.rbegin()->second.loss_scale.has_value()
          ? fmt::format("After multiplication by the loss scale (last {:g})",
                        *evidence.run.samples.rbegin()->second.loss_scale)
          : "Without a loss scale",
      evidence.format->min_subnormal - 1, verdict->where.front(), percent(gradients.worst));
  verdict->remedy = remedy_for_small_gradients(evidence);
  return verdict;
}

std::optional<Verdict> judge_subnormals(const Evidence& evidence) {
  if (evidence.format == nullptr || underflows(lost_gradients(evidence))) return std::nullopt;
  FormatCounts all;
  Ranked parameters;
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    const FormatCounts& counts = parameter.scaled_gradient[evidence.format_index];
    all.add(counts);
    if (counts.subnormal_share() > kSubnormal)
      parameters.emplace_back(counts.subnormal_share(), parameter.info.name);
  }
  if (all.subnormal_share() <= kSubnormal) return std::nullopt;
  std::optional<Verdict> verdict =
      share_verdict(Severity::warning, "subnormals", all.subnormal_share());
  verdict->where = worst_first(parameters);
  verdict->title = fmt::format("{} of the gradients' values are subnormal in {}",
                               percent(all.subnormal_share()), evidence.format->name);
  verdict->detail = fmt::format(
      "They lie between 2^{} and 2^{} {}, and keep fewer bits the smaller they are.",
      evidence.format->min_subnormal - 1, evidence.format->min_normal, scale_words(evidence));
  verdict->remedy = remedy_for_small_gradients(evidence);
  return verdict;
}

std::optional<Verdict> judge_zero_gradients(const Evidence& evidence) {
  Ranked parameters;
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    const auto& gradient = parameter.gradient;
    if (gradient.has_value() && gradient->numel > 0 && gradient->zeros == gradient->numel)
      parameters.emplace_back(static_cast<double>(gradient->numel), parameter.info.name);
  }
  if (parameters.empty()) return std::nullopt;
  std::optional<Verdict> verdict =
      number_verdict(Severity::warning, "zero_gradients", static_cast<double>(parameters.size()),
                     parameters.size() == 1 ? "parameter" : "parameters");
  verdict->where = worst_first(parameters);
  verdict->title = fmt::format("The gradient of {} is zero in every sample",
                               first_and_others(verdict->where, parameters.size()));
  verdict->detail =
      "Either nothing depends on the parameter, or its gradient vanishes on its way through a "
      "16-bit operator.";
  verdict->remedy =
      "record a few steps at O0: if the gradient is not zero there, raise the loss scale or keep "
      "the layer in float32";
  return verdict;
}

}  // namespace semitone::report
