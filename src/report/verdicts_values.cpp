// Weights, their updates, and the outputs of layers.

#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace semitone::report {
namespace {

// A weight that never moves is not trained. Below a tenth, updates that are too small in one step
// are usually large enough in another.
constexpr double kLostUpdates = 0.1;
// Activations vary from batch to batch: those that come within a factor of 4 of the largest number
// overflow sooner or later.
constexpr double kNearTheLimit = 0.25;

bool is_sixteen_bit(const ParameterSummary& parameter) {
  return sixteen_bit_format(parameter.info.dtype) != nullptr;
}

double lost_share(double lost, double all) {
  return all > 0 ? std::clamp(lost / all, 0.0, 1.0) : 0;
}

// Updates of 16-bit weights that have no masters. What the step changed is all that can be seen
// then: an element that has a gradient and did not move has lost its update.
struct LostUpdates {
  double lost = 0;
  double all = 0;
  Ranked parameters;
};

LostUpdates lost_updates(const Summary& summary) {
  LostUpdates found;
  for (const ParameterSummary& parameter : summary.parameters) {
    if (!is_sixteen_bit(parameter) || parameter.updates_alone == 0) continue;
    const auto all =
        static_cast<double>(std::max(parameter.with_gradient, parameter.changed_alone));
    const auto lost =
        static_cast<double>(std::max(std::int64_t{0}, parameter.with_gradient - parameter.moved));
    found.lost += lost;
    found.all += all;
    if (lost_share(lost, all) > kLostUpdates)
      found.parameters.emplace_back(lost_share(lost, all), parameter.info.name);
  }
  return found;
}

// What the weights of the model would lose if they were kept in 16 bits.
double share_without_masters(const Evidence& evidence) {
  double lost = 0;
  double all = 0;
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    lost += static_cast<double>(evidence.format_index == kBFloat16 ? parameter.lost_bfloat16
                                                                   : parameter.lost_float16);
    all += static_cast<double>(parameter.changed);
  }
  return lost_share(lost, all);
}

// Outputs in the run's 16-bit format. Those of a layer in float32 may be as large as they like.
struct LargeOutputs {
  Ranked infinite;  // by the number of values
  Ranked near;      // finite, near the limit
  double most = 0;  // of the finite ones' shares of the largest number
};

LargeOutputs large_outputs(const Evidence& evidence) {
  LargeOutputs found;
  for (const LayerSummary& layer : evidence.summary.layers) {
    if (!layer.output.has_value() || layer.output->dtype != evidence.format->name) continue;
    const double share = layer.output->max_abs / evidence.format->max;
    if (layer.output->infs > 0) {
      found.infinite.emplace_back(static_cast<double>(layer.output->infs), layer.name);
    } else if (share > kNearTheLimit) {
      found.most = std::max(found.most, share);
      found.near.emplace_back(share, layer.name);
    }
  }
  return found;
}

}  // namespace

std::optional<Verdict> judge_weights(const Evidence& evidence) {
  Ranked parameters;
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    const auto& weight = parameter.weight;
    if (weight.has_value() && weight->nans + weight->infs > 0)
      parameters.emplace_back(static_cast<double>(weight->nans + weight->infs),
                              parameter.info.name);
  }
  if (parameters.empty()) return std::nullopt;
  std::optional<Verdict> verdict =
      number_verdict(Severity::problem, "nonfinite_weights", static_cast<double>(parameters.size()),
                     parameters.size() == 1 ? "parameter" : "parameters");
  verdict->where = worst_first(parameters);
  verdict->title = fmt::format("The weights of {} are not finite",
                               first_and_others(verdict->where, parameters.size()));
  verdict->detail =
      "An update was not finite and was not skipped. The training since then is lost.";
  verdict->remedy =
      "go back to a checkpoint, and find the first inf or NaN with report::NonFiniteCheck "
      "(semitone "
      "train --check-nonfinite)";
  return verdict;
}

std::optional<Verdict> judge_updates(const Evidence& evidence) {
  const auto& parameters = evidence.summary.parameters;
  const bool has_updates =
      std::any_of(parameters.begin(), parameters.end(),
                  [](const ParameterSummary& parameter) { return parameter.updates > 0; });
  if (!has_updates) return std::nullopt;
  const LostUpdates updates = lost_updates(evidence.summary);
  const double share = lost_share(updates.lost, updates.all);
  if (share > kLostUpdates) {
    std::optional<Verdict> verdict = share_verdict(Severity::problem, "lost_updates", share);
    verdict->where = worst_first(updates.parameters);
    verdict->title = fmt::format(
        "{} of the weights' updates are lost: 16-bit weights have no "
        "float32 masters",
        percent(share));
    verdict->detail =
        "An update below half of the distance to the next 16-bit number leaves the weight as it "
        "is, in every step again.";
    verdict->remedy =
        "train at O2, which keeps float32 master weights, or at O1, whose weights are float32";
    return verdict;
  }
  // Steps that only accumulate gradients say nothing of 16-bit weights.
  const auto has_master = [](const ParameterSummary& parameter) {
    return parameter.updates > parameter.updates_alone;
  };
  const bool any_master = std::ranges::any_of(parameters, has_master);
  const bool is_unknown =
      updates.all == 0 && std::ranges::any_of(parameters, [&](const ParameterSummary& parameter) {
        const bool is_frozen = any_master && parameter.updates == 0;
        return is_sixteen_bit(parameter) && !has_master(parameter) && !is_frozen;
      });
  if (is_unknown) return std::nullopt;
  std::optional<Verdict> good = share_verdict(Severity::good, "lost_updates", share);
  if (updates.all > 0) {
    good->title =
        fmt::format("{} of the weights' updates are lost, which is little", percent(share));
    return good;
  }
  good->title = "No update of a weight is lost: weights or their masters are float32";
  good->detail = fmt::format("In {} weights without masters, {} of the updates would be lost.",
                             kNumberFormats[evidence.format_index].name,
                             percent(share_without_masters(evidence)));
  return good;
}

std::optional<Verdict> judge_outputs(const Evidence& evidence) {
  if (evidence.format == nullptr) return std::nullopt;
  const LargeOutputs outputs = large_outputs(evidence);
  const bool overflows = !outputs.infinite.empty();
  const Ranked& layers = overflows ? outputs.infinite : outputs.near;
  if (layers.empty()) return std::nullopt;
  std::optional<Verdict> verdict =
      share_verdict(Severity::warning, "large_outputs", overflows ? 1 : outputs.most);
  verdict->where = worst_first(layers);
  verdict->title = fmt::format(
      "Outputs of {} {} {}'s largest number", first_and_others(verdict->where, layers.size()),
      overflows ? "exceed" : fmt::format("reach {} of", percent(outputs.most)),
      evidence.format->name);
  verdict->detail = fmt::format(
      "Numbers above {:g} become infinite. A loss scale does not change "
      "the forward pass.",
      evidence.format->max);
  verdict->remedy =
      "keep the layers in float32 (CastPolicy::keep_fp32_params), normalise their inputs, or "
      "train in bfloat16 (--dtype bf16)";
  if (evidence.format_index == kBFloat16)
    verdict->remedy = "lower the learning rate, or normalise the layers' inputs";
  return verdict;
}

}  // namespace semitone::report
