// Where the time of the sampled steps goes.

#include "src/core/counted.h"
#include "src/report/verdict_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string_view>

namespace semitone::report {
namespace {

// A single operator with a fifth of the time is worth a look.
constexpr double kWideOperator = 0.2;
// Emulated operators are no faster than in fp32: above a fifth, the times say nothing about a
// machine that has the arithmetic.
constexpr double kEmulated = 0.2;
// Weights that are cast once a step, and activations that stay in 16 bits, take a few per cent.
constexpr double kCasts = 0.1;
// Only products become much faster in 16 bits. With half of the time in them, the whole can become
// at most twice as fast (Amdahl).
constexpr double kMostlyProducts = 0.5;
// Gradients are averaged during backward: little of that should remain visible.
constexpr double kCommunication = 0.15;
// A loader that reads ahead hides its time.
constexpr double kWaitForData = 0.1;

// The name without its overload: "add" of "add.Tensor".
std::string_view base_name(std::string_view name) {
  return {name.begin(), std::find(name.begin(), name.end(), '.')};
}

bool is_in_model(const RunOperator& op) {
  return op.pass == "forward" || op.pass == "backward";
}

// In a 16-bit run. LibTorch's _to_copy leaves the work to copy_, whose widest argument is float32
// then; copies of 16-bit tensors are none.
bool is_cast(const RunOperator& op) {
  constexpr auto kCastNames = std::to_array<std::string_view>({"_to_copy", "to", "type_as",
                                                               "_autocast_to_reduced_precision",
                                                               "_autocast_to_full_precision"});
  const std::string_view name = base_name(op.name);
  if (name == "copy_") return op.dtype == "float32" && is_in_model(op);
  return std::find(kCastNames.begin(), kCastNames.end(), name) != kCastNames.end();
}

// Matrix products and convolutions, with their backward passes.
bool is_product(const RunOperator& op) {
  const std::string_view name = base_name(op.name);
  const auto contains = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (contains("upsample") || contains("convert")) return false;  // upsample_bilinear2d
  return contains("conv") || contains("linear") || contains("matmul") || contains("attention") ||
         contains("lstm") || contains("gru") || name.ends_with("mm") || name.ends_with("mm_") ||
         name == "mv" || name == "addmv" || name == "dot" || name == "einsum";
}

double seconds_of(const Summary& summary, const std::function<bool(const RunOperator&)>& which) {
  double seconds = 0;
  for (const RunOperator& op : summary.operators) {
    if (which(op)) seconds += op.seconds;
  }
  return seconds;
}

double share_of_operators(const Summary& summary,
                          const std::function<bool(const RunOperator&)>& which) {
  return summary.operator_seconds > 0 ? seconds_of(summary, which) / summary.operator_seconds : 0;
}

// The names of operators by their time.
Ranked ranked_operators(const Summary& summary,
                        const std::function<bool(const RunOperator&)>& which) {
  std::map<std::string, double> seconds;
  for (const RunOperator& op : summary.operators) {
    if (which(op)) seconds[op.name] += op.seconds;
  }
  Ranked ranked;
  ranked.reserve(seconds.size());
  for (const auto& [name, sum] : seconds) ranked.emplace_back(sum, name);
  return ranked;
}

bool is_wide(const RunOperator& op) {
  return (op.dtype == "float32" || op.dtype == "float64") && is_in_model(op) && !is_cast(op);
}

// An emulated product calls another one in float32, which does its work, and so does its backward pass.
// Only the outermost one has the kernel "emulated".
std::function<bool(const RunOperator&)> emulated_in(const Summary& summary) {
  const bool has_products =
      std::any_of(summary.operators.begin(), summary.operators.end(),
                  [](const RunOperator& op) { return op.kernel == "emulated" && is_product(op); });
  return [has_products](const RunOperator& op) {
    return op.kernel == "emulated" || (has_products && is_product(op) && is_wide(op));
  };
}

// Normalisations compute in float32 by design, and read each value once.
bool is_norm(std::string_view name) {
  return name.find("norm") != name.npos;
}

std::string remedy_for_wide(const Summary& summary, const std::string& name) {
  const bool is_in_forward =
      std::any_of(summary.operators.begin(), summary.operators.end(), [&](const RunOperator& op) {
        return op.name == name && op.pass == "forward" && is_wide(op);
      });
  if (!is_in_forward)
    return "lower the forward operator that it belongs to if its results allow that "
           "(CastPolicy::lower); semitone ops says why an operator is in float32";
  return fmt::format(
      "lower it if its results allow that: CastPolicy::lower(\"{}\"); semitone ops says why an "
      "operator is in float32. In an autograd function of yours, cast the arguments to 16 bits",
      name);
}

bool has_operator_times(const Evidence& evidence) {
  return evidence.run.has_device_times() && evidence.summary.operator_seconds > 0;
}

double share_of_step(const Summary& summary, const char* phase) {
  const auto found = summary.phases.find(phase);
  if (found == summary.phases.end() || summary.step_seconds.value_or(0) <= 0) return 0;
  return found->second / *summary.step_seconds;
}

}  // namespace

std::optional<Verdict> judge_wide_operators(const Evidence& evidence) {
  const Summary& summary = evidence.summary;
  if (evidence.format == nullptr || !has_operator_times(evidence)) return std::nullopt;
  Ranked wide;
  const auto is_emulated = emulated_in(summary);
  const auto is_chosen = [&](const RunOperator& op) { return is_wide(op) && !is_emulated(op); };
  for (auto& [seconds, name] : ranked_operators(summary, is_chosen)) {
    if (!is_norm(name) && seconds > kWideOperator * summary.operator_seconds)
      wide.emplace_back(seconds, name);
  }
  if (wide.empty()) return std::nullopt;
  const auto names = worst_first(wide);
  const std::string& name = names.front();
  double seconds = 0;
  double bytes = 0;
  std::int64_t casts = 0;
  for (const RunOperator& op : summary.operators) {
    if (op.name != name || !is_chosen(op)) continue;
    seconds += op.seconds;
    casts += op.casts;
    bytes += op.cast_bytes;
  }
  std::optional<Verdict> verdict =
      share_verdict(Severity::warning, "wide_operator", seconds / summary.operator_seconds);
  verdict->where = names;
  verdict->title = fmt::format(
      "'{}' computes in float32 in a {} run, and takes {} of the "
      "operators' time",
      name, evidence.format->name, percent(seconds / summary.operator_seconds));
  verdict->detail = "float32 takes twice the memory traffic of 16 bits, and its own arithmetic.";
  if (casts > 0) {
    verdict->detail +=
        fmt::format(" {} for it in the samples, {:.3g} MB.", counted(casts, "cast"), bytes / 1e6);
  }
  verdict->remedy = remedy_for_wide(summary, name);
  return verdict;
}

std::optional<Verdict> judge_emulation(const Evidence& evidence) {
  if (!has_operator_times(evidence)) return std::nullopt;
  const auto is_emulated = emulated_in(evidence.summary);
  const double share = share_of_operators(evidence.summary, is_emulated);
  if (share <= kEmulated) return std::nullopt;
  const auto ranked = ranked_operators(evidence.summary, is_emulated);
  std::optional<Verdict> verdict = share_verdict(Severity::warning, "emulated", share);
  verdict->where = worst_first(ranked);
  const auto& operators = evidence.summary.operators;
  const bool has_float8 =
      std::any_of(operators.begin(), operators.end(), [](const RunOperator& op) {
        return op.kernel == "emulated" && op.dtype.starts_with("float8");
      });
  verdict->title = fmt::format("{} of the operators' time is emulation of {}", percent(share),
                               has_float8 ? "float8" : evidence.run.info.dtype);
  if (has_float8) {
    verdict->detail =
        "Products in float8 are computed in float32 on every device. Values are right, but times "
        "say nothing about a device that multiplies float8.";
    verdict->remedy = "train without CastPolicy::fp8 for speed";
    return verdict;
  }
  verdict->detail =
      "The processor has no arithmetic for this dtype: operators compute in float32 and round. "
      "Values are right, but times say nothing about other machines.";
  verdict->remedy =
      "take the times from a machine with 16-bit instructions (semitone doctor names those of "
      "this one), or train at O0 here";
  return verdict;
}

std::optional<Verdict> judge_casts(const Evidence& evidence) {
  if (evidence.format == nullptr || !has_operator_times(evidence)) return std::nullopt;
  const double share = share_of_operators(evidence.summary, is_cast);
  if (share <= kCasts) return std::nullopt;
  Ranked causes;
  for (const RunOperator& op : evidence.summary.operators) {
    if (op.cast_bytes > 0) causes.emplace_back(op.cast_bytes, op.name);
  }
  std::optional<Verdict> verdict = share_verdict(Severity::advice, "casts", share);
  verdict->where = worst_first(causes);
  verdict->title = fmt::format("Casts take {} of the operators' time", percent(share));
  verdict->detail =
      "Tensors change between float32 and 16 bits. Most bytes are cast for the "
      "operators that are named.";
  const std::string& level = evidence.run.info.opt_level;
  verdict->remedy = fmt::format(
      "{}put operators between products on the list of their neighbours (docs/cast_policies.md)",
      level == "O2" || level == "O3" ? "" : "train at O2, whose weights are in 16 bits, or ");
  return verdict;
}

std::optional<Verdict> judge_products(const Evidence& evidence) {
  const Summary& summary = evidence.summary;
  if (evidence.format == nullptr || !has_operator_times(evidence)) return std::nullopt;
  const double share = share_of_operators(summary, is_product);
  if (share >= kMostlyProducts) return std::nullopt;
  std::optional<Verdict> verdict = share_verdict(Severity::advice, "products", share);
  verdict->where =
      worst_first(ranked_operators(summary, [](const RunOperator& op) { return !is_product(op); }));
  verdict->title =
      fmt::format("Expect no large speed-up: only {} of the time is products", percent(share));
  verdict->detail = fmt::format(
      "Convolutions and matrix products gain most from 16 bits. If they took no time at all, the "
      "operators would be {:.2g} times as fast.",
      1 / (1 - share));
  verdict->remedy =
      "use fused layers for the other operators (docs/fused_layers.md), or train larger layers or "
      "batches";
  return verdict;
}

std::optional<Verdict> judge_communication(const Evidence& evidence) {
  const double share = share_of_step(evidence.summary, "communication");
  if (share <= kCommunication) return std::nullopt;
  std::optional<Verdict> verdict = share_verdict(Severity::advice, "communication", share);
  verdict->title = fmt::format("{} of a step is waiting for other ranks", percent(share));
  verdict->detail = "This is the part of the communication that the backward pass does not hide.";
  verdict->remedy =
      "accumulate gradients over several batches (no_sync), compress them to 16 bits "
      "(DistributedDataParallelOptions::compress), or look for a rank that is slower than the "
      "others";
  return verdict;
}

std::optional<Verdict> judge_data(const Evidence& evidence) {
  const double share = share_of_step(evidence.summary, "data");
  if (share <= kWaitForData) return std::nullopt;
  std::optional<Verdict> verdict = share_verdict(Severity::advice, "data", share);
  verdict->title = fmt::format("{} of a step is waiting for data", percent(share));
  verdict->detail = "The model computes nothing meanwhile.";
  verdict->remedy = "read ahead with data::PrefetchLoader, or with more workers of the loader";
  return verdict;
}

}  // namespace semitone::report
