// Settings of the training and of the machine.

#include "src/core/counted.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::report {
namespace {

// Half of a parameter's gradients below eps: most of its updates are smaller than the optimizer
// means them to be.
constexpr double kBelowEps = 0.5;

// Whether eps is added to the root of a mean of squared gradients, element by element.
bool divides_by_root(std::string_view optimizer) {
  const auto contains = [&](std::string_view part) {
    return optimizer.find(part) != optimizer.npos;
  };
  return contains("Adam") || contains("LAMB") || contains("RMSprop");
}

// The optimizer, or the one whose options an optimizer of another kind has.
const std::string& rule_of(const RunOptimizerGroup& group) {
  return divides_by_root(group.optimizer) ? group.optimizer : group.rule;
}

// Semitone's optimizers compute in fp32, whatever dtype their parameters have.
bool computes_in_fp32(std::string_view optimizer) {
  return optimizer.starts_with("Fused");
}

double share_below(const ValueCounts& values, double limit) {
  const auto all = values.non_zero();
  if (all == 0) return 0;
  std::int64_t below = 0;
  const int limit_exponent = std::ilogb(limit);
  for (std::size_t i = 0; i < values.counts.size(); ++i) {
    if (values.first_exponent + static_cast<int>(i) < limit_exponent) below += values.counts[i];
  }
  return static_cast<double>(below) / static_cast<double>(all);
}

// The largest eps of a run's groups that divide by a root.
const RunOptimizerGroup* group_with_largest_eps(const RunData& run) {
  const RunOptimizerGroup* found = nullptr;
  for (const RunOptimizerGroup& group : run.optimizer_groups) {
    if (!divides_by_root(rule_of(group)) || group.eps.value_or(0) <= 0) continue;
    if (found == nullptr || *group.eps > *found->eps) found = &group;
  }
  return found;
}

// How the layers of batch norm computed in the steps that updated weights.
std::map<std::string, RunBatchNorm> batch_norms_of(const RunData& run) {
  std::map<std::string, RunBatchNorm> layers;
  for (const auto& [step, sample] : run.samples) {
    if (sample.skipped) continue;
    for (const RunBatchNorm& layer : sample.batch_norms) {
      RunBatchNorm& all = layers.try_emplace(layer.layer, layer).first->second;
      all.training = all.training && layer.training;
    }
  }
  return layers;
}

// Cores' worth of time that all processes on the machine get.
double available_cores(const RunInfo& info) {
  return std::min(static_cast<double>(info.cores),
                  info.cpu_quota.value_or(static_cast<double>(info.cores)));
}

// Processes that share these cores: a launcher may have given each its own.
std::int64_t processes_on_cores(const RunInfo& info) {
  return info.cores < info.all_cores ? 1 : std::max<std::int64_t>(1, info.local_world_size);
}

std::string computes_with(const RunInfo& info, std::int64_t processes) {
  const std::string threads = counted(info.threads, "thread");
  if (processes == 1) return fmt::format("LibTorch computes with {}", threads);
  return fmt::format("{} processes compute with {} each", processes, threads);
}

std::string on_cores(const RunInfo& info) {
  if (info.cpu_quota.value_or(static_cast<double>(info.cores)) < static_cast<double>(info.cores))
    return fmt::format("the time of {:.3g} cores, which the control group grants", *info.cpu_quota);
  return counted(info.cores, "core");
}

}  // namespace

std::optional<Verdict> judge_threads(const Evidence& evidence) {
  const RunInfo& info = evidence.run.info;
  const bool knows_processes = info.world_size == 1 || info.local_world_size > 0;
  if (info.cores < 1 || info.threads < 1 || !knows_processes) return std::nullopt;
  const std::int64_t processes = processes_on_cores(info);
  const double available = available_cores(info);
  const auto threads = static_cast<double>(info.threads) * static_cast<double>(processes);
  const bool has_too_many = threads > available;
  // A second thread of a core adds little. On a GPU, a single thread is enough for what is left to the
  // CPU.
  const double enough = info.physical_cores > 0
                            ? std::min(available, static_cast<double>(info.physical_cores))
                            : available;
  const bool has_too_few = 2 * threads <= enough && info.device == "cpu";
  if (!has_too_many && !has_too_few) return std::nullopt;
  const std::int64_t best = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(has_too_many ? available : enough) / processes);
  if (best == info.threads) return std::nullopt;  // more processes than cores
  std::optional<Verdict> verdict =
      number_verdict(has_too_many ? Severity::warning : Severity::advice, "threads", threads,
                     threads == 1 ? "thread" : "threads");
  verdict->title = fmt::format("{} on {}", computes_with(info, processes), on_cores(info));
  verdict->detail =
      has_too_many
          ? "Threads of OpenMP wait for each other by turning in a loop. Those without a core "
            "delay all others, and a step takes several times as long."
          : "The other cores do nothing, unless other programs use them.";
  verdict->remedy = fmt::format("set OMP_NUM_THREADS={}", best);
  return verdict;
}

