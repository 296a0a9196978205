// What the training's 16-bit format leaves of the gradients, at the loss scale in force.

#include "src/report/small_gradients.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace semitone::report {
namespace {

// Losing the gradients in [2^-27, 2^-24) was enough to make a detector diverge (Micikevicius et al.,
// Mixed Precision Training, 2018): a twentieth of all values is more than noise.
constexpr double kUnderflowOverall = 0.05;
// A parameter that loses half of its gradient is hardly trained, however small it is.
constexpr double kUnderflowParameter = 0.5;
// Below the last normal number a value loses a bit with each power of two. A tenth of such values
// shows that the distribution lies at the format's edge: its zeros are then values that vanished.
constexpr double kAtTheEdge = 0.1;
// A fifth of the values with fewer bits than the format has is worth a larger scale.
constexpr double kSubnormal = 0.2;
// A gradient that is zero in a single sample may be that of a branch which this step did not take.
constexpr std::int64_t kFewestSamples = 2;

// Values of gradients that are lost, out of all that are not zero by themselves.
struct LostValues {
  double lost = 0;
  double all = 0;

  double share() const { return all > 0 ? lost / all : 0; }
};

enum class Passed { yes, no, unknown };

// Whether a parameter's gradient has been in the format: it is, or the gradient of its layer's
// output is, from which it is computed. Otherwise its layer lost nothing, however small it is.
Passed passed_format(const Evidence& evidence, const ParameterSummary& parameter) {
  const std::string_view name = evidence.format->name;
  if (parameter.gradient->dtype == name) return Passed::yes;
  const auto& layers = evidence.summary.layers;
  const auto layer = std::ranges::find(layers, parameter.info.layer, &LayerSummary::name);
  if (layer == layers.end() || !layer->output_gradient.has_value()) return Passed::unknown;
  return layer->output_gradient->dtype == name ? Passed::yes : Passed::no;
}

// Whether zeros can be values that vanished. A gradient that was in the format before a cast, as
// those of fp32 weights at O1 are, has no value below the format's smallest number. The rows of a
// table that a batch does not have are zero by themselves.
bool may_have_vanished(const ParameterSummary& parameter, Passed passed, std::size_t format) {
  const bool was_in_format = passed == Passed::yes || parameter.scaled_gradient[format].zero == 0;
  return was_in_format && parameter.info.layer_type.find("Embedding") == std::string::npos;
}

LostValues lost_values(const Evidence& evidence, const ParameterSummary& parameter) {
  const std::size_t format = evidence.format_index;
  const FormatCounts& counts = parameter.scaled_gradient[format];
  const Passed passed = passed_format(evidence, parameter);
  if (passed == Passed::no) return {0, static_cast<double>(counts.total)};
  LostValues found{static_cast<double>(counts.zero), static_cast<double>(counts.total)};
  // A gradient in the format has lost these values already.
  if (may_have_vanished(parameter, passed, format) && counts.total > 0 &&
      counts.zero_share() + counts.subnormal_share() >= kAtTheEdge) {
    const auto zeros = static_cast<double>(parameter.gradient->zeros);
    found.lost += zeros;
    found.all += zeros;
  }
  return found;
}

// Values of gradients that are subnormal in the format, and what has more than kSubnormal of them.
struct Subnormals {
  FormatCounts counts;
  Ranked where;

  void add(const FormatCounts& of_one, const std::string& name) {
    counts.add(of_one);
    if (of_one.subnormal_share() > kSubnormal) where.emplace_back(of_one.subnormal_share(), name);
  }
  bool are_many() const { return counts.subnormal_share() > kSubnormal; }
};

Subnormals subnormals_of_parameters(const Evidence& evidence) {
  Subnormals found;
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    if (!parameter.gradient.has_value() || passed_format(evidence, parameter) == Passed::no)
      continue;
    found.add(parameter.scaled_gradient[evidence.format_index], parameter.info.name);
  }
  return found;
}

// Those of the layers' outputs. They are smaller where a loss is a mean over many values, and are
// added up in the parameters' gradients, which look healthy then.
Subnormals subnormals_of_outputs(const Evidence& evidence) {
  Subnormals found;
  for (const LayerSummary& layer : evidence.summary.layers) {
    if (layer.output_gradient.has_value() && layer.output_gradient->dtype == evidence.format->name)
      found.add(layer.scaled_gradient[evidence.format_index], layer.name);
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
    const LostValues lost = lost_values(evidence, parameter);
    found.overall.lost += lost.lost;
    found.overall.all += lost.all;
    found.worst = std::max(found.worst, lost.share());
    if (lost.share() > kUnderflowOverall)
      found.parameters.emplace_back(lost.share(), parameter.info.name);
  }
  return found;
}

bool underflows(const LostGradients& gradients) {
  return gradients.overall.share() > kUnderflowOverall;
}

std::string scale_words(const Evidence& evidence) {
  const auto& samples = evidence.run.samples;
  const auto scale =
      samples.empty() ? std::optional<double>() : samples.rbegin()->second.loss_scale;
  return scale.has_value() ? fmt::format("at the loss scale of their step, last {:g}", *scale)
                           : "without a loss scale";
}