std::optional<Verdict> judge_eps(const Evidence& evidence) {
  const NumberFormat& float16 = kNumberFormats[kFloat16];
  for (const RunOptimizerGroup& group : evidence.run.optimizer_groups) {
    const double eps = group.eps.value_or(1);
    if (!divides_by_root(rule_of(group)) || computes_in_fp32(rule_of(group)) ||
        group.dtype != float16.name || eps > std::ldexp(1.0, float16.min_subnormal - 1))
      continue;
    std::optional<Verdict> verdict = number_verdict(Severity::problem, "eps", eps, "");
    verdict->title = fmt::format("{}'s eps of {:.3g} is zero in float16", rule_of(group), eps);
    verdict->detail =
        "The optimizer has float16 weights, and computes in float16. Where a gradient is zero from "
        "the start, it then divides zero by zero, and the weight becomes NaN.";
    verdict->remedy = fmt::format("train with fp32 masters (O2), or with an eps of at least {:.3g}",
                                  std::ldexp(1.0, float16.min_normal));
    return verdict;
  }
  const RunOptimizerGroup* const group = group_with_largest_eps(evidence.run);
  if (group == nullptr) return std::nullopt;
  ValueCounts all;
  Ranked weights;
  for (const ParameterSummary& parameter : evidence.summary.parameters) {
    if (!parameter.gradient.has_value()) continue;
    all.add(*parameter.gradient);
    const double share = share_below(*parameter.gradient, *group->eps);
    if (share > kBelowEps) weights.emplace_back(share, parameter.info.name);
  }
  if (weights.empty()) return std::nullopt;
  const auto number = weights.size();
  std::optional<Verdict> verdict =
      share_verdict(Severity::advice, "eps", share_below(all, *group->eps));
  verdict->where = worst_first(weights);
  verdict->title =
      fmt::format("Most gradients of {} are smaller than {}'s eps of {:.3g}",
                  first_and_others(verdict->where, number), rule_of(*group), *group->eps);
  verdict->detail = fmt::format(
      "An update is the mean gradient divided by its root mean square plus eps. Where eps is the "
      "larger one, updates shrink with the gradients: {} of all gradients' values are below it.",
      percent(share_below(all, *group->eps)));
  verdict->remedy = "set a smaller eps; with fp32 weights or masters 1e-12 is still safe";
  return verdict;
}

std::optional<Verdict> judge_batch_norms(const Evidence& evidence) {
  const auto layers = batch_norms_of(evidence.run);
  Ranked evaluating;
  for (const auto& [name, layer] : layers)
    if (!layer.training) evaluating.emplace_back(1, name);
  if (evaluating.empty()) return std::nullopt;
  std::optional<Verdict> verdict =
      share_verdict(Severity::advice, "batch_norm_eval",
                    static_cast<double>(evaluating.size()) / static_cast<double>(layers.size()));
  const auto number = evaluating.size();
  verdict->where = worst_first(evaluating);
  verdict->title =
      fmt::format("{} of {} layers of batch norm {} with running statistics in training steps",
                  number, layers.size(), number == 1 ? "normalises" : "normalise");
  verdict->detail = fmt::format(
      "{} did so in a step that updated weights: eval() was in force. Running statistics do not "
      "change then, and do not follow the weights.",
      first_and_others(verdict->where, number));
  verdict->remedy =
      "call model->train() after each evaluation. If these layers are to stay frozen, nothing "
      "needs "
      "to change";
  return verdict;
}

std::optional<Verdict> judge_running_statistics(const Evidence& evidence) {
  Ranked layers;
  std::string dtype;
  const auto all = batch_norms_of(evidence.run);
  for (const auto& [name, layer] : all) {
    if (!layer.training || sixteen_bit_format(layer.dtype) == nullptr) continue;
    layers.emplace_back(1, name);
    dtype = layer.dtype;
  }
  if (layers.empty()) return std::nullopt;
  std::optional<Verdict> verdict =
      share_verdict(Severity::warning, "running_statistics",
                    static_cast<double>(layers.size()) / static_cast<double>(all.size()));
  const auto number = layers.size();
  verdict->where = worst_first(layers);
  verdict->title = fmt::format("Running statistics of {} are in {}",
                               first_and_others(verdict->where, number), dtype);
  verdict->detail =
      "A step moves them by a tenth of the difference to its batch. In 16 bits, moves below half a "
      "unit in the last place are lost, and variances above float16's range become inf. Evaluation "
      "uses them.";
  verdict->remedy = "keep batch norm in fp32: O2, or Options::keep_batchnorm_fp32(true)";
  return verdict;
}

}  // namespace semitone::report