// "After multiplication by the loss scale (last 1024), values below 2^-25 vanish."
std::string vanishing_words(const Evidence& evidence) {
  const auto scale = evidence.run.samples.rbegin()->second.loss_scale;
  return fmt::format("{}, values below 2^{} vanish.",
                     scale.has_value()
                         ? fmt::format("After multiplication by the loss scale (last {:g})", *scale)
                         : "Without a loss scale",
                     evidence.format->min_subnormal - 1);
}

// Single parameters that lose their gradients, while the whole is in order.
std::optional<Verdict> lost_parameters(const Evidence& evidence, const LostGradients& gradients) {
  std::optional<Verdict> verdict = share_verdict(Severity::warning, "underflow", gradients.worst);
  Ranked most;
  std::copy_if(gradients.parameters.begin(), gradients.parameters.end(), std::back_inserter(most),
               [](const auto& parameter) { return parameter.first >= kUnderflowParameter; });
  verdict->where = worst_first(std::move(most));
  verdict->title =
      fmt::format("'{}' loses {} of its gradient's values in {}", verdict->where.front(),
                  percent(gradients.worst), evidence.format->name);
  verdict->detail = fmt::format(
      "{} A bias before a normalisation, or of an attention's keys, has no gradient but rounding "
      "errors: there this is harmless.",
      vanishing_words(evidence));
  verdict->remedy = remedy_for_small_gradients(evidence);
  return verdict;
}

std::optional<Verdict> lost_values_verdict(const Evidence& evidence,
                                           const LostGradients& gradients) {
  const double share = gradients.overall.share();
  std::optional<Verdict> verdict = share_verdict(Severity::problem, "underflow", share);
  verdict->where = worst_first(gradients.parameters);
  verdict->title = fmt::format("{} of the gradients' values round to zero in {}: {}",
                               percent(share), evidence.format->name,
                               first_and_others(verdict->where, gradients.parameters.size()));
  verdict->detail =
      fmt::format("{} '{}' loses {}. Weights with such gradients are not trained.",
                  vanishing_words(evidence), verdict->where.front(), percent(gradients.worst));
  verdict->remedy = remedy_for_small_gradients(evidence);
  return verdict;
}

std::string remedy_for_zeros(const Evidence& evidence) {
  if (evidence.format == nullptr) return "freeze the parameter, or check that forward uses it";
  return fmt::format(
      "record a few steps at O0: if the gradient is not zero there, {}keep the "
      "layer in float32",
      evidence.format_index == kBFloat16 ? "" : "raise the loss scale or ");
}

}  // namespace

std::optional<Verdict> judge_underflow(const Evidence& evidence) {
  if (evidence.format == nullptr) return std::nullopt;
  const LostGradients gradients = lost_gradients(evidence);
  if (gradients.overall.all == 0) return std::nullopt;
  if (underflows(gradients)) return lost_values_verdict(evidence, gradients);
  if (gradients.worst >= kUnderflowParameter) return lost_parameters(evidence, gradients);
  if (judge_zero_gradients(evidence).has_value() || subnormals_of_outputs(evidence).are_many())
    return std::nullopt;
  const double share = gradients.overall.share();
  std::optional<Verdict> good = share_verdict(Severity::good, "underflow", share);
  good->title = fmt::format("Gradients keep clear of {}'s lower end: {} round to zero",
                            evidence.format->name, percent(share));
  good->detail = fmt::format("Counted {}.", scale_words(evidence));
  return good;
}

std::optional<Verdict> judge_subnormals(const Evidence& evidence) {
  if (evidence.format == nullptr || underflows(lost_gradients(evidence))) return std::nullopt;
  const Subnormals of_parameters = subnormals_of_parameters(evidence);
  const Subnormals of_outputs = subnormals_of_outputs(evidence);
  if (!of_parameters.are_many() && !of_outputs.are_many()) return std::nullopt;
  const Subnormals& found = of_parameters.are_many() ? of_parameters : of_outputs;
  const double share = found.counts.subnormal_share();
  std::optional<Verdict> verdict = share_verdict(Severity::warning, "subnormals", share);
  verdict->where = worst_first(found.where);
  verdict->title = fmt::format(
      "{} of the values of {} are subnormal in {}", percent(share),
      of_parameters.are_many() ? "the parameters' gradients" : "the gradients of layers' outputs",
      evidence.format->name);
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
    if (gradient.has_value() && gradient->samples >= kFewestSamples && gradient->numel > 0 &&
        gradient->zeros == gradient->numel)
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
      evidence.format == nullptr
          ? "Nothing that the loss depends on uses the parameter, or its branch is multiplied by "
            "zero."
          : "Either nothing depends on the parameter, or its gradient vanishes on its way through "
            "a 16-bit operator.";
  verdict->remedy = remedy_for_zeros(evidence);
  return verdict;
}

}  // namespace semitone::report
